"""ReMDM (Wang et al. 2025, arXiv 2503.00307): a revealed token may return to [MASK] and be written again.

With alpha(t) the share revealed at time t, a revealed position is masked again with probability sigma, and a masked one
is revealed with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t), so that the share at time s is alpha_s.
The probability sigma is at most sigma_max = min(1, (1 - alpha_s) / alpha_t). Source: kuleshov-group/remdm
`diffusion.py`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.sampler import Plan, Sampler
from diffusion_lens.step_state import StepState

# The authors' settings of eta for each strategy.
ETA = {"cap": 0.008, "rescale": 0.015, "conf": 1.0, "loop": 0.02}


@dataclass(frozen=True)
class ReMDM(Sampler):
    """Reveals and remasks positions at random; the last step reveals all that remain and remasks none.

    Attributes:
        strategy: Rule for sigma. "cap" takes min(eta, sigma_max). "rescale" takes eta · sigma_max. "conf" spreads
            eta · sigma_max over the revealed positions by softmax(-p), so that the tokens of the lowest probability
            return first. "loop" takes plain steps until `t_on`, then sigma = eta at a constant share `alpha_on`, and
            plain steps again after `t_off`.
        eta: Strength of remasking, from 0 to 1; by default the authors' value for the strategy.
        t_on: Time at which "loop" begins to remask.
        t_off: Time at which "loop" ends remasking.
        alpha_on: Share revealed while "loop" remasks.
    """

    strategy: str = "cap"
    eta: float | None = None
    t_on: float = 0.55
    t_off: float = 0.05
    alpha_on: float = 0.9
    name = "remdm"

    def __post_init__(self) -> None:
        if self.strategy not in ETA:
            raise ValueError(f"strategy={self.strategy!r}; it must be one of {', '.join(ETA)}")
        if self.eta is not None and not 0 <= self.eta <= 1:
            raise ValueError(f"eta={self.eta}; it must be between 0 (never mask again) and 1")
        if not 0 < self.t_off < self.t_on < 1 or not 0 < self.alpha_on < 1:
            raise ValueError(
                f"t_off={self.t_off}, t_on={self.t_on}, alpha_on={self.alpha_on}; they must satisfy "
                "0 < t_off < t_on < 1 and 0 < alpha_on < 1"
            )

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        if step.index == step.n_steps - 1:
            return Plan.of_all(step.masked)
        alpha_t, alpha_s = self._alpha(step.t), self._alpha(step.s)
        revealed = ~confidence.isnan()
        sigma = self._sigma(step, alpha_t, alpha_s)
        share = torch.zeros_like(confidence)
        if self.strategy == "conf":
            spread = (-confidence).masked_fill(~revealed, float("-inf")).softmax(dim=1).nan_to_num()
            share = sigma * spread
            sigma = 0.0
        else:
            share += sigma
        reveal = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
        positions, remask = step.masked.clone(), revealed.clone()
        positions[step.masked] = noise.by_position(step.index, step.masked) < reveal
        remask[revealed] = noise.by_position(step.index, revealed) < share[revealed]
        return Plan.of_all(positions, remask)

    def _alpha(self, t: float) -> float:
        """The share revealed at time t."""
        if self.strategy != "loop":
            return 1 - t
        if t > self.t_on:
            return (1 - t) * self.alpha_on / (1 - self.t_on)
        return self.alpha_on if t > self.t_off else 1 - t * (1 - self.alpha_on) / self.t_off

    def _sigma(self, step: StepState, alpha_t: float, alpha_s: float) -> float:
        """The probability with which a revealed position returns to [MASK]; for "conf", their sum over positions."""
        eta = ETA[self.strategy] if self.eta is None else self.eta
        sigma_max = min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0
        if self.strategy == "loop":
            return min(eta, sigma_max) if self.t_off < step.s and step.t <= self.t_on else 0.0
        return min(eta, sigma_max) if self.strategy == "cap" else eta * sigma_max
