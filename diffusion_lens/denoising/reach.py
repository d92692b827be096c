"""How far a text has come: where its blocks begin, of models that write block after block from left to right.

A position whose block has not been opened contains -1, `UNREACHED`: no position sees it. Opening a block puts the
blank of the model there: [MASK], or for a causal model -1 again, because its network reads nothing at a position still
to be written. A causal model is the case of blocks of one position.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.shapes import PosMask, Tokens
from weight_conversion import Context, Variant


@dataclass(frozen=True)
class Reach(ABC):
    """Where the blocks of a canvas begin.

    Attributes:
        size: Number of positions in a block.
        first_shifted: Whether the first token of a block is read in the row before it, which is finished: it is written
            first, and the other tokens are read in place.
    """

    size: int
    first_shifted: ClassVar[bool] = False

    @abstractmethod
    def blocks(self, positions: Tokens, given: PosMask) -> Int[Tensor, "batch pos"]:
        """The number of the block of each position, from 0.

        Args:
            positions: Int[batch pos], the number of each position among the real ones of its row.
            given: Bool[batch pos], positions of the prompt.
        """

    @abstractmethod
    def in_blocks(self, blocks: Int[Tensor, "batch pos"], opened: Int[Tensor, "batch"]) -> PosMask:
        """Bool[batch pos], the positions that are read in blocks; those before them are the context.

        Args:
            blocks: The number of the block of each position.
            opened: Int[batch], the number of the block that each row writes.
        """


@dataclass(frozen=True)
class FromStart(Reach):
    """Blocks are counted from the first token of the text, so that a prompt may end inside a block."""

    def blocks(self, positions: Tokens, given: PosMask) -> Int[Tensor, "batch pos"]:
        return positions // self.size

    def in_blocks(self, blocks: Int[Tensor, "batch pos"], opened: Int[Tensor, "batch"]) -> PosMask:
        return torch.ones_like(blocks, dtype=torch.bool)


@dataclass(frozen=True)
class AfterPrompt(Reach):
    """Blocks are counted from the end of the prompt, in both directions. What comes before the open one is causal."""

    first_shifted: ClassVar[bool] = True

    def blocks(self, positions: Tokens, given: PosMask) -> Int[Tensor, "batch pos"]:
        end = _end_of_prompt(positions, given)
        return (positions - end).div(self.size, rounding_mode="floor") - (-end).div(self.size, rounding_mode="floor")

    def in_blocks(self, blocks: Int[Tensor, "batch pos"], opened: Int[Tensor, "batch"]) -> PosMask:
        return blocks >= opened[:, None]


@dataclass(frozen=True)
class WholePrompt(Reach):
    """The prompt is the first block, whatever its length, and the others are counted from its end."""

    def blocks(self, positions: Tokens, given: PosMask) -> Int[Tensor, "batch pos"]:
        after = positions - _end_of_prompt(positions, given)
        return after.div(self.size, rounding_mode="floor").clamp(min=-1) + 1

    def in_blocks(self, blocks: Int[Tensor, "batch pos"], opened: Int[Tensor, "batch"]) -> PosMask:
        return blocks > 0


_AFTER: dict[Context, type[Reach]] = {"blocks": FromStart, "causal": AfterPrompt, "prompt": WholePrompt}


def reach_of(variant: Variant) -> Reach | None:
    """Where the blocks of a model begin; `None` where the whole canvas is open from the first step on."""
    if not variant.opens_blocks:
        return None
    assert variant.block_size is not None
    return _AFTER[variant.block_context](variant.block_size)


def _end_of_prompt(positions: Tokens, given: PosMask) -> Int[Tensor, "batch 1"]:
    """The number of the first position of each row that is not given."""
    # Padding on the left has the number of the first token, which belongs to the prompt.
    later = positions.masked_fill(given | (positions == 0), positions.shape[1])
    return later.amin(dim=1, keepdim=True)
