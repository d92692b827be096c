"""How far a text has come: where its blocks begin, of models that write block after block from left to right.

A position whose block has not been opened contains -1, `UNREACHED`: no position sees it. Opening a block puts the
blank of the model there: [MASK], or for a causal model -1 again, because its network reads nothing at a position still
to be written. A causal model is the case of blocks of one position.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from diffusion_lens.shapes import PosMask, Tokens
from weight_conversion import Variant


@dataclass(frozen=True)
class Reach(ABC):
    """Where the blocks of a canvas begin.

    Attributes:
        size: Number of positions in a block.
        seeded: Whether the row before a block, which is finished, predicts its first token, which is written first.
    """

    size: int
    seeded: ClassVar[bool] = False

    @abstractmethod
    def blocks(self, positions: Tokens, given: PosMask) -> Int[Tensor, "batch pos"]:
        """The number of the block of each position, from 0.

        Args:
            positions: Int[batch pos], the number of each position among the real ones of its row.
            given: Bool[batch pos], positions of the prompt.
        """


@dataclass(frozen=True)
class FromStart(Reach):
    """Blocks are counted from the first token of the text, so that a prompt may end inside a block."""

    def blocks(self, positions: Tokens, given: PosMask) -> Int[Tensor, "batch pos"]:
        return positions // self.size


@dataclass(frozen=True)
class AfterPrompt(Reach):
    """Blocks are counted from the end of the prompt, in both directions: the first position that is not given."""

    seeded: ClassVar[bool] = True

    def blocks(self, positions: Tokens, given: PosMask) -> Int[Tensor, "batch pos"]:
        # Padding on the left has the number of the first token, which belongs to the prompt.
        later = positions.masked_fill(given | (positions == 0), positions.shape[1])
        end = later.amin(dim=1, keepdim=True)
        return (positions - end).div(self.size, rounding_mode="floor") - (-end).div(self.size, rounding_mode="floor")


def reach_of(variant: Variant) -> Reach | None:
    """Where the blocks of a model begin; `None` where the whole canvas is open from the first step on."""
    if not variant.opens_blocks:
        return None
    assert variant.block_size is not None
    return AfterPrompt(variant.block_size) if variant.causal_prefix else FromStart(variant.block_size)
