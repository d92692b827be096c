"""Where the blocks of a canvas begin, of a model that counts them from the end of the prompt.

Inside the loop, the step knows the position. Outside, the first [MASK] of a row ends its prompt, as it does in the
first step of the loop; a row without [MASK] is all prompt, and nothing in it is open. `model.at_block(start)` sets
another position.
"""

from abc import ABC
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.settings import whole_numbers
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.step_state import StepClock


class BlockOrigins(ABC):
    """How a network is told where the blocks of a canvas begin."""

    cfg: DiffusionConfig
    clock: StepClock

    @property
    def in_loop(self) -> bool:
        """Whether a pass is a step of the loop that writes an open block."""
        return self.clock.step is not None and self.clock.step.block is not None

    @contextmanager
    def at_block(self, start: SupportsIndex | Sequence[int] | Int[Tensor, "batch"]) -> Iterator[Any]:
        """Let the open block begin at this position in every forward pass inside that is no step of the loop.

            with model.at_block(12):
                logits = model(tokens)

        It is needed for a residual stream (`start_at_layer=`), and for a block whose first tokens are written already.
        Results record the positions. Inside, no other thread may use the model.

        Args:
            start: Position in all rows, or one for each row of the batch.

        Raises:
            ValueError: A position is negative, or blocks of the model do not begin at the end of the prompt.
        """
        if not self.cfg.counts_from_prompt:
            raise ValueError(
                f"at_block: {self.cfg.model_name!r} counts no blocks from the end of a prompt, so that its attention "
                "does not depend on where one is open; leave it out"
            )
        given = start.tolist() if isinstance(start, Tensor) else start
        starts = whole_numbers("start", given)
        if not starts or min(starts) < 0:
            raise ValueError(f"start={given}; it must be positions of the canvas, 0 or more")
        with self.clock.counting_from(torch.tensor(starts, device=self.cfg.device)):
            yield self

    def origins_of(self, tokens: Tokens | None, real: PosMask | None = None) -> Int[Tensor, "rest"] | None:
        """The first position of each row that is read in blocks; `None` where it is the first token of every text.

        Args:
            tokens: Int[batch pos]; `None` for a residual stream.
            real: Bool[batch pos], false at padding.

        Raises:
            ValueError: The input is a residual stream, and nothing says where the open block begins.
        """
        if not self.cfg.counts_from_prompt:
            return None
        if self.clock.origin is not None:
            return self.clock.origin
        if tokens is None:
            raise ValueError(
                f"a residual stream does not say where the open block begins, and the attention of "
                f"{self.cfg.model_name!r} depends on it: run the pass inside `with model.at_block(start):`, with the "
                "position of the first [MASK], or the number of positions if there is none"
            )
        masked = tokens.eq(self.cfg.blank)
        return first_true(masked if real is None else masked & real)

    def _origins_of_pass(
        self, tokens: Tokens | None, real: PosMask | None, n_batch: int
    ) -> Int[Tensor, "batch"] | None:
        """The origins of the rows of a pass, which may be copies of those of a step, one after the other."""
        origins = self.origins_of(tokens, real)
        if origins is None:
            return None
        if n_batch % len(origins):
            raise ValueError(
                f"at_block was given {len(origins)} positions, and the batch has {n_batch} rows: give one position, or "
                "one for each row"
            )
        return origins.repeat(n_batch // len(origins))


def first_true(positions: PosMask) -> Int[Tensor, "batch"]:
    """The first true position of each row; the number of positions where none is."""
    places = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    return places.masked_fill(~positions, positions.shape[1]).amin(dim=1)
