"""Figures that compare two sets of vectors, and probabilities by layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import one_axes, spaced


def paired_scatter(
    coordinates: Float[Tensor, "2 fact 2"],
    explained: Float[Tensor, "2"],
    names: Sequence[str],
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Scatter plot of two sets of points. A line connects the two points of each fact.

    Args:
        coordinates: Coordinates of each fact of each set on the two axes.
        explained: Share of the variance that each axis explains.
        names: Names of the two sets.
    """
    ax = one_axes(ax, 4.6, 4.2)
    ax.plot(*coordinates.permute(2, 0, 1).numpy(), color="0.75", linewidth=0.7, zorder=1)
    for points, name, marker in zip(coordinates, names, "o^", strict=True):
        ax.scatter(*points.T.numpy(), s=16, marker=marker, label=name, linewidth=0, zorder=2)
    ax.set_aspect("equal", adjustable="datalim")
    ax.tick_params(labelsize=8)
    for set_label, axis in ((ax.set_xlabel, 0), (ax.set_ylabel, 1)):
        set_label(f"component {axis + 1} ({float(explained[axis]):.0%} of the variance)", fontsize=9)
    ax.set_title(title or "Both sets in their common principal components", fontsize=10)
    ax.legend(fontsize=8)
    return ax


def spectra(
    singular_values: Float[Tensor, "2 component"],
    effective_ranks: Sequence[float],
    names: Sequence[str],
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Share of the variance of each set by principal component, on a logarithmic scale.

    Args:
        singular_values: Singular values of each set.
        effective_ranks: Effective rank of each set, for the legend.
        names: Names of the two sets.
    """
    ax = one_axes(ax, 4.6, 3.2)
    for values, effective, name, marker in zip(singular_values, effective_ranks, names, "o^", strict=True):
        shares = values[values > 0].square() / values.square().sum()
        label = f"{name}: effective rank {effective:.1f}"
        ax.plot(range(1, len(shares) + 1), shares.numpy(), label=label, marker=marker, markersize=3, linewidth=1)
    ax.set_yscale("log")
    ax.tick_params(labelsize=8)
    ax.set_xlabel("principal component", fontsize=9)
    ax.set_ylabel("share of the variance", fontsize=9)
    ax.set_title(title or "Singular-value spectra", fontsize=10)
    ax.legend(fontsize=8)
    return ax


def similarity_curve(
    table: Mapping[int, Mapping[str, float]],
    axis: str,
    statistic: str,
    ax: Any = None,
    label: str | None = None,
    title: str | None = None,
) -> Any:
    """A similarity by layer or step, with confidence intervals as bars. A dotted line in a band shows chance level.

    Args:
        table: Columns value, low, high, chance, chance_low and chance_high, by layer or step.
        axis: Name of the horizontal axis, "layer" or "step".
        statistic: Name of the similarity.
        label: Name of the curve in the legend, if several curves share the axes.
    """
    ax = one_axes(ax, 5.2, 3.2)
    ticks = list(table)
    column = {name: [row[name] for row in table.values()] for name in next(iter(table.values()))}
    (line,) = ax.plot(ticks, column["value"], label=label or statistic, marker="o", markersize=3)
    colour = line.get_color()
    ax.vlines(ticks, column["low"], column["high"], color=colour, linewidth=1)
    ax.plot(ticks, column["chance"], color=colour, linestyle=":", linewidth=1, label=f"{label or statistic}, by chance")
    ax.fill_between(ticks, column["chance_low"], column["chance_high"], color=colour, alpha=0.15, linewidth=0)
    ax.set_xticks([ticks[i] for i in spaced(len(ticks))])
    ax.tick_params(labelsize=8)
    ax.set_xlabel(axis, fontsize=9)
    ax.set_ylabel(statistic.replace("_", " "), fontsize=9)
    ax.set_title(title or f"Similarity by {axis}", fontsize=10)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax


def probability_by_layer(
    curves: Mapping[str, tuple[Float[Tensor, "layer"], Float[Tensor, "layer"], Float[Tensor, "layer"]]],
    before: Mapping[str, float],
    layers: Sequence[int],
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """p(answer) by the layer at which v* was inserted. A dotted line shows p(answer) without v*.

    Args:
        curves: Mean p(answer) and the two ends of its confidence interval by layer, for each curve by name.
        before: p(answer) without v*, by the same names.
        layers: Layers on the horizontal axis.
    """
    ax = one_axes(ax, 5.2, 3.2)
    for name, (mean, low, high) in curves.items():
        (line,) = ax.plot(layers, mean.numpy(), label=name, marker="o", markersize=3)
        ax.fill_between(layers, low.numpy(), high.numpy(), color=line.get_color(), alpha=0.2, linewidth=0)
        ax.axhline(before[name], color=line.get_color(), linestyle=":", linewidth=1, label=f"{name}, without v*")
    ax.set_ylim(-0.02, 1.02)
    ax.set_xticks([layers[i] for i in spaced(len(layers))])
    ax.tick_params(labelsize=8)
    ax.set_xlabel("layer of v*", fontsize=9)
    ax.set_ylabel("p(answer)", fontsize=9)
    ax.set_title(title or "The answer's probability with v*", fontsize=10)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
