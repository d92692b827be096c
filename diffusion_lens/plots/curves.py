"""Curves, bars and scatter plots: effects by layer, shares by group, similarities of vectors, panels of signatures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.plots.axes import RESTORED, one_axes, panels, spaced

_COLOURS = ("0.75", "tab:purple", "tab:orange")
_INSIDE: Mapping[str, Any] = {}
_RIGHT: Mapping[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "frameon": False}


@dataclass(frozen=True, eq=False)
class Curve:
    """Means, one for each layer.

    Attributes:
        mean: NaN where there is none.
        low, high: Ends of the interval; a curve without interval is a baseline, drawn dotted in grey.
    """

    mean: Float[Tensor, "layer"]
    low: Float[Tensor, "layer"] | None = None
    high: Float[Tensor, "layer"] | None = None


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


def effect_curves(
    mean: Float[Tensor, "role layer"],
    low: Float[Tensor, "role layer"],
    high: Float[Tensor, "role layer"],
    roles: Sequence[str],
    layers: Sequence[int],
    kind: str,
    ax: Any = None,
    title: str | None = None,
    controls: Mapping[str, Float[Tensor, "role layer"]] | None = None,
) -> Any:
    """Plot the average indirect effect by layer, one curve with a confidence band for each token role.

    The colour of a role does not depend on which other roles occur.

    Args:
        mean: Average effect, a difference of probabilities; NaN where a role does not occur.
        low, high: Lower and upper end of the confidence band.
        roles: Name of each row.
        layers: Layer of each column.
        kind: Kind of state that was restored, as in `heat_map`.
        controls: Average effect in each control, drawn as lines of the same colours, dotted or dashed.

    Raises:
        ValueError: No role occurs.
    """
    occurring = [row for row in range(len(roles)) if not mean[row].isnan().all()]
    if not occurring:
        raise ValueError(f"there is no curve to draw: the effect is NaN in every role of {', '.join(roles)}")
    ax = one_axes(ax, width=6.0, height=3.2)
    ax.axhline(0, color="0.8", linewidth=0.8)
    for row in occurring:
        _band(ax, layers, mean[row], low[row], high[row], roles[row], f"C{row}")
    for (name, control), style in zip((controls or {}).items(), (":", "--"), strict=False):
        ax.plot([], [], color="0.4", linestyle=style, label=name)
        for row in occurring:
            ax.plot(layers, control[row].tolist(), color=f"C{row}", linestyle=style, linewidth=1)
    ax.set_xticks([layers[column] for column in spaced(len(layers))])
    return _labelled(ax, RESTORED[kind], "average indirect effect", title or "Average effect of restoring a state")


def level_curves(
    spans: Float[Tensor, "level axis"],
    curves: Mapping[str, Sequence[tuple[float, float]]],
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Plot shares by noise level. Horizontal bars are ranges of levels, vertical bars are one standard error long.

    Args:
        spans: Lowest and highest noise level of each point.
        curves: Value and standard error of each point, by the label of the curve.
    """
    ax = one_axes(ax, width=6.0, height=3.2)
    middles, halves = spans.mean(dim=1).numpy(), (spans.diff(dim=1)[:, 0] / 2).numpy()
    ax.axhline(1, color="0.8", linewidth=0.8)
    for label, points in curves.items():
        values = [value for value, _ in points]
        errors = [0.0 if math.isnan(error) else error for _, error in points]
        ax.errorbar(middles, values, yerr=errors, xerr=halves, label=label, fmt="o", markersize=4, elinewidth=1)
    title = title or "Dictionary by noise level"
    return _labelled(ax, "noise level t (share of masked tokens)", "share", title, parse_math=False)


def labelled_lines(
    values: Float[Tensor, "entry axis"],
    labels: Sequence[str],
    columns: Sequence[str],
    xlabel: str,
    ylabel: str,
    title: str,
    ax: Any = None,
) -> Any:
    """Draw one line for each row of `values`; a NaN interrupts it.

    Args:
        values: A row for each line.
        labels: Name of each line.
        columns: Label of each column.
    """
    ax = one_axes(ax, width=7.0, height=3.4)
    positions = range(len(columns))
    for i, (row, label) in enumerate(zip(values, labels, strict=True)):
        # Ten colours, then the same ones dashed.
        ax.plot(positions, row.tolist(), color=f"C{i % 10}", linestyle="-" if i < 10 else "--", marker=".", label=label)
    shown = spaced(len(columns))
    crowded = max(map(len, columns)) > 4
    ax.set_xticks(
        list(shown), [columns[i] for i in shown], rotation=30 if crowded else 0, ha="right" if crowded else "center"
    )
    return _labelled(ax, xlabel, ylabel, title, legend=_RIGHT if len(labels) > 1 else None, parse_math=False)


