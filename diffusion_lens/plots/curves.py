"""Curves, bars and scatter plots: effects by layer, shares by group, similarities of vectors, panels of signatures."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.plots.axes import (
    BASELINE,
    RESTORED,
    Look,
    figure_size,
    label_axes,
    label_places,
    letters_in,
    look,
    n_curves,
    one_axes,
    panels,
    points,
    room_of,
    shortened,
    width_of,
)
from diffusion_lens.settings.figures import STYLE, styled

MOST_LABELS = 12  # of an axis with one place for each layer or step
_BESIDE = 0.42  # largest share of the width that a legend beside the axes has; a wider one is below
_UPRIGHT = 0.4  # largest share of the room that labels of rows or upright labels have
SMALLEST_PANEL = (1.6, 1.8)  # inches
_HANDLE = 3.5  # width of the line in a legend with the space around it, in font sizes


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
        evidence: Percentiles, between 0 and 1, and reuse, a cosine.
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


@styled
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
        _band(ax, layers, mean[row], low[row], high[row], roles[row], look(row, len(roles)))
    for (name, control), style in zip((controls or {}).items(), (":", "--"), strict=False):
        ax.plot([], [], color="0.4", linestyle=style, label=name)
        for row in occurring:
            colour = look(row, len(roles)).colour
            ax.plot(layers, control[row].tolist(), color=colour, linestyle=style, linewidth=1)
    _label_numbers(ax, layers)
    return _labelled(ax, RESTORED[kind], "average indirect effect", title or "Average effect of restoring a state")


@styled
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
    for i, (label, estimates) in enumerate(curves.items()):
        values = [value for value, _ in estimates]
        errors = [0.0 if math.isnan(error) else error for _, error in estimates]
        drawn = {"color": look(i, len(curves)).colour, "fmt": look(i).marker}
        ax.errorbar(middles, values, yerr=errors, xerr=halves, label=label, markersize=4, elinewidth=1, **drawn)
    title = title or "Dictionary by noise level"
    return _labelled(ax, "noise level t (share of masked tokens)", "share", title, parse_math=False)


@styled
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
        drawn = look(i, len(labels))
        line = {"color": drawn.colour, "linestyle": drawn.dash, "marker": drawn.marker}
        ax.plot(positions, row.tolist(), markersize=3, label=label, **line)
    label_columns(ax, columns, MOST_LABELS)
    return _labelled(ax, xlabel, ylabel, title, legend=legend_outside if len(labels) > 1 else None, parse_math=False)


@styled
def curves_by_iteration(
    curves: Mapping[str, Float[Tensor, "iteration"]], xlabel: str, ylabel: str, ax: Any = None, title: str | None = None
) -> Any:
    """Draw one line for each curve, of any number of iterations, such as the loss of a training.

    Args:
        curves: Value after each iteration, by the name of the curve; a single curve has no legend.
    """
    ax = one_axes(ax, width=5.2, height=3.2)
    for i, (name, values) in enumerate(curves.items()):
        drawn = look(i, len(curves))
        line = {"color": drawn.colour, "linestyle": drawn.dash, "marker": drawn.marker}
        # About ten markers, which do not hide the curve.
        every = max(1, len(values) // 10)
        ax.plot(
            range(1, len(values) + 1), values.tolist(), linewidth=1, label=name, markersize=3, markevery=every, **line
        )
    return _labelled(ax, xlabel, ylabel, title or "", legend_outside if len(curves) > 1 else None, parse_math=False)


@styled
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
        drawn = _bar_look(i, len(shares))
        ax.bar(at, heights, width=width, label=state, yerr=ends, capsize=2, error_kw={"lw": 0.8}, **drawn)
    label_columns(ax, [group.replace("_", "\n") for group in groups], all=True)
    ax.set_ylim(0, 1.02)
    return _labelled(ax, "", ylabel, title or "")


@styled
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
    numbers = sorted({number for by_number in curves.values() for number in by_number})
    for i, (group, by_number) in enumerate(curves.items()):
        # The bars of different groups are drawn side by side.
        at = [number + 0.05 * (i - (len(curves) - 1) / 2) for number in by_number]
        shares, *ends = torch.tensor(list(by_number.values())).T
        lengths = torch.stack([(shares - end).abs().nan_to_num(0.0) for end in ends]).tolist()
        drawn = {"color": look(i, len(curves)).colour, "marker": look(i).marker, "markersize": 3}
        ax.errorbar(at, shares.tolist(), yerr=lengths, label=group, elinewidth=0.8, capsize=2, **drawn)
    _label_numbers(ax, numbers)
    ax.set_ylim(-0.02, 1.02)
    return _labelled(ax, xlabel, ylabel, title or "", parse_math=False)


@styled
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
    drawn = look(len(ax.collections))  # of which each diagram has one
    colour, areas = drawn.colour, (12 + 120 * counts / counts.sum()).tolist()
    ax.plot(confidence.tolist(), right.tolist(), color=colour, linestyle=drawn.dash, linewidth=1)
    ax.scatter(confidence.tolist(), right.tolist(), color=colour, marker=drawn.marker, s=areas)
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    return _labelled(ax, "confidence", "share that is right", title or "", legend=None, parse_math=False)


@styled
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
    drawn = {"color": look(0).colour, "fmt": "o", "markersize": 4}
    ax.errorbar(means.tolist(), range(len(labels)), xerr=lengths, capsize=2, elinewidth=1, **drawn)
    _label_rows(ax, labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    return _labelled(ax, xlabel, "", title or "", legend=None, parse_math=False)


@styled
def paired_bars(
    values: Mapping[str, Float[Tensor, "entry"]],
    labels: Sequence[str],
    xlabel: str,
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Bars of several groups side by side, one row below the other, from a line at 0.

    Args:
        values: Value of each row, by the name of the group.
        labels: Name of each row, the first at the top.
    """
    ax = one_axes(ax, width=5.2, height=1.0 + 0.26 * len(labels))
    height = 0.8 / len(values)
    for i, (group, lengths) in enumerate(values.items()):
        at = [row + (i - (len(values) - 1) / 2) * height for row in range(len(labels))]
        colour, hatch = look(i, len(values)).colour, look(i + 1).hatch
        drawn = {"color": colour, "hatch": hatch, "edgecolor": "white" if hatch else colour}
        ax.barh(at, lengths.tolist(), height=height, label=group, **drawn)
    ax.axvline(0, color="0.6", linewidth=1)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    _label_rows(ax, labels)
    legend = legend_outside if len(values) > 1 else None
    return _labelled(ax, xlabel, "", title or "", legend=legend, parse_math=False)


