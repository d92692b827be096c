"""Pictures, as matplotlib axes: drawn, returned, never shown. Needs the extra `plot`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

Figure = Any  # matplotlib's; the library is imported when something is drawn

# One hue a kind, as in ROME's figures.
_HUES = {"resid": "Purples", "mlp": "Greens", "attn": "Reds"}
_RESTORED = {"resid": "hidden state", "mlp": "MLP outputs", "attn": "attention outputs"}


def heat_map(
    scores: Float[Tensor, "pos layer"],
    *,
    str_tokens: Sequence[str],
    subject: tuple[int, int],
    limits: tuple[float, float],
    kind: str,
    answer: Sequence[str],
    title: str | None = None,
    ax: Any = None,
) -> Any:
    """ROME's figure: tokens down, the subject's starred, layers across, p(answer) as colour within `limits`."""
    ax = _axes(ax, width=0.5 * scores.shape[1] + 3.2, height=0.26 * scores.shape[0] + 1.1)
    image = ax.imshow(scores.numpy(), cmap=_HUES[kind], vmin=limits[0], vmax=limits[1], aspect="auto")
    start, stop = subject
    labels = [_shown(word) + ("*" if start <= i < stop else "") for i, word in enumerate(str_tokens)]
    ax.set_yticks(range(len(labels)), labels)
    ax.set_xticks(range(scores.shape[1]))
    ax.set_xlabel(f"layer whose {_RESTORED[kind]} is restored")
    ax.set_title(title or "Impact of restoring a state after corrupted input", fontsize=10)
    bar = ax.figure.colorbar(image, ax=ax)
    bar.ax.set_title(f"p({''.join(answer).strip() or '…'})", fontsize=8)
    return ax


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
    ax = _axes(ax, width=0.85 * n_pos + 1.6, height=0.36 * n_canvases + 1.0)
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
                "·" if blank else _shown(word),
                ha="center",
                va="center",
                fontsize=8,
                color=colour,
                fontweight="bold" if new else "normal",
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


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """A figure that no window manager knows, and its axes in reading order."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'diffusion-lens[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _axes(ax: Any, width: float, height: float) -> Any:
    return panels(1, 1, width, height)[1][0] if ax is None else ax


def _shown(word: str) -> str:
    return word.strip() or repr(word)[1:-1]
