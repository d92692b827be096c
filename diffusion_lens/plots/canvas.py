"""The canvas by denoising step: a row for each step, a token in each cell, as a figure or as HTML.

The HTML, a page or a part of one, has no scripts, fonts or downloads.
"""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

import numpy as np

from diffusion_lens.plots.axes import (
    CELLS,
    LETTER,
    colour_map,
    figure_size,
    ink_on,
    label_axes,
    label_places,
    look,
    one_axes,
    points,
    readable,
    shortened,
)
from diffusion_lens.settings.figures import STYLE, styled

WIDEST = 14  # positions side by side; a longer canvas is drawn in bands, one below the other
_LONGEST = 11  # characters of a token in a band
_SMALLEST = 4.0  # points of the text of a token
_TWO_LINES = 0.7  # share of the height of a row that a text of two may have
_HIGHEST_INCHES, _WIDEST_INCHES = 24.0, 14.0  # of the cells of a new figure
_NARROWEST = 25  # points of a column beside the given positions
_MOST_BANDS = 4  # of the difference of two long canvases
_MASKED, _GIVEN = "0.4", "0.35"  # greys of dots and of the prompt; both have a contrast above 4.5 with white
# Backgrounds of the cells of two runs; in grey they differ too.
DIFFERENCES = {"the same": "#ffffff", "written in one": "#d6e6f4", "another token": "#fdb462"}
_SAME, _WAS, _BEGINS = "0.45", "0.25", "#a04000"  # texts in both runs, in the first, the line where they part


@styled
def denoising_grid(
    words: Sequence[Sequence[str]],
    hidden: Sequence[Sequence[bool]],
    revealed_at: Sequence[int],
    confidence: Sequence[float],
    first_step: int = 0,
    *,
    title: str | None = None,
    ax: Any = None,
    folded: bool = True,
) -> Any:
    """The canvas by denoising step: one row per step, each token coloured by its probability when it was revealed.

    Consecutive steps that write nothing are one thin row without texts, labelled "steps 5-11 …".

    A canvas of more than 14 positions is drawn without the given positions at its start, in bands of at most 14
    positions, one below the other. A band has the steps that change it. Where the texts of all bands have no room, the
    positions are side by side, without texts.

    Args:
        words: Text of each position, for each canvas of the trajectory.
        hidden: Whether each position is still masked, for each canvas.
        revealed_at: Step that revealed each position for good; -1 for positions of the prompt.
        confidence: Probability of each token when it was revealed.
        first_step: Number of the step that follows the first canvas.
        folded: Whether steps that write nothing are folded; otherwise each has a row, also in bands.
    """
    same = _unchanged(words, hidden, revealed_at, first_step) if folded else [False] * len(words)
    n_given = _first_written(revealed_at, hidden[0]) if _is_narrow(len(revealed_at), ax) else 0
    cells = [list(zip(canvas, blank, strict=True)) for canvas, blank in zip(words, hidden, strict=True)]
    bands = _bands(cells, n_given, same, folded)
    written = _has_room(ax, sum(len(spans) + (len(bands) > 1) for _, spans in bands), len(bands[0][0]))
    if not written:
        bands = [(range(n_given, len(revealed_at)), _spans_of(same))]
    n_columns, several = len(bands[0][0]), len(bands) > 1
    long = several or n_given > 0
    rows: list[tuple[range, range] | range] = []
    for positions, spans in bands:
        rows += [positions] * several + [(positions, span) for span in spans]  # with a label above each of several
    heights, centres = _placed([1 if not isinstance(row, range) and same[row[1].start] else 2 for row in rows])
    height = int(heights.sum()) / 2
    width = 0.85 * n_columns if written else min(0.85 * n_columns, _WIDEST_INCHES)
    ax = one_axes(ax, width=width + 1.6, height=min((0.26 if long else 0.36) * height, _HIGHEST_INCHES) + 1.0)
    size = _text_size(ax, height)
    longest = min(_LONGEST if long else 99, max(3, int(_points(ax, 75)[0] / n_columns / (LETTER * size))))
    shade = np.full((len(rows), n_columns), np.nan)
    ticks: dict[float, str] = {}
    for i, (row, y) in enumerate(zip(rows, centres, strict=True)):
        if isinstance(row, range):
            ticks[y] = _header_of(row)
            continue
        positions, span = row
        canvas, step, thin = span.start, first_step + span.stop - 2, same[span.start]
        ticks[y] = _label_of(span, first_step) + thin * " …"
        for column, pos in enumerate(positions):
            if 0 <= revealed_at[pos] <= step:
                shade[i, column] = confidence[pos]
            if not thin and written:
                given, masked = revealed_at[pos] < 0, hidden[canvas][pos]
                text = "·" if masked else readable(words[canvas][pos])
                ax.text(
                    column,
                    y,
                    shortened(text, longest),
                    ha="center",
                    va="center",
                    fontsize=size * (1.6 if masked else 1),
                    color=_MASKED if masked else _GIVEN if given else "black",
                    fontweight="bold" if 0 <= revealed_at[pos] == step else "normal",
                    parse_math=False,
                    in_layout=False,  # It is inside the axes, and to measure all texts takes half of the time.
                )
    # The range ends above 1, so that black text can be read on the darkest cell.
    image = ax.imshow(
        np.repeat(shade, heights, axis=0),
        cmap=colour_map("YlGn"),
        vmin=0,
        vmax=1.6,
        aspect="auto",
        extent=(-0.5, n_columns - 0.5, height - 0.5, -0.5),
        **CELLS,
    )
    _label_rows(ax, ticks, height)
    ax.tick_params(length=0)
    if written:
        ax.set_xticks([])
    else:
        label_places(ax.xaxis, range(n_columns), list(map(str, bands[0][0])), points(8))
    for side in ax.spines.values():
        side.set_visible(False)
    bar = ax.figure.colorbar(
        image, ax=ax, boundaries=np.linspace(0, 1, 101), ticks=[0, 0.5, 1], pad=0.01, aspect=max(20, len(rows))
    )
    left_out = f" ({n_given} given positions at the start are not drawn)" if n_given else ""
    if n_given and _points(ax)[0] < 250:
        left_out = f"\n(without {n_given} given positions)"
    label_axes(ax, "" if written else "position", "", f"{title or 'The canvas, step by step'}{left_out}")
    _label_rows(ax, ticks, height)
    bar.ax.tick_params(labelsize=points(8))
    bar.ax.set_title("p(token)", fontsize=points(8))
    return ax


