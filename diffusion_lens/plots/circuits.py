"""Figures of circuits: a map of the edges, and what circuits of growing size keep of a metric."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import one_axes
from diffusion_lens.plots.heat_maps import labelled_map


def edge_map(
    scores: Float[Tensor, "writer reader"],
    writers: Sequence[str],
    readers: Sequence[str],
    limits: tuple[float, float] | None = None,
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Heat map of edges: writers down, readers across. Cells without an edge (NaN) are grey.

    Args:
        limits: Scores at the ends of the colour scale; by default minus and plus the largest absolute score.
    """
    bound = float(scores.nan_to_num().abs().max())
    ax = labelled_map(
        scores,
        rows=writers,
        layers=range(len(readers)),
        xlabel="reader: queries, keys and values of attention (a), MLP (m)",
        hue="RdBu",
        limits=limits or (-bound, bound),
        bar="score",
        title=title or "Scores of the edges, summed over heads",
        ax=ax,
    )
    ax.set_xticks(range(len(readers)), readers, rotation=90, fontsize=8)
    ax.set_ylabel("writer", fontsize=9)
    return ax


def kept_by_size(
    curves: Mapping[str, Float[Tensor, "entry"]],
    sizes: Sequence[int],
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """What circuits keep of a metric, by their number of edges on a logarithmic axis. Dotted lines are at 0 and 1.

    Args:
        curves: Share of the metric of each circuit, for each curve by name; a single curve has no legend.
        sizes: Number of edges of each circuit; 0 is drawn at the left end.
    """
    ax = one_axes(ax, width=5.2, height=3.2)
    for level in (0, 1):
        ax.axhline(level, color="0.6", linestyle=":", linewidth=1)
    for name, shares in curves.items():
        entries = sorted(zip(sizes, shares.tolist(), strict=True))
        ax.plot(*zip(*entries, strict=True), label=name, marker="o", markersize=3)
    ax.set_xscale("symlog", linthresh=1)
    ax.set_xlim(left=0)
    ax.tick_params(labelsize=8)
    ax.set_xlabel("edges of the circuit", fontsize=9)
    ax.set_ylabel("share of the metric kept", fontsize=9)
    ax.set_title(title or "Faithfulness of circuits", fontsize=10)
    if len(curves) > 1:
        ax.legend(fontsize=8)
    return ax
