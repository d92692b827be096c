"""A forward pass that stores activations, later passes that resume from them, and cells: copies with replaced states.

A pass that differs from the stored one only from block l on starts at block l, from the stored residual stream. On a
causal model it also starts at the first position that differs, because the keys and values of the earlier positions are
stored; on one that attends by blocks of positions, at the first position of that block. Several texts with common
beginnings may be one row (`model/packing.py`); its positions are then the places of that row.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.engine.batching import (
    graph_row_bytes,
    in_batches,
    keeps,
    reserved,
    row_bytes,
    rows_at_once,
    scored,
)
from diffusion_lens.denoising.cache import activation_shape
from diffusion_lens.hooks.clock import restoring
from diffusion_lens.hooks.names import resid_post
from diffusion_lens.hooks.step import StepState
from diffusion_lens.interventions import Hook
from diffusion_lens.model.attention import KeyValueCache, LayerKeyValues
from diffusion_lens.model.packing import TextTree, reading_tree
from diffusion_lens.model.shapes import PosMask, Resid, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer, origins_of


def stream_entering(block: int) -> str:
    """The last hook point of the residual stream before a block (`n_layers`: before the final norm).

    In a `KeptRun`, the activation at `hook_embed` includes learned position vectors, so that it is this stream.
    """
    return resid_post(block - 1) if block else "hook_embed"


def keys_and_values(block: int) -> tuple[str, str]:
    """The hook points of a block's rotated keys and of its values."""
    return f"blocks.{block}.attn.hook_rot_k", f"blocks.{block}.attn.hook_v"


