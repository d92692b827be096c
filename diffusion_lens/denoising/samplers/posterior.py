"""The reverse process by p(x_0): draw the token of each position at time s, given its token at time t.

Under absorbing noise a masked position stays masked with probability chance(s) / chance(t), and otherwise takes a token
drawn from p(x_0), where chance(t) is the probability that a token is masked by time t (Sahoo et al. 2024,
arXiv 2406.07524, eq. 7). Under uniform noise every position is drawn again in every step (Schiff et al. 2024,
arXiv 2412.10193, eq. 16).
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.denoising.prediction import Prediction
from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.sampler import Plan, Sampler
from diffusion_lens.denoising.schedule import check_eps, linear_times
from diffusion_lens.step_state import StepState
from weight_conversion import NoiseSchedule

CHANCES = ("schedule", "time")


@dataclass(frozen=True)
class Posterior(Sampler):
    """Draws the token of each masked position from the posterior under absorbing noise.

    Attributes:
        chance: Probability that a token is masked at time t: "schedule", 1 - exp(-sigma(t)), or "time", t itself.
        removes_rest: Whether the last step is one at time `eps` that writes the likeliest token at each position still
            masked. Otherwise the last of the steps to `eps` draws a token at each of them.
        eps: Time at which the run ends.
        proposal: Limits of the likeliest tokens that are drawn from. It ranks nothing.
        schedule: Schedule of noise; `None` takes the model's.
    """

    chance: str = "schedule"
    removes_rest: bool = True
    eps: float = 1e-5
    proposal: Proposal = field(default_factory=Proposal)
    schedule: NoiseSchedule | None = None
    name = "posterior"
    reads_confidence = False
    may_change_nothing = True

    def __post_init__(self) -> None:
        check_eps(self.eps)
        if self.chance not in CHANCES:
            raise ValueError(f"chance={self.chance!r}; it must be one of {', '.join(CHANCES)}")

    def n_steps(self, steps: int | None, blanks: Tensor) -> int:
        """Number of steps, the last of which removes the rest.

        Raises:
            ValueError: There is no step before it.
        """
        return checked_steps(super().n_steps(steps, blanks), self.removes_rest)

    def times(self, n_steps: int) -> list[float]:
        return ending_times(n_steps, self.eps, self.removes_rest)

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        return Plan.of_all(step.masked)

    def transition(self, step: StepState, prediction: Prediction) -> Float[Tensor, "selected d_vocab"]:
        p = prediction.p_clean
        if step.index == step.n_steps - 1:
            return F.one_hot(p.argmax(dim=-1), p.shape[-1]).double() if self.removes_rest else p
        t, s = (torch.tensor(x, dtype=torch.float64) for x in (step.t, step.s))
        if self.chance == "schedule":
            t, s = prediction.schedule.chance(t), prediction.schedule.chance(s)
        return prediction.noise.posterior(p, prediction.present, float(t), float(s))


@dataclass(frozen=True)
class UniformPosterior(Sampler):
    """Draws the token of every position from the posterior under uniform noise, in every step.

    Attributes:
        keeps_prediction: Whether the network is told the time of the last step that changed the canvas (of any row of
            the batch), as in the authors' code with `use_cache`, which saves forward passes.
        eps: Time at which the run ends.
        proposal: Limits of the likeliest tokens that are drawn from. It ranks nothing.
        schedule: Schedule of noise; `None` takes the model's.
    """

    keeps_prediction: bool = False
    eps: float = 1e-5
    proposal: Proposal = field(default_factory=Proposal)
    schedule: NoiseSchedule | None = None
    name = "uniform_posterior"
    reads_confidence = False
    may_change_nothing = True
    noises = frozenset({"uniform"})

    def __post_init__(self) -> None:
        check_eps(self.eps)

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        return Plan.of_all(step.masked)

    def transition(self, step: StepState, prediction: Prediction) -> Float[Tensor, "selected d_vocab"]:
        t, s = (float(prediction.schedule.chance(torch.tensor(x, dtype=torch.float64))) for x in (step.t, step.s))
        return prediction.noise.posterior(prediction.p_clean, prediction.present, t, s)


def ending_times(n_steps: int, eps: float, removes_rest: bool) -> list[float]:
    """Times from 1 to `eps`, and with `removes_rest` a last step from there to 0."""
    times: list[float] = linear_times(n_steps - removes_rest, eps).tolist()
    return [*times, 0.0] if removes_rest else times


def checked_steps(steps: int, removes_rest: bool) -> int:
    """The number of steps; a `ValueError` if the last one, which removes the rest of the noise, is the only one."""
    if removes_rest and steps < 2:
        raise ValueError(
            f"steps={steps}: the last step removes what noise remains, so there must be one before it; use steps=2 or "
            "more"
        )
    return steps
