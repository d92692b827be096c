"""Reveal the most confident positions of the open block, for models that write block after block.

A block of B positions is written in S steps: step s of it reveals B // S positions, one more in the first B % S steps
(Cheng et al. 2025, SDAR, arXiv 2510.06303). Where the prompt fills a part of the block, or earlier steps revealed more,
the block is filled in fewer steps. A row opens its next block in the step after.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.sampler import Above, Plan, Sampler, Within
from diffusion_lens.settings import whole_number
from diffusion_lens.shapes import PosMask
from diffusion_lens.step_state import StepState
from weight_conversion import Variant

ORDERS = ("confidence", "sequential")


@dataclass(frozen=True)
class BlockConfidence(Sampler):
    """Reveals a number of positions of the open block in each step.

    Attributes:
        steps_per_block: Steps S of a block. By default the `steps` of the run are shared evenly among the blocks of a
            row, and without `steps` a block has as many as positions.
        order: "confidence" reveals the positions of the highest confidence first, "sequential" the leftmost.
        threshold: Confidence above which a position is revealed in any case, beyond the step's number; `None` for none.
        entropy_bound: Bound in nats: a step reveals the positions of the lowest entropy as long as their entropies add
            up to no more, and at least one. It replaces the step's number. `None` for none. The proposal's score has
            to be "entropy".
        block_length: Number of positions in a block for which the settings are meant; `None` for any. A model with
            another one is refused.
        proposal: Rule by which tokens are proposed and scored.
    """

    steps_per_block: int | None = None
    order: str = "confidence"
    threshold: float | None = None
    entropy_bound: float | None = None
    block_length: int | None = None
    proposal: Proposal = field(default_factory=Proposal)
    name = "block_confidence"
    reads_confidence = False

    def __post_init__(self) -> None:
        for name in ("steps_per_block", "block_length"):
            value = getattr(self, name)
            if value is not None and whole_number(name, value) < 1:
                raise ValueError(f"{name}={value}; it must be a whole number, at least 1, or None")
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}; it must be one of {', '.join(ORDERS)}")
        for name in ("threshold", "entropy_bound"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}; it must be a finite number, 0 or more, or None")
        if self.entropy_bound is not None and (self.threshold is not None or self.order != "confidence"):
            raise ValueError("entropy_bound says how many positions a step reveals: leave out threshold and order")
        if self.entropy_bound is not None and self.proposal.score != "entropy":
            raise ValueError(
                f"entropy_bound={self.entropy_bound} adds up entropies, and proposal.score={self.proposal.score!r}: "
                "give proposal=Proposal(score='entropy')"
            )

    def misfit(self, variant: Variant) -> str | None:
        if problem := without_blocks(variant):
            return problem
        if self.block_length not in (None, variant.block_size):
            return (
                f"is for blocks of {self.block_length} positions, and this model has blocks of {variant.block_size}: "
                f"give block_length={variant.block_size}, or load the model with block_size={self.block_length}"
            )
        return None

    def settled(self, steps: int | None, variant: Variant) -> Sampler:
        unknown = steps is None and self.steps_per_block is None
        return replace(self, steps_per_block=variant.block_size) if unknown else self

    def n_steps_by_blocks(self, steps: int | None, blanks: PosMask, blocks: Int[Tensor, "batch pos"], size: int) -> int:
        """Number of steps of the run, as many as the row that needs most takes at most.

        Raises:
            ValueError: `steps` are fewer than the blocks of a row, or contradict `steps_per_block`.
        """
        masks = (F.one_hot(blocks) * blanks[..., None]).sum(dim=1)
        most = None
        if self.steps_per_block is not None:
            most = int(_steps_of(masks, size, self.steps_per_block).sum(dim=1).max())
        return steps_of_run(steps, most, self.steps_per_block, int((masks > 0).sum(dim=1).max()))

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        block = step.block
        assert block is not None
        n_masked = step.masked.sum(dim=1)
        if self.entropy_bound is not None:
            return Plan(step.masked, n_masked.clamp(max=1), surplus=Within(self.entropy_bound))

        # 1. The steps of this block.
        if self.steps_per_block is not None:
            n_steps = torch.full_like(n_masked, self.steps_per_block)
        else:
            n_steps = block.steps_of(step.n_steps)

        # 2. The number that this one reveals. After the block's last step, which only a hook can cause, all.
        counts = block.size // n_steps + (block.step < block.size % n_steps).long()
        counts = torch.where(block.step < n_steps, counts, n_masked).minimum(n_masked)
        positions = step.masked
        if self.order == "sequential":
            positions = step.masked & (step.masked.cumsum(dim=1) <= counts[:, None])

        # 3. The first step of a block may be its first token's alone.
        if block.first_shifted:
            places = torch.arange(positions.shape[1], device=positions.device)
            seed = step.masked & (places == block.start[:, None])
            seeding = seed.any(dim=1) & (block.step == 0)
            if bool((short := seeding & (n_masked > 1) & (n_steps < block.size)).any()):
                n_short = int(n_steps[short][0])
                given = "1 step" if n_short == 1 else f"{n_short} steps"
                raise ValueError(
                    f"a block of {block.size} positions has {given}, and the first of them is its first token's alone, "
                    f"so [MASK]s would be left: give {block.size} steps for each block (without steps and "
                    "steps_per_block, a block has as many)"
                )
            positions = torch.where(seeding[:, None], seed, positions)
            counts = torch.where(seeding, 1, counts)
        return Plan(positions, counts, surplus=None if self.threshold is None else Above(self.threshold))


def without_blocks(variant: Variant) -> str | None:
    """Why a sampler that reveals positions inside the model's blocks does not fit a kind of model; `None` if it may."""
    if not variant.grows and variant.opens_blocks:
        return None
    instead = "'left_to_right'" if variant.grows else "'confidence', or 'blocks', which makes blocks of any size"
    return f"reveals positions inside the model's blocks, and this model has none: use {instead}"


def steps_of_run(steps: int | None, most: int | None, steps_per_block: int | None, n_blocks: int) -> int:
    """The number of steps of a run, from `steps` or from `steps_per_block`, by which the canvas takes `most`.

    Args:
        n_blocks: Number of blocks of the row that has most of them.

    Raises:
        ValueError: The two contradict each other, or there are fewer steps than blocks.
    """
    if most is not None:
        if steps not in (None, most):
            raise ValueError(
                f"steps={steps}, and with steps_per_block={steps_per_block} this canvas takes {most}: leave one of "
                "them out"
            )
        return max(1, most)
    assert steps is not None, "a sampler without either was settled for the model"
    if steps < n_blocks:
        raise ValueError(f"steps={steps} for {n_blocks} blocks: a block takes at least one step; give {n_blocks}")
    return steps


def _steps_of(masks: Int[Tensor, "batch block"], size: int, n_steps: int) -> Int[Tensor, "batch block"]:
    """The number of steps that fill blocks with so many masked positions; 0 of a block without any."""
    each, more = divmod(size, n_steps)
    revealed = torch.tensor([each + (step < more) for step in range(n_steps)], device=masks.device).cumsum(dim=0)
    return torch.searchsorted(revealed, masks) + (masks > 0)
