"""Maps: scores over layers and positions, several traces on one colour scale, tokens in cells, edges, graphs of runs.

The graph of a run has steps from top to bottom, layers from left to right, and heavy lines for decisions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import (
    ABSENT,
    CELLS,
    HUES,
    LETTER,
    RESTORED,
    Figure,
    colour_map,
    ink_on,
    label_axes,
    label_places,
    letters_in,
    look,
    one_axes,
    panels,
    points,
    readable,
    room_of,
    row_labels,
    short_answer,
    shortened,
    width_of,
)
from diffusion_lens.plots.curves import legend_outside
from diffusion_lens.settings.figures import styled

MOST_NUMBERS = 12  # of columns
_ROWS, _UPRIGHT = 0.45, 0.3  # largest shares of the room that labels of rows and upright labels of columns have
_ABOVE_BAR = 16  # points between map and title, so that a title wider than the map is above the label of the colour bar
LONGEST, FEWEST = 9, 4  # letters of a token that is written
MOST_COLUMNS = 16  # whose cells have the width of a token
CELL_INCHES = 0.72  # width of a token
_MAP_WIDTH, _MAP_HEIGHT = 0.55, 0.6  # shares of a figure that its map has, about


@runtime_checkable
class Trace(Protocol):
    """The parts of a trace that `trace_panels` uses."""

    @property
    def scores(self) -> Float[Tensor, "pos layer"]: ...

    @property
    def corrupted(self) -> float: ...

    def plot(self, ax: Any = None, title: str | None = None, limits: tuple[float, float] | None = None) -> Any: ...


@styled
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


@styled
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
    """A heat map with labelled rows, layers as columns and a labelled colour bar. Cells that are NaN are grey.

    Args:
        rows, layers: Label of each row and column. Where they would collide, every second, third, ... is drawn.
        hue: Colour map, unless another is chosen.
        limits: Values at the ends of the colour scale.
        bar: Label of the colour bar.
    """
    ax = one_axes(ax, *_map_size(*values.shape))
    ax.set_facecolor(ABSENT)
    highest = max(limits[1], limits[0] + 1e-6)  # The scale must not be empty, even if all values are equal.
    image = ax.imshow(values.numpy(), cmap=colour_map(hue), vmin=limits[0], vmax=highest, aspect="auto", **CELLS)
    size, (width, height) = points(8), room_of(ax)
    names = [shortened(row, letters_in(_ROWS * width, size)) for row in rows]
    left = max((width_of(name, size) for name in names), default=0.0) + 10
    right = 0.06 * width + width_of("0.00", size) + 10  # of the colour bar
    # The title is above the middle of the map, which is not the middle of the figure.
    room = width - abs(right - left)
    label_axes(ax, xlabel, "", title, pad=_ABOVE_BAR * size / 8, room=room)
    label_places(ax.yaxis, range(len(rows)), names, size)
    longest = max(letters_in(_UPRIGHT * height, size), int((width - left - right) / len(layers) / (LETTER * size)))
    columns = [shortened(str(layer), longest) for layer in layers]
    numbers = all(str(layer)[:1].isdigit() for layer in layers)
    label_places(ax.xaxis, range(len(layers)), columns, size, MOST_NUMBERS if numbers else None)
    thin = min(0.05, max(0.02, 1 / len(layers)))
    scale = ax.figure.colorbar(image, cax=ax.inset_axes((1.01 + thin, 0, thin, 1)))
    scale.ax.tick_params(labelsize=size)
    # An annotation instead of a title, because the layout reserves no room for the width of titles. It ends where the
    # numbers of the bar end, about.
    above = {"xycoords": "axes fraction", "textcoords": "offset points"}
    right = max(0.0, width_of("0.00", size) + 7 - max(0.0, width_of(bar, size) - width / 3))
    scale.ax.annotate(bar, (1, 1), (right, 5), **above, ha="right", fontsize=size, parse_math=False)
    return ax


@styled
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


@styled
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

    Every row and column is drawn. Where cells are too small for a line of text, or for a few letters, the tokens are
    left out.

    Args:
        words: Token of each cell, shortened to fit; an empty text writes nothing.
        layers: Label of each column.
        xlabel: Label of the horizontal axis.
        labels: The other arguments of `labelled_map`: rows, hue, limits, bar, title.
    """
    n_rows, n_columns = values.shape
    size = points(7)
    ax = one_axes(ax, width=2.4 + CELL_INCHES * min(n_columns, MOST_COLUMNS), height=1.1 + 0.26 * n_rows)
    labelled_map(values.float(), layers=layers, xlabel=xlabel, ax=ax, **labels)
    width, height = room_of(ax)
    n_letters = int((_MAP_WIDTH * width / n_columns) / (LETTER * size))
    if _MAP_HEIGHT * height < size * n_rows or n_letters < FEWEST:
        return ax
    (image,) = ax.get_images()
    for row, of_row in enumerate(words):
        for column, word in enumerate(of_row):
            if not word:
                continue
            value = float(values[row, column])
            behind = ax.get_facecolor() if math.isnan(value) else image.cmap(image.norm(value))
            ax.text(
                column,
                row,
                shortened(readable(word), min(LONGEST, n_letters)),
                ha="center",
                va="center",
                fontsize=size,
                color=ink_on(behind),
                parse_math=False,
                in_layout=False,  # It is inside the axes, and to measure all texts takes half of the time.
            )
    return ax


