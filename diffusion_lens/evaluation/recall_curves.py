"""The recall table as curves over steps. Needs the extra `plot`."""

from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_lens.evaluation.naming import DirectionPair, cell_name
from diffusion_lens.evaluation.published import published_rows
from diffusion_lens.evaluation.recall_table import Share, steps_label
from diffusion_lens.evaluation.scores import SCORES
from diffusion_lens.plots import one_axes


def recall_curves(
    table: Mapping[DirectionPair, Mapping[int | None, Share]],
    steps: Sequence[int | None],
    score: str,
    *,
    ax: Any,
    title: str,
) -> Any:
    """One line per cell with its intervals, published numbers dashed in the same colour. Returns the matplotlib axes.

    Columns are equally spaced, whatever their numbers of steps.

    Raises:
        ValueError: The table is empty.
    """
    if not table:
        raise ValueError("there is no curve to draw: the table is empty, because the model was queried for no fact")
    ax = one_axes(ax, width=7.2, height=3.6)
    legend: dict[str, Any] = {}
    markers: dict[str, str] = {}
    for i, (cell, shares) in enumerate(table.items()):
        colour, plotted = f"C{i}", [shares[column] for column in steps]
        offset = 0.06 * (i - (len(table) - 1) / 2)  # Shifts the cells, so that equal values do not hide one another.
        legend[f"{cell_name(*cell)} (n = {plotted[0].questions})"] = ax.errorbar(
            [x + offset for x in range(len(steps))],
            [share.mean for share in plotted],
            # NaN ends and negative lengths, which rounding can give, become bars of length 0.
            yerr=[[max(0.0, gap) for gap in gaps] for gaps in zip(*map(_gaps, plotted), strict=True)],
            color=colour,
            marker="o",
            markersize=4,
            capsize=2,
        )
        for label, row in published_rows(cell, score).items():
            if points := [(x + offset, row[column].value) for x, column in enumerate(steps) if column in row]:
                marker = markers.setdefault(label, "x+^vs"[len(markers) % 5])
                ax.plot(*zip(*points, strict=True), color=colour, linestyle="--", marker=marker, alpha=0.6)
    for label, marker in markers.items():
        (legend[label],) = ax.plot([], [], color="0.4", linestyle="--", marker=marker)
    ax.set_xticks(range(len(steps)), [steps_label(column) for column in steps], fontsize=8)
    ax.set_xlim(-0.5, len(steps) - 0.5)
    ax.set_ylim(-0.03, 1.03)
    ax.set_ylabel(SCORES[score], fontsize=8)
    ax.set_title(title, fontsize=10, parse_math=False)
    ax.legend(legend.values(), legend.keys(), loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=7)
    return ax


def _gaps(share: Share) -> tuple[float, float]:
    """Distances from the mean to the lower and the upper end of the interval."""
    return share.mean - share.low, share.high - share.mean