@styled
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
    for i, (pairs, name, marker) in enumerate(zip(coordinates, names, "o^", strict=True)):
        drawn = {"color": look(i, 2).colour, "marker": marker, "label": name}
        ax.scatter(*pairs.T.numpy(), s=16, linewidth=0, zorder=2, **drawn)
    ax.set_aspect("equal", adjustable="datalim")
    xlabel, ylabel = (f"component {i + 1} ({float(share):.0%} of the variance)" for i, share in enumerate(explained))
    return _labelled(ax, xlabel, ylabel, title or "Both sets in their common principal components", legend=_inside)


@styled
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
    for i, (values, effective, name) in enumerate(zip(singular_values, effective_ranks, names, strict=True)):
        shares = values[values > 0].square() / values.square().sum()
        label = f"{name}: effective rank {effective:.1f}"
        drawn = {"color": look(i, 2).colour, "marker": "o^"[i], "markersize": 3, "linewidth": 1}
        ax.plot(range(1, len(shares) + 1), shares.numpy(), label=label, **drawn)
    ax.set_yscale("log")
    title = title or "Singular-value spectra"
    return _labelled(ax, "principal component", "share of the variance", title, legend=_inside)


@styled
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
    drawn = look(n_curves(ax))
    colour = drawn.colour
    ax.plot(ticks, column["value"], label=label or statistic, color=colour, marker=drawn.marker, markersize=3)
    ax.vlines(ticks, column["low"], column["high"], color=colour, linewidth=1)
    ax.plot(ticks, column["chance"], color=colour, linestyle=":", linewidth=1, label=f"{label or statistic}, by chance")
    ax.fill_between(ticks, column["chance_low"], column["chance_high"], color=colour, alpha=0.15, linewidth=0)
    _label_numbers(ax, ticks)
    return _labelled(ax, axis, statistic.replace("_", " "), title or f"Similarity by {axis}")


@styled
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
    for i, (name, (mean, low, high)) in enumerate(curves.items()):
        colour = _band(ax, layers, mean, low, high, name, look(i, len(curves)))
        ax.axhline(before[name], color=colour, linestyle=":", linewidth=1, label=f"{name}, without v*")
    ax.set_ylim(-0.02, 1.02)
    _label_numbers(ax, layers)
    return _labelled(ax, "layer of v*", "p(answer)", title or "The answer's probability with v*")


