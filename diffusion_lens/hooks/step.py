"""`StepState`, the value of `hook.step` in the denoising loop."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.model.shapes import PosMask, Tokens

Branch = Literal["conditional", "unconditional"]
BRANCHES = get_args(Branch)


class RunIdentity:
    """Identifies one run of the loop. Instances are compared by identity."""


@dataclass(frozen=True)
class OpenBlock:
    """The block of positions that each row writes in a step, where a canvas is written block after block.

    Rows are independent: each opens its next block in the step after the one that filled its last. `origin` is the
    first position that is read in blocks: 0, the end of the prompt, or `start` where finished tokens are causal. If
    `first_alone`, the first token is read in the row before it, which is finished, and is written first. If
    `first_shifted`, that row is not the one in which the others are read: they are read in place.
    """

    index: Int[Tensor, "batch"]  # number of the block in its row, from 0
    origin: Int[Tensor, "batch"]
    start: Int[Tensor, "batch"]  # its first position on the canvas
    stop: Int[Tensor, "batch"]  # the position after its last
    step: Int[Tensor, "batch"]  # steps since the block was opened, so 0 in its first step
    order: Int[Tensor, "batch"]  # number of blocks that the run fills before it; the prompt may fill others
    n_blocks: Int[Tensor, "batch"]  # number of blocks that the run fills in the row
    size: int  # positions in a block
    first_shifted: bool = False
    first_alone: bool = False

    def rows(
        self, rows: Int[Tensor, "selected"], positions: Int[Tensor, "selected"], batch: Int[Tensor, "selected"]
    ) -> Int[Tensor, "selected"]:
        """The rows of the logits that predict tokens: of a block's first one the row before it, if it is shifted."""
        if not self.first_shifted:
            return rows
        first = positions == self.start[batch % len(self.start)]
        return torch.where(first, rows - 1, rows).clamp(min=0)

    def steps_of(self, n_steps: int) -> Int[Tensor, "batch"]:
        """Number of steps that each row's block has, where the steps of a run are shared evenly among its blocks."""
        n_blocks = self.n_blocks.clamp(min=1)
        return (self.order + 1) * n_steps // n_blocks - self.order * n_steps // n_blocks

    def steps_of_all(self, n_steps: int) -> int:
        """Number of steps that every block has, where all rows write theirs in the same steps."""
        return n_steps // int(self.n_blocks.max())

    def repeat(self, copies: int) -> "OpenBlock":
        """The blocks of a batch that consists of several copies of this one."""
        rows = {name: x.repeat(copies) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return OpenBlock(**rows, size=self.size, first_shifted=self.first_shifted, first_alone=self.first_alone)


@dataclass(frozen=True, eq=False)
class Handed:
    """What a step hands to the next beside the canvas, as the next one reads it: the state of a run whose steps depend
    on what earlier ones predicted. At the first step of a block it is that of `empty`.

    Attributes:
        expected: Float[batch block d_model], expected embedding of the prediction at each position of the open block,
            for the self-conditioning of the network; 0 in the first step.
        likeliest: Int[batch block], the likeliest token of the prediction; -1 in the first step.
        streak: Int[batch], number of consecutive steps that predicted these.
        finished: Bool[batch], whether the row has written its block and waits for the others.
    """

    expected: Float[Tensor, "*step batch block d_model"]
    likeliest: Int[Tensor, "*step batch block"]
    streak: Int[Tensor, "*step batch"]
    finished: Bool[Tensor, "*step batch"]

    @classmethod
    def empty(cls, n_batch: int, block: int, d_model: int, dtype: torch.dtype, device: torch.device) -> "Handed":
        """What the first step of a block reads."""
        zeros = torch.zeros(n_batch, block, d_model, dtype=dtype, device=device)
        rows = torch.zeros(n_batch, dtype=torch.long, device=device)
        return cls(zeros, torch.full_like(zeros[..., 0], -1, dtype=torch.long), rows, rows.bool())

    @classmethod
    def stacked(cls, steps: Sequence["Handed"]) -> "Handed":
        """Those of several steps, with an axis for these."""
        return cls(*(torch.stack(tensors) for tensors in zip(*(vars(step).values() for step in steps), strict=True)))

    def __getitem__(self, index: Any) -> "Handed":
        """That of one step of several, or with (slice, rows) that of some steps and rows."""
        return Handed(*(tensor[index] for tensor in vars(self).values()))

    def repeat(self, copies: int) -> "Handed":
        """That of several copies of the batch, one after the other."""
        return Handed(*(tensor.repeat(copies, *[1] * (tensor.dim() - 1)) for tensor in vars(self).values()))

    def to(self, device: str | torch.device | None) -> "Handed":
        """The same on another device."""
        return Handed(*(tensor.to(device) for tensor in vars(self).values()))


@dataclass(frozen=True)
class StepState:
    """One denoising step as a hook sees it.

    A hook changes the run by what it returns; what it writes into these tensors changes nothing.

    Attributes:
        index: Index of the step, from 0 to `n_steps - 1`.
        n_steps: Number of steps of the run.
        t: Time before the step; 1 if all is masked, 0 at the end.
        s: Time after the step, `s < t`.
        tokens: Int[batch pos], canvas of the step (also in the unconditional branch, whose network sees the prompt
            masked); -1 marks positions that the text has not reached yet.
        masked: Bool[batch pos], true at the positions that are not yet revealed; of a canvas with [MASK] that is
            written block after block, those of the open block.
        given: Bool[batch pos], true at the positions of the prompt.
        branch: "conditional", or "unconditional" for the second forward pass of guidance.
        sigma: Noise level of the canvas by the run's schedule of noise, which a network with time conditioning reads;
            a tuple with that of each row, where rows differ; `None` if the schedule is not known, which counts as the
            log-linear one.
        run: Identity of the run, the same object in all its steps, so that a hook with a memory can tell runs apart. By
            default a new identity; `None` for a single step outside a run, as in analyses of trajectories.
        block: The block that each row writes; `None` where the whole canvas is open from the first step on.
        handed: What the step reads of the steps before it; `None` where it reads the canvas alone.
        real: Bool[batch pos], false at padding; `None` where there is none.
    """

    index: int
    n_steps: int
    t: float
    s: float
    tokens: Tokens
    masked: PosMask
    given: PosMask
    branch: Branch = "conditional"
    sigma: float | tuple[float, ...] | None = None
    run: RunIdentity | None = field(default_factory=RunIdentity, repr=False, compare=False)
    block: OpenBlock | None = None
    handed: Handed | None = field(default=None, repr=False)
    real: PosMask | None = field(default=None, repr=False)

    def repeat(self, copies: int) -> "StepState":
        """The step of a batch that consists of several copies of this step's batch, one after the other."""
        rows = {name: getattr(self, name).repeat(copies, 1) for name in ("tokens", "masked", "given")}
        sigma = self.sigma * copies if isinstance(self.sigma, tuple) else self.sigma
        block = None if self.block is None else self.block.repeat(copies)
        handed = None if self.handed is None else self.handed.repeat(copies)
        real = None if self.real is None else self.real.repeat(copies, 1)
        return replace(self, **rows, sigma=sigma, block=block, handed=handed, real=real)
