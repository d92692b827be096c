"""Cells: copies of one stored pass in which some states are replaced.

Causal tracing and activation patching score a grid of cells. A cell enters at a block with the stored residual stream.
Its patches are written into that stream, and at hook points of that block and of later ones. Only the blocks and
positions that a patch can affect are computed. Not computed are:

- Blocks before the entry. Cells that have entered share passes; cells that enter at later blocks join them there.
- On a causal model, positions before the first patched one, whose keys and values are stored, and texts of a tree that
  do not contain it.
- In the last block, rows that are not read, unless a state is written there.
- Cells that cannot affect a row that is read: those patched after the last block at another position and, on a causal
  model, those patched at a later position than every row that is read.

If the caller has hooks inside the network, which may mix positions, every block is computed at all positions.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.engine.batching import in_batches, keeps, reserved, row_bytes, rows_at_once, scored
from diffusion_lens.analysis.engine.kept_run import KeptRun, NetworkInput, stream_entering
from diffusion_lens.interventions import Hook


@dataclass(frozen=True)
class CellBudget:
    """The memory for the cells of one pass, beside what is stored."""

    given: NetworkInput  # of the pass of which the cells are copies
    n_bytes: int
    least_by_row: int = 0  # bytes that a row takes at least, after its pass
    explicit: bool = False  # whether the cells are written into patterns of the attention

    @classmethod
    def of(
        cls, given: NetworkInput, kept_bytes: int, max_bytes: int, least_by_row: int = 0, explicit: bool = False
    ) -> "CellBudget":
        """What `max_bytes` leaves beside `kept_bytes`, those of the stored activations of both runs; a `ValueError`
        unless that suffices for one cell."""
        keeps(kept_bytes)
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


# A pass over fewer rows takes about the same time, so cells at neighbouring positions share passes of this size. An
# accelerator waits for the kernels of a small pass to be launched, so its passes are larger.
ROWS_OF_A_PASS = 24
ROWS_ON_AN_ACCELERATOR = 256

Measure = Callable[[Float[Tensor, "batch selected d_vocab_out"], Int[Tensor, "selected"]], Tensor]


@dataclass(frozen=True, eq=False)
class Patch:
    """The states that are written into one cell at one hook point.

    Attributes:
        states: Source of the states; a single row is used for all rows of the pass.
        source: Positions in `states`.
        target: Positions in the pass, one for each of `source`.
        units: Head or neuron that is patched at each of `target`; `None` for whole states.
        heads_first: Whether the activation is [row head query key] instead of [row pos ...].
        is_local: Whether the rest of the block reads the state at its own position only.
    """

    block: int
    point: str
    states: Float[Tensor, "#batch pos ..."]
    source: tuple[int, ...]
    target: tuple[int, ...]
    units: tuple[int, ...] | None = None
    heads_first: bool = False
    is_local: bool = True


@dataclass(frozen=True, eq=False)
class Cell:
    """One copy of the pass, with states that are written into the stream entering a block and at later hook points."""

    entry: int  # first block that is computed; `n_layers` if only the final norm and the head are
    patches: tuple[Patch, ...]

    @property
    def positions(self) -> set[int]:
        """The patched positions."""
        return {position for patch in self.patches for position in patch.target}

    @property
    def first_position(self) -> int:
        """The first patched position."""
        return min(self.positions)


class CellRuns:
    """Scores cells of one stored pass, many in each forward pass.

    Args:
        run: The stored pass, with the stream entering each block at which a cell may enter and, if passes resume at
            positions, the keys and values of all blocks.
        measure: Function from the logits of whole copies at some of the rows that are read, and the indices of these
            rows among all that are read, to a score for each copy, Float[cell ...].
        unchanged: Score of the pass without a patch.
    """

    def __init__(self, run: KeptRun, measure: Measure, unchanged: Tensor, budget: CellBudget) -> None:
        self.run, self.measure, self.unchanged, self.budget = run, measure, unchanged, budget
        self.n_layers = run.input.model.cfg.n_layers
        self.rows = run.input.read_rows
        self.read_positions = frozenset(self.rows)

    def scores(self, cells: Sequence[Cell], progress: str | None = None) -> Float[Tensor, "cell ..."]:
        """The score of each cell, with a progress bar of this title if one is given."""
        scores = self.unchanged.expand(len(cells), *self.unchanged.shape).clone()
        reaching = [index for index, cell in enumerate(cells) if reaches_a_row(self.run.input, cell)]
        positions_per_group = self._positions_per_group([cells[index] for index in reaching])
        groups: dict[tuple[int, bool, bool], list[int]] = {}
        for index in reaching:
            groups.setdefault(self._group(cells[index], positions_per_group), []).append(index)
        with tqdm(total=len(cells), desc=progress, unit="cell", disable=progress is None) as bar:
            done = len(cells) - len(reaching)
            bar.update(done)
            scored(done, len(cells))
            for (_, _, whole_last_block), members in groups.items():
                ordered = sorted(members, key=lambda index: cells[index].entry)

                def score(indices: Sequence[int], whole_last_block: bool = whole_last_block) -> Tensor:
                    return self._score_group([cells[index] for index in indices], whole_last_block)

                for indices, found in in_batches(score, ordered, self._cells_at_once([cells[i] for i in members])):
                    scores[list(indices)] = found.to(scores.dtype)
                    done += len(indices)
                    bar.update(len(indices))
                    scored(done, len(cells))
        return scores

    def _score_group(self, cells: Sequence[Cell], whole_last_block: bool) -> Float[Tensor, "cell ..."]:
        """Scores of cells of one group, in the order of their entries."""
        offset, end = self._extent(cells)
        computed = [index for index, row in enumerate(self.rows) if offset <= row < end]
        read = [self.rows[index] - offset for index in computed]
        entries = sorted({cell.entry for cell in cells})
        stream = self.run.stream(entries[0], offset, end)[:0]
        for entry, stop in zip(entries, [*entries[1:], self.n_layers], strict=True):
            # 1. Cells that enter here join those that have entered before.
            entering = [cell for cell in cells if cell.entry == entry]
            inside = [cell for cell in cells if cell.entry <= entry]
            stream = torch.cat([stream, self._enter(entering, offset, end)])

            # 2. Compute all of them up to the next entry, with the states of each cell written into its own rows.
            blocks = range(entry, stop)
            hooks = self._hooks(inside, blocks, offset, whole_last_block)
            logits_at = read if stop == self.n_layers else None
            stream = self.run.resume(stream, blocks, offset, hooks=hooks, logits_at=logits_at)
        return self.measure(stream, torch.tensor(computed, device=stream.device))

    def _extent(self, cells: Sequence[Cell]) -> tuple[int, int]:
        """The first position that a pass over these cells computes, and one past the last."""
        pass_input = self.run.input
        if not pass_input.resumes_at_positions:
            return 0, pass_input.n_pos
        offset = pass_input.seen_from(min(cell.first_position for cell in cells))
        return offset, max(pass_input.seen_until(position) for cell in cells for position in cell.positions)

    def _cells_at_once(self, cells: Sequence[Cell]) -> int:
        offset, end = self._extent(cells)
        return self.budget.cells_from(offset, sum(offset <= row < end for row in self.rows))

    def _enter(self, cells: Sequence[Cell], offset: int, end: int) -> Float[Tensor, "batch pos d_model"]:
        """The stream at the entry of these cells, with the states that are written there."""
        entry = cells[0].entry
        stream = self.run.stream(entry, offset, end).repeat(len(cells), 1, 1)
        patches = [(i, p) for i, cell in enumerate(cells) for p in cell.patches if p.point == stream_entering(entry)]
        _write(stream, patches, len(cells), offset)
        return stream

    def _hooks(self, cells: Sequence[Cell], blocks: range, offset: int, last_block_too: bool) -> list[tuple[str, Hook]]:
        """Hooks that write the states of these cells in these blocks."""
        by_point: dict[str, list[tuple[int, Patch]]] = {}
        for index, cell in enumerate(cells):
            for patch in cell.patches:
                if patch.block in blocks and (last_block_too or patch.block < self.n_layers - 1):
                    by_point.setdefault(patch.point, []).append((index, patch))

        def writer(patches: Sequence[tuple[int, Patch]]) -> Hook:
            def write(activation: Tensor, hook: object) -> Tensor:
                written = activation.clone()
                _write(written, patches, len(cells), offset)
                return written

            return write

        return [(point, writer(patches)) for point, patches in by_point.items()]

    def _positions_per_group(self, cells: Sequence[Cell]) -> int:
        """Number of adjacent positions whose cells share a pass, which begins at the first of them: the more, the fewer
        passes, but the more positions are computed again."""
        if not cells or not self.run.input.resumes_at_positions:
            return self.run.input.n_pos
        rows_by_position = len(cells) * self.run.input.n_rows / len({cell.first_position for cell in cells})
        if self.run.input.model.cfg.is_on_cpu:
            return math.ceil(ROWS_OF_A_PASS / rows_by_position)
        # At most an eighth of the positions, which adds about an eighth to the work.
        return min(math.ceil(ROWS_ON_AN_ACCELERATOR / rows_by_position), max(2, self.run.input.n_pos // 8))

    def _group(self, cell: Cell, positions_per_group: int) -> tuple[int, bool, bool]:
        """Key of the cells that can share passes: the group of neighbouring positions in which they begin, whether no
        block is computed, and whether the last block also computes rows that are not read."""
        first_positions = cell.first_position // positions_per_group
        in_last = [patch for patch in cell.patches if patch.block == self.n_layers - 1 and patch.block >= cell.entry]
        last_block_matters = any(
            not patch.is_local or not self.read_positions.isdisjoint(patch.target) for patch in in_last
        )
        return first_positions, cell.entry == self.n_layers, last_block_matters or self.run.input.is_hooked


def reaches_a_row(given: NetworkInput, cell: Cell) -> bool:
    """Whether a cell of this pass can change a row that is read; with hooks of the caller, every patched cell can."""
    if not cell.patches or given.is_hooked:
        return bool(cell.patches)
    rows = set(given.read_rows)
    if cell.entry == given.model.cfg.n_layers:
        return not rows.isdisjoint(cell.positions)
    if not given.resumes_at_positions:
        return True
    ranges = [(given.seen_from(position), given.seen_until(position)) for position in cell.positions]
    return any(start <= row < stop for start, stop in ranges for row in rows)


def _write(activation: Tensor, patches: Iterable[tuple[int, Patch]], n_cells: int, offset: int) -> None:
    """Write patches, each with the index of its copy, into an activation of whole copies from position `offset` on."""
    by_source: dict[tuple[int, bool], list[tuple[int, Patch]]] = {}
    for index, patch in patches:
        by_source.setdefault((id(patch.states), patch.units is None), []).append((index, patch))
    for members in by_source.values():
        first = members[0][1]
        by_cell = activation.unflatten(0, (n_cells, -1))
        if first.heads_first:
            by_cell = by_cell.transpose(2, 3)
        table = [
            (index, source, target - offset, unit)
            for index, patch in members
            for source, target, unit in zip(patch.source, patch.target, patch.units or repeat(0), strict=False)
        ]
        cell, source, target, unit = torch.tensor(table, device=activation.device).unbind(1)
        units = () if first.units is None else (unit,)
        states = first.states.to(activation.device)[(slice(None), source, *units)].transpose(0, 1)
        by_cell[(cell, slice(None), target, *units)] = states.to(activation.dtype)
