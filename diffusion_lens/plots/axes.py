"""Building blocks of all figures: colours, figures with several panels, and token labels for an axis."""

from collections.abc import Sequence
from typing import Any

from diffusion_lens.plots.notebook import CELL, Figure, PanelAxes

# One hue per kind of restored state, as in ROME's figures.
HUES = {"resid": "Purples", "mlp": "Greens", "attn": "Reds"}
RESTORED = {
    "resid": "layer (hidden state restored)",
    "mlp": "centre of the layers (MLP outputs restored)",
    "attn": "centre of the layers (attention outputs restored)",
}
ABSENT = "#ededed"  # Colour of cells without a value. White would read as a low probability.


def panels(
    rows: int,
    columns: int,
    width: float,
    height: float,
    *,
    width_ratios: Sequence[int] | None = None,
    height_ratios: Sequence[int] | None = None,
) -> tuple[Figure, PanelAxes]:
    """A new figure that pyplot does not track, and its axes in reading order. A notebook shows it at the cell's end."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'diffusion-lens[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, width_ratios=width_ratios, height_ratios=height_ratios)
    axes = PanelAxes(grid.flat)
    CELL.add(figure, axes)
    return figure, axes


def one_axes(ax: Any, width: float, height: float) -> Any:
    """`ax` if it is given, otherwise the axes of a new figure of this size in inches."""
    if ax is None:
        return panels(1, 1, width, height)[1][0]
    CELL.leave_to_the_user(ax)
    return ax


def spaced(n: int) -> range:
    """Indices of at most 12 of n columns, evenly spaced, to label."""
    return range(0, n, -(-n // 12))


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
    text = " ".join(map(readable, answer))
    return text if len(text) <= 18 else f"{text[:17].rstrip()}…"


def ink_on(colour: Sequence[float]) -> str:
    """Black or white, whichever has the higher contrast with a colour: at least 4.58 by WCAG 2.

    Args:
        colour: Red, green and blue between 0 and 1, and perhaps an opacity, which is not used.
    """
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) ** 2 >= 1.05 * 0.05 else "white"