@styled
def kept_by_size(
    curves: Mapping[str, Float[Tensor, "entry"]], sizes: Sequence[int], ax: Any = None, title: str | None = None
) -> Any:
    """What circuits keep of a metric, by their number of edges on a logarithmic axis. Dotted lines are at 0 and 1.

    Args:
        curves: Share of the metric of each circuit, for each curve by name; a single curve has no legend.
        sizes: Number of edges of each circuit; 0 is drawn at the left end.
    """
    ax = one_axes(ax, width=5.2, height=3.2)
    for level in (0, 1):
        ax.axhline(level, color="0.6", linestyle=":", linewidth=1)
    before = n_curves(ax)
    for i, (name, shares) in enumerate(curves.items(), before):
        entries = sorted(zip(sizes, shares.tolist(), strict=True))
        drawn = look(i, len(curves)) if not before and len(curves) > 1 else look(i)
        line = {"color": drawn.colour, "linestyle": drawn.dash, "marker": drawn.marker, "markersize": 3}
        ax.plot(*zip(*entries, strict=True), label=name, **line)
    ax.set_xscale("symlog", linthresh=1)
    ax.set_xlim(left=0)
    legend = _inside if len(curves) > 1 else None
    return _labelled(
        ax, "edges of the circuit", "share of the metric kept", title or "Faithfulness of circuits", legend
    )


@styled
def signature_panels(models: Sequence[SignaturePanels], show: str | None = None, ax: Any = None) -> Any:
    """Draw one row of panels for each model; returns the axes in reading order.

    Args:
        show: One of `SIGNATURES`, to draw this panel of one model alone and return its axes.
        ax: Axes of this panel.

    Raises:
        ValueError: The figure is too small for all panels, one panel is chosen of several models, or axes are given for
            all panels.
    """
    if show is not None:
        if len(models) > 1:
            raise ValueError(
                f"show={show!r} draws the panel of one model; there are {len(models)}: draw each on its ax="
            )
        return _SIGNATURES[show](one_axes(ax, width=4.2, height=3.2), models[0], f"{models[0].name}\n")
    if ax is not None:
        raise ValueError(f"ax= is one panel, and there are four: give show=, one of {', '.join(_SIGNATURES)}")
    width, height = figure_size(12.0, 3.5 * len(models))
    if width < SMALLEST_PANEL[0] * 4 or height < SMALLEST_PANEL[1] * len(models):
        least = SMALLEST_PANEL[0] * 4, SMALLEST_PANEL[1] * len(models)
        raise ValueError(
            f"size={(width, height)} is too small for four panels, which need {least[0]:g} x {least[1]:g} inches; "
            f"draw one of them with show=, one of {', '.join(_SIGNATURES)}"
        )
    _, axes = panels(len(models), 4, width=width, height=height)
    for row, model in enumerate(models):
        for i, draw in enumerate(_SIGNATURES.values()):
            draw(axes[4 * row + i], model, "" if i else f"{model.name}\n")
    for column in range(4):  # one scale for all models
        low, high = zip(*(each.get_ylim() for each in axes[column::4]), strict=True)
        for each in axes[column::4]:
            each.set_ylim(min(low), max(high))
    return axes


def _evidence(ax: Any, model: SignaturePanels, name: str) -> Any:
    return _draw(ax, model.evidence, f"{name}evidence: percentile and reuse", "percentile; cosine", (0.0, 1.05))


def _cuts(ax: Any, model: SignaturePanels, name: str) -> Any:
    return _draw(ax, model.cuts, f"{name}edge reader to source cut", "log p(answer) lost (nats)")


def _routes(ax: Any, model: SignaturePanels, name: str) -> Any:
    if not model.routes:
        ax.text(0.5, 0.5, model.why_no_routes, ha="center", transform=ax.transAxes, fontsize=points(8))
    return _draw(ax, model.routes, f"{name}routes: correlation forward and reverse", "correlation", (-1.05, 1.05))


def _gradients(ax: Any, model: SignaturePanels, name: str) -> Any:
    for i, (label, value) in enumerate(model.embeddings.items()):
        colour = look(5 + i, 5 + len(model.embeddings)).colour
        ax.axhline(value, color=colour, linewidth=1, linestyle="--", label=label)
    return _draw(ax, model.gradients, f"{name}gradients: cosine forward and reverse", "cosine", (-1.05, 1.05))


_SIGNATURES = {"evidence": _evidence, "cuts": _cuts, "routes": _routes, "gradients": _gradients}
SIGNATURES = tuple(_SIGNATURES)  # the panels


def _draw(
    ax: Any, curves: Mapping[str, Curve], title: str, ylabel: str, limits: tuple[float, float] | None = None
) -> Any:
    ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    n_layers = 0
    for i, (label, curve) in enumerate(curves.items()):
        n_layers = len(curve.mean)
        if curve.mean.isnan().all():  # it has no entry in the legend either
            continue
        if curve.low is None or curve.high is None:
            ax.plot(range(n_layers), curve.mean.tolist(), color=BASELINE, linestyle=":", marker=".", label=label)
        else:
            _band(ax, range(n_layers), curve.mean, curve.low, curve.high, label, look(i, len(curves)))
    if limits is not None:
        # Of a quantity that may leave them, with the margin that matplotlib adds.
        low, high = ax.dataLim.intervaly
        ax.set_ylim(limits[0] if low >= limits[0] else ax.get_ylim()[0], max(limits[1], high))
    _label_numbers(ax, range(n_layers))
    return _labelled(ax, "layer", ylabel, title, legend=_below, parse_math=False)


