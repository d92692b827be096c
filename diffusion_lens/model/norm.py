"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), computed in float32 at least, as in TransformerLens."""

import torch
from torch import Tensor, nn

from diffusion_lens.model.hook_points import StepHookPoint
from diffusion_lens.shapes import Resid


class RMSNorm(nn.Module):
    """x / scale · w, with `hook_scale` [batch pos 1] on sqrt(mean(x²) + eps) and `hook_normalized` before w."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model, device="meta"))
        self.hook_scale = StepHookPoint()
        self.hook_normalized = StepHookPoint()

    @property
    def w(self) -> Tensor:
        """TransformerLens's name of the weight."""
        return self.weight

    def forward(self, x: Resid) -> Resid:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = self.hook_scale((wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        normalized: Tensor = self.hook_normalized((wide / scale).to(x.dtype))
        return normalized * self.weight
