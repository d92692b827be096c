"""What a network is told of the time, and the schedule of noise with which it was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weight_conversion.checks import check_choice, check_count, check_flag, check_positive

SCHEDULES = ("log_linear", "linear", "geometric")


@dataclass(frozen=True)
class TimeConditioning:
    """Adaptive LayerNorms (adaLN, Peebles and Xie 2023, arXiv 2212.09748): each norm is shifted and scaled, and each
    output gated, by linear functions of one vector, which an MLP computes from the noise level sigma.

    Attributes:
        d_cond: Width of that vector.
        told: Whether the network is told the time. Otherwise sigma is always 0, so that the vector is a constant.
        folded: Whether the constant shifts, scales and gates are folded into norms and output matrices. The tensors
            from which they were computed are kept, so that an export can undo it.
    """

    d_cond: int
    told: bool
    folded: bool = False

    def __post_init__(self) -> None:
        check_count("d_cond", self.d_cond)
        check_flag("told", self.told)
        check_flag("folded", self.folded)
        if self.told and self.folded:
            raise ValueError("a network that is told the time has no constant shifts, scales and gates to fold")


@dataclass(frozen=True)
class NoiseSchedule:
    """The total noise sigma(t) with which a model was trained; a token is noised with probability 1 - exp(-sigma).

    Attributes:
        kind: "log_linear", sigma = -log(1 - (1 - eps) t); "linear", the same with eps = 0, and sigma at most
            -log(eps); or "geometric", sigma = sigma_min^(1 - t) · sigma_max^t.
        eps: Number of the first two.
        sigma_min, sigma_max: Numbers of the last.
    """

    kind: Literal["log_linear", "linear", "geometric"] = "log_linear"
    eps: float = 1e-3
    sigma_min: float = 1e-4
    sigma_max: float = 20.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, SCHEDULES)
        for name in ("eps", "sigma_min", "sigma_max"):
            check_positive(name, getattr(self, name))
        if self.eps >= 1 or self.sigma_min >= self.sigma_max:
            raise ValueError(f"{self}: eps must be below 1, and sigma_min below sigma_max")