@styled
def difference_grid(
    was: Sequence[Sequence[str | None]],
    now: Sequence[Sequence[str | None]],
    differs: Sequence[Sequence[bool]],
    first_step: int = 0,
    *,
    title: str | None = None,
    ax: Any = None,
    folded: bool = True,
) -> Any:
    """Two canvases by denoising step: what is the same is pale; where they differ, both texts are in a coloured cell.

    The texts of a cell that differs are written where it begins to differ or changes, and in the last row. A line
    marks where it begins. Steps and positions are folded and divided as in `denoising_grid`. Of several bands, the
    first four in which something differs are drawn.

    Args:
        was: Text of each position, for each canvas of the first run; `None` where nothing is written.
        now: The same of the second run.
        differs: Whether the canvases differ at each position.
        first_step: Number of the step that follows the first canvas.
        folded: Whether steps that write nothing in both runs are folded.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    cells = [list(zip(*both, strict=True)) for both in zip(was, now, differs, strict=True)]
    same = [folded and i > 0 and cells[i] == cells[i - 1] for i in range(len(cells))]
    changing = [
        pos for pos, first in enumerate(cells[0]) if any(canvas[pos] != first or canvas[pos][2] for canvas in cells)
    ]
    bands = _bands(cells, changing[0] if changing and _is_narrow(len(cells[0]), ax) else 0, same, folded)
    several = len(bands) > 1
    differing = [each for each in bands if any(canvas[pos][2] for canvas in cells for pos in each[0])]
    bands = differing[:_MOST_BANDS] or bands[:1]

    # 1. Rows: those in which two texts stand below each other are higher, and above each of several bands is a label.
    rows: list[tuple[range, range, bool] | range] = []
    for positions, spans in bands:
        rows += [positions] * several
        last = max(span.start for span in spans if not same[span.start])
        rows += [(positions, span, span.start == last) for span in spans]
    told = [
        [] if isinstance(row, range) else [_told(cells, pos, row[1].start, same, row[2]) for pos in row[0]]
        for row in rows
    ]
    sizes = [
        2 if isinstance(row, range) else 1 if same[row[1].start] else 3 if any(both) else 2
        for row, both in zip(rows, told, strict=True)
    ]
    heights, centres = _placed(sizes)
    height, n_columns = int(heights.sum()) / 2, len(bands[0][0])
    ax = one_axes(ax, width=0.8 * n_columns + 1.2, height=0.28 * height + 1.0)

    # 2. The cells.
    ax.set(xlim=(-0.5, n_columns - 0.5), ylim=(height - 0.5, -0.5))
    column_width, size = _points(ax)[0] / n_columns, _text_size(ax, height, 7, of_row=_TWO_LINES)
    written = _TWO_LINES * _points(ax)[1] / height >= _SMALLEST
    # Average letters are 0.6 font sizes wide, and 0.66 if they are bold; an arrow with its space is 1.3.
    before, after = max(3, int((column_width / size - 1.3) / 0.6)), max(3, int(column_width / size / 0.66))
    style = {"ha": "center", "va": "center", "fontsize": size, "parse_math": False, "in_layout": False}
    colours, inks = _of_states()
    status = np.full((len(rows), n_columns), np.nan)
    ticks: dict[float, str] = {}
    for i, (row, y) in enumerate(zip(rows, centres, strict=True)):
        if isinstance(row, range):
            ticks[y] = _header_of(row)
            continue
        positions, span, _ = row
        thin = same[span.start]
        ticks[y] = _label_of(span, first_step) + thin * " …"
        for column, pos in enumerate(positions):
            old, new, differ = cells[span.start][pos]
            status[i, column] = (1 if old is None or new is None else 2) if differ else 0
            if written and told[i][column]:
                was_ink, ink = inks[int(status[i, column])]
                ax.text(column, y - 0.36, f"{_short(old, before)} →", color=was_ink, **style)
                weight = "normal" if new is None else "bold"
                ax.text(column, y + 0.36, _short(new, after), fontweight=weight, color=ink, **style)
            elif written and not differ and not thin and old is None:
                ax.text(column, y, "·", color=_SAME, **{**style, "fontsize": 1.8 * size})
            elif written and not differ and not thin:
                ax.text(column, y, _short(old, before + 2), color=_SAME, **style)
            if differ and not (span.start and cells[span.start - 1][pos][2]):
                top = y - heights[i] / 4
                ax.plot([column - 0.48, column + 0.48], [top, top], color=_BEGINS, linewidth=2, solid_capstyle="butt")
    ax.imshow(
        np.repeat(status, heights, axis=0),
        cmap=ListedColormap(colours),
        vmin=0,
        vmax=2,
        aspect="auto",
        extent=(-0.5, n_columns - 0.5, height - 0.5, -0.5),
        **CELLS,
    )
    _label_rows(ax, ticks, height)
    ax.set_xticks([] if several else range(n_columns), [] if several else list(map(str, bands[0][0])))
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    patches = [
        Patch(facecolor=colour, edgecolor="0.6", label=label)
        for label, colour in zip(DIFFERENCES, colours, strict=True)
    ]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 1 if several else 3.6}
    ax.legend(handles=patches, **below, ncols=3, fontsize=points(7), frameon=False)
    hidden = len(differing) - len(bands)
    left_out = f"\n(after position {bands[-1][0][-1]}, {hidden} more groups of positions differ)" if hidden > 0 else ""
    label_axes(
        ax, "" if several else "position", "", f"{title or 'The difference of two runs'}{left_out}", parse_math=False
    )
    ax.tick_params(axis="x", labelsize=points(7))
    ax.xaxis.labelpad = 1
    return ax


def _of_states() -> tuple[list[str], list[tuple[str, str]]]:
    """Background of each of the `DIFFERENCES`, and the colours of the first and the second run's text on it."""
    if STYLE.get().cmap is None:
        return list(DIFFERENCES.values()), [(_WAS, "black")] * len(DIFFERENCES)
    from matplotlib.colors import to_rgb

    colours = [DIFFERENCES["the same"], look(0, 2).colour, look(1, 2).colour]
    return colours, [(ink_on(to_rgb(colour)),) * 2 for colour in colours]


