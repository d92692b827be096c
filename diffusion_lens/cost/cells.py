"""Passes of the engine that scores cells (`analysis.cells`): copies of a kept run that begin at a block and a position.

Cells that begin at neighbouring positions share passes. In each pass the cells join in the order of their first blocks,
so a cell costs the blocks above it and, where earlier positions see none of it, the positions from there on.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from diffusion_lens.analysis.batching import row_bytes, rows_at_once
from diffusion_lens.analysis.cells import ROWS_OF_A_PASS, ROWS_ON_AN_ACCELERATOR
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.cost.passes import Pass


class CellAt(NamedTuple):
    """A cell.

    Attributes:
        entry: First block that is computed; the number of blocks if only the final norm and the head are.
        position: First patched position.
        whole: Whether the last block matters at positions that are not read.
    """

    entry: int
    position: int
    whole: bool = False


@dataclass(frozen=True)
class Canvas:
    """The run of which cells are copies.

    Attributes:
        cfg: Config of the model.
        rows: Rows of a copy.
        positions: Positions that are computed.
        read: Rows of the logits that are read.
        max_bytes: Memory to use in addition to the weights.
        kept_bytes: Bytes of it that the stored runs keep.
    """

    cfg: DiffusionConfig
    rows: int
    positions: int
    read: tuple[int, ...]
    max_bytes: int = 2**30
    kept_bytes: int = 0

    @property
    def resumes(self) -> bool:
        """Whether a pass may begin at a later position."""
        size = self.cfg.block_size
        return size is not None and size < self.positions and not self.cfg.counts_from_prompt

    def seen_from(self, position: int) -> int:
        """The first position whose states depend on those of this one."""
        size = self.cfg.block_size
        return 0 if size is None else position // size * size

    def copies_from(self, offset: int) -> int:
        """Copies that share a pass from this position on."""
        n_positions, n_read = self.positions - offset, sum(row >= offset for row in self.read)
        one_row = row_bytes(self.cfg, n_positions, n_read, offset)
        left = self.max_bytes - self.kept_bytes
        return max(1, rows_at_once(self.cfg, n_positions, n_read, left, one_row) // self.rows)

    def run(self, rows: int | None = None) -> Pass:
        """A pass over the whole canvas, which keeps its states."""
        return Pass(rows or self.rows, self.positions, 0, self.cfg.n_layers, len(self.read), whole=True)

    def cells(self, cells: Iterable[CellAt]) -> Counter[Pass]:
        """The passes that score cells."""
        depth = self.cfg.n_layers
        reaching = [cell for cell in cells if self.reaches(cell)]
        together = self._positions_together(reaching)
        groups: dict[tuple[int, bool, bool], list[CellAt]] = {}
        for cell in reaching:
            groups.setdefault((cell.position // together, cell.entry == depth, cell.whole), []).append(cell)
        passes: Counter[Pass] = Counter()
        for (_, _, whole), members in groups.items():
            members.sort(key=lambda cell: cell.entry)
            first = self.seen_from(min(cell.position for cell in members)) if self.resumes else 0
            size = self.copies_from(first)
            for start in range(0, len(members), size):
                passes.update(self._batch(members[start : start + size], whole))
        return passes

    def reaches(self, cell: CellAt) -> bool:
        """Whether a cell can change a row that is read."""
        if cell.entry == self.cfg.n_layers and cell.position not in self.read:
            return False
        return not self.resumes or self.seen_from(cell.position) <= max(self.read, default=-1)

    def _batch(self, cells: Sequence[CellAt], whole: bool) -> Iterable[Pass]:
        """The passes of cells that are computed together, in the order of their entries."""
        depth = self.cfg.n_layers
        offset = self.seen_from(min(cell.position for cell in cells)) if self.resumes else 0
        n_read = sum(row >= offset for row in self.read)
        counts = [(entry, len(list(own))) for entry, own in groupby(cell.entry for cell in cells)]
        inside = 0
        for (entry, entering), (stop, _) in pairwise([*counts, (depth, 0)]):
            inside += entering
            read = n_read if stop == depth else 0
            yield Pass(self.rows * inside, self.positions - offset, entry, stop, read, offset, whole, patched=True)

    def _positions_together(self, cells: Sequence[CellAt]) -> int:
        """Number of neighbouring positions whose cells share passes."""
        if not cells or not self.resumes:
            return self.positions
        by_position = len(cells) * self.rows / len({cell.position for cell in cells})
        if self.cfg.is_on_cpu:
            return math.ceil(ROWS_OF_A_PASS / by_position)
        return min(math.ceil(ROWS_ON_AN_ACCELERATOR / by_position), max(2, self.positions // 8))
