"""The norms: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) and LayerNorm (Ba et al. 2016, arXiv 1607.06450).

Both are computed at least in float32, as in TransformerLens.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_lens.model.hook_points import StepHookPoint
from diffusion_lens.model.linear import beside
from diffusion_lens.model.modulation import Modulation


class Norm(nn.Module, ABC):
    """x / scale · w. `hook_scale` [... 1] is at the scale, and `hook_normalized` before the product with w.

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

    def forward(self, x: Float[Tensor, "*rest d"], modulation: Modulation | None = None) -> Float[Tensor, "*rest d"]:
        """Normalise the stream. A norm that the time modulates needs the `modulation`; others take none."""
        wide = self._centred(x.to(torch.promote_types(x.dtype, torch.float32)))
        scale = self.hook_scale(self._scale(wide))
        normalized: Tensor = self.hook_normalized((wide / scale).to(x.dtype))
        return self._weighted(normalized, modulation)

    def without_hooks(
        self, x: Float[Tensor, "*rest d"], modulation: Modulation | None = None
    ) -> Float[Tensor, "*rest d"]:
        """The same function, without its hook points."""
        wide = self._centred(x.to(torch.promote_types(x.dtype, torch.float32)))
        return self._weighted((wide / self._scale(wide)).to(x.dtype), modulation)

    @abstractmethod
    def _centred(self, x: Float[Tensor, "*rest d"]) -> Float[Tensor, "*rest d"]:
        """The input, or its deviation from its mean."""

    @abstractmethod
    def _weighted(
        self, normalized: Float[Tensor, "*rest d"], modulation: Modulation | None
    ) -> Float[Tensor, "*rest d"]:
        """The output for a normalised input."""

    def _scale(self, x: Float[Tensor, "*rest d"]) -> Float[Tensor, "*rest 1"]:
        return (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()


class RMSNorm(Norm):
    """x / scale · w, with the scale sqrt(mean(x²) + eps)."""

    def _centred(self, x: Float[Tensor, "*rest d"]) -> Float[Tensor, "*rest d"]:
        return x

    def _weighted(
        self, normalized: Float[Tensor, "*rest d"], modulation: Modulation | None
    ) -> Float[Tensor, "*rest d"]:
        return normalized * beside(self.weight, normalized)


class LayerNorm(Norm):
    """(x - mean) / scale · w + b, with the scale sqrt(variance + eps).

    Args:
        bias: Whether there is a b.
        modulated: Whether the output is then shifted and scaled by the time (`Modulation`).
    """

    def __init__(self, width: int, eps: float, bias: bool = False, modulated: bool = False) -> None:
        super().__init__(width, eps)
        self.modulated = modulated
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(width, device="meta")) if bias else None)

    @property
    def b(self) -> Tensor:
        """TransformerLens's name of the bias; zeros if there is none."""
        return torch.zeros_like(self.weight) if self.bias is None else self.bias

    def _centred(self, x: Float[Tensor, "*rest d"]) -> Float[Tensor, "*rest d"]:
        return x - x.mean(-1, keepdim=True)

    def _weighted(
        self, normalized: Float[Tensor, "*rest d"], modulation: Modulation | None
    ) -> Float[Tensor, "*rest d"]:
        weighted = normalized * beside(self.weight, normalized)
        if self.bias is not None:
            weighted = weighted + beside(self.bias, weighted)
        if self.modulated != (modulation is not None):
            raise ValueError(
                "the time shifts and scales the output of this norm, so it needs a modulation: "
                "model.ln_final(resid, model.final_modulation_at(...))"
                if self.modulated
                else "the time does not modulate this norm: leave the modulation out"
            )
        return weighted if modulation is None else modulation.shift_and_scale(weighted)
