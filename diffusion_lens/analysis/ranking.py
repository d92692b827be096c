"""Ranks of tokens among all that a model can write."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.model.transformer import DiffusionTransformer


def clean_logits(
    model: DiffusionTransformer,
    logits: Float[Tensor, "entry d_vocab_out"],
    present: Int[Tensor, "entry"] | None = None,
    sigma: Float[Tensor, "entry"] | None = None,
) -> Float[Tensor, "entry d_vocab_out"]:
    """Logits whose softmax is p(x_0).

    Args:
        present: Token on the canvas at each position that the logits predict, for a head that needs it.
        sigma: Noise of the canvas, for the same head; by default that of the current step or of `model.at_time`.
    """
    if sigma is not None:
        return model.head.clean_logits(logits, present, sigma.to(logits.device))
    at = None if present is None else present[:, None]
    return model.head_at(at).clean_logits(logits[:, None])[:, 0]


@dataclass(frozen=True, eq=False)
class Ranking:
    """Rows of logits in which tokens are ranked, in float32 at least.

    Attributes:
        logits: Float[entry d_vocab_out], -inf at tokens that the model cannot write, such as [MASK].
        log_probabilities: Float[entry d_vocab_out], of all tokens, as the network predicts them.
    """

    logits: Float[Tensor, "entry d_vocab_out"]
    log_probabilities: Float[Tensor, "entry d_vocab_out"]

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        logits: Float[Tensor, "entry d_vocab_out"],
        present: Int[Tensor, "entry"] | None = None,
    ) -> "Ranking":
        """The ranking by the logits of a model.

        Args:
            present: Token on the canvas at each position that the logits predict, for a head that needs it.
        """
        logits = clean_logits(model, logits, present)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        writable = model.cfg.writable(torch.arange(logits.shape[-1], device=logits.device))
        return cls(wide.masked_fill(~writable, float("-inf")), wide.log_softmax(dim=-1))

    def rank(self, tokens: Int[Tensor, "entry target"]) -> Int[Tensor, "entry target"]:
        """Number of strictly likelier tokens, for each token; 0 is the likeliest, and tokens that tie have one rank."""
        logits = self.logits.gather(-1, tokens)
        # One target at a time, because all comparisons together would have an axis more than the logits.
        ranks = [(self.logits > logits[:, i, None]).sum(dim=-1) for i in range(tokens.shape[1])]
        return torch.stack(ranks, dim=-1) if ranks else tokens

    def probability(self, tokens: Int[Tensor, "entry target"]) -> Float[Tensor, "entry target"]:
        """Probability of each token."""
        return self.log_probabilities.gather(-1, tokens).exp()

    def top(self, k: int) -> Int[Tensor, "entry top"]:
        """The `k` likeliest tokens, the likeliest first."""
        return self.logits.topk(k, dim=-1).indices
