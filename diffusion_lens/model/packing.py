"""Positions of several sequences side by side in the rows of a smaller batch.

A batch of sequences of different lengths is padded, and a pass may need a part of the positions only, because the
states of the others are known or nobody reads them. Here the positions that are needed stand close together: a row
has those of several sequences, and each position attends to those of its own sequence, as it does in the batch. The
keys and values of positions with known states come from an earlier pass.

Activations then have another shape than hooks expect, so `is_plain` says whether a network can be run like this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.model.attention import AttentionContext
from diffusion_lens.model.attention_patterns import Visibility
from diffusion_lens.model.hook_points import anything_listens
from diffusion_lens.model.kv_cache import LayerKeyValues
from diffusion_lens.model.logit_rows import LogitRows
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Resid


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the positions of the sequences stand.

    Attributes:
        sequence: Int[row column], the sequence of each place; -1 where the row is padded.
        position: Int[row column], the position in this sequence; 0 where the row is padded.
        place: Int[batch pos], column + row · columns of each position of the sequences; -1 where it is left out.
    """

    sequence: Int[Tensor, "row column"]
    position: Int[Tensor, "row column"]
    place: Int[Tensor, "batch pos"]

    @classmethod
    def of(cls, needed: PosMask, rows: Int[Tensor, "batch"]) -> "Packing":
        """The needed positions of each sequence, in the row that is given for the sequence."""
        sequence, position = needed.nonzero(as_tuple=True)
        counts = rows[sequence].bincount(minlength=int(rows.max()) + 1)
        by_row = rows[sequence].argsort(stable=True)
        sequence, position = sequence[by_row], position[by_row]
        row = rows[sequence]
        column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        sequences = torch.full((len(counts), int(counts.max())), -1, device=row.device)
        sequences[row, column] = sequence
        positions = torch.zeros_like(sequences)
        positions[row, column] = position
        place = torch.full(needed.shape, -1, device=row.device)
        place[sequence, position] = row * sequences.shape[1] + column
        return cls(sequences, positions, place)

    def find(
        self, sequence: Int[Tensor, "entry"], position: Int[Tensor, "entry"]
    ) -> tuple[Int[Tensor, "entry"], Int[Tensor, "entry"]]:
        """Row and column of positions."""
        place, n_column = self.place[sequence, position], self.sequence.shape[1]
        return place.div(n_column, rounding_mode="floor"), place % n_column

    def gather(self, x: Float[Tensor, "batch pos *rest"]) -> Float[Tensor, "row column *rest"]:
        """The states of these positions; any state where a row is padded."""
        return x[self.sequence.clamp(min=0), self.position]

    def repacked(self, x: Float[Tensor, "row column *rest"], other: "Packing") -> Float[Tensor, "_ _ *rest"]:
        """States at these positions as they stand in another packing, whose positions are all among these."""
        return x.flatten(0, 1)[self.place[other.sequence.clamp(min=0), other.position]]

    def context(
        self,
        whole: AttentionContext,
        known: "Packing | None" = None,
        condition: Float[Tensor, "row d_cond"] | None = None,
    ) -> AttentionContext:
        """The context of a pass over these positions.

        Args:
            whole: That of a pass over the batch of sequences.
            known: Positions with known keys and values, which come before these.
            condition: Vector of the time of each row.
        """
        n_batch, n_pos = self.place.shape
        keys = self if known is None else known.before(self)
        query, key = self.sequence[:, :, None], keys.sequence[:, None, :]
        pairs = query.clamp(min=0), self.position[:, :, None], keys.position[:, None, :]
        visible = whole.visibility.dense(n_pos, n_pos, self.place.device)[:, 0].expand(n_batch, -1, -1)[pairs]
        # Padding sees padding, because the softmax of a row that sees nothing is undefined.
        allowed = ((query == key) & (visible | (query < 0)))[:, None]
        visibility = Visibility(None if bool(allowed.all()) else allowed, causal=False)
        rotary, bias, factors = whole.rotary, whole.bias, whole.query_factors
        if rotary is not None:
            cos, sin = (self.gather(table.expand(n_batch, n_pos, *table.shape[-2:])) for table in rotary)
            rotary = cos, sin
        if bias is not None:
            by_pair = bias.expand(n_batch, -1, -1, -1).permute(0, 2, 3, 1)[pairs].permute(0, 3, 1, 2)
            bias = by_pair.masked_fill(~allowed, float("-inf"))
        if factors is not None:
            factors = self.gather(factors.expand(n_batch, -1, -1, -1))
        return replace(
            whole, visibility=visibility, rotary=rotary, bias=bias, query_factors=factors, condition=condition
        )

    def before(self, other: "Packing") -> "Packing":
        """Each row of these positions, followed by the same row of others. The places are still those of these."""
        sequence = torch.cat([self.sequence, other.sequence], dim=1)
        return Packing(sequence, torch.cat([self.position, other.position], dim=1), self.place)


def rows_of_least_work(lengths: Sequence[int], per_position: int, per_key: int) -> list[int]:
    """The row of each sequence, for rows that take the fewest multiplications.

    Few rows have little padding; in many rows, a position meets few keys.

    Args:
        lengths: Number of positions of each sequence.
        per_position: Multiplications of a position in the linear maps of a block.
        per_key: Multiplications of a position with one key and its value.
    """
    n_rows, least, chosen = len(lengths), float("inf"), [0] * len(lengths)
    while True:
        # The longest sequence first, each in the row that is the shortest so far.
        filled, rows = [0] * n_rows, [0] * len(lengths)
        for sequence in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            rows[sequence] = filled.index(min(filled))
            filled[rows[sequence]] += lengths[sequence]
        width = max(filled)
        if (work := n_rows * width * (per_position + per_key * width)) <= least:
            least, chosen = work, rows
        if n_rows == 1:
            return chosen
        n_rows = (n_rows + 1) // 2


def is_plain(model: DiffusionTransformer, first_block: int) -> bool:
    """Whether nobody sees the shape of activations from a block on: no hook, no step of the loop, no foreign module,
    no second place of weights."""
    if model.clock.step is not None or model.placement is not None:
        return False
    parts = [*model.blocks[first_block:], model.ln_final, model.unembed]
    if model.cfg.is_told_time:
        parts += [model.time_embed, model.final_modulation, model.hook_time, model.hook_final_modulation]
    classes = {type(module).__module__ for module in chain.from_iterable(part.modules() for part in parts)}
    own = all(name.startswith(("diffusion_lens.model.", "torch.nn.")) for name in classes)
    return own and not any(map(anything_listens, parts))


def run_blocks(
    model: DiffusionTransformer,
    resid: Resid,
    context: AttentionContext,
    first_block: int,
    past: Sequence[LayerKeyValues],
    rows: LogitRows | None = None,
) -> Float[Tensor, "batch _ d_model"]:
    """The residual stream behind the last block.

    Args:
        resid: Float[row column d_model], the stream that enters the first of these blocks.
        past: Known keys and values of each of these blocks, to which the new ones are appended.
        rows: Rows of the stream that the last block computes; by default all.
    """
    with model.clock.passing():
        blocks = model.blocks[first_block:]
        for i, (block, known) in enumerate(zip(blocks, past, strict=True)):
            resid = block(resid, context, known, rows if i == len(blocks) - 1 else None)
        return resid if rows is None or len(blocks) else rows.gather(resid)
