"""Cells: copies of one kept run in which some states are replaced.

Causal tracing and activation patching, on one canvas or at the steps of a run, score a grid of cells. A cell enters at
a block with the kept residual stream; its patches are written on that stream, and at hook points of that block and of
later ones. Only the blocks and positions that a patch can affect are computed. Left out are:

- Blocks before the entry. Cells that have entered run on together, joined at later blocks by those that enter there.
- On a causal model, positions before the first one patched, whose keys and values are kept.
- In the last block, rows that are not read, unless a state is written there.
- Cells that cannot reach a row that is read: those patched after the last block at another position and, on a causal
  model, those patched at a later position than every row read.

While the caller has hooks inside the network, which may mix positions, every block runs whole.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.batching import in_batches, row_bytes, rows_at_once
from diffusion_lens.analysis.kept_run import KeptRun, NetworkInput, stream_entering
from diffusion_lens.interventions import Hook

# Below about this many rows a pass takes the same time, so cells at neighbouring positions share passes up to it.
ROWS_OF_A_PASS = 24

Measure = Callable[[Float[Tensor, "batch selected d_vocab_out"], Int[Tensor, "selected"]], Tensor]


@dataclass(frozen=True, eq=False)
class Patch:
    """States that one cell gets at one hook point.

    Attributes:
        block: Block of the hook point.
        point: Name of the hook point.
        states: Float[#row pos ...], source of the states; one row serves all rows of the run.
        source: Positions in `states`.
        target: Positions in the run, one for each of `source`.
        head: Head that is patched, where the activation has heads.
        heads_first: Whether the activation is [row head query key] and not [row pos ...].
        is_local: Whether what follows in the same block reads the state at its own position only.
    """

    block: int
    point: str
    states: Float[Tensor, "#row pos ..."]
    source: tuple[int, ...]
    target: tuple[int, ...]
    head: int | None = None
    heads_first: bool = False
    is_local: bool = True


@dataclass(frozen=True, eq=False)
class Cell:
    """One copy of the run.

    Attributes:
        entry: First block that is run; `n_layers` where only the final norm and the head are.
        patches: States that are written: on the stream entering that block, and at hook points from there on.
    """

    entry: int
    patches: tuple[Patch, ...]

    @property
    def first_position(self) -> int:
        """The first position patched."""
        return min(position for patch in self.patches for position in patch.target)


@dataclass(frozen=True)
class _Group:
    """Cells that can share passes.

    Attributes:
        first_positions: Number of the group of neighbouring positions in which the cells begin.
        only_final_norm: Whether no block is run.
        runs_last_block_whole: Whether the last block computes rows that are not read, too.
    """

    first_positions: int
    only_final_norm: bool
    runs_last_block_whole: bool


def cells_that_fit(given: NetworkInput, kept_bytes: int, max_bytes: int, extra_row_bytes: int = 0) -> int:
    """Cells that one pass may hold.

    Args:
        given: Input of the run whose copies the cells are.
        kept_bytes: Bytes that are kept meanwhile: the clean and the corrupted run.
        max_bytes: Memory to use beside the weights.
        extra_row_bytes: Bytes that a row takes beside those of a plain forward pass.

    Raises:
        ValueError: `max_bytes` does not hold what is kept and one cell.
    """
    cfg, n_read = given.model.cfg, len(given.read_rows)
    one_row = row_bytes(cfg, given.n_pos, n_read) + given.past_bytes_by_row + extra_row_bytes
    if kept_bytes + given.n_rows * one_row > max_bytes:
        raise ValueError(
            f"max_bytes={max_bytes:,} is too little: the clean and the corrupted run keep {kept_bytes:,} bytes, and "
            f"one cell of {given.n_rows} rows takes {given.n_rows * one_row:,} more"
        )
    left = max_bytes - kept_bytes
    return max(1, min(left // one_row, rows_at_once(cfg, given.n_pos, n_read, left)) // given.n_rows)


class CellRuns:
    """Scores cells of one kept run, many in a pass.

    Args:
        run: The run; it keeps the stream entering each block at which a cell may enter and, where it resumes at
            positions, the keys and values of all blocks.
        measure: From the logits of whole copies at some of the rows read, and the indices of these rows among all that
            are read, to a score for each copy, Float[cell ...].
        unchanged: Score of the run itself.
        cells_at_once: Cells that one pass may hold, as `cells_that_fit` counts them.
    """

    def __init__(self, run: KeptRun, measure: Measure, unchanged: Tensor, cells_at_once: int) -> None:
        self.run, self.measure, self.unchanged, self.cells_at_once = run, measure, unchanged, cells_at_once
        self.n_layers = run.input.model.cfg.n_layers
        self.rows = run.input.read_rows
        self.read_positions = frozenset(self.rows)

    def scores(self, cells: Sequence[Cell], progress: str | None = None) -> Float[Tensor, "cell ..."]:
        """The score of each cell.

        Args:
            progress: Title of a progress bar; by default none is shown.
        """
        scores = self.unchanged.expand(len(cells), *self.unchanged.shape).clone()
        reaching = [index for index, cell in enumerate(cells) if self._reaches_a_row(cell)]
        positions_per_group = self._positions_per_group([cells[index] for index in reaching])
        groups: dict[_Group, list[int]] = {}
        for index in reaching:
            groups.setdefault(self._group(cells[index], positions_per_group), []).append(index)
        with tqdm(total=len(cells), desc=progress, unit="cell", disable=progress is None) as bar:
            bar.update(len(cells) - len(reaching))
            for group, members in groups.items():
                ordered = sorted(members, key=lambda index: cells[index].entry)

                def score(indices: Sequence[int], group: _Group = group) -> Tensor:
                    return self._score_group([cells[index] for index in indices], group)

                for indices, scored in in_batches(score, ordered, self.cells_at_once):
                    scores[list(indices)] = scored.to(scores.dtype)
                    bar.update(len(indices))
        return scores

    def _score_group(self, cells: Sequence[Cell], group: _Group) -> Float[Tensor, "cell ..."]:
        """Scores of cells of one group, in the order of their entries."""
        offset = min(cell.first_position for cell in cells) if self.run.input.resumes_at_positions else 0
        computed = [index for index, row in enumerate(self.rows) if row >= offset]
        read = [self.rows[index] - offset for index in computed]
        entries = sorted({cell.entry for cell in cells})
        stream = self.run.stream(entries[0], offset)[:0]
        for entry, stop in zip(entries, [*entries[1:], self.n_layers], strict=True):
            # 1. Cells that enter here join those that have entered before.
            entering = [cell for cell in cells if cell.entry == entry]
            inside = [cell for cell in cells if cell.entry <= entry]
            stream = torch.cat([stream, self._enter(entering, offset)])

            # 2. They run together up to the next entry, with the states of each written into its own rows.
            blocks = range(entry, stop)
            hooks = self._hooks(inside, blocks, offset, group.runs_last_block_whole)
            logits_at = read if stop == self.n_layers else None
            stream = self.run.resume(stream, blocks, offset, hooks=hooks, logits_at=logits_at)
        return self.measure(stream, torch.tensor(computed, device=stream.device))

    def _enter(self, cells: Sequence[Cell], offset: int) -> Float[Tensor, "batch pos d_model"]:
        """The stream at the entry of these cells, with the states that are written there."""
        entry = cells[0].entry
        stream = self.run.stream(entry, offset).repeat(len(cells), 1, 1)
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

    def _reaches_a_row(self, cell: Cell) -> bool:
        """Whether a cell can change a row that is read; the caller's hooks may carry a change anywhere."""
        if not cell.patches or self.run.input.is_hooked:
            return bool(cell.patches)
        if cell.entry == self.n_layers:
            return any(not self.read_positions.isdisjoint(patch.target) for patch in cell.patches)
        return not self.run.input.resumes_at_positions or cell.first_position <= max(self.read_positions, default=-1)

    def _positions_per_group(self, cells: Sequence[Cell]) -> int:
        """How many neighbouring positions share passes that begin at the first of them.

        A larger group needs fewer passes, and recomputes more positions.
        """
        if not cells or not self.run.input.resumes_at_positions:
            return self.run.input.n_pos
        rows_by_position = len(cells) * self.run.input.n_rows / len({cell.first_position for cell in cells})
        return math.ceil(ROWS_OF_A_PASS / rows_by_position)

    def _group(self, cell: Cell, positions_per_group: int) -> _Group:
        first_positions = cell.first_position // positions_per_group
        in_last = [patch for patch in cell.patches if patch.block == self.n_layers - 1 and patch.block >= cell.entry]
        last_block_matters = any(
            not patch.is_local or not self.read_positions.isdisjoint(patch.target) for patch in in_last
        )
        return _Group(first_positions, cell.entry == self.n_layers, last_block_matters or self.run.input.is_hooked)


def _write(activation: Tensor, patches: Iterable[tuple[int, Patch]], n_cells: int, offset: int) -> None:
    """Write patches into an activation of whole copies from position `offset` on; each comes with its copy's index."""
    by_source: dict[tuple[int, bool], list[tuple[int, Patch]]] = {}
    for index, patch in patches:
        by_source.setdefault((id(patch.states), patch.head is None), []).append((index, patch))
    for members in by_source.values():
        first = members[0][1]
        by_cell = activation.unflatten(0, (n_cells, -1))
        if first.heads_first:
            by_cell = by_cell.transpose(2, 3)
        table = [
            (index, source, target - offset, patch.head or 0)
            for index, patch in members
            for source, target in zip(patch.source, patch.target, strict=True)
        ]
        cell, source, target, head = torch.tensor(table, device=activation.device).unbind(1)
        heads = () if first.head is None else (head,)
        states = first.states[(slice(None), source, *heads)].transpose(0, 1)
        by_cell[(cell, slice(None), target, *heads)] = states.to(activation.dtype)
