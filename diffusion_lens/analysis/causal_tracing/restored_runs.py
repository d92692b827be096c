"""Restored runs of one corrupted run, each computed only where it differs.

A cell restores the states of one place in a span of blocks. What need not be computed:

- Below the span's first block nothing changes, and in that block only the cell's place: attention mixes places before
  the state is restored, all that follows in the block is place by place. So one pass of the block with every place
  restored gives each cell's state there, and a cell enters at the block after it.
- Cells that have entered run on together, joined at each block by those that enter there.
- On a causal model the places before the restored one stay as in the corrupted run, whose keys and values are kept.
- In the last block only the rows that are read.
- Cells that cannot reach what is read (after the last block anywhere else; on a causal model before the corrupted
  places or after the last row) score what the corrupted run scores.

A hook of the caller's may mix places wherever it acts. While there is one, cells enter at the span's first block, are
written into there too, and every block runs whole.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.batching import in_batches, row_bytes, rows_at_once
from diffusion_lens.analysis.causal_tracing.restoration import SITES, Restoration
from diffusion_lens.hook_names import resid_post
from diffusion_lens.interventions import Hook
from diffusion_lens.model.kv_cache import KeyValueCache, LayerKeyValues
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.step_state import StepState

Scores = Float[Tensor, "sample selected"]


@dataclass(frozen=True, eq=False)
class CanvasRun:
    """A run to be taken.

    Attributes:
        tokens: its canvases.
        answer: what is asked of it.
        hooks: what is hooked into it.
        step: the step that it stands for.
        real: false at padding, which every canvas has at the same places; `None` where there is none.
    """

    tokens: Tokens
    answer: Answer
    hooks: Sequence[tuple[str, Hook]] = ()
    step: StepState | None = None
    real: Bool[Tensor, "1 pos"] | None = None

    def mask(self, n_rows: int) -> PosMask | None:
        """The attention mask of a run of so many rows."""
        return None if self.real is None else self.real.expand(n_rows, -1)


@dataclass(frozen=True)
class Cell:
    """One place, and the blocks whose state is restored there."""

    place: int
    span: range


class RestoredRuns:
    """The clean and the corrupted run of one canvas, and every run between them.

    Args:
        clean: one row.
        corrupted: a row a sample, of the same length.
        touched: the places that the corruption touches.
        layers: around which states are restored.
        max_bytes: memory to use beside the weights.

    Raises:
        ValueError: `max_bytes` does not hold the two runs and one cell.
    """

    def __init__(
        self,
        model: DiffusionTransformer,
        clean: CanvasRun,
        corrupted: CanvasRun,
        touched: range,
        restoration: Restoration,
        layers: Sequence[int],
        max_bytes: int,
    ) -> None:
        self.model = model
        self.n_layers = model.cfg.n_layers
        self.answer, self.step = corrupted.answer, corrupted.step
        self.site = SITES[restoration.kind]
        self.severed = SITES[restoration.severed] if restoration.severed else None
        self.spans = {layer: restoration.span(layer, self.n_layers) for layer in layers}
        self.samples = len(corrupted.tokens)
        self.watched = model.is_hooked
        self.mask = corrupted.mask
        # Kept keys and values go with runs without padding.
        self.causal = model.cfg.is_causal and not self.watched and corrupted.real is None
        n_pos, last = clean.tokens.shape[1], int(self.answer.rows.max())
        self.reaching = range(touched.start, last + 1) if self.causal else range(n_pos)
        self.n_pos = max(last + 1, touched.stop) if self.causal else n_pos
        every, seen = range(self.n_layers), slice(0, self.n_pos)
        starts = {span.start for span in self.spans.values()}
        self.max_rows = self._fit(max_bytes, restoration, len(starts))

        with model.clock.at(clean.step), model.hooks(fwd_hooks=list(clean.hooks)):
            logits, kept = model.run_with_cache(
                clean.tokens[:, seen],
                attention_mask=clean.mask(1),
                names_filter=[self.site(layer) for layer in every],
                logits_at=self.answer.rows,
            )
        self.clean_logits = logits
        self.clean_scores: Scores = clean.answer.probabilities(logits, 1)[0]
        self._clean = {layer: kept[self.site(layer)] for layer in every}

        names = ["hook_embed", *(resid_post(layer) for layer in every)]
        names += [self.severed(layer) for layer in every] if self.severed else []
        names += [f"blocks.{layer}.attn.{name}" for layer in every for name in ("hook_rot_k", "hook_v") if self.causal]
        with model.clock.at(corrupted.step), model.hooks(fwd_hooks=list(corrupted.hooks)):
            logits, self._low = model.run_with_cache(
                corrupted.tokens[:, seen],
                attention_mask=self.mask(self.samples),
                names_filter=names,
                logits_at=self.answer.rows,
            )
        self.corrupted_scores: Scores = self.answer.probabilities(logits, self.samples)[0]
        if not self.watched:
            self._restored = {layer: self._restore_everywhere(restoration.kind, layer) for layer in starts}

    def grid(self, positions: Sequence[int], progress: bool = False) -> Float[Tensor, "pos layer sample selected"]:
        """Probability of each token of the answer in every cell, by draw; of no positions a grid without rows."""
        wanted = [[Cell(place, span) for span in self.spans.values()] for place in positions]
        cells = list(dict.fromkeys(cell for row in wanted for cell in row))
        scored = dict(tqdm(self.scores(cells), desc="trace", total=len(cells), unit="cell", disable=not progress))
        grid = self.corrupted_scores.new_empty(len(positions), len(self.spans), *self.corrupted_scores.shape)
        for row, by_layer in zip(grid, wanted, strict=True):
            row.copy_(torch.stack([scored[cell] for cell in by_layer]))
        return grid.cpu()

    def scores(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Scores]]:
        """Each cell's probabilities of the answer's tokens, by draw."""
        groups: dict[Any, list[Cell]] = {}
        read = set(self.answer.rows.tolist())
        for cell in cells:
            at_the_end = self._entry(cell) == self.n_layers
            if cell.place not in self.reaching or (at_the_end and cell.place not in read):
                yield cell, self.corrupted_scores
            else:
                # Written into in the last block, a place matters if it is read; then the block runs whole.
                whole = self.watched or (cell.place in read and self._writes_at_the_end(cell))
                # Two neighbours go together: a place more to run, but half as many passes.
                offset = max(self.reaching.start, cell.place // 2 * 2) if self.causal else 0
                groups.setdefault((at_the_end, whole, offset), []).append(cell)
        for (_, whole, offset), members in groups.items():
            ordered = sorted(members, key=self._entry)

            def run(
                batch: Sequence[Cell], whole: bool = whole, offset: int = offset
            ) -> Float[Tensor, "cell sample selected"]:
                return self._run(batch, offset, whole)

            for batch, scored in in_batches(run, ordered, self.max_rows // self.samples):
                yield from zip(batch, scored, strict=True)

    def _run(self, cells: Sequence[Cell], offset: int, whole: bool) -> Float[Tensor, "cell sample selected"]:
        """Cells in order of entry, from place `offset` on; `whole`: hooks reach the last block too."""
        model, last_block = self.model, self.n_layers - 1
        asked = (self.answer.rows >= offset).nonzero().flatten()
        rows = self.answer.rows[asked] - offset
        first, out = self._entry(cells[0]), self._stream(0)[:0, offset:]
        for block in range(first, self.n_layers):
            entering = [cell for cell in cells if self._entry(cell) == block]
            out = torch.cat([out, self._entering(entering, offset)]) if entering else out
            inside = [cell for cell in cells if self._entry(cell) <= block]
            upto: dict[str, Any] = {"logits_at": rows} if block == last_block else {"stop_at_layer": block + 1}
            hooks = self._writes(block, inside, offset) if block < last_block or whole else []
            # Attaching nothing is not free: it goes through every hook point of the model.
            attached = model.hooks(fwd_hooks=hooks) if hooks else nullcontext()
            with model.clock.at(self.step, len(inside)), attached:
                past, mask = self._past(block, len(inside), offset), self.mask(len(out))
                out = model(out, start_at_layer=block, attention_mask=mask, past_kv_cache=past, **upto)
        if first == self.n_layers:
            out = model(self._entering(cells, offset), start_at_layer=self.n_layers, logits_at=rows)
        scores = self.corrupted_scores.repeat(len(cells), 1, 1)
        scores[:, :, asked] = self.answer.probabilities(out, self.samples, asked)
        return scores

    def _fit(self, max_bytes: int, restoration: Restoration, n_starts: int) -> int:
        """Rows that one batch may have, beside what is kept."""
        cfg, n_pos = self.model.cfg, self.n_pos
        by_row = (1 + self.n_layers * (2 if self.severed else 1)) * cfg.d_model
        by_row += n_starts * cfg.d_model if restoration.kind != "resid" else 0
        by_row += 2 * self.n_layers * (cfg.n_key_value_heads or cfg.n_heads) * cfg.d_head if self.causal else 0
        by_read = cfg.d_vocab_out * (self.samples if self.answer.unconditional is not None else 1)
        kept = n_pos * (self.samples * by_row + self.n_layers * cfg.d_model) * cfg.dtype.itemsize
        kept += len(self.answer.rows) * (by_read * cfg.dtype.itemsize + 4 * (1 + self.samples))  # logits, scores
        one_row = row_bytes(cfg, n_pos, len(self.answer.rows))
        if kept + self.samples * one_row > max_bytes:
            raise ValueError(
                f"max_bytes={max_bytes:,} is too little: the clean and the corrupted run keep {kept:,} bytes, and one "
                f"cell of {self.samples} draws takes {self.samples * one_row:,} more"
            )
        return max(self.samples, rows_at_once(cfg, n_pos, len(self.answer.rows), max_bytes - kept))

    def _restore_everywhere(self, kind: str, layer: int) -> Float[Tensor, "sample pos d_model"]:
        """What block `layer` leaves at each place when only this place's state is restored in it."""
        clean: Tensor = self._clean[layer].expand(self.samples, -1, -1)
        if kind == "resid":
            return clean
        restored: Tensor = self.model.run_with_hooks(
            self._stream(layer),
            start_at_layer=layer,
            stop_at_layer=layer + 1,
            attention_mask=self.mask(self.samples),
            fwd_hooks=[(self.site(layer), lambda activation, hook: clean)],
        )
        return restored

    def _entry(self, cell: Cell) -> int:
        """The block that a cell enters: behind the first one of its span, or that one."""
        return cell.span.start + (not self.watched)

    def _stream(self, block: int) -> Float[Tensor, "sample pos d_model"]:
        """The corrupted stream entering a block."""
        stream: Tensor = self._low["hook_embed" if block == 0 else resid_post(block - 1)]
        return stream

    def _entering(self, cells: Sequence[Cell], offset: int) -> Float[Tensor, "batch pos d_model"]:
        """The corrupted stream at the cells' entry, with their place restored if that is behind their first block."""
        entry = self._entry(cells[0])
        stream = self._stream(entry)[:, offset:].repeat(len(cells), 1, 1)
        if self.watched:
            return stream
        layer, places = entry - 1, _places(cells, stream)
        _by_cell(stream, self.samples)[torch.arange(len(cells)), :, places - offset] = self._restored[layer][
            :, places
        ].transpose(0, 1)
        return stream

    def _writes(self, block: int, cells: Sequence[Cell], offset: int) -> list[Any]:
        """Hooks that hold what is restored, and what is severed, in one block of the cells that are inside."""
        hooks = []
        if restored := [i for i, cell in enumerate(cells) if block in cell.span]:
            clean = self._clean[block].expand(self.samples, -1, -1)
            hooks.append((self.site(block), self._put(clean, cells, restored, offset)))
        if self.severed and (above := [i for i, cell in enumerate(cells) if block > cell.span.start]):
            low = self._low[self.severed(block)]
            hooks.append((self.severed(block), self._put(low, cells, above, offset)))
        return hooks

    def _put(
        self, values: Float[Tensor, "sample pos d_model"], cells: Sequence[Cell], which: Sequence[int], offset: int
    ) -> Hook:
        places = _places([cells[i] for i in which], values)
        index = torch.tensor(which, device=values.device)

        def hook_fn(activation: Tensor, hook: Any) -> Tensor:
            written = activation.clone()
            _by_cell(written, self.samples)[index, :, places - offset] = values[:, places].transpose(0, 1)
            return written

        return hook_fn

    def _past(self, block: int, n_cells: int, offset: int) -> KeyValueCache | None:
        """Keys and values of the places before `offset`, which are those of the corrupted run."""
        if not offset:
            return None
        cache = KeyValueCache(self.n_layers)
        keys, values = (self._low[f"blocks.{block}.attn.{name}"][:, :offset] for name in ("hook_rot_k", "hook_v"))
        cache.layers[block] = LayerKeyValues(keys.repeat(n_cells, 1, 1, 1), values.repeat(n_cells, 1, 1, 1))
        return cache

    def _writes_at_the_end(self, cell: Cell) -> bool:
        return self.severed is not None or (cell.span.stop == self.n_layers and len(cell.span) > 1)


def _by_cell(x: Float[Tensor, "batch pos d_model"], samples: int) -> Float[Tensor, "cell sample pos d_model"]:
    by_cell: Tensor = x.view(-1, samples, *x.shape[1:])
    return by_cell


def _places(cells: Sequence[Cell], like: Tensor) -> Int[Tensor, "cell"]:
    return torch.tensor([cell.place for cell in cells], device=like.device)
