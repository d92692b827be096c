"""Samplers of the reverse process: they draw the token of each position at time s, given its token at time t.

- By p(x_0): under absorbing noise a masked position stays masked with probability chance(s) / chance(t), and otherwise
  takes a token drawn from p(x_0), where chance(t) is the probability that a token is masked by time t (Sahoo et al.
  2024, arXiv 2406.07524, eq. 7). Under uniform noise every position is drawn again in every step (Schiff et al. 2024,
  arXiv 2412.10193, eq. 16).
- By scores, the ratios p_sigma(y) / p_sigma(x) of noised probabilities (Lou et al. 2023, arXiv 2310.16834;
  louaaron/Score-Entropy-Discrete-Diffusion `sampling.py`).
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.denoising.sampler import Plan, PositionNoise, Prediction, Proposal, Sampler, check_eps
from diffusion_lens.hooks.step import StepState
from diffusion_lens.settings import checked_arguments, one_of
from weight_conversion import NoiseSchedule

CHANCES = ("schedule", "time")
STEPS = ("analytic", "euler")


class _Transitions(Sampler):
    """Draws at every open position, from the likeliest tokens as far as `proposal` limits them; it ranks nothing.

    With `removes_rest` the last step, from `eps` to 0, removes what noise remains.
    """

    removes_rest: bool = False
    reads_confidence = False
    may_change_nothing = True

    def n_steps(self, steps: int | None, blanks: Tensor) -> int:
        """Number of steps, with `removes_rest` at least 2."""
        steps = super().n_steps(steps, blanks)
        if self.removes_rest and steps < 2:
            raise ValueError(
                f"steps={steps}: the last step removes what noise remains, so there must be one before it; use steps=2 "
                "or more"
            )
        return steps

    def times(self, n_steps: int) -> list[float]:
        times = super().times(n_steps - self.removes_rest)
        return [*times, 0.0] if self.removes_rest else times

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        return Plan.of_all(step.masked)


@checked_arguments
@dataclass(frozen=True)
class Posterior(_Transitions):
    """Draws the token of each masked position from the posterior under absorbing noise.

    Attributes:
        chance: Probability that a token is masked at time t: "schedule", 1 - exp(-sigma(t)), or "time", t itself.
        removes_rest: Whether the last step is one at time `eps` that writes the likeliest token at each position still
            masked. Otherwise the last of the steps to `eps` draws a token at each of them.
    """

    chance: str = "schedule"
    removes_rest: bool = True
    eps: float = 1e-5
    proposal: Proposal = field(default_factory=Proposal)
    schedule: NoiseSchedule | None = None
    name = "posterior"

    def __post_init__(self) -> None:
        check_eps(self.eps)
        one_of(*CHANCES)("chance", self.chance)

    def transition(self, step: StepState, prediction: Prediction) -> Float[Tensor, "selected d_vocab"]:
        p = prediction.p_clean
        if step.index == step.n_steps - 1:
            return F.one_hot(p.argmax(dim=-1), p.shape[-1]).double() if self.removes_rest else p
        t, s = (torch.tensor(x, dtype=torch.float64) for x in (step.t, step.s))
        if self.chance == "schedule":
            t, s = prediction.schedule.chance(t), prediction.schedule.chance(s)
        return prediction.noise.posterior(p, prediction.present, float(t), float(s))


@checked_arguments
@dataclass(frozen=True)
class UniformPosterior(_Transitions):
    """Draws the token of every position from the posterior under uniform noise, in every step.

    Attributes:
        keeps_prediction: Whether the network is given the time of the last step that changed the canvas (of any row of
            the batch), as in the authors' code with `use_cache`, which saves forward passes.
        removes_rest: Whether the last step is one from `eps` to 0, which removes the noise that remains.
        greedy_tail: Whether that step writes the likeliest token at every position, rather than draw one.
    """

    keeps_prediction: bool = False
    eps: float = 1e-5
    proposal: Proposal = field(default_factory=Proposal)
    schedule: NoiseSchedule | None = None
    removes_rest: bool = False
    greedy_tail: bool = False
    name = "uniform_posterior"
    noises = frozenset({"uniform"})

    def __post_init__(self) -> None:
        check_eps(self.eps)
        if self.greedy_tail and not self.removes_rest:
            raise ValueError("greedy_tail=True says how the last step removes the rest of the noise: removes_rest=True")

    def transition(self, step: StepState, prediction: Prediction) -> Float[Tensor, "selected d_vocab"]:
        if self.greedy_tail and step.index == step.n_steps - 1:
            return F.one_hot(prediction.logits.argmax(dim=-1), prediction.logits.shape[-1]).double()
        t, s = (float(prediction.schedule.chance(torch.tensor(x, dtype=torch.float64))) for x in (step.t, step.s))
        return prediction.noise.posterior(prediction.p_clean, prediction.present, t, s)


@checked_arguments
@dataclass(frozen=True)
class Score(_Transitions):
    """Draws the token of each masked position, or under uniform noise of every position, by the scores.

    The last step is one at time `eps` that removes all noise that remains, [MASK] included.

    Attributes:
        step: "analytic", the exact step for the scores at its start (Tweedie); or "euler", a step of first order.
        eps: Time at which the last step begins.
    """

    step: str = "analytic"
    eps: float = 1e-5
    proposal: Proposal = field(default_factory=Proposal)
    schedule: NoiseSchedule | None = None
    name = "score"
    removes_rest = True
    noises = frozenset({"absorbing", "uniform"})

    def __post_init__(self) -> None:
        check_eps(self.eps)
        one_of(*STEPS)("step", self.step)

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
