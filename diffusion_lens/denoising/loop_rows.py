"""Rows of a denoising run between two steps: all that its later steps depend on, so that equal rows end alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.denoising.run import Run
from diffusion_lens.shapes import Tokens


@dataclass(frozen=True, eq=False)
class LoopRows:
    """Rows of a run before a step.

    Attributes:
        tokens: Int[batch pos], their canvases.
        revealed_at: Int[batch pos], as in `Run`.
        confidence: Float[batch pos], as in `Run`.
        kept: Float[batch], noise that a row's next prediction keeps from the last one; NaN where it keeps none.
        seeds: One seed for each row.
    """

    tokens: Tokens
    revealed_at: Int[Tensor, "batch pos"]
    confidence: Float[Tensor, "batch pos"]
    kept: Float[Tensor, "batch"]
    seeds: list[int]

    @classmethod
    def of(cls, run: Run) -> "LoopRows":
        """The rows of a run that has taken its last step so far."""
        return cls(run.tokens, run.revealed_at, run.confidence, run.kept, run.seeds)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    def at(self, rows: Sequence[int]) -> "LoopRows":
        """Some of the rows."""
        chosen = list(rows)
        return LoopRows(
            self.tokens[chosen],
            self.revealed_at[chosen],
            self.confidence[chosen],
            self.kept[chosen],
            [self.seeds[row] for row in chosen],
        )

    @classmethod
    def joined(cls, parts: Sequence["LoopRows"]) -> "LoopRows":
        """The rows of several."""
        return cls(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.revealed_at for part in parts]),
            torch.cat([part.confidence for part in parts]),
            torch.cat([part.kept for part in parts]),
            [seed for part in parts for seed in part.seeds],
        )

    def keys(self, run: Run) -> list[tuple[object, ...]]:
        """For each row, what its later steps in this run depend on, apart from its seed.

        Confidence is a part of it only where the sampler reads it. The steps that revealed tokens are one where blocks
        are opened by the step that filled the last.
        """
        parts = [self.tokens.tolist()]
        if run.sampler.reads_confidence:
            parts.append(self.confidence.nan_to_num(nan=-1.0).tolist())
        if run.canvas.reach is not None and not run.model.cfg.grows:
            parts.append(self.revealed_at.tolist())
        if run.sampler.has_times_of_rows:
            parts.append(self.kept.nan_to_num(nan=-1.0)[:, None].tolist())
        return [tuple(map(tuple, row)) for row in zip(*parts, strict=True)]
