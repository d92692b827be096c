"""Rows whose logits are asked for, so that the last block computes no others.

After the last block's attention nothing mixes places any more: a row that is not read needs its key and value there,
and neither query, MLP, norm nor logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.shapes import Resid

Rows = Tensor | Sequence[int] | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PickedRows:
    """Rows of each row of the batch, filled up to a rectangle.

    Attributes:
        grid: Int[batch selected], rows to compute.
        asked: batch index and column of `grid` of each pair that was asked for; `None` when that is all of it.
        n_pos: rows there are.
    """

    grid: Int[Tensor, "batch selected"]
    asked: tuple[Int[Tensor, "entry"], Int[Tensor, "entry"]] | None
    n_pos: int

    @classmethod
    def parse(cls, rows: Rows, n_batch: int, n_pos: int, device: torch.device) -> "PickedRows":
        """From what `logits_at` may be: Int[selected], Bool[batch pos], or a pair of batch and row indices.

        Raises:
            ValueError: anything else, or a row outside.
        """
        if isinstance(rows, tuple) and len(rows) == 2 and isinstance(rows[0], Tensor) and isinstance(rows[1], Tensor):
            return cls._of_pairs(rows[0].to(device), rows[1].to(device), n_batch, n_pos)
        picked = torch.as_tensor(rows, device=device) if len(rows) else torch.zeros(0, dtype=torch.long, device=device)
        if picked.dtype == torch.bool and picked.shape == (n_batch, n_pos):
            batch, pos = picked.nonzero(as_tuple=True)
            return cls._of_pairs(batch, pos, n_batch, n_pos)
        if picked.dim() != 1 or picked.dtype == torch.bool:
            raise ValueError(f"logits_at is {picked.dtype} {list(picked.shape)}; see forward() for what it may be")
        if picked.numel() and not -n_pos <= int(picked.min()) <= int(picked.max()) < n_pos:
            raise ValueError(f"logits_at={picked.tolist()} reaches outside the {n_pos} rows")
        return cls((picked % n_pos).expand(n_batch, -1), None, n_pos)

    @classmethod
    def _of_pairs(
        cls, batch: Int[Tensor, "entry"], rows: Int[Tensor, "entry"], n_batch: int, n_pos: int
    ) -> "PickedRows":
        for name, index, size in (("batch", batch, n_batch), ("row", rows, n_pos)):
            if index.numel() and not -size <= int(index.min()) <= int(index.max()) < size:
                raise ValueError(f"logits_at reaches {name} indices outside the {size} there are: {index.tolist()}")
        batch, rows = batch % n_batch, rows % n_pos
        counts = batch.bincount(minlength=n_batch)
        by_batch = batch.argsort(stable=True)
        column = torch.empty_like(batch)
        column[by_batch] = torch.arange(len(batch), device=batch.device) - (counts.cumsum(0) - counts)[batch[by_batch]]
        grid = torch.zeros(n_batch, int(counts.max()), dtype=torch.long, device=batch.device)
        grid[batch, column] = rows
        return cls(grid, (batch, column), n_pos)

    @property
    def saves_work(self) -> bool:
        """Whether the rectangle leaves out enough rows to be worth gathering."""
        return 4 * self.grid.shape[1] <= 3 * self.n_pos

    def of(self, x: Resid) -> Float[Tensor, "batch selected d_model"]:
        """These rows, as the rectangle."""
        return x[torch.arange(x.shape[0], device=x.device)[:, None], self.grid]

    def flat(self, x: Float[Tensor, "batch selected d_model"]) -> Float[Tensor, "*selected d_model"]:
        """The rows that were asked for, of the rectangle."""
        return x if self.asked is None else x[self.asked]
