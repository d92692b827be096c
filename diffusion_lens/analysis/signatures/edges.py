"""The causal counterpart of evidence: what the answer loses when its reader no longer attends to the source."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.signatures.reading import CanvasReading


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
    heads: list[int | slice] = list(range(cfg.n_heads)) if by_head else [slice(None)]
    lost = reading.losses.new_empty(len(batch.tokens), cfg.n_layers, len(heads))
    for layer, stream in enumerate(reading.streams):
        for column, head in enumerate(heads):

            def cut(scores: Tensor, hook: Any, head: int | slice = head) -> Tensor:
                changed = scores.clone()
                changed[batch.each, head, batch.rows, batch.sources] = float("-inf")
                return changed

            logits = batch.logits([(f"blocks.{layer}.attn.hook_attn_scores", cut)], stream, layer)
            lost[:, layer, column] = batch.losses(logits) - reading.losses
    lost[~batch.sees_source] = torch.nan
    return (lost if by_head else lost[..., 0]).float()
