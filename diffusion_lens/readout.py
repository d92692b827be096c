"""Where token i is read: the only place that knows about a shift.

A masked diffusion model of SMDM's or LLaDA's kind predicts the token at place i in row i of its logits. A causal model,
and Dream, predict it in row i - 1. Everything else speaks of places and asks here for rows.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.shapes import PosMask


class Readout(ABC):
    """Maps places (where a token stands) to rows (where the network predicts it)."""

    @abstractmethod
    def rows(self, places: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The row that predicts each place."""

    def locate(
        self, places: PosMask, real: PosMask | None = None
    ) -> tuple[Int[Tensor, "selected"], Int[Tensor, "selected"]]:
        """Row of the batch and row of the logits that predict each marked place, in reading order.

        Args:
            real: false at padding, whose rows predict nothing; `None` where there is none.
        """
        batch, pos = places.nonzero(as_tuple=True)
        rows = self.rows(pos)
        return batch, rows if real is None else torch.where(real[batch, rows], rows, pos)


class InPlace(Readout):
    """Row i predicts token i."""

    def rows(self, places: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        return places


class Shifted(Readout):
    """Row i - 1 predicts token i. Nothing predicts the first; it keeps its own row (Dream's convention)."""

    def rows(self, places: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        return (places - 1).clamp(min=0)


READOUTS: dict[str, Readout] = {"in_place": InPlace(), "shifted": Shifted()}
