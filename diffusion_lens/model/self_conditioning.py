"""Self-conditioning: what a step predicted changes how the next step embeds its open block (Chen et al. 2022, arXiv
2208.04202; as in DiffusionGemma).

The prediction enters as its expected embedding, Σ p(token) · W_E[token]. It passes a norm and a gated MLP and is added
to the embedding of the open block, whose norm follows. In the first step of a block there is no prediction, and the
expected embedding is zero; the norm follows all the same.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_lens.model.hook_points import StepHookPoint
from diffusion_lens.model.layers import Embed, RMSNorm, rms_normalized
from diffusion_lens.model.mlp import GatedMLP
from diffusion_lens.model.shapes import PosMask, Resid


class SelfConditioning(nn.Module):
    """`hook_expected` [batch pos d_model] is the expected embedding, and `hook_self_conditioning` what is added to the
    embedding of the open block; both are 0 at other positions."""

    def __init__(self, norm: RMSNorm, mlp: GatedMLP) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp
        self.hook_expected, self.hook_self_conditioning = StepHookPoint(), StepHookPoint()

    def forward(self, embedded: Resid, expected: Resid | None, is_open: PosMask) -> Resid:
        """The stream at the first block: embedded tokens, with the prediction in the open block."""
        inside = is_open[..., None]
        expected = self.hook_expected(torch.zeros_like(embedded) if expected is None else expected.to(embedded.dtype))
        signal = self.hook_self_conditioning(self.mlp(self.norm(expected)) * inside)
        return torch.where(inside, rms_normalized(embedded + signal, self.norm.eps), embedded)


def expected_embedding(embed: Embed, logits: Float[Tensor, "*rest d_vocab"]) -> Float[Tensor, "*rest d_model"]:
    """Σ softmax(logits) · W_E, scaled as embeddings are; logits of all tokens in the order of the embedding."""
    weight = embed.weight
    p = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(weight.dtype)
    return embed.scaled(p.to(weight.device) @ weight).to(logits.device)
