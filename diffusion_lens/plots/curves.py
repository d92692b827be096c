"""Curves of average effects, with their intervals."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import RESTORED, one_axes, spaced


def effect_curves(
    mean: Float[Tensor, "role layer"],
    low: Float[Tensor, "role layer"],
    high: Float[Tensor, "role layer"],
    roles: Sequence[str],
    layers: Sequence[int],
    kind: str,
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Average indirect effect over layers, a curve with its interval for each role that a token can have.

    A role keeps its colour whichever others occur.

    Args:
        mean: the effect, a difference of probabilities; NaN where a role does not occur.
        low, high: ends of the interval drawn as a band.
        roles: the name of each row.
        layers: the layer of each column.
        kind: what was restored, as in `heat_map`.

    Raises:
        ValueError: no role occurs.
    """
    occurring = [row for row in range(len(roles)) if not mean[row].isnan().all()]
    if not occurring:
        raise ValueError(f"there is no curve to draw: the effect is NaN in every role of {', '.join(roles)}")
    ax = one_axes(ax, width=6.0, height=3.2)
    ax.axhline(0, color="0.8", linewidth=0.8)
    for row in occurring:
        colour = f"C{row}"
        ax.plot(layers, mean[row].numpy(), color=colour, label=roles[row], marker="o", markersize=3)
        ax.fill_between(layers, low[row].numpy(), high[row].numpy(), color=colour, alpha=0.2, linewidth=0)
    ax.set_xticks([layers[column] for column in spaced(len(layers))])
    ax.tick_params(labelsize=8)
    ax.set_xlabel(RESTORED[kind], fontsize=9)
    ax.set_ylabel("average indirect effect", fontsize=9)
    ax.set_title(title or "Average effect of restoring a state", fontsize=10)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