def _band(ax: Any, x: Sequence[int], mean: Tensor, low: Tensor, high: Tensor, label: str, drawn: Look) -> Any:
    """Draw a curve with its interval; returns the colour."""
    line = {"color": drawn.colour, "linestyle": drawn.dash, "marker": drawn.marker, "markersize": 3}
    ax.plot(x, mean.tolist(), label=label, **line)
    ax.fill_between(x, low.tolist(), high.tolist(), color=drawn.colour, alpha=0.2, linewidth=0)
    return drawn.colour


def _bar_look(index: int, n: int) -> dict[str, Any]:
    """Colour and hatching of a group of bars; without a chosen colour map the first group is grey."""
    grey = index == 0 and STYLE.get().cmap is None
    colour = "0.8" if grey else look(index - 1 if STYLE.get().cmap is None else index, n).colour
    return {"color": colour, "hatch": look(index).hatch, "edgecolor": "white" if look(index).hatch else colour}


def _label_numbers(ax: Any, places: Sequence[int]) -> None:
    label_places(ax.xaxis, places, list(map(str, places)), points(8), MOST_LABELS)


def label_columns(ax: Any, labels: Sequence[str], most: int | None = None, all: bool = False) -> None:
    """Label the columns 0, 1, ... of a picture of lines or bars; `all` says that each label is needed."""
    longest = letters_in(_UPRIGHT * room_of(ax)[1], points(8))
    names = [label if "\n" in label else shortened(label, longest) for label in labels]
    label_places(ax.xaxis, range(len(labels)), names, points(8), most, all=all)


def _label_rows(ax: Any, labels: Sequence[str]) -> None:
    longest = letters_in(_UPRIGHT * room_of(ax)[0], points(8))
    label_places(ax.yaxis, range(len(labels)), [shortened(label, longest) for label in labels], points(8))


def _inside(ax: Any) -> None:
    ax.legend(fontsize=points(8))


def legend_outside(ax: Any, entries: Mapping[str, Any] | None = None) -> None:
    """The legend beside the axes, or below them where it would take too much of the width.

    Args:
        entries: What is drawn, by its label; by default all that has a label.
    """
    labelled = _entries(ax) if entries is None else entries
    widest = max(width_of(label, points(8)) for label in labelled) + _HANDLE * points(8)
    if widest > _BESIDE * room_of(ax)[0]:
        _below(ax, labelled)
    else:
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "frameon": False}
        ax.legend(labelled.values(), labelled.keys(), fontsize=points(8), **place)


def _below(ax: Any, entries: Mapping[str, Any] | None = None) -> None:
    """The legend below the labels of the axes, where it hides no curve, in as many columns as have room."""
    from matplotlib.transforms import ScaledTranslation

    labelled = _entries(ax) if entries is None else entries
    if not labelled:
        return
    size, width = points(7), room_of(ax)[0]
    labels = [shortened(label, letters_in(0.95 * width - _HANDLE * size, size)) for label in labelled]
    widest = max(width_of(label, size) for label in labels) + _HANDLE * size
    columns = min(len(labels), max(1, int(width / widest)))
    # Below what stands under the axes: ticks, their labels, which may be upright, and the name of the axis.
    ticks = max((label.get_window_extent().height for label in ax.get_xticklabels()), default=0.0) * 72 / ax.figure.dpi
    under = 8 + ticks + (1.4 * points(9) if ax.get_xlabel() else 0)
    shifted = ax.transAxes + ScaledTranslation(0, -under / 72, ax.figure.dpi_scale_trans)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "bbox_transform": shifted, "borderaxespad": 0.2}
    spaces = {"columnspacing": 1.0, "handletextpad": 0.5, "handlelength": 2.0}
    ax.legend(labelled.values(), labels, fontsize=size, ncols=columns, frameon=False, **place, **spaces)


def _entries(ax: Any) -> dict[str, Any]:
    handles, labels = ax.get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True))


def _labelled(
    ax: Any,
    xlabel: str,
    ylabel: str,
    title: str,
    legend: Callable[[Any], None] | None = legend_outside,
    parse_math: bool = True,
) -> Any:
    label_axes(ax, xlabel, ylabel, title, parse_math=parse_math)
    if legend is not None:
        legend(ax)
    return ax
