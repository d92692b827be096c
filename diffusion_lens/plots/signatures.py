"""Panels of the three signatures: evidence, routes and gradients by layer, one row of panels for each model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import panels, spaced


@dataclass(frozen=True, eq=False)
class Curve:
    """Means with their intervals, one for each layer.

    Attributes:
        mean: NaN where there is none.
        low, high: Ends of the interval.
        baseline: Whether the curve is a baseline, drawn dotted in grey without interval.
    """

    mean: Float[Tensor, "layer"]
    low: Float[Tensor, "layer"]
    high: Float[Tensor, "layer"]
    baseline: bool = False


@dataclass(frozen=True, eq=False)
class SignaturePanels:
    """The curves of one model, by label.

    Attributes:
        name: Name of the model.
        evidence: Percentiles and reuse, between 0 and 1.
        cuts: log p(answer) lost by cutting the edge, in nats.
        routes: Correlations; empty if there are none.
        why_no_routes: Why there are none, in a few words.
        gradients: Cosines by layer.
        embeddings: Cosine of the own pair in embedding and head, by label.
    """

    name: str
    evidence: Mapping[str, Curve]
    cuts: Mapping[str, Curve]
    routes: Mapping[str, Curve]
    why_no_routes: str
    gradients: Mapping[str, Curve]
    embeddings: Mapping[str, float]


def signature_panels(models: Sequence[SignaturePanels]) -> list[Any]:
    """Draw one row of panels for each model; returns the axes in reading order."""
    _, axes = panels(len(models), 4, width=12.0, height=3.5 * len(models))
    for row, model in enumerate(models):
        of_evidence, of_cuts, of_routes, of_gradients = axes[4 * row : 4 * row + 4]
        _draw(of_evidence, model.evidence, f"{model.name}\nevidence: percentile and reuse", (0.0, 1.05))
        _draw(of_cuts, model.cuts, "edge reader to source cut", None)
        of_cuts.set_ylabel("log p(answer) lost (nats)", fontsize=9)
        _draw(of_routes, model.routes, "routes: correlation forward and reverse", (-1.05, 1.05))
        if not model.routes:
            of_routes.text(0.5, 0.5, model.why_no_routes, ha="center", transform=of_routes.transAxes, fontsize=8)
        _draw(of_gradients, model.gradients, "gradients: cosine forward and reverse", (-1.05, 1.05))
        for i, (label, value) in enumerate(model.embeddings.items()):
            of_gradients.axhline(value, color=f"C{5 + i}", linewidth=1, linestyle="--", label=label)
        _legend(of_gradients)
    return axes


def _draw(ax: Any, curves: Mapping[str, Curve], title: str, limits: tuple[float, float] | None) -> None:
    ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    n_layers = 0
    for i, (label, curve) in enumerate(curves.items()):
        n_layers = len(curve.mean)
        if curve.baseline:
            ax.plot(range(n_layers), curve.mean.tolist(), color="0.55", linestyle=":", marker=".", label=label)
            continue
        ax.plot(range(n_layers), curve.mean.tolist(), color=f"C{i}", marker="o", markersize=3, label=label)
        ax.fill_between(range(n_layers), curve.low.tolist(), curve.high.tolist(), color=f"C{i}", alpha=0.2, linewidth=0)
    ax.set_xticks(list(spaced(n_layers)) if n_layers else [])
    ax.tick_params(labelsize=8)
    ax.set_xlabel("layer", fontsize=9)
    ax.set_title(title, fontsize=9, parse_math=False)
    if limits is not None:
        ax.set_ylim(*limits)
    if curves:
        _legend(ax)


def _legend(ax: Any) -> None:
    """The labels below the panel, where they hide no curve."""
    ax.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, columnspacing=1.0)