def _text_size(ax: Any, height: float, size: int = 8, of_row: float = 0.95) -> float:
    """Points of the text of a token, which takes this share of the height of a row."""
    return max(_SMALLEST, min(points(size), of_row * _points(ax)[1] / height))


def _has_room(ax: Any, n_rows: int, n_columns: int) -> bool:
    """Whether texts can be read in so many rows and columns on these axes or, if there are none, in a new figure."""
    if hasattr(ax, "get_window_extent"):
        width, height = _points(ax)
    else:
        inches = figure_size(0.0, 0.0)
        if not inches[0]:
            return 0.26 * n_rows <= _HIGHEST_INCHES
        width, height = 72 * inches[0] - points(45), 72 * inches[1] - points(60)
    return height / n_rows >= _SMALLEST and width / n_columns >= 2 * LETTER * _SMALLEST


def _header_of(positions: range) -> str:
    return f"positions {positions[0]}-{positions[-1]}"


def _short(text: str | None, longest: int) -> str:
    """A token that fits into a cell of two runs."""
    return "not yet" if text is None else shortened(readable(text), longest)


def _told(cells: Sequence[Sequence[Any]], pos: int, canvas: int, same: Sequence[bool], last: bool) -> bool:
    """Whether both texts of a position are written in the row of a canvas."""
    new = canvas == 0 or cells[canvas - 1][pos] != cells[canvas][pos]
    return bool(cells[canvas][pos][2]) and not same[canvas] and (new or last)


