"""Reveal block after block from left to right, and within a block equally many positions a step (semi-autoregressive).

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
    """Divides the masks of a row, in reading order, into blocks of `block_length`, and the steps evenly among these.

    The steps left to the current block share the masks up to its end evenly; the first of them take the remainder. A
    block is therefore full when the next begins, also where a hook filled some of it.

    Attributes:
        block_length: Number of masked positions of a block; `None` makes one block.
        order: Order within a block: "confidence" reveals the positions of the highest confidence first, "random" any.
        masks_in_prompt: "counted" treats masks in the prompt like the other masks. "uncounted", as in LLaDA's code,
            divides only the last unbroken series of masks into blocks. Earlier masks compete with this series for the
            same number of reveals. As many positions as the prompt had masks therefore stay masked.
        proposal: Rule by which tokens are proposed and scored.
    """

    block_length: int | None = None
    order: str = "confidence"
    masks_in_prompt: str = "counted"
    proposal: Proposal = field(default_factory=Proposal)
    name = "blocks"
    reads_confidence = False

    def __post_init__(self) -> None:
        if self.block_length is not None and whole_number("block_length", self.block_length) < 1:
            raise ValueError(
                f"block_length={self.block_length}; it must be a whole number, at least 1, or None for one block"
            )
        if self.order not in ("confidence", "random"):
            raise ValueError(f"order={self.order!r}; it must be 'confidence' or 'random'")
        if self.masks_in_prompt not in ("counted", "uncounted"):
            raise ValueError(f"masks_in_prompt={self.masks_in_prompt!r}; it must be 'counted' or 'uncounted'")

    def n_steps(self, steps: int | None, blanks: PosMask) -> int:
        """Number of steps of the run; by default one for each masked position of the row that has most.

        Raises:
            ValueError: The masked positions of a row are not whole blocks, or blocks cannot share the steps evenly.
        """
        lengths = self._in_blocks(blanks).sum(dim=1).tolist()
        steps = max(1, *lengths) if steps is None else steps
        if self.block_length is not None:
            _check(lengths, self.block_length, steps)
        return steps

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        # 1. Divide the masked positions of each row into blocks. Padding is neither masked nor revealed, so it is in no
        #    block.
        in_blocks = self._in_blocks((step.masked | ~confidence.isnan()) & ~step.given)
        lengths = in_blocks.sum(dim=1)
        size = lengths.clamp(min=1) if self.block_length is None else torch.full_like(lengths, self.block_length)
        n_blocks = _rounded_up(lengths, size).clamp(min=1)

        # 2. Find the block of this step, and the steps from `begin` to `end` that are its own. Rounding up makes a
        #    replay end in the last block also where its blocks cannot share its steps evenly.
        current = _rounded_up((step.index + 1) * n_blocks, step.n_steps) - 1
        begin, end = current * step.n_steps // n_blocks, (current + 1) * step.n_steps // n_blocks

        # 3. Consider all masks up to the end of that block.
        block_of = (in_blocks.cumsum(dim=1) - 1).clamp(min=0) // size[:, None]
        positions = step.masked & (block_of <= current[:, None])
        n_masked = positions.sum(dim=1)

        # 4. Reveal this step's share of them; uncounted masks of the prompt do not enlarge it.
        if self.masks_in_prompt == "counted":
            counts = _rounded_up(n_masked, end - step.index)
        else:
            length = (in_blocks & (block_of == current[:, None])).sum(dim=1)
            counts = length // (end - begin) + (step.index - begin < length % (end - begin)).long()
            counts = counts.minimum(n_masked)
        if self.order == "random":
            positions = _sampled(positions, counts, noise.by_position(step.index, positions))
        return Plan(positions, counts)

    def _in_blocks(self, blanks: PosMask) -> PosMask:
        """Bool[batch pos], the masked positions that are divided into blocks."""
        if self.masks_in_prompt == "counted":
            return blanks
        # Masks without another token between them share a number; the last series has the highest.
        series = (~blanks).cumsum(dim=1)
        return blanks & (series == series.masked_fill(~blanks, -1).amax(dim=1, keepdim=True))


def _rounded_up(n: Counts, parts: int | Counts) -> Counts:
    """n / parts, rounded up."""
    return -(n // -parts)


def _sampled(positions: PosMask, counts: Counts, uniform: Float[Tensor, "selected"]) -> PosMask:
    """The `counts` positions of each row whose random number is largest."""
    numbers = torch.full(positions.shape, -1.0, dtype=uniform.dtype, device=positions.device)
    numbers[positions] = uniform
    rank = numbers.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return positions & (rank < counts[:, None])


def _check(lengths: Sequence[int], block_length: int, steps: int) -> None:
    """Raise a `ValueError` unless every row is whole blocks, and these share the steps evenly."""
    for row, length in enumerate(lengths):
        if length % block_length:
            fits = ", ".join(str(n) for n in range(1, length + 1) if length % n == 0)
            raise ValueError(
                f"block_length={block_length} does not divide the {length} masked positions of row {row}: use blocks "
                f"of {fits}, or {_multiples(length, block_length)} masked positions"
            )
    shared = lcm(*(max(length // block_length, 1) for length in lengths))
    if steps % shared:
        raise ValueError(
            f"steps={steps} cannot be divided evenly among {shared} blocks of block_length={block_length}: use "
            f"{_multiples(steps, shared)} steps"
        )


def _multiples(n: int, of: int) -> str:
    """The multiples of a number next to n, in words."""
    below = n // of * of
    return f"{below} or {below + of}" if below else f"{of}"
