"""The cells of a grid that a command prints."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def strongest(effects: "Tensor", n: int) -> list[tuple[int, ...]]:
    """Indices of the cells with the largest effects, the largest first; cells that are NaN are left out."""
    import torch

    flat = effects.nan_to_num(nan=-math.inf).flatten()
    n_cells = min(n, int((~effects.isnan()).sum()))
    indices = torch.unravel_index(flat.argsort(descending=True)[:n_cells], effects.shape)
    return [tuple(cell) for cell in torch.stack(indices, dim=1).tolist()]
