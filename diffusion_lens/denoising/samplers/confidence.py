"""Reveal the places the model is surest of: SMDM's "greedy" (ML-GSAI/SMDM `diff_sample`, alg="greddy")."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.denoising.randomness import PlaceNoise
from diffusion_lens.denoising.sampler import Plan, Sampler
from diffusion_lens.denoising.schedule import revealed_share
from diffusion_lens.step_state import StepState


@dataclass(frozen=True)
class Confidence(Sampler):
    """floor(masked · (1 - s/t)) places a step, all that remain in the last.

    Attributes:
        scope: "row" ranks each row by itself; "batch" ranks the batch as one pool, as the authors' code does.
    """

    scope: str = "row"
    name = "confidence"

    def __post_init__(self) -> None:
        if self.scope not in ("row", "batch"):
            raise ValueError(f"scope={self.scope!r}; it is 'row' or 'batch'")

    def plan(self, step: StepState, noise: PlaceNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        counts = step.masked.sum(dim=1) if self.scope == "row" else step.masked.sum()[None]
        if step.index < step.n_steps - 1:
            counts = (counts.float() * revealed_share(step.t, step.s)).to(torch.long)
        return Plan(step.masked, counts)
