"""The memory for cells (`analysis.cells`) beside the stored runs of which they are copies."""

from dataclasses import dataclass

from diffusion_lens.analysis.batching import reserved, row_bytes, rows_at_once
from diffusion_lens.analysis.kept_run import NetworkInput


@dataclass(frozen=True)
class CellBudget:
    """The memory for the cells of one pass, beside what is stored.

    Attributes:
        given: Input of the pass of which the cells are copies.
        n_bytes: Bytes for cells.
        least_by_row: Bytes that a row takes at least, after its pass.
        explicit: Whether the cells are written into patterns of the attention.
    """

    given: NetworkInput
    n_bytes: int
    least_by_row: int = 0
    explicit: bool = False

    @classmethod
    def of(
        cls, given: NetworkInput, kept_bytes: int, max_bytes: int, least_by_row: int = 0, explicit: bool = False
    ) -> "CellBudget":
        """What `max_bytes` leaves.

        Args:
            kept_bytes: Bytes of the stored activations of the clean and the corrupted run.
            max_bytes: Memory to use in addition to the weights, in bytes.

        Raises:
            ValueError: `max_bytes` does not suffice for the stored activations and one cell.
        """
        budget = cls(given, max_bytes - kept_bytes, least_by_row, explicit)
        # No pass is wider than one that begins at the first position.
        one_cell = given.n_rows * reserved(given.model.cfg, budget.row_bytes(0, len(given.read_rows)))
        if one_cell > budget.n_bytes:
            raise ValueError(
                f"max_bytes={max_bytes:,} is too small: the clean and the corrupted run keep {kept_bytes:,} bytes, and "
                f"one cell of {given.n_rows} rows takes {one_cell:,} more; give at least their sum"
            )
        return budget

    def row_bytes(self, offset: int, n_read: int) -> int:
        """Bytes of the tensors of one row that is computed from position `offset` on."""
        given, n_pos = self.given, self.given.n_pos - offset
        mask = 0 if given.real is None else n_pos * given.n_pos * (1 + given.model.cfg.dtype.itemsize)
        of_pass = row_bytes(given.model.cfg, n_pos, n_read, offset, self.explicit) + mask
        return max(of_pass, self.least_by_row)

    def cells_from(self, offset: int, n_read: int) -> int:
        """Number of cells that one pass should have."""
        cfg, n_pos = self.given.model.cfg, self.given.n_pos - offset
        rows = rows_at_once(cfg, n_pos, n_read, self.n_bytes, self.row_bytes(offset, n_read))
        return max(1, rows // self.given.n_rows)
