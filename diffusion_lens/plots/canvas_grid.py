"""The canvas by denoising step as a figure: a row for each step, a token in each cell."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffusion_lens.plots.axes import one_axes, readable

WIDEST = 14  # positions side by side; a longer canvas is drawn in bands, one below the other
_LONGEST = 11  # characters of a token in a band
_MASKED, _GIVEN = "0.4", "0.35"  # greys of dots and of the prompt; both have a contrast above 4.5 with white


@dataclass(frozen=True)
class _Band:
    """Some neighbouring positions, and the canvases that are drawn of them.

    Attributes:
        positions: The positions.
        canvases: Index of each canvas.
        top: Row of the figure in which the first one is.
    """

    positions: range
    canvases: Sequence[int]
    top: int


def denoising_grid(
    words: Sequence[Sequence[str]],
    hidden: Sequence[Sequence[bool]],
    revealed_at: Sequence[int],
    confidence: Sequence[float],
    first_step: int = 0,
    *,
    title: str | None = None,
    ax: Any = None,
) -> Any:
    """The canvas by denoising step: one row per step, each token coloured by its probability when it was revealed.

    A canvas of more than 14 positions is drawn without the given positions at its start, in bands of at most 14
    positions, one below the other. A band has the steps that change it.

    Args:
        words: Text of each position, for each canvas of the trajectory.
        hidden: Whether each position is still masked, for each canvas.
        revealed_at: Step that revealed each position for good; -1 for positions of the prompt.
        confidence: Probability of each token when it was revealed.
        first_step: Number of the step that follows the first canvas.
    """
    bands, n_given = _bands(words, hidden, revealed_at)
    n_columns, n_rows = len(bands[0].positions), bands[-1].top + len(bands[-1].canvases)
    long = len(bands) > 1 or n_given > 0
    ax = one_axes(ax, width=0.85 * n_columns + 1.6, height=(0.26 if long else 0.36) * n_rows + 1.0)
    shade = np.full((n_rows, n_columns), np.nan)
    ticks = {}
    for band in bands:
        for row, canvas in enumerate(band.canvases, band.top):
            step = first_step + canvas - 1
            ticks[row] = f"step {step}" if step >= 0 else "start"
            for column, pos in enumerate(band.positions):
                if 0 <= revealed_at[pos] <= step:
                    shade[row, column] = confidence[pos]
                given, masked = revealed_at[pos] < 0, hidden[canvas][pos]
                text = "·" if masked else readable(words[canvas][pos])
                ax.text(
                    column,
                    row,
                    f"{text[: _LONGEST - 1]}…" if long and len(text) > _LONGEST else text,
                    ha="center",
                    va="center",
                    fontsize=13 if masked else 8,
                    color=_MASKED if masked else _GIVEN if given else "black",
                    fontweight="bold" if 0 <= revealed_at[pos] == step else "normal",
                    parse_math=False,
                    in_layout=False,  # It is inside the axes, and to measure all texts takes half of the time.
                )
    # The range ends above 1, so that black text can be read on the darkest cell.
    image = ax.imshow(shade, cmap="YlGn", vmin=0, vmax=1.6, aspect="auto")
    ax.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    ax.set_xticks([])
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    bar = ax.figure.colorbar(
        image, ax=ax, boundaries=np.linspace(0, 1, 101), ticks=[0, 0.5, 1], pad=0.01, aspect=max(20, n_rows)
    )
    bar.ax.tick_params(labelsize=8)
    bar.ax.set_title("p(token)", fontsize=8)
    left_out = f" ({n_given} given positions at the start are not drawn)" if n_given else ""
    ax.set_title(f"{title or 'The canvas, step by step'}{left_out}", fontsize=10)
    return ax


def _bands(
    words: Sequence[Sequence[str]], hidden: Sequence[Sequence[bool]], revealed_at: Sequence[int]
) -> tuple[list[_Band], int]:
    """The bands of a canvas, and the number of given positions at its start that are not drawn."""
    n_canvases, n_pos = len(words), len(revealed_at)
    if n_pos <= WIDEST:
        return [_Band(range(n_pos), range(n_canvases), 0)], 0
    n_given = next((pos for pos in range(n_pos) if revealed_at[pos] >= 0 or hidden[0][pos]), 0)
    n_bands = -(-(n_pos - n_given) // WIDEST)
    width = -(-(n_pos - n_given) // n_bands)
    bands, top = [], 0
    for start in range(n_given, n_pos, width):
        positions = range(start, min(start + width, n_pos))
        shown = [[(words[i][pos], hidden[i][pos]) for pos in positions] for i in range(n_canvases)]
        canvases = [i for i in range(n_canvases) if i == 0 or n_bands == 1 or shown[i] != shown[i - 1]]
        bands.append(_Band(positions, canvases, top))
        top += len(canvases) + 1  # with an empty row between bands
    return bands, n_given
