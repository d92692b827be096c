"""Heat maps: scores over layers and positions, several traces on one colour scale, tokens in cells, edges."""

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import (
    ABSENT,
    HUES,
    RESTORED,
    Figure,
    ink_on,
    one_axes,
    panels,
    readable,
    row_labels,
    short_answer,
    shortened,
    spaced,
)

_ABOVE_BAR = 16  # points between map and title, so that a title wider than the map is above the label of the colour bar
LONGEST = 9  # characters of a token
MOST_COLUMNS = 16


@runtime_checkable
class Trace(Protocol):
    """The parts of a trace that `trace_panels` uses."""

    @property
    def scores(self) -> Float[Tensor, "pos layer"]: ...

    @property
    def corrupted(self) -> float: ...

    def plot(self, ax: Any = None, title: str | None = None, limits: tuple[float, float] | None = None) -> Any: ...


def heat_map(
    scores: Float[Tensor, "pos layer"],
    *,
    str_tokens: Sequence[str],
    subject: tuple[int, int],
    positions: Sequence[int],
    layers: Sequence[int],
    kind: str,
    answer: Sequence[str],
    limits: tuple[float, float],
    title: str | None = None,
    ax: Any = None,
) -> Any:
    """ROME's figure: tokens as rows (the subject's with a star), layers as columns, p(answer) as colour.

    Cells that are NaN are grey.

    Args:
        str_tokens: Text of every position of the canvas.
        subject: First position of the subject, and one past its last.
        positions: Position of each row.
        layers: Layer of each column.
        kind: Kind of state that was restored, "resid", "mlp" or "attn"; it selects the hue.
        answer: Text of each answer token.
        limits: Probabilities at the two ends of the colour scale.
    """
    return labelled_map(
        scores,
        rows=row_labels(str_tokens, subject, positions),
        layers=layers,
        xlabel=RESTORED[kind],
        hue=HUES[kind],
        limits=limits,
        bar=f"p({short_answer(answer)})",
        title=title or "Impact of restoring a state after corrupted input",
        ax=ax,
    )


def labelled_map(
    values: Float[Tensor, "entry layer"],
    *,
    rows: Sequence[str],
    layers: Sequence[int | str],
    xlabel: str,
    hue: str,
    limits: tuple[float, float],
    bar: str,
    title: str,
    ax: Any = None,
) -> Any:
    """A heat map with labelled rows, layers as columns and a labelled colour bar. Cells that are NaN are grey."""
    ax = one_axes(ax, *_map_size(*values.shape))
    ax.set_facecolor(ABSENT)
    highest = max(limits[1], limits[0] + 1e-6)  # The scale must not be empty, even if all values are equal.
    image = ax.imshow(values.numpy(), cmap=hue, vmin=limits[0], vmax=highest, aspect="auto")
    # Without parse_math=False a "$" in a token would begin a formula.
    ax.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
    columns = spaced(len(layers))
    ax.set_xticks(columns, [str(layers[column]) for column in columns], fontsize=8)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_title(title, fontsize=10, pad=_ABOVE_BAR)
    thin = min(0.05, 1 / len(layers))
    scale = ax.figure.colorbar(image, cax=ax.inset_axes((1.01 + thin, 0, thin, 1)))
    scale.ax.tick_params(labelsize=8)
    # An annotation instead of a title, because the layout reserves no room for the width of titles.
    above = {"xycoords": "axes fraction", "textcoords": "offset points"}
    scale.ax.annotate(bar, (0, 1), (0, 5), **above, fontsize=8, parse_math=False)
    return ax


