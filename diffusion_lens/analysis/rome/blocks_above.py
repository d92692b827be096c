"""The blocks above layer l, of which the search for v* computes what δ changes and what a read row depends on.

δ is added at the subject's last token. The attention pattern says where it can go from there, and what the rows that
are read depend on. Positions are computed in every iteration if both hold (*moved*). The keys and values of positions
that a read row depends on but δ cannot reach are computed once (*known*); on a causal model, these are the positions
before the subject's last token. All others, such as padding and what follows the last row of a causal model, are left
out. On a bidirectional model every real position is moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.model.attention import AttentionContext
from diffusion_lens.model.kv_cache import LayerKeyValues
from diffusion_lens.model.logit_rows import LogitRows
from diffusion_lens.model.modulation import normed
from diffusion_lens.model.packing import Packing, rows_of_least_work, run_blocks
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Resid

Sees = Bool[Tensor, "batch query key"]


@dataclass(frozen=True, eq=False)
class BlocksAbove:
    """The blocks above layer l on a batch of canvases, without δ.

    Attributes:
        model: The network.
        first: The first of these blocks; `n_layers` if there is none.
        resid: Float[batch pos d_model], the stream that enters it.
        context: The context of a pass over the canvases.
        moved: Bool[batch pos], positions to compute in every iteration.
        known: Bool[batch pos], positions with known keys and values.
        packed: Where the known positions stand in `past`; `None` if there are none.
        past: Their keys and values in each of these blocks.
    """

    model: DiffusionTransformer
    first: int
    resid: Resid
    context: AttentionContext
    moved: PosMask
    known: PosMask
    packed: Packing | None
    past: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: DiffusionTransformer,
        first: int,
        resid: Resid,
        context: AttentionContext,
        edited: PosMask,
        read: PosMask,
    ) -> "BlocksAbove":
        """Choose the positions, and compute the known keys and values.

        Args:
            edited: Bool[batch pos], where δ is added.
            read: Bool[batch pos], rows of the logits that are read.
        """
        n_batch, n_pos = edited.shape
        sees = context.visibility.dense(n_pos, n_pos, resid.device)[:, 0].expand(n_batch, -1, -1)
        ends = edited | read
        if first == model.cfg.n_layers:
            return cls(model, first, resid, context, ends, torch.zeros_like(ends), None, ())
        # A read row is computed in any case, and so is every position that sees it.
        reached, needed = closure(ends, sees.mT), closure(ends, sees)
        moved, known = needed & reached, needed & ~reached
        if not bool(known.any()):
            return cls(model, first, resid, context, moved, known, None, ())
        packed = Packing.of(known, assigned_rows(model, known))
        own = packed.context(context, condition=model.condition_at(None, len(packed.sequence), resid.device))
        past = [LayerKeyValues() for _ in range(first, model.cfg.n_layers)]
        run_blocks(model, packed.gather(resid), own, first, past)
        stored = [(each.keys, each.values) for each in past if each.keys is not None and each.values is not None]
        return cls(model, first, resid, context, moved, known, packed, stored)


@dataclass(frozen=True, eq=False)
class PackedPass:
    """A pass through the blocks above layer l, over the positions of some canvases that are moved.

    Attributes:
        above: These blocks, on all canvases of the batch.
        numbers: The canvases, by their row in the batch.
        stream: Float[row column d_model], the stream at the moved positions without δ.
        context: Context of the pass.
        past: Known keys and values in each block, for these rows.
        edited: Row and column of the position of each canvas where δ is added.
        rows: The rows that are read.
    """

    above: BlocksAbove
    numbers: Int[Tensor, "canvas"]
    stream: Float[Tensor, "row column d_model"]
    context: AttentionContext
    past: Sequence[tuple[Tensor, Tensor]]
    edited: tuple[Int[Tensor, "canvas"], Int[Tensor, "canvas"]]
    rows: LogitRows

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        above: BlocksAbove,
        numbers: Int[Tensor, "canvas"],
        positions: Int[Tensor, "canvas"],
        read: tuple[Int[Tensor, "selected"], Int[Tensor, "selected"]],
    ) -> "PackedPass":
        """Pack the positions of some of the canvases.

        Args:
            numbers: The canvases, by their row in the batch.
            positions: Where δ is added to each.
            read: Canvas, by its row in the batch, and row of each of the logits that are read.
        """
        model, device = above.model, above.resid.device
        chosen = torch.zeros_like(above.moved).index_fill(0, numbers, True)
        moved = above.moved & chosen
        rows = assigned_rows(model, moved)
        packing, known, past = Packing.of(moved, rows), None, []
        if above.packed is not None:
            known = Packing.of(above.known & chosen, rows)
            past = [(above.packed.repacked(k, known), above.packed.repacked(v, known)) for k, v in above.past]
        n_rows, n_column = packing.sequence.shape
        condition = model.condition_at(None, n_rows, device)
        return cls(
            above,
            numbers,
            packing.gather(above.resid),
            packing.context(above.context, known, condition),
            past,
            packing.find(numbers, positions),
            LogitRows.parse(packing.find(*read), n_rows, n_column, device),
        )

    def logits(self, edited: Float[Tensor, "canvas d_model"]) -> Float[Tensor, "selected d_vocab_out"]:
        """The logits at the rows that are read.

        Args:
            edited: The stream of each canvas where δ is added, with δ.
        """
        model, first = self.above.model, self.above.first
        past: list[LayerKeyValues] = [LayerKeyValues(*each) for each in self.past]
        past = past or [LayerKeyValues() for _ in range(first, model.cfg.n_layers)]
        stream = self.stream.index_put(self.edited, edited)
        resid = run_blocks(model, stream, self.context, first, past, self.rows)
        normalized = normed(model.ln_final, resid, model.final_modulation_at(self.context.condition))
        logits: Tensor = model.unembed(self.rows.without_padding(normalized))
        return logits


def closure(start: PosMask, leads_to: Sees) -> PosMask:
    """The positions that can be reached from those of `start`, in any number of steps.

    Args:
        leads_to: Bool[batch pos pos], whether a step leads from the first position to the second.
    """
    while True:
        more = start | (leads_to & start[:, :, None]).any(dim=1)
        if torch.equal(more, start):
            return start
        start = more


def assigned_rows(model: DiffusionTransformer, needed: PosMask) -> Int[Tensor, "batch"]:
    """The row of a packed pass for each canvas with positions that are needed."""
    lengths = needed.sum(dim=1)
    canvases = lengths.nonzero().flatten()
    cfg = model.cfg
    assert cfg.d_mlp is not None
    of_maps = 4 * cfg.d_model**2 + 3 * cfg.d_model * cfg.d_mlp
    rows = rows_of_least_work(lengths[canvases].tolist(), of_maps, 2 * cfg.n_heads * cfg.d_head)
    return torch.zeros_like(lengths).index_copy(0, canvases, torch.tensor(rows, device=lengths.device))
