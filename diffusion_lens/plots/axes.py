"""Building blocks of all figures: colours, figures with several panels, and token labels for an axis."""

from collections.abc import Sequence
from typing import Any

Figure = Any  # A matplotlib figure. Matplotlib is imported on first use.

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
) -> tuple[Figure, list[Any]]:
    """A new figure that no window manager tracks, and its axes in reading order."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'diffusion-lens[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, width_ratios=width_ratios, height_ratios=height_ratios)
    return figure, list(grid.flat)


def one_axes(ax: Any, width: float, height: float) -> Any:
    """`ax` if it is given, otherwise the axes of a new figure of this size in inches."""
    return panels(1, 1, width, height)[1][0] if ax is None else ax


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
