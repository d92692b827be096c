"""Reveal the positions of the highest confidence: SMDM's "greedy" (ML-GSAI/SMDM `diff_sample`, alg="greddy")."""

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.sampler import Plan, Sampler
from diffusion_lens.denoising.schedule import check_eps, revealed_share
from diffusion_lens.step_state import StepState
from weight_conversion import Variant


@dataclass(frozen=True)
class Confidence(Sampler):
    """Reveals floor(masked · (1 - s/t)) positions a step; the last step reveals all that remain.

    Attributes:
        scope: Set of positions that are counted and ranked together. "row" takes each row by itself. "batch" takes the
            batch as one pool, as SMDM's code does. "mean" ranks each row by itself and reveals in each the number that
            an average row is due, as Dream's code does, so that a row with more masks than average keeps some.
        eps: Time at which the run ends.
        choice_temperature: 0 takes the positions of the highest confidence; above 0, positions are sampled without
            replacement, with probabilities softmax(confidence / choice_temperature).
        proposal: Rule by which tokens are proposed and scored.
    """

    scope: str = "row"
    eps: float = 1e-5
    choice_temperature: float = 0.0
    proposal: Proposal = field(default_factory=Proposal)
    name = "confidence"
    reads_confidence = False

    def __post_init__(self) -> None:
        if self.scope not in ("row", "batch", "mean"):
            raise ValueError(f"scope={self.scope!r}; it must be 'row', 'batch' or 'mean'")
        if not math.isfinite(self.choice_temperature) or self.choice_temperature < 0:
            raise ValueError(
                f"choice_temperature={self.choice_temperature}; it must be a finite number, 0 (no sampling) or more"
            )
        check_eps(self.eps)

    def couples_rows(self, variant: Variant) -> bool:
        return self.scope != "row"

    def by_row(self, variant: Variant) -> Sampler:
        return replace(self, scope="row")

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        n_masked = step.masked.sum(dim=1).float()
        if self.scope == "batch":
            n_masked = n_masked.sum(dim=0, keepdim=True)
        elif self.scope == "mean":
            n_masked = n_masked.mean().expand_as(n_masked)
        share = revealed_share(step.t, step.s) if step.index < step.n_steps - 1 else 1.0
        return Plan(step.masked, (n_masked * share).to(torch.long), jitter=self._jitter(step, noise))

    def _jitter(self, step: StepState, noise: PositionNoise) -> Float[Tensor, "batch pos"] | None:
        """Gumbel noise: the largest of score + noise sample without replacement (Kool et al. 2019, 1903.06059)."""
        if not self.choice_temperature:
            return None
        uniform = noise.by_position(step.index, step.masked).clamp(min=torch.finfo(torch.float64).tiny)
        jitter = torch.zeros(step.masked.shape, dtype=torch.float64, device=step.masked.device)
        jitter[step.masked] = -self.choice_temperature * torch.log(-torch.log(uniform))
        return jitter
