"""Which token is proposed at a position, and how confident the model is of it.

A `Sampler` chooses positions, and its `Proposal` chooses tokens. At a temperature, tokens are sampled with Gumbel
noise, if requested from the likeliest tokens only (top-p, top-k). Positions are ranked by the probability of their
token, by the margin of the likeliest token over the second, or by negative entropy.
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
    """The likeliest token, or at a temperature one that is sampled by Gumbel-max in float64.

    This is argmax exp(logits) / (-log u)^T of ML-GSAI/SMDM `add_gumbel_noise`, in logarithms so that nothing overflows.
    It is in float64 because Gumbel noise of low precision lowers the temperature (Zheng et al. 2024, arXiv 2409.02908).
    """
    if uniform is None:
        return logits.argmax(dim=-1)
    return (logits.double() - temperature * torch.log(-torch.log(uniform))).argmax(dim=-1)


def confidence_of(
    logits: Float[Tensor, "selected d_vocab_out"], tokens: Int[Tensor, "selected"]
) -> Float[Tensor, "selected"]:
    """Softmax probability of each proposed token, in float64; 0 for an id without a logit, such as [MASK]."""
    writable = tokens < logits.shape[-1]
    chosen = torch.softmax(logits.double(), dim=-1).gather(1, tokens.clamp(max=logits.shape[-1] - 1)[:, None])[:, 0]
    return chosen * writable


def likeliest(
    logits: Float[Tensor, "selected d_vocab_out"],
    top_p: float | None,
    top_k: int | None,
    first: str = "top_p",
    crosses: bool = True,
) -> Bool[Tensor, "selected d_vocab_out"]:
    """The likeliest tokens that together have more than `top_p`, and of these the `top_k` likeliest.

    Tokens that tie with the last of the `top_k` are included, and at least one token is. Source: DreamLM/Dream
    `generation_utils.py`, `top_p_logits` and `top_k_logits`, in this order.

    Args:
        first: "top_k" takes the `top_k` likeliest tokens first, and of these those that together have more than
            `top_p`, as transformers does.
        crosses: Whether the token with which they have it is included, too.
    """
    likely = torch.ones_like(logits, dtype=torch.bool)
    for name in ("top_p", "top_k") if first == "top_p" else ("top_k", "top_p"):
        remaining = logits.masked_fill(~likely, float("-inf"))
        if name == "top_p" and top_p is not None:
            # A token is in if the likelier tokens together do not exceed top_p yet.
            ordered, index = remaining.double().sort(dim=-1, descending=True, stable=True)
            mass = ordered.softmax(dim=-1).cumsum(dim=-1)
            mass_before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
            inside = mass_before <= top_p if crosses else (mass <= top_p) | (mass_before == 0)
            likely &= torch.zeros_like(likely).scatter_(1, index, inside)
        elif name == "top_k" and top_k is not None:
            likely &= remaining >= remaining.topk(min(top_k, remaining.shape[-1]), dim=-1).values[:, -1:]
    return likely


@dataclass(frozen=True)
class Proposal:
    """How tokens are proposed, and how positions are ranked.

    Attributes:
        score: Score of a position: "probability" of the proposed token; "margin" of the likeliest token over the
            second; or "entropy", the negative entropy, the sum of p · log(p + 1e-10) over the vocabulary.
        scored_on: Distribution used to compute the score: "model" (softmax of the logits) or "sampled" (after
            temperature, top-p and top-k).
        top_p: Nucleus sampling: sample from the smallest set of most likely tokens whose total probability reaches
            `top_p`; `None` for all tokens.
        top_k: Number of most likely tokens to sample from; `None` for all tokens.
        writes_mask: Whether [MASK] may be proposed, where the head has a column for it. A position where it is proposed
            counts as revealed and stays masked, so that masks can remain at the end. Otherwise the best other token is
            proposed there; the probabilities are still the model's own, in which [MASK] has its share.
        crosses: Whether the token with which the total probability crosses `top_p` is sampled from, too; the likeliest
            always is.
        first: Limit that is applied first where both are given, "top_p" or "top_k".
    """

    score: str = "probability"
    scored_on: str = "model"
    top_p: float | None = None
    top_k: SupportsIndex | None = None
    writes_mask: bool = False
    first: str = "top_p"
    crosses: bool = True

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score={self.score!r}; it must be one of {', '.join(SCORES)}")
        if self.first not in ("top_p", "top_k"):
            raise ValueError(f"first={self.first!r}; it must be 'top_p' or 'top_k'")
        if self.scored_on not in ("model", "sampled"):
            raise ValueError(f"scored_on={self.scored_on!r}; it must be 'model' or 'sampled'")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}; it must be a probability above 0, or None to keep all tokens")
        if self.top_k is not None and whole_number("top_k", self.top_k) < 1:
            raise ValueError(f"top_k={self.top_k}; it must be a whole number, at least 1, or None to keep all tokens")

    @property
    def is_plain(self) -> bool:
        """Whether the score is the probability under the model, which the loop records in any case."""
        return self.score == "probability" and self.scored_on == "model"

    def propose(
        self,
        logits: Float[Tensor, "selected d_vocab_out"],
        temperature: float = 0.0,
        uniform: Float[Tensor, "selected d_vocab_out"] | None = None,
        mask_id: int | None = None,
    ) -> Int[Tensor, "selected"]:
        """A token for each row of logits.

        Args:
            uniform: Random numbers in (0, 1) for sampling at a temperature; `None` takes the likeliest token.
            mask_id: Id of [MASK], if the model has one.
        """
        allowed = self._writable(logits, mask_id) if uniform is None else self.allowed(logits, temperature, mask_id)
        return propose_tokens(allowed, temperature, uniform)

    def allowed(
        self, logits: Float[Tensor, "selected d_vocab_out"], temperature: float, mask_id: int | None
    ) -> Float[Tensor, "selected d_vocab_out"]:
        """The logits, -inf at tokens that are not sampled: [MASK], unless it may be written, and unlikely ones."""
        allowed = self._writable(logits, mask_id)
        if not self.filters:
            return allowed
        likely = self._likeliest(logits / temperature)
        # The best allowed token is always in, also where [MASK] alone reaches top_p.
        likely.scatter_(1, allowed.argmax(dim=-1, keepdim=True), True)
        return allowed.masked_fill(~likely, float("-inf"))

    def scores(
        self, logits: Float[Tensor, "selected d_vocab_out"], tokens: Int[Tensor, "selected"], temperature: float = 0.0
    ) -> Float[Tensor, "selected"]:
        """Score of each proposed token, in float64; tokens of higher score are revealed first."""
        if self.scored_on == "sampled":
            logits = logits.double() / (temperature or 1.0)
            if self.filters:
                logits = logits.masked_fill(~self._likeliest(logits), float("-inf"))
        if self.score == "probability":
            return confidence_of(logits, tokens)
        probabilities = logits.double().softmax(dim=-1)
        if self.score == "margin":
            first, second = probabilities.topk(2, dim=-1).values.unbind(dim=-1)
            return first - second
        return (probabilities * (probabilities + 1e-10).log()).sum(dim=-1)

    def _likeliest(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Bool[Tensor, "selected d_vocab_out"]:
        top_k = None if self.top_k is None else whole_number("top_k", self.top_k)
        return likeliest(logits, self.top_p, top_k, self.first, self.crosses)

    def _writable(
        self, logits: Float[Tensor, "selected d_vocab_out"], mask_id: int | None
    ) -> Float[Tensor, "selected d_vocab_out"]:
        if mask_id is None or mask_id >= logits.shape[-1] or self.writes_mask:
            return logits
        return logits.index_fill(1, torch.tensor([mask_id], device=logits.device), float("-inf"))

    @property
    def filters(self) -> bool:
        """Whether tokens are sampled from the likeliest ones only."""
        return self.top_p is not None or self.top_k is not None