def _unchanged(
    words: Sequence[Sequence[str]], hidden: Sequence[Sequence[bool]], revealed_at: Sequence[int], first_step: int = 0
) -> list[bool]:
    """Whether each canvas is the one before, and its step has revealed nothing; arguments as in `denoising_grid`."""
    shown = [(list(canvas), list(blank)) for canvas, blank in zip(words, hidden, strict=True)]
    return [i > 0 and shown[i] == shown[i - 1] and first_step + i - 1 not in revealed_at for i in range(len(shown))]


def _first_written(revealed_at: Sequence[int], hidden: Sequence[bool]) -> int:
    """The first position that was not given, or 0; `hidden` is the first canvas's."""
    return next((pos for pos, step in enumerate(revealed_at) if step >= 0 or hidden[pos]), 0)


def _spans_of(same: Sequence[bool]) -> list[range]:
    """The canvases that share a row: neighbours that are all `same` as the one before; each other has its own."""
    spans = []
    for thin, group in groupby(range(len(same)), same.__getitem__):
        own = list(group)
        spans += [range(own[0], own[-1] + 1)] if thin else [range(i, i + 1) for i in own]
    return spans


def _label_of(span: range, first_step: int = 0) -> str:
    """The steps after which the canvas was as in a row."""
    first, last = first_step + span.start - 1, first_step + span.stop - 2
    if last > first:
        return f"steps {first}-{last}"
    return f"step {first}" if first >= 0 else "start"


def _points(ax: Any, beside: int = 45, above: int = 60) -> tuple[float, float]:
    """Width and height in points that axes will have beside and below their labels.

    A constrained layout gives axes their size when it is drawn. Before, they have 0.775 by 0.77 of their part of the
    figure.
    """
    box, inch = ax.get_window_extent(), ax.figure.dpi / 72
    width, height = float(box.width / inch), float(box.height / inch)
    if ax.figure.get_layout_engine() is None:
        return width, height
    return max(1.0, width / 0.775 - points(beside)), max(1.0, height / 0.77 - points(above))


