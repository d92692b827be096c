"""The amount of noise at each time: sigma(t), its derivative, and the chance that a token has been noised.

A token is replaced by noise at a rate that depends on the time only, so that it is noised at time t with probability
1 - exp(-sigma(t)), where sigma is the integral of the rate (Lou et al. 2023, arXiv 2310.16834; Sahoo et al. 2024,
arXiv 2406.07524).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from weight_conversion import NoiseSchedule


class Schedule(ABC):
    """A schedule of noise over the times 0 (none) to 1 (all tokens are noise)."""

    @abstractmethod
    def sigma(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        """Total noise at each time."""

    @abstractmethod
    def rate(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        """Derivative of sigma by the time."""

    @abstractmethod
    def time(self, sigma: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        """The time of each total noise, the inverse of `sigma`."""

    def chance(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        """Probability that a token has been noised by each time, 1 - exp(-sigma)."""
        return -torch.expm1(-self.sigma(t))

    def sigma_at(self, t: float) -> float:
        """Total noise at one time."""
        return float(self.sigma(torch.tensor(t, dtype=torch.float64)))


@dataclass(frozen=True)
class LogLinear(Schedule):
    """sigma = -log(1 - (1 - eps) t): a token is noised with probability (1 - eps) t."""

    eps: float = 1e-3

    def sigma(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return -torch.log1p(-(1 - self.eps) * t)

    def time(self, sigma: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return -torch.expm1(-sigma) / (1 - self.eps)

    def rate(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return (1 - self.eps) / (1 - (1 - self.eps) * t)


@dataclass(frozen=True)
class Linear(Schedule):
    """A token is noised with probability t; sigma = -log(1 - t) is at most -log(eps) (Arriola et al. 2025)."""

    eps: float = 1e-3

    def sigma(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return -torch.log1p(-t).clamp(min=math.log(self.eps))

    def rate(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return 1 / (1 - t)

    def time(self, sigma: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return -torch.expm1(-sigma)

    def chance(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return t


@dataclass(frozen=True)
class Geometric(Schedule):
    """sigma = sigma_min^(1 - t) · sigma_max^t."""

    sigma_min: float = 1e-4
    sigma_max: float = 20.0

    def sigma(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return self.sigma_min ** (1 - t) * self.sigma_max**t

    def rate(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return self.sigma(t) * math.log(self.sigma_max / self.sigma_min)

    def time(self, sigma: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return torch.log(sigma / self.sigma_min) / math.log(self.sigma_max / self.sigma_min)


def schedule_of(described: NoiseSchedule | None) -> Schedule:
    """The schedule of a description; where a checkpoint says nothing of it, the log-linear one."""
    described = NoiseSchedule() if described is None else described
    if described.kind == "geometric":
        return Geometric(float(described.sigma_min), float(described.sigma_max))
    return {"log_linear": LogLinear, "linear": Linear}[described.kind](float(described.eps))
