"""Numbers from logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def token_probabilities(
    logits: Float[Tensor, "batch place d_vocab_out"], tokens: Int[Tensor, "place"]
) -> Float[Tensor, "batch place"]:
    """Probability of each place's own token."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = wide.gather(-1, tokens.expand(logits.shape[0], -1)[..., None])[..., 0]
    return (own - wide.logsumexp(dim=-1)).exp()
