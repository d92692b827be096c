"""`StepState`, the value of `hook.step` in the denoising loop, and `StepClock`, which hook points read it from."""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from threading import RLock, get_ident
from typing import Any, Literal, get_args
from weakref import WeakSet

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.hooks.interrupts import restoring
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
    `first_shifted`, the first token is read in the row before it, which is finished: it is written first, and the other
    tokens are read in place.
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

    def repeat(self, copies: int) -> "OpenBlock":
        """The blocks of a batch that consists of several copies of this one."""
        rows = {name: x.repeat(copies) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return OpenBlock(**rows, size=self.size, first_shifted=self.first_shifted)


@dataclass(frozen=True)
class StepState:
    """One denoising step as a hook sees it.

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

    def repeat(self, copies: int) -> "StepState":
        """The step of a batch that consists of several copies of this step's batch, one after the other."""
        rows = {name: getattr(self, name).repeat(copies, 1) for name in ("tokens", "masked", "given")}
        sigma = self.sigma * copies if isinstance(self.sigma, tuple) else self.sigma
        return replace(self, **rows, sigma=sigma, block=None if self.block is None else self.block.repeat(copies))


# Protects the state of all clocks; it is shared by all models, so that a model can be copied. A thread may need it
# twice, where the garbage collector ends a context.
_COUNTING = RLock()
_HELD = (
    "another thread is running hooks or the denoising loop on this model, which would change the result of this call. "
    "Use a lock, or load a second copy"
)


class StepClock:
    """The current step of one model's loop, shared by all hook points of the model; outside the loop it is `None`.

    `at` sets the step for forward passes outside the loop that reproduce a step, as analyses of trajectories do. While
    guidance runs both branches as one batch, `branches` has the state of each half.

    Step and hooks belong to the model, so only one thread at a time may use them: `held` refuses a second one. Plain
    forward passes may run in several threads; they are counted, because hooks attached meanwhile would affect them.
    """

    def __init__(self) -> None:
        self.step: StepState | None = None
        self.branches: tuple[StepState, StepState] | None = None
        self.time: float | None = None
        self.origins: Int[Tensor, "batch"] | None = None
        self.levels = 0  # contexts of hooks inside each other
        self._busy = False
        self.holder: int | None = None
        self._depth = 0
        self._passes: defaultdict[int, Any] = defaultdict(RLock)  # by thread
        _CLOCKS.add(self)

    @property
    def origin(self) -> Int[Tensor, "batch"] | None:
        """The first position of each row that is read in blocks, as the step says, then `at` or `telling`;
        `None` if neither says it."""
        block = None if self.step is None else self.step.block
        return self.origins if block is None else block.origin

    def __deepcopy__(self, memo: object) -> "StepClock":
        # A copy of the model is idle, even if the original is running.
        return StepClock()

    @restoring
    def held(self) -> Iterator[None]:
        """Exclude other threads while hooks are attached; the same thread may enter again."""
        with _COUNTING:
            if self.holder not in (None, get_ident()):
                raise RuntimeError(_HELD)
            # First the holder, then the passes: a pass locks first, and then asks for the holder.
            self.holder = get_ident()
            if not self._depth and len(self._passes) > 1 and self._is_passed_elsewhere():
                self.holder = None
                raise RuntimeError(
                    "another thread is running a forward pass on this model. Changing its hooks or starting "
                    "the denoising loop now would change its result. Use a lock, or load a second copy"
                )
            self._depth += 1
        try:
            yield
        finally:
            with _COUNTING:
                self._depth -= 1
                if not self._depth:
                    self.holder = None

    def passing(self) -> AbstractContextManager[Any]:
        """The lock of this thread's forward passes. While it is locked, no other thread may hold the model; once it is,
        the thread calls `require_free`. No signal can interrupt the beginning or the end of `with` a lock, and no
        handler is needed for it, which would slow down every pass."""
        lock: AbstractContextManager[Any] = self._passes[get_ident()]
        return lock

    def require_free(self) -> None:
        """Raise a `RuntimeError` if another thread holds the model."""
        with _COUNTING:  # a thread that is about to hold it may yet be refused
            if self.holder not in (None, get_ident()):
                raise RuntimeError(_HELD)

    def _is_passed_elsewhere(self) -> bool:
        return any(_is_locked(lock) for thread, lock in list(self._passes.items()) if thread != get_ident())

    def forget_other_passes(self) -> None:
        """Drop the passes of other threads, which a copy of the process does not have."""
        self._passes = defaultdict(RLock, {get_ident(): self._passes[get_ident()]})

    @restoring
    def running(self, model_name: str) -> Iterator[None]:
        """Hold the model for one run of the loop; at its end, exception or not, the step is `None` again."""
        if self._busy:
            raise RuntimeError(
                f"a denoising loop of this {model_name!r} is already running, in another thread or around this "
                "call (in a hook of it). Hooks and steps belong to the model, so it can run one loop at a time. "
                "Wait for that run to end, or load the model a second time"
            )
        with self.held():
            self._busy = True
            try:
                yield
            finally:
                self.step = self.branches = None
                self._busy = False

    @restoring
    def at(
        self, step: StepState | None, copies: int = 1, origins: Int[Tensor, "batch"] | None = None
    ) -> Iterator[None]:
        """Set the step of all hook points, and restore the previous one at the end, exception or not.

        Args:
            step: Step that the forward passes inside reproduce, with one row of its canvas per row; `None` for none.
            copies: Number of copies of these rows in a batch.
            origins: The first position of each row that is read in blocks, for passes without a step.
        """
        with self.held():
            before = self.step, self.branches, self.origins
            self.step, self.branches = None if step is None else step.repeat(copies), None
            self.origins = self.origins if origins is None else origins
            try:
                yield
            finally:
                self.step, self.branches, self.origins = before

    @restoring
    def telling(self, **values: Any) -> Iterator[None]:
        """Give all passes inside that have no step this `time`, or these `origins`; the previous ones are restored."""
        with self.held():
            before = {name: vars(self)[name] for name in values}
            vars(self).update(values)
            try:
                yield
            finally:
                vars(self).update(before)


def _is_locked(lock: Any) -> bool:
    """Whether another thread has locked it."""
    if not lock.acquire(blocking=False):
        return True
    lock.release()
    return False


_CLOCKS: WeakSet[StepClock] = WeakSet()


def _begin_child() -> None:
    for clock in list(_CLOCKS):
        clock.forget_other_passes()
    _COUNTING.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_COUNTING.acquire, after_in_parent=_COUNTING.release, after_in_child=_begin_child)
