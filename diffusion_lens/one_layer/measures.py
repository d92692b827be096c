"""What is measured of a network of the toy: accuracy, p(answer) and the three signatures, as one number each.

The signatures are those of `analysis.signatures`. Evidence, edge cuts and routes have a value for each layer; here it
is that of one layer, the one in which cutting the edge from reader to source costs the reverse answer most. Cosines are
means over layers.

The transfer <g_f, g_r> / |g_f|² is left out: a network that has learned a fact has no forward gradient left (g_f = 0),
so that a mean over facts is that of the few with the smallest gradients.
"""

import math

import torch
from torch import Tensor

from diffusion_lens.analysis.signatures import reversal_signatures
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.one_layer.toy import answers, taught_pairs
from diffusion_lens.taught_pairs import TaughtCanvas

# Matrices whose gradients are compared: what a fact is stored in, and what routes it.
GRADIENTS = {"v": "attn.v", "o": "attn.o", "down": "mlp.down", "u": "unembed", "q": "attn.q", "k": "attn.k"}
MEASURES = {
    "same_accuracy": "share of right answers, asked as trained",
    "reverse_accuracy": "share of right answers, asked in reverse",
    "same_probability": "mean p(answer), asked as trained",
    "reverse_probability": "mean p(answer), asked in reverse",
    "percentile_same": "evidence percentile, asked as trained",
    "percentile_reverse": "evidence percentile, asked in reverse",
    "percentile_shuffled": "the same by the evidence of other facts: the baseline",
    "reuse": "reuse of the evidence",
    "cut_same": "log p(answer) lost without the edge, as trained",
    "cut_reverse": "log p(answer) lost without the edge, in reverse",
    "routes": "correlation of the routes",
    "counterfactual": "correlation of the routes if only positions differ; undefined with learned positions",
    **{f"cosine_{name}": f"cosine of the gradients in {matrix}" for name, matrix in GRADIENTS.items()},
    **{f"shuffled_{name}": f"the same for shuffled pairs, {matrix}" for name, matrix in GRADIENTS.items()},
    "first_order_predicted": "change of the reverse loss by a step that lowers the forward loss by 0.1%, predicted",
    "first_order_measured": "the same, measured",
}


def measure(model: DiffusionTransformer, variant: str, data: str) -> dict[str, float]:
    """All `MEASURES` of a network, NaN where one does not exist.

    A causal reader does not see a later source, so it has no forward cut and no routes. The counterfactual route does
    not exist with learned positions either, which queries and keys contain.
    """
    pairs = taught_pairs(variant, data)
    found = reversal_signatures(model, pairs, candidates=answers())
    layer = int(found.edge_cut[1].nan_to_num(-math.inf).argmax())
    routes, counterfactual = found.route_correlation, found.counterfactual_correlation
    values = {
        "same_accuracy": _accuracy(model, [pair.forward for pair in pairs]),
        "reverse_accuracy": _accuracy(model, [pair.reverse for pair in pairs]),
        "same_probability": found.probability[0],
        "reverse_probability": found.probability[1],
        "percentile_same": found.evidence_percentile[0, layer],
        "percentile_reverse": found.evidence_percentile[1, layer],
        "percentile_shuffled": found.shuffled_percentile[1, layer],
        "reuse": found.evidence_reuse[layer],
        "cut_same": found.edge_cut[0, layer],
        "cut_reverse": found.edge_cut[1, layer],
        "routes": math.nan if routes is None else routes[layer],
        "counterfactual": math.nan if counterfactual is None else counterfactual[layer],
    }
    for name, matrix in GRADIENTS.items():
        own = [pair for parameter, pair in found.gradient_cosine.items() if f"{matrix}." in parameter]
        values[f"cosine_{name}"], values[f"shuffled_{name}"] = torch.tensor(own).mean(dim=0)
    values["first_order_predicted"], values["first_order_measured"] = found.first_order
    return {name: float(values[name]) for name in MEASURES}


@torch.no_grad()
def _accuracy(model: DiffusionTransformer, canvases: list[TaughtCanvas]) -> Tensor:
    rows = torch.arange(len(canvases)), torch.tensor([canvas.row for canvas in canvases])
    logits = model(torch.stack([canvas.tokens for canvas in canvases]), logits_at=rows)
    right = logits.argmax(dim=-1) == torch.tensor([canvas.answer_token for canvas in canvases])
    share: Tensor = right.float().mean()
    return share
