"""Evidence: how much the value at the source speaks for each candidate answer, per unit of attention.

A head that attends to position j with weight 1 adds W_O v_j to the reader's residual stream. Its direct effect on the
logit of token y is

    e(y | j) = (gamma · U_y) · (W_O v_j),

with gamma the weight of the final norm and U_y the column of the head. In a network that is told the time, W_O v_j
passes the gate and gamma is scaled as at that time. Neither the reader nor a position occurs, so
what one direction has written can be reused by the other. The formula is ours, after the claim of arXiv 2602.02133 that
the value side does not know positions. It follows the direct path only: what later blocks make of the output is not in
it. Its causal counterpart is the edge cut (`edges`).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.analysis.signatures.canvases import mean_where
from diffusion_lens.analysis.signatures.reading import CanvasReading
from diffusion_lens.model.linear import beside, rows_of


@torch.no_grad()
def evidence_of(
    reading: CanvasReading, candidates: Sequence[int], *, by_head: bool = False
) -> Float[Tensor, "fact layer *head candidate"]:
    """The evidence for every candidate, of all heads of a layer together or of each, in float32 at least."""
    model = reading.batch.model
    token_ids = torch.tensor(list(candidates), device=reading.batch.tokens.device)
    wide = torch.promote_types(model.cfg.dtype, torch.float32)
    columns = (rows_of(model.unembed.weight, token_ids).to(wide) * beside(model.final_weight(), token_ids).to(wide)).T
    by_layer = []
    for layer, (block, values) in enumerate(zip(model.blocks, reading.values, strict=True)):
        weights = beside(block.attn.W_O, values).to(wide) * model.gates_at(layer)[0].to(wide)
        by_query_head = values.to(wide).repeat_interleave(len(weights) // values.shape[1], dim=1)
        written = torch.einsum("fhd,hdm->fhm" if by_head else "fhd,hdm->fm", by_query_head, weights)
        by_layer.append(written @ columns)
    return torch.stack(by_layer, dim=1)


def percentiles(
    evidence: Float[Tensor, "fact layer candidate"], right: Sequence[int], different: Bool[Tensor, "fact fact"]
) -> Float[Tensor, "fact estimate layer"]:
    """The share of the other candidates that the right answer of a fact exceeds: by the evidence of the fact's own
    source, and in the mean by that of the sources of other facts.

    The second is the baseline. It is 0.5 if the candidates are the answers of the facts themselves; among other
    candidates, an answer may rank high or low whatever the source. A tie counts half.

    Args:
        evidence: Evidence for each candidate.
        right: Index of each fact's answer among the candidates.
        different: Which facts are others (`other_facts`).
    """
    table = torch.stack([_share_exceeded(evidence, index) for index in right])
    return torch.stack([table.diagonal().T, mean_where(table, different)], dim=1)


def _share_exceeded(evidence: Float[Tensor, "fact layer candidate"], index: int) -> Float[Tensor, "fact layer"]:
    """The share of the other candidates that one candidate exceeds, by the source of each fact."""
    own = evidence[..., index, None]
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
