"""Reveal the next token, as a causal model writes; on a masked diffusion model, the leftmost masked position."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.sampler import Plan, Sampler
from diffusion_lens.shapes import PosMask
from diffusion_lens.step_state import StepState
from weight_conversion import Variant


@dataclass(frozen=True)
class LeftToRight(Sampler):
    """One position a step in every row that has one left; `steps=` has no effect."""

    name = "left_to_right"
    reads_confidence = False

    def misfit(self, variant: Variant) -> str | None:
        return None

    def n_steps(self, steps: int | None, blanks: PosMask) -> int:
        return int(blanks.sum(dim=1).max())

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        first = step.masked & (step.masked.cumsum(dim=1) == 1)
        return Plan.of_all(first)