def share_bars(
    shares: Mapping[str, Sequence[float]],
    groups: Sequence[str],
    intervals: Mapping[str, Float[Tensor, "entry 2"]] | None = None,
    ax: Any = None,
    title: str | None = None,
    ylabel: str = "share of probes won",
) -> Any:
    """Plot shares by group as adjacent bars, one colour for each state of the model. Returns the axes.

    Args:
        shares: Share in each group, by state, such as "before" and "after".
        groups: Names of the groups.
        intervals: Ends of the interval of each share, by state; NaN draws none.
    """
    ax = one_axes(ax, width=2.0 + 0.9 * len(groups), height=2.8)
    width = 0.8 / len(shares)
    for i, (state, heights) in enumerate(shares.items()):
        at = [group + (i - (len(shares) - 1) / 2) * width for group in range(len(groups))]
        ends = None
        if intervals is not None:
            lengths = (intervals[state] - torch.tensor(heights)[:, None]).abs()
            ends = lengths.nan_to_num(0.0).T.tolist()
        ax.bar(at, heights, width=width, label=state, color=_COLOURS[i], yerr=ends, capsize=2, error_kw={"lw": 0.8})
    ax.set_xticks(range(len(groups)), [group.replace("_", "\n") for group in groups])
    ax.set_ylim(0, 1.02)
    return _labelled(ax, "", ylabel, title or "")


