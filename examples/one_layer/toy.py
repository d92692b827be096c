"""The toy of the one-layer experiment: 64 facts "A is B" of three tokens, and small networks that learn them.

A and B are one token each, and every fact has its own two. There are three sets of sentences:

    one-way     "A is B" for all 64 facts
    both-ways   "A is B" and "B is A" for all 64 facts
    mixed       "A is B" for all 64 facts, and "B is A" for the first 32 of them only

Both variants can be trained by their own losses, and the AR network by the objectives of `one_layer.objectives` too.

The questions of `taught_pairs` are about the facts that were told one way, and in "both-ways" about all.

What is measured of a network of the toy: accuracy, p(answer) and the three signatures, as one number each.

The signatures are those of `analysis.signatures`. Evidence, edge cuts and routes have a value for each layer; here it
is that of one layer, the one in which cutting the edge from reader to source costs the reverse answer most. Cosines are
means over layers.

The transfer <g_f, g_r> / |g_f|² is left out: a network that has learned a fact has no forward gradient left (g_f = 0),
so that a mean over facts is that of the few with the smallest gradients.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.analysis.signatures import reversal_signatures
from diffusion_lens.facts.taught_pairs import TaughtCanvas, TaughtPair
from diffusion_lens.model.transformer import DiffusionTransformer
from one_layer.objectives import IS, LONGEST, MARKS, MASK, N_FACTS, OBJECTIVES, Asked, plain_question
from weight_conversion import Architecture, PositionKind

DATA = ("one-way", "both-ways", "mixed")
VARIANTS = ("mdm", "ar")
# The facts told in both directions in the mixed data: the first ones.
_N_BOTH = N_FACTS // 2


@dataclass(frozen=True)
class Cell:
    """One training of the experiment.

    Attributes:
        positions: Kind of positions (`model/positions.py`).
        variant: "mdm", masked diffusion with bidirectional attention, "ar", next-token prediction with causal
            attention, or the same with another objective, the name of one of `OBJECTIVES`.
        data: Name of the sentences, one of `DATA`.
        depth: Number of layers.
        seed: Seed of weights, order of the sentences, and noise.
    """

    positions: PositionKind
    variant: str
    data: str
    depth: int
    seed: int

    @property
    def id(self) -> str:
        """Name in records and files."""
        return f"{self.positions} {self.variant} {self.data} depth {self.depth} seed {self.seed}"


def architecture(positions: PositionKind, variant: str, depth: int = 1) -> Architecture:
    """The network: width 64, 4 heads of 16, MLP of 128.

    Both variants have the same tokens, so that a seed gives the same weights to all networks of one depth. The AR
    baseline never reads [MASK]. With another objective, its embedding has rows for the marks too.
    """
    masked, has_marks = variant == "mdm", variant in OBJECTIVES
    return Architecture(
        family="diffusion_lens",
        name=f"one-layer-{variant}" if depth == 1 else f"{depth}-layer-{variant}",
        n_layers=depth,
        d_model=64,
        n_heads=4,
        n_key_value_heads=4,
        d_head=16,
        d_mlp=128,
        d_vocab=MASK + 1 + (len(MARKS) if has_marks else 0),
        d_vocab_out=MASK,
        n_ctx=LONGEST if has_marks else 3,
        attention_dir="bidirectional" if masked else "causal",
        readout="in_place" if masked else "shifted",
        mask_token_id=MASK if masked else None,
        positional_embedding_type=positions,
    )


def answers() -> list[int]:
    """The token A of every fact."""
    return list(range(1, N_FACTS + 1))


def sentences(data: str) -> Int[Tensor, "entry pos"]:
    """The sentences that a network is trained on."""
    a = torch.tensor(answers())
    b, middle = a + N_FACTS, torch.full_like(a, IS)
    forward, backward = torch.stack([a, middle, b], dim=1), torch.stack([b, middle, a], dim=1)
    n_backward = {"one-way": 0, "both-ways": N_FACTS, "mixed": _N_BOTH}[data]
    return torch.cat([forward, backward[:n_backward]])


def taught_pairs(variant: str, data: str) -> list[TaughtPair]:
    """The sentence "A is B" and the reverse question of the facts that are asked about.

    The MDM reads A in "[M] is B" and in "B is [M]". The AR network reads B after "A is" and A after "B is", in the form
    of its objective.
    """
    asked = answers()[_N_BOTH if data == "mixed" else 0 :]
    if variant == "mdm":
        return [_mdm_pair(a, a + N_FACTS) for a in asked]
    ask = OBJECTIVES[variant].ask if variant in OBJECTIVES else plain_question
    return [_ar_pair(a, a + N_FACTS, ask) for a in asked]


def _mdm_pair(a: int, b: int) -> TaughtPair:
    forward = TaughtCanvas(_row((MASK, IS, b)), row=0, answer_token=a, source=2)
    return TaughtPair(forward, TaughtCanvas(_row((b, IS, MASK)), row=2, answer_token=a, source=0), id=f"fact {a}")


def _ar_pair(a: int, b: int, ask: Callable[[int, int], Asked]) -> TaughtPair:
    as_trained, in_reverse = ask(a, b), ask(b, a)
    forward = TaughtCanvas(_row(as_trained.tokens), as_trained.row, answer_token=b, source=as_trained.last)
    reverse = TaughtCanvas(_row(in_reverse.tokens), in_reverse.row, answer_token=a, source=in_reverse.first)
    return TaughtPair(forward, reverse, id=f"fact {a}")


def _row(tokens: Sequence[int]) -> Int[Tensor, "pos"]:
    return torch.tensor(tokens)


# Matrices whose gradients are compared: what a fact is stored in, and what routes it.
GRADIENTS = {"v": "attn.v", "o": "attn.o", "down": "mlp.down", "u": "unembed", "q": "attn.q", "k": "attn.k"}
MEASURES = {
    "same_accuracy": "share of right answers, asked as trained",
    "reverse_accuracy": "share of right answers, asked in reverse",
    "same_probability": "mean p(answer), asked as trained",
    "reverse_probability": "mean p(answer), asked in reverse",
    "percentile_same": "evidence percentile, asked as trained",
    "percentile_reverse": "evidence percentile, asked in reverse",
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

# Of studies with other objectives only.
INFILL = "infill_accuracy"  # share of right answers, asked for A in the sentence as trained


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


@torch.no_grad()
def infill_accuracy(model: DiffusionTransformer, variant: str, data: str) -> float:
    """Share of the facts whose A the network gives in the sentence as trained, from what follows A there; NaN where
    nothing of its training is such a question."""
    if variant == "mdm":
        return float(_accuracy(model, [pair.forward for pair in taught_pairs(variant, data)]))
    if variant not in OBJECTIVES or (infill := OBJECTIVES[variant].infill) is None:
        return math.nan
    asked = [pair.reverse.answer_token for pair in taught_pairs(variant, data)]
    canvases = [(a, _row(infill(a + N_FACTS))) for a in asked]
    rows = [TaughtCanvas(tokens, len(tokens) - 1, answer_token=a, source=0) for a, tokens in canvases]
    return float(_accuracy(model, rows))
