"""Evidence: how much the value at the source speaks for each candidate answer, per unit of attention.

A head that attends to position j with weight 1 adds W_O v_j to the reader's residual stream. Its direct effect on the
logit of token y is

    e(y | j) = (gamma · U_y) · (W_O v_j),

with gamma the weight of the final norm and U_y the column of the head. Neither the reader nor a position occurs, so
what one direction has written can be reused by the other. The formula is ours, after the claim of arXiv 2602.02133 that
the value side does not know positions. It follows the direct path only: what later blocks make of the output is not in
it. Its causal counterpart is the edge cut (`edges`).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.analysis.signatures.reading import CanvasReading


@torch.no_grad()
def evidence_of(reading: CanvasReading, candidates: Sequence[int]) -> Float[Tensor, "fact layer head candidate"]:
    """The evidence of every head for every candidate, in float32 at least."""
    model = reading.batch.model
    token_ids = torch.tensor(list(candidates), device=reading.batch.tokens.device)
    wide = torch.promote_types(model.cfg.dtype, torch.float32)
    columns = (model.unembed.weight[token_ids].to(wide) * model.ln_final.weight.to(wide)).T
    by_layer = []
    for block, values in zip(model.blocks, reading.values, strict=True):
        weights = block.attn.W_O.to(wide)
        by_query_head = values.to(wide).repeat_interleave(len(weights) // values.shape[1], dim=1)
        by_layer.append(torch.einsum("fhd,hdm->fhm", by_query_head, weights) @ columns)
    return torch.stack(by_layer, dim=1)


def percentile(evidence: Float[Tensor, "fact layer candidate"], right: Sequence[int]) -> Float[Tensor, "fact layer"]:
    """The share of the other candidates that the right one exceeds; a tie counts half, so that chance is 0.5.

    Args:
        evidence: Evidence for each candidate.
        right: Index of each fact's answer among the candidates.
    """
    column = torch.tensor(list(right), device=evidence.device)[:, None, None].expand(-1, evidence.shape[1], 1)
    own = evidence.gather(-1, column)
    exceeded = (evidence < own).sum(dim=-1) + 0.5 * ((evidence == own).sum(dim=-1) - 1)
    return exceeded / (evidence.shape[-1] - 1)


def reuse(
    one: Float[Tensor, "fact layer candidate"], other: Float[Tensor, "fact layer candidate"]
) -> Float[Tensor, "fact layer"]:
    """The cosine of the evidence on two canvases, each centred over the candidates.

    It is 1 where the value depends on its token only, as in the first block of a model without learned positions.
    """
    centred = [x.double() - x.double().mean(dim=-1, keepdim=True) for x in (one, other)]
    return F.cosine_similarity(centred[0], centred[1], dim=-1).float()