def shares_by_number(
    curves: Mapping[str, Mapping[int, tuple[float, float, float]]],
    xlabel: str,
    ylabel: str,
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Plot shares by a whole number, one curve for each group, with intervals as vertical bars. Returns the axes.

    Args:
        curves: Share and ends of its interval (NaN draws none) by the number, for each group by name.
    """
    ax = one_axes(ax, width=5.6, height=3.0)
    numbers = sorted({number for points in curves.values() for number in points})
    for i, (group, points) in enumerate(curves.items()):
        # The bars of different groups are drawn side by side.
        at = [number + 0.05 * (i - (len(curves) - 1) / 2) for number in points]
        shares, *ends = torch.tensor(list(points.values())).T
        lengths = torch.stack([(shares - end).abs().nan_to_num(0.0) for end in ends])
        ax.errorbar(
            at, shares.tolist(), yerr=lengths.tolist(), label=group, marker="o", markersize=3, elinewidth=0.8, capsize=2
        )
    ax.set_xticks(numbers)
    ax.set_ylim(-0.02, 1.02)
    return _labelled(ax, xlabel, ylabel, title or "", parse_math=False)


def reliability(
    confidence: Float[Tensor, "bin"],
    right: Float[Tensor, "bin"],
    counts: Int[Tensor, "bin"],
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """A reliability diagram: the share that is right by confidence, with a dotted line where the two are equal.

    Args:
        confidence: Mean confidence of each bin.
        right: Share of each bin that is right.
        counts: Number of examples in each bin, as the area of its dot.
    """
    ax = one_axes(ax, 3.8, 3.4)
    ax.plot([0, 1], [0, 1], color="0.6", linestyle=":", linewidth=1)
    ax.plot(confidence.tolist(), right.tolist(), linewidth=1)
    ax.scatter(confidence.tolist(), right.tolist(), s=(12 + 120 * counts / counts.sum()).tolist())
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    return _labelled(ax, "confidence", "share that is right", title or "", legend=None, parse_math=False)


def ranked_means(
    means: Float[Tensor, "entry"],
    intervals: Float[Tensor, "entry 2"],
    labels: Sequence[str],
    expected: float,
    xlabel: str,
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Means as dots with their intervals, one below the other, and a dotted line where they are expected.

    Args:
        intervals: Ends of the interval of each mean; NaN draws none.
        labels: Name of each mean, the first at the top.
    """
    ax = one_axes(ax, width=5.2, height=1.0 + 0.26 * len(labels))
    lengths = (intervals - means[:, None]).abs().nan_to_num(0.0).T.tolist()
    ax.axvline(expected, color="0.6", linestyle=":", linewidth=1)
    ax.errorbar(means.tolist(), range(len(labels)), xerr=lengths, fmt="o", markersize=4, capsize=2, elinewidth=1)
    ax.set_yticks(range(len(labels)), labels, parse_math=False)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    return _labelled(ax, xlabel, "", title or "", legend=None, parse_math=False)


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
    xlabel, ylabel = (f"component {i + 1} ({float(share):.0%} of the variance)" for i, share in enumerate(explained))
    return _labelled(ax, xlabel, ylabel, title or "Both sets in their common principal components", legend=_INSIDE)


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
    title = title or "Singular-value spectra"
    return _labelled(ax, "principal component", "share of the variance", title, legend=_INSIDE)


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
    return _labelled(ax, axis, statistic.replace("_", " "), title or f"Similarity by {axis}")


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
        colour = _band(ax, layers, mean, low, high, name)
        ax.axhline(before[name], color=colour, linestyle=":", linewidth=1, label=f"{name}, without v*")
    ax.set_ylim(-0.02, 1.02)
    ax.set_xticks([layers[i] for i in spaced(len(layers))])
    return _labelled(ax, "layer of v*", "p(answer)", title or "The answer's probability with v*")


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
    legend = _INSIDE if len(curves) > 1 else None
    return _labelled(
        ax, "edges of the circuit", "share of the metric kept", title or "Faithfulness of circuits", legend
    )


def signature_panels(models: Sequence[SignaturePanels]) -> list[Any]:
    """Draw one row of panels for each model; returns the axes in reading order."""
    _, axes = panels(len(models), 4, width=12.0, height=3.5 * len(models))
    for row, model in enumerate(models):
        of_evidence, of_cuts, of_routes, of_gradients = axes[4 * row : 4 * row + 4]
        _draw(of_evidence, model.evidence, f"{model.name}\nevidence: percentile and reuse", (0.0, 1.05))
        _draw(of_cuts, model.cuts, "edge reader to source cut", None, "log p(answer) lost (nats)")
        _draw(of_routes, model.routes, "routes: correlation forward and reverse", (-1.05, 1.05))
        if not model.routes:
            of_routes.text(0.5, 0.5, model.why_no_routes, ha="center", transform=of_routes.transAxes, fontsize=8)
        _draw(of_gradients, model.gradients, "gradients: cosine forward and reverse", (-1.05, 1.05))
        for i, (label, value) in enumerate(model.embeddings.items()):
            of_gradients.axhline(value, color=f"C{5 + i}", linewidth=1, linestyle="--", label=label)
        _legend(of_gradients)
    return axes


def _draw(
    ax: Any, curves: Mapping[str, Curve], title: str, limits: tuple[float, float] | None, ylabel: str = ""
) -> None:
    ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    n_layers = 0
    for i, (label, curve) in enumerate(curves.items()):
        n_layers = len(curve.mean)
        if curve.low is None or curve.high is None:
            ax.plot(range(n_layers), curve.mean.tolist(), color="0.55", linestyle=":", marker=".", label=label)
        else:
            _band(ax, range(n_layers), curve.mean, curve.low, curve.high, label, f"C{i}")
    ax.set_xticks(list(spaced(n_layers)) if n_layers else [])
    _labelled(ax, "layer", ylabel, title, legend=None, fontsize=9, parse_math=False)
    if limits is not None:
        ax.set_ylim(*limits)
    if curves:
        _legend(ax)


def _band(
    ax: Any, x: Sequence[int], mean: Tensor, low: Tensor, high: Tensor, label: str, colour: str | None = None
) -> Any:
    """Draw a curve with its interval; returns the colour, by default the next one of the axes."""
    (line,) = ax.plot(x, mean.tolist(), color=colour, label=label, marker="o", markersize=3)
    ax.fill_between(x, low.tolist(), high.tolist(), color=line.get_color(), alpha=0.2, linewidth=0)
    return line.get_color()


def _legend(ax: Any) -> None:
    """The labels below the panel, where they hide no curve."""
    ax.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, columnspacing=1.0)


def _labelled(
    ax: Any, xlabel: str, ylabel: str, title: str, legend: Mapping[str, Any] | None = _RIGHT, **of_title: Any
) -> Any:
    ax.tick_params(labelsize=8)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.set_title(title, **{"fontsize": 10, **of_title})
    if legend is not None:
        ax.legend(fontsize=8, **legend)
    return ax