def trace_panels(
    rows: Sequence[Sequence[Trace]],
    titles: Sequence[Sequence[str]] | None = None,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Heat maps in rows. The maps of a row share one colour scale.

    A row may contain the three kinds of one trace, or the same trace of two models. All cells of a row have the same
    height, so that a position is at the same height on two canvases. The area below a shorter canvas is grey.

    Args:
        rows: Traces of each row; rows may differ in length.
        titles: Title of each trace, in the same rows. Default: the title that the trace's own `plot` writes.
        limits: Probabilities at the two ends of one colour scale for all rows. Default: each row has its own scale,
            from its lowest corrupted run to its highest score.

    Raises:
        ValueError: A row is empty, or the rows of titles do not match the rows of traces.
    """
    if not rows or not all(rows):
        raise ValueError("there is nothing to draw; trace_panels takes rows of traces, such as [[resid, mlp, attn]]")
    lengths = [len(row) for row in rows]
    if titles is not None and [len(row) for row in titles] != lengths:
        raise ValueError(
            f"the rows have {[len(row) for row in titles]} titles and {lengths} traces; give each trace a title"
        )
    n_columns = max(lengths)
    tallest = [max(trace.scores.shape[0] for trace in row) for row in rows]
    widest = [max(row[column].scores.shape[1] for row in rows if column < len(row)) for column in range(n_columns)]
    figure, axes = panels(
        len(rows),
        n_columns,
        width=sum(_map_size(0, n_layers)[0] for n_layers in widest),
        height=sum(_map_size(n_pos, 0)[1] for n_pos in tallest),
        width_ratios=widest,
        height_ratios=tallest,
    )
    for i, row in enumerate(rows):
        shared = limits or (
            min(trace.corrupted for trace in row),
            max(float(trace.scores.nan_to_num().max()) for trace in row),
        )
        own = axes[i * n_columns : (i + 1) * n_columns]
        for j, trace in enumerate(row):
            trace.plot(ax=own[j], title=titles[i][j] if titles else None, limits=shared)
            own[j].set_ylim(tallest[i] - 0.5, -0.5)
        for ax in own[len(row) :]:
            ax.remove()
    return figure


def token_map(
    values: Float[Tensor, "entry layer"],
    words: Sequence[Sequence[str]],
    *,
    layers: Sequence[int | str],
    xlabel: str,
    ax: Any = None,
    **labels: Any,
) -> Any:
    """A heat map with labelled rows, and a token written in each cell. Cells that are NaN are grey.

    Of more than 16 columns, every second, third, ... is drawn, the last among them, so that the figure is at most 14
    inches wide.

    Args:
        words: Token of each cell, shortened to fit; an empty text writes nothing.
        layers: Label of each column.
        xlabel: Label of the horizontal axis.
        labels: The other arguments of `labelled_map`: rows, hue, limits, bar, title.
    """
    n_rows, n_columns = values.shape
    every = -(-n_columns // MOST_COLUMNS)
    drawn = range((n_columns - 1) % every, n_columns, every)
    values = values[:, list(drawn)].float()
    ax = one_axes(ax, width=2.4 + 0.72 * len(drawn), height=1.1 + 0.26 * n_rows)
    said = xlabel if every == 1 else f"{xlabel} (one in {every} of {n_columns})"
    labelled_map(values, layers=[layers[i] for i in drawn], xlabel=said, ax=ax, **labels)
    (image,) = ax.get_images()
    for row, of_row in enumerate(words):
        for column, word in enumerate(of_row[i] for i in drawn):
            if not word:
                continue
            value = float(values[row, column])
            cell = ax.get_facecolor() if math.isnan(value) else image.cmap(image.norm(value))
            ax.text(
                column,
                row,
                shortened(readable(word), LONGEST),
                ha="center",
                va="center",
                fontsize=7,
                color=ink_on(cell),
                parse_math=False,
                in_layout=False,  # It is inside the axes, and to measure all texts takes half of the time.
            )
    return ax


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


def _map_size(n_pos: int, n_layers: int) -> tuple[float, float]:
    """Width and height in inches at which every token label is legible."""
    return 2.2 + max(2.0, 0.17 * n_layers), 1.0 + max(0.8, 0.2 * n_pos)
