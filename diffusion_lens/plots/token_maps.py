"""Heat maps with a token in each cell."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import one_axes, readable
from diffusion_lens.plots.heat_maps import labelled_map

LONGEST = 9  # characters of a token


def token_map(
    values: Float[Tensor, "entry layer"], words: Sequence[Sequence[str]], *, ax: Any = None, **labels: Any
) -> Any:
    """A heat map with labelled rows, and a token written in each cell. Cells that are NaN are grey.

    Args:
        words: Token of each cell, shortened to fit; an empty text writes nothing.
        labels: The other arguments of `labelled_map`: rows, layers, xlabel, hue, limits, bar, title.
    """
    n_rows, n_columns = values.shape
    ax = one_axes(ax, width=2.4 + 0.72 * n_columns, height=1.1 + 0.26 * n_rows)
    labelled_map(values.float(), ax=ax, **labels)
    (image,) = ax.get_images()
    for row, of_row in enumerate(words):
        for column, word in enumerate(of_row):
            if not word:
                continue
            text = readable(word)
            red, green, blue, _ = image.cmap(image.norm(float(values[row, column])))
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            ax.text(
                column,
                row,
                text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if is_dark else "black",
                parse_math=False,
            )
    return ax
