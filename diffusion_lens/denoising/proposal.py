"""Which token is proposed at a place, and how sure the model is of it.

A `Sampler` says where, the `Proposal` that it holds says what. At a temperature tokens are drawn by Gumbel noise, from
the likeliest if asked (top-p, top-k); places are ranked by the probability of their token, by its margin over the
second, or by negative entropy.
"""

from dataclasses import dataclass
from typing import SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.settings import whole_number

SCORES = ("probability", "margin", "entropy")


def propose_tokens(
    logits: Float[Tensor, "selected d_vocab_out"],
    temperature: float,
    uniform: Float[Tensor, "selected d_vocab_out"] | None,
) -> Int[Tensor, "selected"]:
    """The likeliest token, or at a temperature one drawn by Gumbel-max in float64.

    argmax exp(logits) / (-log u)^T of ML-GSAI/SMDM `add_gumbel_noise`, taken in logarithms so that nothing overflows.
    Float64 because low-precision Gumbel noise lowers the temperature unasked (Zheng et al. 2024, arXiv 2409.02908).
    """
    if uniform is None:
        return logits.argmax(dim=-1)
    return (logits.double() - temperature * torch.log(-torch.log(uniform))).argmax(dim=-1)


def confidence_of(
    logits: Float[Tensor, "selected d_vocab_out"], tokens: Int[Tensor, "selected"]
) -> Float[Tensor, "selected"]:
    """Softmax probability of each proposed token, in float64; zero for an id that cannot be written, such as [MASK]."""
    writable = tokens < logits.shape[-1]
    chosen = torch.softmax(logits.double(), dim=-1).gather(1, tokens.clamp(max=logits.shape[-1] - 1)[:, None])[:, 0]
    return chosen * writable


def likeliest(
    logits: Float[Tensor, "selected d_vocab_out"], top_p: float | None, top_k: int | None
) -> Bool[Tensor, "selected d_vocab_out"]:
    """The tokens that stay: the likeliest that together have more than `top_p`, and of these the `top_k` likeliest.

    Tokens that tie with the last of the `top_k` stay too. At least one token stays. Source: DreamLM/Dream
    `generation_utils.py`, `top_p_logits` and `top_k_logits`, in this order.
    """
    kept = torch.ones_like(logits, dtype=torch.bool)
    if top_p is not None:
        ordered, index = logits.double().sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        likelier = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
        kept = torch.zeros_like(kept).scatter_(1, index, likelier <= top_p)
    if top_k is not None:
        left = logits.masked_fill(~kept, float("-inf"))
        kept &= left >= left.topk(min(top_k, left.shape[-1]), dim=-1).values[:, -1:]
    return kept


@dataclass(frozen=True)
class Proposal:
    """How a token is proposed at a place, and by what the places are ranked.

    Attributes:
        score: "probability" of the proposed token; "margin", of the likeliest token over the second; "entropy", the
            negative entropy, the sum of p · log(p + 1e-10) over the vocabulary.
        scored_on: the distribution that the score is read from: "model", the softmax of the logits; or "drawn", what
            tokens are drawn from, after temperature, top-p and top-k.
        top_p: draw from the likeliest tokens that together have more than this probability.
        top_k: draw from so many likeliest tokens.
        writes_mask: whether [MASK] may be proposed, where the head has a column for it. A place that it wins takes a
            turn and stays masked, so that masks can remain in the end. Otherwise another token is proposed there;
            probabilities stay the model's own, in which [MASK] has its share.
    """

    score: str = "probability"
    scored_on: str = "model"
    top_p: float | None = None
    top_k: SupportsIndex | None = None
    writes_mask: bool = False

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score={self.score!r}; it is one of {', '.join(SCORES)}")
        if self.scored_on not in ("model", "drawn"):
            raise ValueError(f"scored_on={self.scored_on!r}; it is 'model' or 'drawn'")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}; it is a probability above 0, or None to keep all tokens")
        if self.top_k is not None and whole_number("top_k", self.top_k) < 1:
            raise ValueError(f"top_k={self.top_k}; it is a whole number from 1 on, or None to keep all tokens")

    @property
    def is_plain(self) -> bool:
        """Whether the score is the probability under the model, which the loop records anyway."""
        return self.score == "probability" and self.scored_on == "model"

    def propose(
        self,
        logits: Float[Tensor, "selected d_vocab_out"],
        temperature: float = 0.0,
        uniform: Float[Tensor, "selected d_vocab_out"] | None = None,
        mask_id: int | None = None,
    ) -> Int[Tensor, "selected"]:
        """A token for each place.

        Args:
            uniform: numbers in (0, 1), at a temperature; `None` proposes the likeliest token.
            mask_id: the id of [MASK], if the model has one.
        """
        open_ = logits
        if mask_id is not None and mask_id < logits.shape[-1] and not self.writes_mask:
            open_ = logits.index_fill(1, torch.tensor([mask_id], device=logits.device), float("-inf"))
        if uniform is not None and self._filters:
            kept = self._likeliest(logits / temperature)
            # When [MASK] alone is likely enough, the best other token stands in for it.
            kept.scatter_(1, open_.argmax(dim=-1, keepdim=True), True)
            open_ = open_.masked_fill(~kept, float("-inf"))
        return propose_tokens(open_, temperature, uniform)

    def scores(
        self, logits: Float[Tensor, "selected d_vocab_out"], tokens: Int[Tensor, "selected"], temperature: float = 0.0
    ) -> Float[Tensor, "selected"]:
        """How sure the model is of each proposed token, in float64; the higher, the sooner it is revealed."""
        if self.scored_on == "drawn":
            logits = logits.double() / (temperature or 1.0)
            if self._filters:
                logits = logits.masked_fill(~self._likeliest(logits), float("-inf"))
        if self.score == "probability":
            return confidence_of(logits, tokens)
        probabilities = logits.double().softmax(dim=-1)
        if self.score == "margin":
            first, second = probabilities.topk(2, dim=-1).values.unbind(dim=-1)
            return first - second
        return (probabilities * (probabilities + 1e-10).log()).sum(dim=-1)

    def _likeliest(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Bool[Tensor, "selected d_vocab_out"]:
        return likeliest(logits, self.top_p, None if self.top_k is None else whole_number("top_k", self.top_k))

    @property
    def _filters(self) -> bool:
        return self.top_p is not None or self.top_k is not None
