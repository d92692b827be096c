"""What a sampler decides: at which places a token is proposed in this step, and how many of them are revealed.

The loop proposes a token for each of these places, and reveals the most confident. Which token that is, and what being
sure of it means, the sampler's `proposal` says. A sampler is a small final object; to write one, answer `plan`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.shapes import PosMask
from diffusion_lens.step_state import StepState


@dataclass(frozen=True)
class Plan:
    """One step's decision.

    Attributes:
        places: where tokens are proposed.
        counts: how many of them are revealed, for each row, or, with a single entry, for the batch as one pool.
        remask: revealed places that return to [MASK] in this step, if any.
        jitter: added to the confidence before places are ranked, where their choice is partly chance.
    """

    places: PosMask
    counts: Int[Tensor, "pools"]
    remask: PosMask | None = None
    jitter: Float[Tensor, "batch pos"] | None = None


class Sampler(ABC):
    """Chooses places; never tokens.

    Attributes:
        name: by which it is asked for and recorded.
        eps: the time at which the run ends.
        proposal: which token is proposed at a place, and how sure the model is of it.
    """

    name: str
    eps: float = 1e-5
    proposal: Proposal = Proposal()

    def n_steps(self, asked: int | None, blanks: PosMask) -> int:
        """Steps of the run; 32 unless asked otherwise, as in SMDM's evaluation."""
        return 32 if asked is None else asked

    @abstractmethod
    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        """The places considered between `step.t` and `step.s`, and how many are revealed.

        Args:
            noise: random numbers by place, for samplers that leave something to chance.
            confidence: probability of each token when it was revealed; NaN where none was (given, masked, padding).
        """


def most_confident(confidence: Float[Tensor, "batch pos"], plan: Plan) -> PosMask:
    """The `plan.counts` most confident of `plan.places`, after `plan.jitter`; among equals the leftmost."""
    pools = plan.counts.numel()
    if plan.jitter is not None:
        confidence = confidence + plan.jitter
    scores = confidence.masked_fill(~plan.places, float("-inf")).reshape(pools, -1)
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return (rank < plan.counts[:, None]).reshape(plan.places.shape) & plan.places