@styled
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
        layers=readers,
        xlabel="reader: queries, keys and values of attention (a), MLP (m)",
        hue="RdBu",
        limits=limits or (-bound, bound),
        bar="score",
        title=title or "Scores of the edges, summed over heads",
        ax=ax,
    )
    ax.set_ylabel("writer", fontsize=points(9))
    return ax


def _map_size(n_pos: int, n_layers: int) -> tuple[float, float]:
    """Width and height in inches at which every token label is legible."""
    return 2.2 + max(2.0, 0.17 * n_layers), 1.0 + max(0.8, 0.2 * n_pos)


_MARKERS = {"token": "s", "embed": "s", "head": "o", "mlp": "D", "decision": ">", "target": "*", "error": "x"}
_MARKERS |= {"feature": "^"}
_ROW = 0.2  # inches of a position


@styled
def run_graph(
    nodes: Sequence[Mapping[str, Any]],
    edges: Sequence[tuple[int, int, float, bool]],
    title: str,
    ax: Any = None,
) -> Any:
    """Draw nodes as dots, as large as their effects, and edges as lines, as wide as their weights.

    Args:
        nodes: Of each node its kind, x, index of its step, label of the step, position, the word that the step reads
            there, the word that it writes there, and its effect.
        edges: Source, target, weight, and whether the edge is a decision.
    """
    # 1. A row for each position of a step that has a node.
    rows: dict[tuple[int, int], float] = {}
    for step, position in sorted({(node["step"], node["position"]) for node in nodes}):
        before = next(reversed(rows), None)
        rows[step, position] = 0.0 if before is None else rows[before] + (1.0 if before[0] == step else 2.5)
    places = [(node["x"], rows[node["step"], node["position"]]) for node in nodes]
    ax = one_axes(ax, width=6.4, height=1.2 + _ROW * (max(rows.values(), default=0.0) + 1))

    # 2. Edges below the nodes; the ends of the colour map are negative and positive effects.
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    chosen = colour_map("RdBu")
    mapped = colormaps[chosen] if isinstance(chosen, str) else chosen
    colours = to_hex(mapped(0.1)), to_hex(mapped(0.9))
    largest = max((abs(weight) for *_, weight, _ in edges), default=1.0) or 1.0
    for source, target, weight, decision in edges:
        (x, y), (to_x, to_y) = places[source], places[target]
        strength = abs(weight) / largest
        look = {"color": colours[weight > 0], "alpha": 0.15 + 0.75 * strength, "solid_capstyle": "round"}
        if decision:
            ax.plot([x, to_x], [y, to_y], linewidth=2.5, zorder=2, **{**look, "color": "0.4", "alpha": 0.8})
        else:
            ax.plot([x, to_x], [y, to_y], linewidth=0.3 + 2.2 * strength, zorder=1, **look)

    # 3. Nodes, and the words of the positions.
    most = max((abs(node["effect"]) for node in nodes), default=1.0) or 1.0
    for node, (x, y) in zip(nodes, places, strict=True):
        size, colour = 8 + 110 * abs(node["effect"]) / most, colours[node["effect"] > 0]
        ax.scatter([x], [y], s=size, marker=_MARKERS[node["kind"]], color=colour, zorder=3, linewidths=1)
        if node["kind"] in ("decision", "target"):
            ax.annotate(readable(node["word"]), (x, y), (7, 0), textcoords="offset points", va="center", size=points(7))
    words = {
        (node["step"], node["position"]): f"{node['label']}:{node['position']} {readable(node['read'])}"
        for node in nodes
    }
    ax.margins(x=0.16)
    ax.set_yticks(list(rows.values()), [words[key] for key in rows], fontsize=points(7))
    across = sorted({int(node["x"]) for node in nodes if node["kind"] in ("head", "mlp", "feature")})
    ends = [-1, max((node["x"] for node in nodes), default=0)]
    ax.set_xticks([ends[0], *across, ends[1]], ["embed", *map(str, across), "writes"], fontsize=points(7))
    ax.invert_yaxis()
    features = ", features △" if any(node["kind"] == "feature" for node in nodes) else ""
    label_axes(ax, f"layer: heads ○, MLPs ◇{features}", "step:position", title)
    return ax


@styled
def predicted_changes(changes: Mapping[str, Float[Tensor, "cell 2"]], title: str, ax: Any = None) -> Any:
    """Scatter plot of predicted and measured changes, with the line on which they are equal.

    Args:
        changes: The predicted and the measured change of each cell, by the label of its kind.
    """
    ax = one_axes(ax, 4.6, 4.2)
    ax.axline((0, 0), slope=1, color="0.75", linewidth=0.8, zorder=1)
    for i, (label, cells) in enumerate(changes.items()):
        drawn = look(i, len(changes))
        ax.scatter(*cells.T.tolist(), s=14, color=drawn.colour, marker=drawn.marker, label=label, zorder=2)
    ax.locator_params(nbins=4)  # labels such as −1.25 have room in a column of a paper
    label_axes(ax, "predicted change", "measured change", title)
    legend_outside(ax)
    return ax
