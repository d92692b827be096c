"""Building blocks of all figures: new figures, their display in notebooks, colours, and token labels for an axis.

A script gets axes and saves their figure, so pyplot does not track figures. In a Jupyter kernel, `CELL` keeps the
figures of the running cell, and shows each once, at the cell's end, in the order of drawing. Axes that are the value of
a cell, or are given to `display` or to `ipywidgets.interact`, show their figure in place of the text `<Axes: ...>`.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeAlias

from diffusion_lens.plots.looks import figure_size, luminance, points
from diffusion_lens.plots.ticks import LETTER, letters_in, room_of, width_of
from diffusion_lens.settings.arguments import kind_of, shown

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
