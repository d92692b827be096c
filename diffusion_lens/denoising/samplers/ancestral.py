"""The reverse process itself: each masked position is revealed with probability 1 - s/t, independently.

Sources: Sahoo et al. 2024 (arXiv 2406.07524); ML-GSAI/SMDM `diff_sample` and DreamLM/Dream `_sample`, alg="origin".
"""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.sampler import Plan, Sampler
from diffusion_lens.denoising.schedule import check_eps, revealed_share
from diffusion_lens.step_state import StepState


@dataclass(frozen=True)
class Ancestral(Sampler):
    """Reveals positions at random; the last step reveals all that remain.

    Attributes:
        eps: Time at which the run ends.
        proposal: Rule by which tokens are proposed; its scores are not used, because nothing is ranked.
    """

    eps: float = 1e-5
    proposal: Proposal = field(default_factory=Proposal)
    name = "ancestral"
    reads_confidence = False

    def __post_init__(self) -> None:
        check_eps(self.eps)

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        positions = step.masked
        if step.index < step.n_steps - 1:
            positions = step.masked.clone()
            positions[step.masked] = noise.by_position(step.index, step.masked) < revealed_share(step.t, step.s)
        return Plan.of_all(positions)
