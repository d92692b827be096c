"""Building blocks of all figures: new figures, their display in notebooks, their look, and labels for an axis.

A script gets axes and saves their figure, so pyplot does not track figures. In a Jupyter kernel, `CELL` keeps the
figures of the running cell, and shows each once, at the cell's end, in the order of drawing. Axes that are the value of
a cell, or are given to `display` or to `ipywidgets.interact`, show their figure in place of the text `<Axes: ...>`.

The look is what `style` chooses, or a default. The default colours of lines are those of Okabe & Ito (2008), without
yellow, which is too light on white. Readers with any kind of colour blindness can tell them apart, and so can a reader
of a grey print by the markers and line styles.

Every second, third, ... tick label is drawn where all would collide. How much room there is depends on the size of the
axes, which is known when the figure is laid out. So the ticks are chosen then, as matplotlib chooses those of numbers.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple, TypeAlias
from unicodedata import east_asian_width

import numpy as np

from diffusion_lens.settings.arguments import kind_of, shown
from diffusion_lens.settings.figures import STYLE

FONT_SIZE = 9.0  # points of the labels of axes
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "", "////", "....")
BASELINE = "0.55"
CELLS: dict[str, Any] = {"interpolation": "none"}  # Cells of a map keep their colours, also at their edges.
_LISTED = 20  # colours of the largest map that is a list to choose from
_LIGHTEST = 0.6  # relative luminance of a line that is seen on white


class Look(NamedTuple):
    """How one of several lines or groups of bars is drawn."""

    colour: Any
    marker: str
    dash: str
    hatch: str


def points(size: int) -> float:
    """A font size that is `size` where labels have the default of 9 points."""
    chosen = STYLE.get().font_size
    return size * (1.0 if chosen is None else float(chosen) / FONT_SIZE)


def figure_size(width: float, height: float) -> tuple[float, float]:
    """The chosen size of a figure in inches, or this one."""
    chosen = STYLE.get().size
    return (width, height) if chosen is None else (chosen[0], chosen[1])


def colour_map(default: str) -> Any:
    """The chosen colour map, or this one."""
    chosen = STYLE.get().cmap
    return default if chosen is None else chosen


def look(index: int, n: int | None = None) -> Look:
    """How the line `index` of `n` is drawn; without `n`, of a number that is not known yet."""
    colours = _colours(index, n)
    # Where colours repeat, and where they are many, dashes differ as well.
    turn = max(index // len(colours), index // len(LINES))
    return Look(
        colours[index % len(colours)],
        MARKERS[index % len(MARKERS)],
        DASHES[turn % len(DASHES)],
        HATCHES[index % len(HATCHES)],
    )


def n_curves(ax: Any) -> int:
    """How many curves axes have. Curves have markers, and other lines have none."""
    return sum(line.get_marker() not in ("", "None", None) for line in ax.lines)


def _colours(index: int, n: int | None) -> list[Any]:
    """The colours to choose from, as many as it takes for the line `index`."""
    if STYLE.get().cmap is None:
        return list(LINES)
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    chosen = STYLE.get().cmap
    mapped = colormaps[chosen] if isinstance(chosen, str) else chosen
    if mapped.N <= _LISTED:
        return [to_hex(mapped(i)) for i in range(mapped.N)]
    colours = mapped(np.arange(mapped.N))
    visible = colours[luminance(colours) <= _LIGHTEST]
    visible = visible if len(visible) else colours
    places = [_spread(i) for i in range(index + 1)] if n is None else np.linspace(0, 1, max(n, index + 1))
    return [to_hex(visible[round(float(place) * (len(visible) - 1))]) for place in places]


def _spread(i: int) -> float:
    """The place of a colour on a map, away from those of the colours before it: 0, 1, 1/2, 1/4, 3/4, 1/8, ..."""
    if i < 2:
        return float(i)
    halves = 1 << ((i - 1).bit_length() - 1)
    return (2 * (i - 1 - halves) + 1) / (2 * halves)


def luminance(colours: Any) -> Any:
    """Relative luminance of colours by WCAG 2, between 0 (black) and 1 (white).

    Args:
        colours: Array with red, green and blue between 0 and 1 on its last axis, and perhaps an opacity.
    """
    import numpy as np

    parts = np.asarray(colours, dtype=float)[..., :3]
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


LETTER, _WIDE_LETTER = 0.62, 1.0  # mean widths of letters in font sizes
_LINE = 1.25  # height of a line, and of the space to the next, in font sizes
_SPACE = 0.8  # between neighbouring labels of one row, in font sizes
_SAFE = 0.6  # share of the width of axes that is left to the map when row labels and a colour bar have their room


class Names:
    """The label of each place, as a function of the tick."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names

    def __call__(self, x: Any, pos: int | None = None) -> str:
        return self.names.get(round(x), "")


