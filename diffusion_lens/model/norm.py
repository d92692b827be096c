"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), computed at least in float32, as in TransformerLens."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_lens.model.hook_points import StepHookPoint


class RMSNorm(nn.Module):
    """x / scale · w. `hook_scale` [... 1] is at sqrt(mean(x²) + eps), and `hook_normalized` before the product with w.

    The activations are [batch pos ...] for norms of the residual stream, [batch pos head ...] for norms of heads.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device="meta"))
        self.hook_scale = StepHookPoint()
        self.hook_normalized = StepHookPoint()

    @property
    def w(self) -> Tensor:
        """TransformerLens's name of the weight."""
        return self.weight

    def forward(self, x: Float[Tensor, "*rest d"]) -> Float[Tensor, "*rest d"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = self.hook_scale(self._scale(wide))
        normalized: Tensor = self.hook_normalized((wide / scale).to(x.dtype))
        return normalized * self.weight

    def without_hooks(self, x: Float[Tensor, "*rest d"]) -> Float[Tensor, "*rest d"]:
        """The same function, without its hook points."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide / self._scale(wide)).to(x.dtype) * self.weight

    def _scale(self, x: Float[Tensor, "*rest d"]) -> Float[Tensor, "*rest 1"]:
        return (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
