"""The reverse process by scores, the ratios p_sigma(y) / p_sigma(x) of noised probabilities.

Source: Lou et al. 2023 (arXiv 2310.16834), louaaron/Score-Entropy-Discrete-Diffusion `sampling.py`.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.denoising.prediction import Prediction
from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.sampler import Plan, Sampler
from diffusion_lens.denoising.samplers.posterior import checked_steps, ending_times
from diffusion_lens.denoising.schedule import check_eps
from diffusion_lens.step_state import StepState
from weight_conversion import NoiseSchedule

STEPS = ("analytic", "euler")


@dataclass(frozen=True)
class Score(Sampler):
    """Draws the token of each masked position, or under uniform noise of every position, by the scores.

    The last step is one at time `eps` that removes all noise that remains, [MASK] included.

    Attributes:
        step: "analytic", the exact step for the scores at its start (Tweedie); or "euler", a step of first order.
        eps: Time at which the last step begins.
        proposal: Limits of the likeliest tokens that are drawn from. It ranks nothing.
        schedule: Schedule of noise; `None` takes the model's.
    """

    step: str = "analytic"
    eps: float = 1e-5
    proposal: Proposal = field(default_factory=Proposal)
    schedule: NoiseSchedule | None = None
    name = "score"
    reads_confidence = False
    may_change_nothing = True
    noises = frozenset({"absorbing", "uniform"})

    def __post_init__(self) -> None:
        check_eps(self.eps)
        if self.step not in STEPS:
            raise ValueError(f"step={self.step!r}; it must be 'analytic' or 'euler'")

    def n_steps(self, steps: int | None, blanks: Tensor) -> int:
        """Number of steps, the last of which removes the rest.

        Raises:
            ValueError: There is no step before it.
        """
        return checked_steps(super().n_steps(steps, blanks), removes_rest=True)

    def times(self, n_steps: int) -> list[float]:
        return ending_times(n_steps, self.eps, removes_rest=True)

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        return Plan.of_all(step.masked)

    def transition(self, step: StepState, prediction: Prediction) -> Float[Tensor, "selected d_vocab"]:
        schedule, noise, present = prediction.schedule, prediction.noise, prediction.present
        sigma = schedule.sigma_at(step.t)
        scores = prediction.scores
        if step.index == step.n_steps - 1:
            p = noise.analytic(scores, present, prediction.amount(sigma))
            if prediction.mask is not None:
                p[:, prediction.mask] = 0.0
            return p
        if self.step == "analytic":
            return noise.analytic(scores, present, prediction.amount(sigma - schedule.sigma_at(step.s)))
        rate = float(schedule.rate(torch.tensor(step.t, dtype=torch.float64)))
        return noise.euler(scores, present, prediction.amount((step.t - step.s) * rate))