def places_with_room(places: Sequence[int], apart: float, most: int | None) -> Any:
    """A locator of matplotlib: ticks at every place, or at every second, third, ... where labels would collide.

    Args:
        places: Coordinates of the ticks, ascending.
        apart: Least distance of two ticks in points.
        most: Largest number of ticks.
    """
    return _locator()(places, apart, most)


@cache
def _locator() -> type[Any]:
    from matplotlib.ticker import Locator

    class PlacesWithRoom(Locator):
        def __init__(self, places: Sequence[int], apart: float, most: int | None) -> None:
            self.places: Any = np.asarray(places, dtype=float)
            self.apart, self.most = apart, most

        def __call__(self) -> Any:
            axis: Any = self.axis
            ax, n = axis.axes, len(self.places)
            if n < 2:
                return self.places
            along = np.zeros((n, 2))
            side = int(axis.axis_name == "y")
            along[:, side] = self.places
            along[:, 1 - side] = (ax.get_ylim if side == 0 else ax.get_xlim)()[0]
            at = ax.transData.transform(along)[:, side] * 72 / ax.figure.dpi
            first = 1 if self.most is None else -(-n // self.most)
            every = next((k for k in range(first, n) if np.abs(np.diff(at[::k])).min() >= self.apart), n)
            return self.places[::every]

        def tick_values(self, vmin: float, vmax: float) -> Any:
            return self()

        def __reduce__(self) -> Any:  # Figures can be pickled and copied.
            return places_with_room, (self.places.astype(int).tolist(), self.apart, self.most), vars(self)

    return PlacesWithRoom


def label_places(
    axis: Any, places: Sequence[int], labels: Sequence[str], size: float, most: int | None = None, *, all: bool = False
) -> None:
    """Label the places of an axis. Names that would collide across are turned upright; of more, some are left out.

    Args:
        axis: `ax.xaxis` or `ax.yaxis`.
        labels: Text of each place. None is taken for a formula.
        size: Font size in points.
        most: Largest number of labels.
        all: Whether each label is needed, such as those of bars.
    """
    across = axis.axis_name == "x"
    widest = max((width_of(label, size) for label in labels), default=0.0)
    names = any(not _is_number(label) for label in labels)
    upright = across and names and len(labels) * (widest + _SPACE * size) > _SAFE * room_of(axis.axes)[0]
    n_lines = max((label.count("\n") + 1 for label in labels), default=1)
    apart = widest + _SPACE * size if across and not upright else _LINE * size * n_lines
    axis.set_major_locator(places_with_room(places, 0.0 if all else apart, most))
    axis.set_major_formatter(Names(dict(zip(places, labels, strict=True))))
    axis.set_tick_params(labelsize=size, labelrotation=90 if upright else 0)
    for tick in axis.get_major_ticks(
        min(len(places), most or len(places))
    ):  # Without parse_math=False a "$" in a token would begin a formula.
        tick.label1.set_parse_math(False)


def width_of(text: str, size: float) -> float:
    """About how wide the longest line of a text is, in points."""
    lines = (sum(_WIDE_LETTER if east_asian_width(c) in "WF" else LETTER for c in line) for line in text.split("\n"))
    return size * max(lines)


def letters_in(width: float, size: float) -> int:
    """About how many letters fit in this width in points, at least 4."""
    return max(4, int(width / (LETTER * size)))


def room_of(ax: Any) -> tuple[float, float]:
    """Width and height in points of the part of the figure that axes and their labels have for themselves."""
    width, height = (72 * float(side) / ax.figure.dpi for side in (ax.figure.bbox.width, ax.figure.bbox.height))
    place = ax.get_subplotspec()
    if place is None:
        box = ax.get_position()
        return width * min(1.0, 1.3 * box.width), height * min(1.0, 1.3 * box.height)
    grid = place.get_gridspec()
    widths, heights = grid.get_width_ratios(), grid.get_height_ratios()
    of_columns = sum(widths[place.colspan.start : place.colspan.stop]) / sum(widths)
    of_rows = sum(heights[place.rowspan.start : place.rowspan.stop]) / sum(heights)
    return width * of_columns, height * of_rows


def _is_number(label: str) -> bool:
    return label.lstrip("-").replace(".", "", 1).isdigit()


Figure: TypeAlias = Any  # A matplotlib figure. Matplotlib is imported on first use.
DPI = 120.0  # dots per inch of a figure in a notebook
_PROSE = 0.9  # share of the room that a line of a title has, whose letters are narrower than digits
PRINT_DPI = 130.0  # of a saved one
_MOST_DPI = 600
_OF_NUMBERS = frozenset("0123456789.,")
CSS_INCH = 96  # pixels of a browser per inch, so that 8 points look like 8 points
# One hue per kind of restored state, as in ROME's figures.
HUES = {"resid": "Purples", "mlp": "Greens", "attn": "Reds"}
RESTORED = {
    "resid": "layer (hidden state restored)",
    "mlp": "centre of the layers (MLP outputs restored)",
    "attn": "centre of the layers (attention outputs restored)",
}
ABSENT = "#ededed"  # Colour of cells without a value. White would read as a low probability.


class PanelAxes(list[Any]):
    """The axes of a figure in reading order. A list of its own type can show its figure in a notebook."""


def panels(
    rows: int,
    columns: int,
    width: float,
    height: float,
    *,
    width_ratios: Sequence[int] | None = None,
    height_ratios: Sequence[int] | None = None,
) -> tuple[Figure, PanelAxes]:
    """A new figure that pyplot does not track, and its axes in reading order. A notebook shows it at the cell's end.

    Args:
        width, height: Size in inches, unless `style` or the function that draws was given another.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'diffusion-lens[plot]'") from error
    figure = Figure(figsize=figure_size(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, width_ratios=width_ratios, height_ratios=height_ratios)
    axes = PanelAxes(grid.flat)
    CELL.add(figure, axes)
    return figure, axes


def one_axes(ax: Any, width: float, height: float) -> Any:
    """`ax` if it is given, otherwise the axes of a new figure of this size in inches."""
    if ax is None:
        return panels(1, 1, width, height)[1][0]
    if not hasattr(ax, "get_figure"):
        raise TypeError(f"ax={shown(ax)} is {kind_of(ax)}; give the axes of a matplotlib figure, or leave ax out")
    CELL.leave_to_the_user(ax)
    return ax


def label_axes(
    ax: Any, xlabel: str, ylabel: str, title: str, pad: float = 6.0, parse_math: bool = True, room: float | None = None
) -> None:
    """Name the axes and write the title, on several lines where it is wider than its room.

    Args:
        pad: Points between title and axes.
        parse_math: Whether the title may have formulas.
        room: Width of the title in points; by default that of the axes with their labels.
    """
    ax.tick_params(labelsize=points(8))
    width, height = room_of(ax)
    ax.set_xlabel(_in_lines(xlabel, letters_in(_PROSE * width, points(9))), fontsize=points(9))
    ax.set_ylabel(_in_lines(ylabel, letters_in(_PROSE * height, points(9))), fontsize=points(9))
    said = _in_lines(title, letters_in(_PROSE * (room or width), points(10)))
    ax.set_title(said, fontsize=points(10), pad=pad, parse_math=parse_math)


def _in_lines(text: str, longest: int) -> str:
    """A text in lines of at most this width in letters."""
    lines = text.split("\n")
    wide = max((width_of(line, 1.0) / LETTER / len(line) for line in lines if line), default=1.0)
    return "\n".join(line for each in lines for line in wrap(each, max(1, int(longest / wide + 1e-6))) or [""])


def row_labels(str_tokens: Sequence[str], subject: tuple[int, int], positions: Sequence[int]) -> list[str]:
    """The readable token at each position. Tokens of the subject get a star."""
    start, stop = subject
    return [readable(str_tokens[pos]) + ("*" if start <= pos < stop else "") for pos in positions]


def readable(word: str) -> str:
    """A token as a label: outer spaces (also SentencePiece's "▁") are removed, invisible characters are escaped."""
    spaced = word.replace("▁", " ")
    text = spaced.strip(" ") or "␣" * len(spaced)
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def short_answer(answer: Sequence[str]) -> str:
    """The answer token by token, shortened so that it fits above a colour bar."""
    return shortened(" ".join(map(readable, answer)), 18)


def shortened(text: str, longest: int) -> str:
    """A text that is at most as wide as so many letters, the last one "…" if the text is longer.

    A number is kept or left out as a whole, since its first digits would be another number.
    """
    letters = [width_of(char, 1.0) / LETTER for char in text]
    if sum(letters) <= longest:
        return text
    end = sum(width <= longest - 1 + 1e-6 for width in accumulate(letters))
    while end > 0 and text[end - 1] in _OF_NUMBERS and text[end] in _OF_NUMBERS:
        end -= 1
    return f"{text[:end].rstrip()}…"


def ink_on(colour: Sequence[float]) -> str:
    """Black or white, whichever has the higher contrast with a colour: at least 4.58 by WCAG 2.

    Args:
        colour: Red, green and blue between 0 and 1, and perhaps an opacity, which is not used.
    """
    return "black" if (float(luminance(colour)) + 0.05) ** 2 >= 1.05 * 0.05 else "white"


def png_of(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    target = BytesIO()
    figure.savefig(target, format="png", dpi=_dots(figure, DPI))
    return target.getvalue()


def _dots(figure: Figure, dpi: float) -> float:
    """At least `dpi`, and as many dots per inch as give one to each cell of the maps of a figure."""
    maps = [(ax, image.get_array().shape[:2]) for ax in figure.axes for image in ax.get_images()]
    if all(max(shape) <= dpi / 2 for _, shape in maps):
        return dpi
    figure.draw_without_rendering()
    per_dot = [
        max(shape[0] / ax.get_window_extent().height, shape[1] / ax.get_window_extent().width) for ax, shape in maps
    ]
    return float(min(_MOST_DPI, max(dpi, figure.dpi * max(per_dot))))


def css_size(figure: Figure) -> tuple[int, int]:
    """Width and height of the figure in a browser, in pixels."""
    width, height = figure.get_size_inches()
    return round(width * CSS_INCH), round(height * CSS_INCH)


def figure_of(drawn: Any) -> Figure:
    """The figure of what `plot` returns, axes or a list of axes; a figure itself."""
    first = drawn[0] if isinstance(drawn, Sequence) else drawn
    return first if hasattr(first, "savefig") else first.get_figure()


def save_figure(drawn: Any, path: str | Path, dpi: float | None = None) -> Path:
    """Write a figure as PDF, SVG, PNG or another format, by the ending of the path, completely or not at all.

    Text of a PDF is in TrueType fonts (Type 42, which journals ask for) and that of an SVG is text, so that both can be
    searched, copied and edited.

    Args:
        drawn: A figure, axes, or a list of axes: what `plot` returns.
        dpi: Dots per inch of formats made of dots. Default: 130, or as many as give a dot to each cell of a map.

    Raises:
        ValueError: Matplotlib does not write this format.
    """
    from matplotlib import rc_context

    from weight_conversion import renamed_when_whole

    target, image = Path(path), BytesIO()
    try:
        with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "ps.fonttype": 42}):
            figure = figure_of(drawn)
            dots = _dots(figure, PRINT_DPI) if dpi is None else dpi
            figure.savefig(image, dpi=dots, format=target.suffix.removeprefix(".") or None)
    except ValueError as error:
        raise ValueError(f"{target}: {error}") from error
    with renamed_when_whole(target) as part:
        part.write_bytes(image.getvalue())
    return target


class CellFigures:
    """The figures that a cell has drawn and not shown yet. Outside a Jupyter kernel no figure is kept."""

    def __init__(self) -> None:
        self._waiting: list[Figure] = []
        self._shell: Any = None

    def add(self, figure: Figure, axes: PanelAxes) -> None:
        """Show a new figure at the end of the cell, and let itself and its axes show it wherever they are displayed."""
        shell = _kernel_shell()
        if shell is None:
            return
        if shell is not self._shell:
            shell.events.register("post_execute", self.show)
            self._shell = shell
        self._waiting.append(figure)
        for drawn in (figure, axes, *axes):
            drawn._ipython_display_ = partial(self._show_now, figure)

    def leave_to_the_user(self, ax: Any) -> None:
        """Print no text for axes that the user has made: their figure shows what was drawn on them."""
        if _kernel_shell() is not None and "_ipython_display_" not in vars(ax):
            ax._ipython_display_ = _nothing

    def show(self) -> None:
        """Show the figures of the cell that were not shown yet, also those after one that cannot be drawn."""
        waiting, self._waiting = self._waiting, []
        failures = []
        for figure in waiting:
            try:
                _display(figure)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    @contextmanager
    def unshown(self) -> Iterator[None]:
        """Do not show the figures that are drawn inside."""
        n_waiting = len(self._waiting)
        try:
            yield
        finally:
            del self._waiting[n_waiting:]

    def __reduce__(self) -> str:
        return "CELL"  # so that figures can be pickled and copied, although they refer to the shell by this object

    def _show_now(self, figure: Figure) -> None:
        if any(each is figure for each in self._waiting):
            self.show()  # all of them, so that they stay in order
        else:
            _display(figure)


CELL = CellFigures()


def _display(figure: Figure) -> None:
    from IPython.display import display

    width, height = css_size(figure)
    data = {"image/png": png_of(figure), "text/plain": repr(figure)}
    display(data, raw=True, metadata={"image/png": {"width": width, "height": height}})


def _kernel_shell() -> Any:
    """The shell of the Jupyter kernel that runs this code, or `None`; a terminal's IPython is no kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None else shell


def _nothing() -> None:
    pass
