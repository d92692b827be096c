"""Where in the denoising loop an activation belongs: what `hook.step` holds inside the loop."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock, get_ident
from typing import Literal

from diffusion_lens.shapes import PosMask, Tokens

Branch = Literal["conditional", "unconditional"]


class RunIdentity:
    """Stands for one run of the loop; no two runs share one. Compared by identity."""


@dataclass(frozen=True)
class StepState:
    """One denoising step as a hook sees it.

    Attributes:
        index: 0 for the first step, `n_steps - 1` for the last.
        n_steps: steps of the whole run.
        t: time before the step; 1 is all masked, 0 is done.
        s: time after the step, `s < t`.
        tokens: Int[batch pos], the canvas of the step (in the unconditional branch too, whose network sees the
            prompt masked); on a causal model -1 marks places not reached yet.
        masked: Bool[batch pos], the places still to be filled.
        given: Bool[batch pos], the places that came with the prompt.
        branch: "conditional", or "unconditional" for guidance's second forward pass.
        run: the same object in all steps of one run and in no other run, so that a hook that remembers something can
            tell whether it belongs to this run. A state made without one stands for a run of its own; `None` where a
            single step is run by itself, as the analyses of trajectories do, and there is nothing to remember.
    """

    index: int
    n_steps: int
    t: float
    s: float
    tokens: Tokens
    masked: PosMask
    given: PosMask
    branch: Branch = "conditional"
    run: RunIdentity | None = field(default_factory=RunIdentity, repr=False, compare=False)

    def repeat(self, copies: int) -> "StepState":
        """The step of a batch that holds every row so many times, one copy of the batch after the other."""
        rows = {name: getattr(self, name).repeat(copies, 1) for name in ("tokens", "masked", "given")}
        return replace(self, **rows)


# Held only while a clock notes who uses it; one for all models, so that a model can be copied.
_NOTING = Lock()


class StepClock:
    """The current step of one model's loop; `None` outside. Shared by all hook points of that model.

    A single run that stands for a step, as the analyses of trajectories take them, is lent the step by `at`.

    While guidance runs both of its branches as one batch, `branches` holds the state of each half.

    Step and hooks belong to the model, so one thread at a time may use them: `held` refuses a second one. Plain passes
    may run in several threads, and are noted, because hooks attached meanwhile would reach into them.
    """

    def __init__(self) -> None:
        self.step: StepState | None = None
        self.branches: tuple[StepState, StepState] | None = None
        self._busy = False
        self._holder: int | None = None
        self._depth = 0
        self._passing: Counter[int] = Counter()

    def __deepcopy__(self, memo: object) -> "StepClock":
        # A copy of the model runs nothing yet, whatever its original is doing.
        return StepClock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other threads out while hooks are attached; the same thread may hold it again inside.

        Raises:
            RuntimeError: another thread holds the model, or is in a forward pass of it.
        """
        with _NOTING:
            self.require_alone()
            self._holder, self._depth = get_ident(), self._depth + 1
        try:
            yield
        finally:
            with _NOTING:
                self._depth -= 1
                if not self._depth:
                    self._holder = None

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Note a forward pass of this thread: until it ends, no other thread may hold the model."""
        thread = get_ident()
        with _NOTING:
            self._check_thread()
            self._passing[thread] += 1
        try:
            yield
        finally:
            with _NOTING:
                self._passing[thread] -= 1
                self._passing += Counter()  # keeps the positive counts

    def require_alone(self) -> None:
        """Raise a `RuntimeError` where another thread holds the model or runs it."""
        self._check_thread()
        if self._passing.keys() - {get_ident()}:
            raise RuntimeError(
                "another thread is in a forward pass of this model, and hooks or a step of yours would reach into it: "
                "let the threads take turns, or give each a model of its own"
            )

    def _check_thread(self) -> None:
        """Raise a `RuntimeError` where another thread holds the model."""
        if self._holder is not None and self._holder != get_ident():
            raise RuntimeError(
                "another thread is running hooks or the denoising loop on this model, whose hooks and step would reach "
                "into this run: let the threads take turns, or give each a model of its own"
            )

    @contextmanager
    def running(self, model_name: str) -> Iterator[None]:
        """Hold the clock for one run of the loop; afterwards, exception or not, no step is lent.

        Raises:
            RuntimeError: a run holds it already, in another thread or around this one.
        """
        with _NOTING:
            if self._busy:
                raise RuntimeError(
                    f"a denoising loop of this {model_name!r} is already running, in another thread or around this "
                    "call (in a hook of it): hooks and steps belong to the model, so two loops at once would mix "
                    "them. Wait for that run to end, or load the model a second time"
                )
            self.require_alone()
            self._busy = True
        try:
            yield
        finally:
            self.step = self.branches = None
            self._busy = False

    @contextmanager
    def one_branch_at_a_time(self) -> Iterator[tuple[StepState, ...]]:
        """The branches, for one to be shown after the other; a hook point reached meanwhile passes the one shown."""
        before = self.step, self.branches
        self.branches = None
        try:
            yield before[1] or ()
        finally:
            self.step, self.branches = before

    @contextmanager
    def at(self, step: StepState | None, copies: int = 1) -> Iterator[None]:
        """Lend a step to all hook points, and give back what they had before, exception or not.

        Args:
            step: the step that the runs inside stand for, a row of its canvas for each of theirs; `None` for runs that
                stand for none.
            copies: how many times the runs inside hold those rows.
        """
        with self.held():
            before = self.step, self.branches
            self.step, self.branches = None if step is None else step.repeat(copies), None
            try:
                yield
            finally:
                self.step, self.branches = before
