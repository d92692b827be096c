"""Which token is proposed at a place, and how sure the model is of it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def propose_tokens(
    logits: Float[Tensor, "place d_vocab_out"], temperature: float, uniform: Float[Tensor, "place d_vocab_out"] | None
) -> Int[Tensor, "place"]:
    """The likeliest token, or at a temperature one drawn by Gumbel-max in float64.

    argmax exp(logits) / (-log u)^T of ML-GSAI/SMDM `add_gumbel_noise`, taken in logarithms so that nothing overflows.
    Float64 because low-precision Gumbel noise lowers the temperature unasked (Zheng et al. 2024, arXiv 2409.02908).
    """
    if uniform is None:
        return logits.argmax(dim=-1)
    return (logits.double() - temperature * torch.log(-torch.log(uniform))).argmax(dim=-1)


def confidence_of(logits: Float[Tensor, "place d_vocab_out"], tokens: Int[Tensor, "place"]) -> Float[Tensor, "place"]:
    """Softmax probability of each proposed token, in float64; zero for an id that cannot be written, such as [MASK]."""
    writable = tokens < logits.shape[-1]
    chosen = torch.softmax(logits.double(), dim=-1).gather(1, tokens.clamp(max=logits.shape[-1] - 1)[:, None])[:, 0]
    return chosen * writable
