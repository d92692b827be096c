"""Selection of the rows whose logits are returned, so that the last block computes no others.

No layer mixes positions after the last block's attention. A position whose logits are not returned therefore needs a
key and a value in that attention, but no query, MLP, norm or logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.shapes import Resid

Rows = Tensor | Sequence[int] | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LogitRows:
    """The selected rows of each sequence of a batch, padded to equally many per sequence.

    Attributes:
        grid: Int[batch selected], rows to compute.
        entries: Batch index and column of `grid` of each requested row; `None` if all of `grid` was requested.
        n_pos: Number of rows of a sequence.
    """

    grid: Int[Tensor, "batch selected"]
    entries: tuple[Int[Tensor, "entry"], Int[Tensor, "entry"]] | None
    n_pos: int

    @classmethod
    def parse(cls, rows: Rows, n_batch: int, n_pos: int, device: torch.device) -> "LogitRows":
        """Read `logits_at`: Int[selected], Bool[batch pos], or a pair of batch and row indices.

        Raises:
            ValueError: The argument has another form, or a row is out of range.
        """
        if isinstance(rows, tuple) and len(rows) == 2 and isinstance(rows[0], Tensor) and isinstance(rows[1], Tensor):
            return cls._of_pairs(rows[0].to(device), rows[1].to(device), n_batch, n_pos)
        index = torch.as_tensor(rows, device=device) if len(rows) else torch.zeros(0, dtype=torch.long, device=device)
        if index.dtype == torch.bool and index.shape == (n_batch, n_pos):
            batch, pos = index.nonzero(as_tuple=True)
            return cls._of_pairs(batch, pos, n_batch, n_pos)
        if index.dim() != 1 or index.dtype == torch.bool:
            raise ValueError(f"logits_at is {index.dtype} {list(index.shape)}; see forward() for what it may be")
        if index.numel() and not -n_pos <= int(index.min()) <= int(index.max()) < n_pos:
            raise ValueError(f"logits_at={index.tolist()} reaches outside the {n_pos} rows")
        return cls((index % n_pos).expand(n_batch, -1), None, n_pos)

    @classmethod
    def _of_pairs(
        cls, batch: Int[Tensor, "entry"], rows: Int[Tensor, "entry"], n_batch: int, n_pos: int
    ) -> "LogitRows":
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

    def on(self, device: torch.device) -> "LogitRows":
        """The rows for a block on this device."""
        entries = None if self.entries is None else (self.entries[0].to(device), self.entries[1].to(device))
        return LogitRows(self.grid.to(device), entries, self.n_pos)

    @property
    def saves_work(self) -> bool:
        """Whether `grid` omits enough rows to make gathering worthwhile."""
        return 4 * self.grid.shape[1] <= 3 * self.n_pos

    def gather(self, x: Resid) -> Float[Tensor, "batch selected d_model"]:
        """The rows of `grid`."""
        return x[torch.arange(x.shape[0], device=x.device)[:, None], self.grid]

    def without_padding(self, x: Float[Tensor, "batch selected d_model"]) -> Float[Tensor, "*selected d_model"]:
        """The requested rows among the gathered ones."""
        return x if self.entries is None else x[self.entries]
