"""The differences between two denoising runs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_lens.records import one_line


@dataclass(frozen=True, eq=False)
class TrajectoryDiff:
    """The differences between two denoising runs of one prompt.

    Attributes:
        first_step: First step after which the canvases differ; `None` if they never do.
        tokens: Bool[batch pos], positions whose final token differs.
        order: Bool[batch pos], positions revealed in another step.
        confidence: Float[batch pos], the second run's confidence minus the first's.
    """

    first_step: int | None
    tokens: Bool[Tensor, "batch pos"]
    order: Bool[Tensor, "batch pos"]
    confidence: Float[Tensor, "batch pos"]

    __repr__ = one_line

    @classmethod
    def of(cls, first: Mapping[str, Tensor], second: Mapping[str, Tensor], first_step: int) -> "TrajectoryDiff":
        """The differences between two runs.

        Args:
            first, second: `tokens`, `canvases`, `revealed_at` and `confidence` of each run, as in `Trajectory`.
            first_step: Step that begins with the first canvas.

        Raises:
            ValueError: The canvases have different shapes, or the runs begin with different canvases.
        """
        canvases, others = first["canvases"], second["canvases"]
        if canvases.shape != others.shape:
            raise ValueError(
                f"runs of different shape cannot be compared: {list(canvases.shape)} and {list(others.shape)} "
                "[canvas batch pos]"
            )
        if not torch.equal(canvases[0], others[0]):
            raise ValueError("the two runs begin with different canvases; compare runs of the same prompt")
        differing = (canvases != others).flatten(1).any(dim=1).nonzero()
        return cls(
            first_step=first_step + int(differing[0]) - 1 if len(differing) else None,
            tokens=first["tokens"] != second["tokens"],
            order=first["revealed_at"] != second["revealed_at"],
            confidence=second["confidence"] - first["confidence"],
        )