def _is_narrow(n_pos: int, ax: Any) -> bool:
    """Whether a canvas is drawn without the given positions at its start, so that its texts have room."""
    return n_pos > WIDEST or (hasattr(ax, "get_window_extent") and _points(ax)[0] / n_pos < _NARROWEST)


def _label_rows(ax: Any, ticks: Mapping[float, str], height: float) -> None:
    """Label the rows whose labels have room: first the positions of bands, then steps, and those of folded steps last.

    A band without a label has none for its steps, which would seem to be those of the band above it.
    """
    row, kept = _points(ax)[1] / height, dict[float, str]()
    headers = [y for y in ticks if ticks[y].startswith("positions")]
    for y in sorted(ticks, key=lambda y: (y not in headers, ticks[y].endswith("…"), y)):
        own = [header for header in headers if header <= y][-1:]
        if all(abs(y - other) * row >= 1.1 * points(7) for other in kept) and (y in headers or set(own) <= kept.keys()):
            kept[y] = ticks[y]
    ax.set_yticks(sorted(kept), [kept[y] for y in sorted(kept)])
    ax.tick_params(axis="y", labelsize=points(8 if row > points(10) else 7))


def _placed(halves: Sequence[int]) -> tuple[Any, list[float]]:
    """Heights of rows, in halves of a row, as an array, and the centre of each, if rows of height 1 are at 0, 1, ..."""
    heights = np.array(halves)
    return heights, (np.cumsum(heights) / 2 - heights / 4 - 0.5).tolist()