@dataclass(frozen=True, eq=False)
class NetworkInput:
    """The input of one forward pass, and the rows of its logits that are read.

    Attributes:
        rows: Rows of the logits that are read, negative ones from the end; `None` reads all of them.
        real: False at padding; `None` where there is none.
        step: The denoising step that hooks read; `None` outside the loop.
        hooks: Hooks of this pass, in addition to those of the caller.
        tree: The layout of the tokens, where several texts are one row.
        read_rows: `rows` as they are, counted from 0.
        is_hooked: Whether the caller has hooks inside the network, which may mix positions.
    """

    model: DiffusionTransformer
    tokens: Tokens
    rows: Sequence[int] | None = None
    real: PosMask | None = None
    step: StepState | None = None
    hooks: Sequence[tuple[str, Hook]] = ()
    tree: TextTree | None = None
    n_rows: int = field(init=False)
    n_pos: int = field(init=False)
    read_rows: list[int] = field(init=False)
    is_hooked: bool = field(init=False)

    def __post_init__(self) -> None:
        n_rows, n_pos = self.tokens.shape
        read = list(range(n_pos)) if self.rows is None else [row % n_pos for row in self.rows]
        vars(self).update(n_rows=n_rows, n_pos=n_pos, read_rows=read, is_hooked=self.model.is_hooked)

    @property
    def resumes_at_positions(self) -> bool:
        """Whether a pass may start at a later position: without padding or hooks, if no position sees all others."""
        cfg, size = self.model.cfg, self.model.cfg.block_size
        later_unseen = size is not None and size < self.n_pos and not cfg.counts_from_prompt
        return later_unseen and self.real is None and not self.is_hooked

    def seen_from(self, position: int) -> int:
        """The first position whose states depend on those of this one: that of its block."""
        size = self.model.cfg.block_size
        return 0 if size is None else position // size * size

    def sees_up_to(self, position: int) -> int:
        """One past the last position that this one sees: the end of its block."""
        size = self.model.cfg.block_size
        return self.n_pos if size is None else min((position // size + 1) * size, self.n_pos)

    def seen_until(self, position: int) -> int:
        """One past the last position whose states depend on those of this one."""
        return self.n_pos if self.tree is None else min(self.tree.stops[position], self.n_pos)

    @restoring
    def at_step(self, copies: int = 1) -> Iterator[None]:
        """Hooks read the denoising step, for this many copies of these rows, and passes that begin at a residual stream
        have the attention of these tokens."""
        in_blocks = self.step is None and self.model.cfg.counts_from_prompt
        origins = origins_of(self.model, self.tokens, self.real) if in_blocks else None
        tree = nullcontext() if self.tree is None else reading_tree(self.model, self.tree)
        with self.model.clock.at(self.step, copies, origins), tree:
            yield

    @property
    def stream_bytes(self) -> int:
        """Bytes of one residual stream, or of one output that is added to it."""
        cfg = self.model.cfg.sizes
        return self.n_rows * self.n_pos * cfg.d_model * cfg.dtype.itemsize

    def kept_bytes(self, n_streams: int) -> int:
        """Bytes of so many residual streams, and of the logits that are read."""
        cfg = self.model.cfg.sizes
        by_row = n_streams * self.n_pos * cfg.d_model + len(self.read_rows) * cfg.d_vocab_out
        return self.n_rows * by_row * cfg.dtype.itemsize

    def stored_bytes(self, names: Iterable[str]) -> int:
        """Bytes of the activations at these hook points of the network."""
        cfg = self.model.cfg
        shapes = (activation_shape(name, cfg.sizes, self.n_rows, self.n_pos) for name in names)
        return sum(math.prod(shape) * cfg.dtype.itemsize for shape in shapes)

    @property
    def past_points(self) -> list[str]:
        """Hook points to store if passes resume at positions: the keys and values of all blocks."""
        if not self.resumes_at_positions:
            return []
        return [name for block in range(self.model.cfg.n_layers) for name in keys_and_values(block)]

    @property
    def past_bytes_by_row(self) -> int:
        """Bytes of one row at all `past_points`."""
        cfg = self.model.cfg.sizes
        d_key_value = (cfg.n_key_value_heads or cfg.n_heads) * cfg.d_head
        return len(self.past_points) * self.n_pos * d_key_value * cfg.dtype.itemsize

    @property
    def graph_bytes(self) -> int:
        """Bytes of the tensors of a pass with gradients, of which its graph keeps most."""
        learns = any(parameter.requires_grad for parameter in self.model.parameters())
        return self.n_rows * graph_row_bytes(self.model.cfg, self.n_pos, len(self.read_rows), learns)

    def mask(self, copies: int = 1) -> PosMask | None:
        """The attention mask of this many copies of these rows."""
        return None if self.real is None else self.real.repeat(copies, 1)

    def embed(self) -> Resid:
        """The residual stream that enters the first block."""
        with self.at_step():
            resid: Resid = self.model(self.tokens, attention_mask=self.real, stop_at_layer=0)
        return resid

    def run(self, names: Iterable[str], embedded: Resid | None = None) -> "KeptRun":
        """Compute the pass, from the input of the first block if it is given, and store activations by hook point."""
        stored: dict[str, Tensor] = {} if embedded is None else {"hook_embed": embedded}

        def store(activation: Tensor, hook: Any) -> None:
            stored[hook.name] = activation

        # `store` is attached after all other hooks, so it stores the states with which the pass continues.
        names = set(names)
        vectors: set[str] = set()
        if "hook_embed" in names:  # kept as the stream that enters the first block
            vectors = {"hook_pos_embed"} if self.model.positions.learned else vectors
            vectors = {"blocks.0.hook_resid_pre"} if self.model.cfg.self_conditioning else vectors
        hooks = [*self.hooks, *zip((names | vectors) - stored.keys(), repeat(store), strict=False)]
        with self.at_step(), self.model.hooks(fwd_hooks=hooks):
            logits: Tensor = self.model(
                self.tokens if embedded is None else embedded,
                start_at_layer=None if embedded is None else 0,
                attention_mask=self.real,
                logits_at=self.rows,
            )
        if embedded is None and vectors:
            learned = self.model.positions.learned
            stored["hook_embed"] = (
                stored["hook_embed"] + stored["hook_pos_embed"] if learned else stored["blocks.0.hook_resid_pre"]
            )
        return KeptRun(self, stored, logits)


@dataclass(frozen=True, eq=False)
class KeptRun:
    """A forward pass with its stored activations, by hook point, and the rows of the logits that are read."""

    input: NetworkInput
    activations: Mapping[str, Tensor]
    logits: Float[Tensor, "batch selected d_vocab_out"]

    def stream(self, block: int, offset: int = 0, stop: int | None = None) -> Resid:
        """The residual stream entering a block, from position `offset` on and up to `stop`."""
        # Blocks may be on several devices.
        return self.activations[stream_entering(block)][:, offset:stop].to(self.input.model.cfg.main_device)

    def resume(
        self,
        stream: Resid,
        blocks: range,
        offset: int = 0,
        *,
        hooks: Sequence[tuple[str, Hook]] = (),
        logits_at: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute these blocks on copies of the rows, whose streams, one copy after the other, differ from position
        `offset` on. Returns the stream after them, or after the last block the logits at some rows."""
        model, copies = self.input.model, len(stream) // self.input.n_rows
        # Without hooks no context is opened, because even an empty one visits every hook point of the model.
        attached = model.hooks(fwd_hooks=list(hooks)) if hooks else nullcontext()
        with self.input.at_step(copies), attached:
            out: Tensor = model(
                stream,
                start_at_layer=blocks.start,
                attention_mask=self.input.mask(copies),
                past_kv_cache=self._past(blocks, copies, offset) if offset else None,
                stop_at_layer=blocks.stop if logits_at is None else None,
                logits_at=logits_at,
            )
        return out

    def _past(self, blocks: range, copies: int, offset: int) -> KeyValueCache:
        """Keys and values of the positions before `offset`, for this many copies of the rows."""
        cache = KeyValueCache(self.input.model.cfg.n_layers)
        for block in blocks:
            keys, values = (self.activations[name][:, :offset] for name in keys_and_values(block))
            cache.layers[block] = LayerKeyValues(keys, values, copies=copies)
        return cache


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
