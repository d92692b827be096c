"""Conditioning on the time by adaptive LayerNorms (adaLN, Peebles and Xie 2023, arXiv 2212.09748).

A network that is told the time reads the noise level sigma of its canvas. An MLP computes one vector from it,

    c = silu(W_out silu(W_hidden e(sigma))),

with e(sigma) the cosines and sines of sigma times 128 frequencies. It passes `hook_time`. From c, a linear map of each
block computes six vectors: shift, scale and gate of its attention, then of its MLP (`blocks.{i}.hook_modulation`), and
one linear map the shift and scale of the last norm (`hook_final_modulation`). With n the output of a norm,

    resid + gate · part(n · (1 + scale) + shift).

All models scale the time alike here, by the log-linear schedule sigma = -log(1 - (1 - 1e-3) t), whatever the schedule
of their own training.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion_lens.noise.schedules import LogLinear

LONGEST_PERIOD = 10_000.0


@dataclass(frozen=True)
class Modulation:
    """How the time changes what one part of the network reads and writes.

    Attributes:
        shift, scale: What is added to the output of its norm, and with 1 + what it is multiplied.
        gate: With what the output of the part is multiplied; `None` for the last norm, which no part follows.
    """

    shift: Float[Tensor, "batch d_model"]
    scale: Float[Tensor, "batch d_model"]
    gate: Float[Tensor, "batch d_model"] | None = None

    def shift_and_scale(self, normalized: Float[Tensor, "batch *rest d_model"]) -> Float[Tensor, "batch *rest d_model"]:
        """n · (1 + scale) + shift."""
        return normalized * (1 + _along(self.scale, normalized)) + _along(self.shift, normalized)


def gated(output: Float[Tensor, "batch *rest d_model"], modulation: Modulation | None) -> Tensor:
    """The output of a part of the network as it is added to the residual stream."""
    if modulation is None or modulation.gate is None:
        return output
    return output * _along(modulation.gate, output)


def normed(norm: nn.Module, x: Tensor, modulation: Modulation | None) -> Tensor:
    """The output of a norm, or of a module in its place, which without a modulation takes the stream alone."""
    out: Tensor = norm(x) if modulation is None else norm(x, modulation)
    return out


class TimeEmbedding(nn.Module):
    """The noise level to the vector c, before it passes `hook_time`."""

    def __init__(self, hidden: nn.Linear, out: nn.Linear) -> None:
        super().__init__()
        self.hidden = hidden
        self.out = out

    def forward(self, sigma: Float[Tensor, "batch"]) -> Float[Tensor, "batch d_cond"]:
        waves = frequency_embedding(sigma, self.hidden.in_features).to(self.hidden.weight.dtype)
        return F.silu(self.out(F.silu(self.hidden(waves))))


def frequency_embedding(sigma: Float[Tensor, "batch"], width: int) -> Float[Tensor, "batch d"]:
    """Cosines, then sines, of sigma times frequencies that fall from 1 to almost 1 / 10 000."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=sigma.device) / half
    angles = sigma.float()[:, None] * torch.exp(-math.log(LONGEST_PERIOD) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def sigma_of(time: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
    """The noise level at a time, by the log-linear schedule, float32."""
    return LogLinear().sigma(time.double()).float()


def _along(vector: Float[Tensor, "batch d_model"], x: Tensor) -> Tensor:
    """The vector of each row of the batch, with axes of size 1 for all others of `x`."""
    return vector.view(len(vector), *[1] * (x.dim() - 2), -1)
