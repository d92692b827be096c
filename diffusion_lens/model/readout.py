"""The rows of the logits that predict the tokens at given positions. Only this module depends on a shift.

A masked diffusion model such as SMDM or LLaDA predicts the token at position i in row i of its logits. A causal model,
and Dream, predict it in row i - 1. All other code works with positions, and gets rows from here.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.hooks.step import OpenBlock
from diffusion_lens.model.shapes import PosMask


class Readout(ABC):
    """Maps positions of tokens to the rows of the logits that predict them."""

    @abstractmethod
    def rows(self, positions: Int[Tensor, "*rest"]) -> Int[Tensor, "*rest"]:
        """The row that predicts the token at each position."""

    def locate(
        self, positions: PosMask, real: PosMask | None = None, block: OpenBlock | None = None
    ) -> tuple[Int[Tensor, "selected"], Int[Tensor, "selected"]]:
        """Row of the batch and row of the logits that predict each marked position, in reading order.

        Args:
            positions: Bool[batch pos], true at the positions to predict.
            real: Bool[batch pos], false at padding, whose rows predict nothing; `None` without padding.
            block: The block that each row of the canvas writes, whose first token may be read in another row.
        """
        batch, pos = positions.nonzero(as_tuple=True)
        rows = self.rows(pos)
        if real is not None:
            rows = torch.where(real[batch, rows], rows, pos)
        return batch, rows if block is None else block.rows(rows, pos, batch)


class InPlace(Readout):
    """Row i predicts token i."""

    def rows(self, positions: Int[Tensor, "*rest"]) -> Int[Tensor, "*rest"]:
        return positions


class Shifted(Readout):
    """Row i - 1 predicts token i. No row predicts the first token; it is read in its own row (Dream's convention)."""

    def rows(self, positions: Int[Tensor, "*rest"]) -> Int[Tensor, "*rest"]:
        return (positions - 1).clamp(min=0)


READOUTS: dict[str, Readout] = {"in_place": InPlace(), "shifted": Shifted()}