def _bands(
    cells: Sequence[Sequence[Any]], start: int, same: Sequence[bool], folded: bool
) -> list[tuple[range, list[range]]]:
    """Neighbouring positions with the canvases of their rows.

    Args:
        cells: What each position shows, for each canvas.
        start: The first position that is drawn.
        same: Whether each canvas shares a thin row with its neighbours.
        folded: Whether a band among several has only the canvases in which it changes.
    """
    n_pos = len(cells[0])
    n_bands = max(1, -(-(n_pos - start) // WIDEST))
    width = max(1, -(-(n_pos - start) // n_bands))
    bands = []
    for left in range(start, max(n_pos, start + 1), width):
        positions, spans = range(left, min(left + width, n_pos)), _spans_of(same)
        if n_bands > 1 and folded:
            shown = [canvas[left : positions.stop] for canvas in cells]
            spans = [range(i, i + 1) for i in range(len(cells)) if i == 0 or shown[i] != shown[i - 1]]
        bands.append((positions, spans))
    return bands


# Ink and paper of the page, in light and dark mode, and the share of green in a cell, by its probability. Every text
# has a contrast of at least 4.5 with its cell. A part of another page takes over its ink.
COLOURS = {"light": ("#222222", "#ffffff"), "dark": ("#e4e4e4", "#181818")}
GREEN = (60, 160, 80)
FAINT = 0.75  # opacity of dots, of the prompt and of row labels


def tint(confidence: float) -> float:
    """Opacity of the green behind a token that was revealed with this probability."""
    return 0.06 + 0.4 * confidence


_CANVAS_STYLE = f"""
.dl-canvas {{ overflow-x: auto; max-width: 100%; }}
.dl-canvas table {{ border-collapse: collapse; color: inherit; margin: .4em 0; }}
.dl-canvas th {{ text-align: right; padding: 0 .8em 0 0; font-weight: normal; white-space: nowrap; border: 0; }}
.dl-canvas td {{ padding: .15em .5em; text-align: center; white-space: pre; border: 1px solid rgba(128,128,128,.35); }}
.dl-canvas th span, .dl-canvas .given, .dl-canvas .blank {{ opacity: {FAINT}; }}
.dl-canvas tr.same th, .dl-canvas tr.same td {{ padding-top: 0; padding-bottom: 0; line-height: 1; }}
.dl-canvas td.new {{ font-weight: bold; outline: 2px solid; outline-offset: -2px; }}
"""
_PAGE_STYLE = """
:root {{ color-scheme: light dark; --ink: {light[0]}; --paper: {light[1]}; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: {dark[0]}; --paper: {dark[1]}; }} }}
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem; color: var(--ink); background: var(--paper); }}
h1 {{ font-size: 1.3em; overflow-wrap: anywhere; }}
p {{ max-width: 50em; }}
.dl-canvas th {{ position: sticky; left: 0; background: var(--paper); }}
@media (max-width: 500px) {{ body {{ margin: .7rem; }} .dl-canvas td {{ padding: .15em .3em; }} }}
""".format(**COLOURS)
_LEGEND = (
    "The canvas before the first step and after each step. A frame marks the step that revealed a token. A darker "
    "green means a higher probability at that step (hover to read it). Dots are masked positions. Steps that write "
    "nothing share a thin row."
)


def canvas_table(
    title: str,
    canvases: Sequence[Sequence[str]],
    hidden: Sequence[Sequence[bool]],
    revealed_at: Sequence[int],
    confidence: Sequence[float],
    first_step: int = 0,
    *,
    folded: bool = True,
) -> str:
    """An HTML page with one row per step. A token is coloured by its probability when it was revealed.

    The page follows the dark mode of the browser. A wide canvas scrolls inside its own box.

    Args:
        title: Title of the page.
        canvases: Text of each position, for each canvas.
        hidden, revealed_at, confidence, first_step: As in `denoising_grid`.
        folded: Whether consecutive steps that write nothing share a thin row.
    """
    fragment = canvas_fragment(canvases, hidden, revealed_at, confidence, first_step, folded=folded)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_PAGE_STYLE}</style></head><body><h1>{escape(title)}</h1><p>{_LEGEND}</p>{fragment}</body></html>"
    )


def canvas_fragment(
    canvases: Sequence[Sequence[str]],
    hidden: Sequence[Sequence[bool]],
    revealed_at: Sequence[int],
    confidence: Sequence[float],
    first_step: int = 0,
    *,
    folded: bool = True,
) -> str:
    """The table of `canvas_table` for a page that contains other things, whose colours it takes over.

    The given tokens before the first masked position are written above the table, since they are the same in each row.
    """
    n_given = _first_written(revealed_at, hidden[0])
    same = _unchanged(canvases, hidden, revealed_at, first_step) if folded else [False] * len(canvases)
    rows = []
    for span in _spans_of(same):
        row, step = span.start, first_step + span.start
        label = "start" if step == 0 else f"after {_label_of(span, first_step)}"
        if same[row]:
            empty = f"<td colspan={len(revealed_at) - n_given}>…</td>"
            rows.append(f'<tr class="same"><th scope=row><span>{label}</span></th>{empty}</tr>')
            continue
        columns = list(zip(canvases[row], hidden[row], revealed_at, confidence, strict=True))
        cells = [_cell(word, blank, at, p, step) for word, blank, at, p in columns[n_given:]]
        rows.append(f"<tr><th scope=row><span>{label}</span></th>{''.join(cells)}</tr>")
    given = escape(" ".join(map(readable, canvases[0][:n_given])))
    prompt = f'<div><span class="given">given:</span> {given}</div>' if n_given else ""
    table = f'<div class="dl-canvas" tabindex=0><table>{"".join(rows)}</table></div>'
    return f"<style>{_CANVAS_STYLE}</style>{prompt}{table}"


def _cell(word: str, blank: bool, revealed_at: int, confidence: float, step: int) -> str:
    if blank:
        return '<td class="blank">·</td>'
    text = escape(readable(word))
    if revealed_at < 0:
        return f'<td class="given">{text}</td>'
    if step <= revealed_at:  # The token was revealed here, masked again later and revealed for good after that.
        return f"<td>{text}</td>"
    new = ' class="new"' if step == revealed_at + 1 else ""
    shade = f"background: rgba({', '.join(map(str, GREEN))}, {tint(confidence):.2f})"
    return f'<td{new} style="{shade}" title="p = {confidence:.3f}">{text}</td>'
