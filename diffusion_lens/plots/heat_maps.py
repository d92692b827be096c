"""Heat maps: of scores over layers and positions, of several traces on one scale, of a run over its steps."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.plots.axes import (
    ABSENT,
    HUES,
    RESTORED,
    Figure,
    one_axes,
    panels,
    readable,
    row_labels,
    short_answer,
    spaced,
)


@runtime_checkable
class Trace(Protocol):
    """What `trace_panels` asks of a trace."""

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
    """ROME's figure: tokens down, the subject's starred, layers across, p(answer) as colour; NaN is grey.

    Args:
        str_tokens: the whole canvas, a string a place.
        subject: first and one past the last place of the subject.
        positions: the place of each row.
        layers: the layer of each column.
        kind: what was restored, "resid", "mlp" or "attn"; it chooses the hue.
        answer: the text of each of its tokens.
        limits: probabilities at the ends of the colour scale.
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
    layers: Sequence[int],
    xlabel: str,
    hue: str,
    limits: tuple[float, float],
    bar: str,
    title: str,
    ax: Any = None,
) -> Any:
    """A grid over layers: a label a row, layers across, a named colour bar; NaN is grey."""
    ax = one_axes(ax, *_map_size(*values.shape))
    ax.set_facecolor(ABSENT)
    highest = max(limits[1], limits[0] + 1e-6)  # a scale has an extent even where there is nothing to see
    image = ax.imshow(values.numpy(), cmap=hue, vmin=limits[0], vmax=highest, aspect="auto")
    # Tokens are text and never markup: a "$" would begin a formula.
    ax.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
    columns = spaced(len(layers))
    ax.set_xticks(columns, [str(layers[column]) for column in columns], fontsize=8)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_title(title, fontsize=10)
    thin = min(0.05, 1 / len(layers))
    scale = ax.figure.colorbar(image, cax=ax.inset_axes((1.01 + thin, 0, thin, 1)))
    scale.ax.tick_params(labelsize=8)
    # Not the bar's title: the layout makes no room for the width of titles.
    above = {"xycoords": "axes fraction", "textcoords": "offset points"}
    scale.ax.annotate(bar, (0, 1), (0, 5), **above, fontsize=8, parse_math=False)
    return ax


def trace_panels(
    rows: Sequence[Sequence[Trace]],
    titles: Sequence[Sequence[str]] | None = None,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Heat maps in rows, each row on one colour scale: the three kinds of a trace, or a model beside its twin.

    Cells of a row are equally high, so that the same place of two canvases stands at the same height; below the end of
    the shorter canvas is grey.

    Args:
        rows: the traces of each row; rows may differ in length.
        titles: one for each trace, in the same rows; by default what the trace's own `plot` writes.
        limits: probabilities at the ends of one scale for all; by default a row's scale goes from the lowest corrupted
            run to the highest score in it.

    Raises:
        ValueError: an empty row, or titles in other rows than the traces.
    """
    if not rows or not all(rows):
        raise ValueError("there is nothing to draw; trace_panels takes rows of traces, such as [[resid, mlp, attn]]")
    lengths = [len(row) for row in rows]
    if titles is not None and [len(row) for row in titles] != lengths:
        raise ValueError(f"titles come in rows of {[len(row) for row in titles]}, the traces in rows of {lengths}")
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


def denoising_grid(
    words: Sequence[Sequence[str]],
    hidden: Sequence[Sequence[bool]],
    revealed_at: Int[Tensor, "pos"],
    confidence: Float[Tensor, "pos"],
    *,
    title: str | None = None,
    ax: Any = None,
) -> Any:
    """The canvas by step: a row a step, each revealed token coloured by how sure the model was of it.

    Args:
        words: the text of each place, for each canvas of the trajectory.
        hidden: whether each place is blank, for each canvas.
        revealed_at: step in which a place was revealed for good, -1 where it was given.
        confidence: probability of the token when it was revealed.
    """
    n_canvases, n_pos = len(words), len(revealed_at)
    ax = one_axes(ax, width=0.85 * n_pos + 1.6, height=0.36 * n_canvases + 1.0)
    shade = np.full((n_canvases, n_pos), np.nan)
    for place in range(n_pos):
        if revealed_at[place] >= 0:
            shade[int(revealed_at[place]) + 1 :, place] = float(confidence[place])
    image = ax.imshow(shade, cmap="YlGn", vmin=0, vmax=1.25, aspect="auto")
    for row, canvas in enumerate(words):
        for place, word in enumerate(canvas):
            given, new = revealed_at[place] < 0, 0 <= revealed_at[place] == row - 1
            blank = hidden[row][place]
            colour = "0.7" if blank else "0.35" if given else "black"
            ax.text(
                place,
                row,
                "·" if blank else readable(word),
                ha="center",
                va="center",
                fontsize=8,
                color=colour,
                fontweight="bold" if new else "normal",
                parse_math=False,
            )
    ax.set_yticks(range(n_canvases), ["start", *(f"step {i}" for i in range(n_canvases - 1))])
    ax.set_xticks([])
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, boundaries=np.linspace(0, 1, 101), ticks=[0, 0.5, 1], pad=0.01)
    bar.ax.set_title("p(token)", fontsize=8)
    ax.set_title(title or "The canvas, step by step", fontsize=10)
    return ax


def _map_size(n_pos: int, n_layers: int) -> tuple[float, float]:
    """Inches of a heat map in which every token can be read, with its labels and its bar."""
    return 2.2 + max(2.0, 0.17 * n_layers), 1.0 + max(0.8, 0.2 * n_pos)
