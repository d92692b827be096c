"""What pictures share: hues, figures of several panels, and how tokens are written on an axis."""

from collections.abc import Sequence
from typing import Any

Figure = Any  # matplotlib's; the library is imported when something is drawn

# One hue a kind, as in ROME's figures.
HUES = {"resid": "Purples", "mlp": "Greens", "attn": "Reds"}
RESTORED = {
    "resid": "layer (hidden state restored)",
    "mlp": "centre of the layers (MLP outputs restored)",
    "attn": "centre of the layers (attention outputs restored)",
}
ABSENT = "#ededed"  # where there is no number; white is a low probability


def panels(
    rows: int,
    columns: int,
    width: float,
    height: float,
    *,
    width_ratios: Sequence[int] | None = None,
    height_ratios: Sequence[int] | None = None,
) -> tuple[Figure, list[Any]]:
    """A figure that no window manager knows, and its axes in reading order."""
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
    """The axes given, or those of a new figure of this size in inches."""
    return panels(1, 1, width, height)[1][0] if ax is None else ax


def spaced(n: int) -> range:
    """At most a dozen of n columns to write a number under."""
    return range(0, n, -(-n // 12))


def row_labels(str_tokens: Sequence[str], subject: tuple[int, int], positions: Sequence[int]) -> list[str]:
    """The readable token of each position, the subject's starred."""
    start, stop = subject
    return [readable(str_tokens[place]) + ("*" if start <= place < stop else "") for place in positions]


def readable(word: str) -> str:
    """A token as a label: without outer spaces, SentencePiece's "▁" among them, and with no character invisible."""
    spaced = word.replace("▁", " ")
    text = spaced.strip(" ") or "␣" * len(spaced)
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def short_answer(answer: Sequence[str]) -> str:
    """The answer token by token, cut where it would outgrow the name of a colour bar."""
    text = " ".join(map(readable, answer))
    return text if len(text) <= 18 else f"{text[:17].rstrip()}…"
