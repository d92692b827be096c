"""Heat maps with a token in each cell."""

import math
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import ink_on, one_axes, readable
from diffusion_lens.plots.heat_maps import labelled_map

LONGEST = 9  # characters of a token
MOST_COLUMNS = 16


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

    Of more than 16 columns, every second, third, ... is drawn, the last among them, so that the figure is at most 14
    inches wide.

    Args:
        words: Token of each cell, shortened to fit; an empty text writes nothing.
        layers: Label of each column.
        xlabel: Label of the horizontal axis.
        labels: The other arguments of `labelled_map`: rows, hue, limits, bar, title.
    """
    n_rows, n_columns = values.shape
    every = -(-n_columns // MOST_COLUMNS)
    drawn = range((n_columns - 1) % every, n_columns, every)
    values = values[:, list(drawn)].float()
    ax = one_axes(ax, width=2.4 + 0.72 * len(drawn), height=1.1 + 0.26 * n_rows)
    said = xlabel if every == 1 else f"{xlabel} (one in {every} of {n_columns})"
    labelled_map(values, layers=[layers[i] for i in drawn], xlabel=said, ax=ax, **labels)
    (image,) = ax.get_images()
    for row, of_row in enumerate(words):
        for column, word in enumerate(of_row[i] for i in drawn):
            if not word:
                continue
            text, value = readable(word), float(values[row, column])
            cell = ax.get_facecolor() if math.isnan(value) else image.cmap(image.norm(value))
            ax.text(
                column,
                row,
                text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…",
                ha="center",
                va="center",
                fontsize=7,
                color=ink_on(cell),
                parse_math=False,
                in_layout=False,  # It is inside the axes, and to measure all texts takes half of the time.
            )
    return ax
