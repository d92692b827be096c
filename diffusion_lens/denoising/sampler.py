"""A sampler decides at which positions a step proposes tokens, and how many of them it reveals.

The loop proposes a token at each of these positions and reveals the most confident ones. The sampler's `proposal` says
which token is proposed and what its confidence is. A sampler of transitions says itself which token or [MASK] each
position may have after the step, by `transition`, and the loop draws it. A sampler is a small final object; to write
one, implement `plan`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.denoising.prediction import Prediction
from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.schedule import linear_times
from diffusion_lens.shapes import PosMask
from diffusion_lens.step_state import StepState
from weight_conversion import NoiseSchedule, Variant


class Surplus(ABC):
    """A rule by which a step reveals more positions than planned, the scores of the proposed tokens being known."""

    @abstractmethod
    def counts(self, ordered: Float[Tensor, "batch pos"]) -> Int[Tensor, "batch"]:
        """Number of positions that each row may reveal, from their scores in descending order; -inf is no position."""


@dataclass(frozen=True)
class Above(Surplus):
    """All positions whose score is above `threshold`."""

    threshold: float

    def counts(self, ordered: Float[Tensor, "batch pos"]) -> Int[Tensor, "batch"]:
        return (ordered > self.threshold).sum(dim=1)


@dataclass(frozen=True)
class Within(Surplus):
    """The first positions whose scores, negative entropies, add up to at most `bound` nats."""

    bound: float

    def counts(self, ordered: Float[Tensor, "batch pos"]) -> Int[Tensor, "batch"]:
        return (-ordered.cumsum(dim=1) <= self.bound).sum(dim=1)


@dataclass(frozen=True)
class Plan:
    """The decision of a sampler for one step.

    Attributes:
        positions: Bool[batch pos], positions where tokens are proposed.
        counts: Int[batch], number of them to reveal in each row; a single entry counts the whole batch as one pool.
        remask: Bool[batch pos], revealed positions that return to [MASK] in this step; `None` for none.
        jitter: Float[batch pos], noise added to the confidence before positions are ranked; `None` for none.
        surplus: Rule by which a row reveals more of them, depending on their scores; `None` for none.
    """

    positions: PosMask
    counts: Int[Tensor, "#batch"]
    remask: PosMask | None = None
    jitter: Float[Tensor, "batch pos"] | None = None
    surplus: Surplus | None = None

    @classmethod
    def of_all(cls, positions: PosMask, remask: PosMask | None = None) -> "Plan":
        """The plan that reveals all of these positions."""
        return cls(positions, positions.sum(dim=1), remask)


class Sampler(ABC):
    """Chooses positions; a sampler of transitions also gives the probabilities of their tokens.

    Attributes:
        name: Name of the sampler in `denoise` and in records.
        noises: Kinds of noise that it undoes.
        eps: Time at which the run ends.
        proposal: Rule by which tokens are proposed and scored.
        schedule: Schedule of noise of the run; `None` takes the model's.
        may_change_nothing: Whether a step that predicts may leave the canvas as it is.
        keeps_prediction: Whether the network is told the time of the last step that changed the canvas, so that a step
            after one that changed nothing predicts the same.
        has_times_of_rows: Whether each row has a time of its own, that of its open block.
        reads_confidence: Whether `plan` reads probabilities of revealed tokens, rather than only where there are any.
            Runs whose canvases agree then still differ.
    """

    name: str
    noises: frozenset[str] = frozenset({"absorbing"})
    eps: float = 1e-5
    proposal: Proposal = Proposal()
    schedule: NoiseSchedule | None = None
    may_change_nothing: bool = False
    keeps_prediction: bool = False
    has_times_of_rows: bool = False
    reads_confidence: bool = True

    def misfit(self, variant: Variant) -> str | None:
        """Why this sampler cannot write the text of a kind of model; `None` if it can."""
        if variant.grows:
            return (
                "reveals positions in any order, and the text of a causal model without [MASK] grows at its end only; "
                "use 'left_to_right'"
            )
        if variant.opens_blocks:
            return (
                "shares its steps among all positions of the canvas, and this model writes one block of "
                f"{variant.block_size} positions after another; use 'block_confidence', 'block_posterior', "
                "'first_hitting' or 'left_to_right'"
            )
        return None

    def couples_rows(self, variant: Variant) -> bool:
        """Whether the run of a row depends on the other rows of its batch."""
        return self.keeps_prediction and not self.has_times_of_rows and variant.is_told_time

    def by_row(self, variant: Variant) -> "Sampler":
        """The sampler with which every row of a batch runs as it runs alone with this one.

        Raises:
            ValueError: There is none.
        """
        if self.couples_rows(variant):
            raise ValueError(
                f"the sampler {self.name!r} of the run tells the network the time of the last step that changed any "
                "row of a batch, so that corrupted runs which are denoised together would depend on one another. "
                "Denoise with the same sampler and keeps_prediction=False"
            )
        return self

    def settled(self, steps: int | None, variant: Variant) -> "Sampler":
        """This sampler with the settings that it leaves to the number of steps and to the kind of model."""
        return self

    def n_steps(self, steps: int | None, blanks: PosMask) -> int:
        """Number of steps of the run; 32 by default, as in SMDM's evaluation.

        Args:
            steps: Number that the caller sets; `None` leaves it to the sampler.
            blanks: Bool[batch pos], positions to be written.
        """
        return 32 if steps is None else steps

    def n_steps_by_blocks(self, steps: int | None, blanks: PosMask, blocks: Int[Tensor, "batch pos"], size: int) -> int:
        """Number of steps of a run that writes block after block.

        Args:
            blocks: The number of the block of each position.
            size: Number of positions in a block.
        """
        return self.n_steps(steps, blanks)

    def times(self, n_steps: int) -> list[float]:
        """The `n_steps + 1` times of a run, falling from 1."""
        times: list[float] = linear_times(n_steps, self.eps).tolist()
        return times

    def times_of_rows(self, step: StepState, noise: PositionNoise) -> Float[Tensor, "batch"]:
        """The time of each row, by default that of the run; with `has_times_of_rows`, that of its open block.

        The schedule gives its noise.
        """
        return torch.full((len(step.tokens),), step.t, dtype=torch.float64, device=step.tokens.device)

    def transition(self, step: StepState, prediction: Prediction) -> Float[Tensor, "selected d_vocab"] | None:
        """Probability of each token or [MASK] after the step, up to a factor, at the positions of the plan.

        The loop draws from it, and a position for which [MASK] is drawn stays masked. `None`, the default, leaves the
        choice of a token to `proposal`.
        """
        return None

    @abstractmethod
    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        """The positions considered between `step.t` and `step.s`, and the number of them to reveal.

        Args:
            noise: Random numbers by position, for samplers that choose at random.
            confidence: Float[batch pos], probability of each token when it was revealed; NaN where none was revealed
                (given, masked, padding).
        """


def most_confident(confidence: Float[Tensor, "batch pos"], plan: Plan) -> PosMask:
    """The `plan.counts` most confident of `plan.positions`, after `plan.jitter`, or more by `plan.surplus`.

    Of equal ones, the leftmost come first.
    """
    pools = plan.counts.numel()
    if plan.jitter is not None:
        confidence = confidence + plan.jitter
    scores = confidence.masked_fill(~plan.positions, float("-inf")).reshape(pools, -1)
    order = scores.argsort(dim=1, descending=True, stable=True)
    counts = plan.counts
    if plan.surplus is not None:
        counts = counts.maximum(plan.surplus.counts(scores.gather(1, order)))
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return (rank < counts[:, None]).reshape(plan.positions.shape) & plan.positions
