"""The causal counterpart of evidence: what the answer loses when its reader no longer attends to the source.

A cut edge changes what its block writes at the reader only. So this block runs at the reader alone, with the keys and
values that the other positions have without the cut, and the later blocks run at all positions. Hooks expect all
positions, so that with hooks the whole block runs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_lens.analysis.signatures.reading import CanvasReading
from diffusion_lens.model.attention import AttentionContext
from diffusion_lens.model.kv_cache import LayerKeyValues
from diffusion_lens.model.packing import Packing, is_plain

Heads = int | slice


@torch.no_grad()
def edge_cut_of(reading: CanvasReading, *, by_head: bool = False) -> Float[Tensor, "fact layer *head"]:
    """log p(answer) minus the same with the edge from reader to source cut in one layer, or in one of its heads.

    A cut edge has the score -inf, so that the reader divides its attention among the other positions. Each cut starts
    at its layer. NaN where there is no edge to cut, because the reader does not see the source.

    Returns:
        Nats; positive where the edge helps.
    """
    batch = reading.batch
    cfg = batch.model.cfg
    heads: list[Heads] = list(range(cfg.n_heads)) if by_head else [slice(None)]
    lost = reading.losses.new_empty(len(batch.tokens), cfg.n_layers, len(heads))
    alone = batch.tokens.shape[1] > 1 and is_plain(batch.model, 0)
    readers = _Readers.of(reading) if alone else None
    for layer in range(cfg.n_layers):
        for column, head in enumerate(heads):
            logits = _cut_in_whole_block(reading, layer, head) if readers is None else readers.cut(layer, head)
            lost[:, layer, column] = batch.losses(logits) - reading.losses
    lost[~batch.sees_source] = torch.nan
    return (lost if by_head else lost[..., 0]).float()


def _cut_in_whole_block(reading: CanvasReading, layer: int, head: Heads) -> Float[Tensor, "fact d_vocab_out"]:
    """The logits with the edge cut."""
    batch = reading.batch

    def cut(scores: Tensor, hook: Any) -> Tensor:
        changed = scores.clone()
        changed[batch.each, head, batch.rows, batch.sources] = float("-inf")
        return changed

    return batch.logits([(_scores_of(layer), cut)], reading.streams[layer], layer)


@dataclass(frozen=True, eq=False)
class _Readers:
    """The readers of a batch, as the only positions of a pass through one block.

    Attributes:
        reading: States of the canvases.
        readers: Where they stand: the only position of each row.
        others: The positions with known keys and values.
        context: Context of the pass.
        is_source: Bool[fact key], which key is that of the source.
    """

    reading: CanvasReading
    readers: Packing
    others: Packing
    context: AttentionContext
    is_source: Bool[Tensor, "fact key"]

    @classmethod
    def of(cls, reading: CanvasReading) -> "_Readers":
        batch = reading.batch
        model, each, device = batch.model, batch.each, batch.tokens.device
        origins = model.origins_of(batch.tokens, batch.real)
        origins = None if origins is None else origins.repeat(len(each) // len(origins))
        positions = None if batch.real is None else (batch.real.long().cumsum(dim=1) - 1).clamp(min=0)
        whole = model.attention_context(reading.streams[0], batch.real, positions, 0, origins)
        reads = torch.zeros_like(batch.tokens, dtype=torch.bool)
        reads[each, batch.rows] = True
        readers, others = Packing.of(reads, each), Packing.of(~reads, each)
        context = readers.context(whole, others, model.condition_at(None, len(each), device))
        is_source = others.before(readers).position == batch.sources[:, None]
        return cls(reading, readers, others, context, is_source)

    def cut(self, layer: int, head: Heads) -> Float[Tensor, "fact d_vocab_out"]:
        """The logits with the edge cut in a layer, in one of its heads or in all."""
        batch, streams = self.reading.batch, self.reading.streams
        model = batch.model

        def cut(scores: Tensor, hook: Any) -> Tensor:
            changed = scores.clone()
            changed[:, head, 0] = changed[:, head, 0].masked_fill(is_source, float("-inf"))
            return changed

        is_source = self.is_source if isinstance(head, int) else self.is_source[:, None]
        known = LayerKeyValues(*(self.others.gather(states) for states in self.reading.attended[layer]))
        with model.hooks(fwd_hooks=[(_scores_of(layer), cut)]), model.clock.passing():
            written = model.blocks[layer](self.readers.gather(streams[layer]), self.context, known)
        # Behind the last block, only the rows of the readers are read.
        stream = streams[min(layer + 1, len(streams) - 1)].index_put((batch.each, batch.rows), written[:, 0])
        return batch.logits(resid=stream, start_at_layer=layer + 1)


def _scores_of(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_attn_scores"
