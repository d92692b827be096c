"""Block after block from left to right, within a block the same number of places each step (semi-autoregressive).

Source: Nie et al. 2025, LLaDA (arXiv 2502.09992), ML-GSAI/LLaDA `generate.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.sampler import Plan, Sampler
from diffusion_lens.settings import whole_number
from diffusion_lens.shapes import PosMask
from diffusion_lens.step_state import StepState

Counts = Int[Tensor, "batch"]


@dataclass(frozen=True)
class Blocks(Sampler):
    """The blanks of a row, in reading order, in blocks of `block_length`; the steps are shared evenly by the blocks.

    In each step the masks up to the end of the current block are shared evenly by the steps left to it, what does not
    divide going to the first. So a block is full when the next begins, also where a hook filled some of it.

    Attributes:
        block_length: blanks of a block; `None` is one block.
        order: within a block, "confidence" reveals the surest places, "random" any.
        masks_in_prompt: "counted", they are blanks like the others; "uncounted", as in LLaDA's code: only the last
            unbroken run of blanks is divided into blocks, the masks before it compete for the turns of that run, and so
            many masks as there were in the prompt remain in the end.
        proposal: which token is proposed at a place, and what being sure of it means.
    """

    block_length: int | None = None
    order: str = "confidence"
    masks_in_prompt: str = "counted"
    proposal: Proposal = field(default_factory=Proposal)
    name = "blocks"

    def __post_init__(self) -> None:
        if self.block_length is not None and whole_number("block_length", self.block_length) < 1:
            raise ValueError(f"block_length={self.block_length}; it is a whole number from 1 on, or None for one block")
        if self.order not in ("confidence", "random"):
            raise ValueError(f"order={self.order!r}; it is 'confidence' or 'random'")
        if self.masks_in_prompt not in ("counted", "uncounted"):
            raise ValueError(f"masks_in_prompt={self.masks_in_prompt!r}; it is 'counted' or 'uncounted'")

    def n_steps(self, asked: int | None, blanks: PosMask) -> int:
        """Steps of the run; unless asked otherwise, one a blank.

        Raises:
            ValueError: the blanks of a row are not whole blocks, or the blocks cannot share the steps evenly.
        """
        lengths = self._in_blocks(blanks).sum(dim=1).tolist()
        steps = max(1, *lengths) if asked is None else asked
        if self.block_length is not None:
            _check(lengths, self.block_length, steps)
        return steps

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        # Padding is neither masked nor revealed, so it is in no block.
        in_blocks = self._in_blocks((step.masked | ~confidence.isnan()) & ~step.given)
        lengths = in_blocks.sum(dim=1)
        size = lengths.clamp(min=1) if self.block_length is None else torch.full_like(lengths, self.block_length)
        n_blocks = _rounded_up(lengths, size).clamp(min=1)
        # Rounded so that a run replayed with steps that its blocks cannot share ends in its last block all the same.
        current = _rounded_up((step.index + 1) * n_blocks, step.n_steps) - 1
        begin, end = current * step.n_steps // n_blocks, (current + 1) * step.n_steps // n_blocks
        block_of = (in_blocks.cumsum(dim=1) - 1).clamp(min=0) // size[:, None]
        places = step.masked & (block_of <= current[:, None])
        left = places.sum(dim=1)
        if self.masks_in_prompt == "counted":
            counts = _rounded_up(left, end - step.index)
        else:
            length = (in_blocks & (block_of == current[:, None])).sum(dim=1)
            counts = length // (end - begin) + (step.index - begin < length % (end - begin)).long()
            counts = counts.minimum(left)
        if self.order == "random":
            return Plan(_drawn(places, counts, noise.by_place(step.index, places)), counts)
        return Plan(places, counts)

    def _in_blocks(self, blanks: PosMask) -> PosMask:
        """The blanks that are divided into blocks."""
        if self.masks_in_prompt == "counted":
            return blanks
        run = (~blanks).cumsum(dim=1)
        return blanks & (run == run.masked_fill(~blanks, -1).amax(dim=1, keepdim=True))


def _rounded_up(n: Counts, parts: int | Counts) -> Counts:
    """n / parts, rounded up."""
    return -(n // -parts)


def _drawn(places: PosMask, counts: Counts, uniform: Float[Tensor, "selected"]) -> PosMask:
    """For each row the `counts` marked places whose number is largest."""
    drawn = torch.full(places.shape, -1.0, dtype=uniform.dtype, device=places.device)
    drawn[places] = uniform
    rank = drawn.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return places & (rank < counts[:, None])


def _check(lengths: Sequence[int], block_length: int, steps: int) -> None:
    for row, length in enumerate(lengths):
        if length % block_length:
            fits = ", ".join(str(n) for n in range(1, length + 1) if length % n == 0)
            raise ValueError(
                f"block_length={block_length} does not divide the {length} blanks of row {row}: blocks of {fits} fit, "
                f"or make it {_multiples(length, block_length)} blanks"
            )
    shared = lcm(*(max(length // block_length, 1) for length in lengths))
    if steps % shared:
        raise ValueError(
            f"steps={steps} cannot be shared evenly by {shared} blocks of block_length={block_length}: "
            f"{_multiples(steps, shared)} steps can"
        )


def _multiples(n: int, of: int) -> str:
    """The multiples next to n."""
    below = n // of * of
    return f"{below} or {below + of}" if below else f"{of}"
