"""`StepClock`, the step and the holder of a model, and contexts that put a model back at any Ctrl-C.

Python handles a signal between any two bytecodes of the main thread, so that a `KeyboardInterrupt` may cut off an
`__exit__` or a `finally` before its first line. While one of these contexts is open, SIGINT has a handler that looks at
the frame that it interrupts. Inside a section (the beginning or the end of a context, or a function that is
`uninterrupted`), the signal waits for the end of the section; everywhere else the previous handler is called at once. A
context that a signal interrupts as it begins is ended before the interrupt is raised.
"""

import _signal  # type: ignore[import-not-found]  # `signal` makes enumerations of handlers, many times as slow
import contextlib
import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial, wraps
from signal import SIGINT
from sys import _current_frames, _getframe
from threading import RLock, current_thread, get_ident, main_thread
from types import CodeType, FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch.autograd.grad_mode
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.hooks.step import StepState

P = ParamSpec("P")
R = TypeVar("R")

_SECTIONS: set[CodeType] = set()
_INTERRUPTIBLE: set[CodeType] = set()
# Python code that runs as other contexts begin and end. A signal waits there too, for the end of the next section.
_OTHER_CONTEXTS = (contextlib.__file__, torch.autograd.grad_mode.__file__)


class _Interrupts:
    """The handling of SIGINT while contexts are open in the main thread."""

    handler: Any = None  # the one that was installed last
    n_open = 0
    waiting: Any = None  # what has to handle a signal that waits

    def deliver(self, around: FrameType, at_once: bool = False) -> None:
        """Handle a signal that waits, unless there is a section around this one too that is going to do so."""
        if current_thread() is main_thread() and (at_once or not _in_section(around)):
            before, self.waiting = self.waiting, None
            before(SIGINT, around)


_INTERRUPTS = _Interrupts()


def _receive(before: Any, number: int, frame: FrameType | None) -> None:
    """Handle a signal by the handler that was there before, or let it wait."""
    if _in_section(frame) or (frame is not None and frame.f_code.co_filename in _OTHER_CONTEXTS):
        _INTERRUPTS.waiting = before
    else:
        before(number, frame)


def _in_section(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _INTERRUPTIBLE:
        if frame.f_code in _SECTIONS:
            return True
        frame = frame.f_back
    return False


class Restoring:
    """A context manager whose beginning and end are not interrupted.

    `_begin` changes what the context changes, or nothing if it raises an error; `_end` puts it back.
    """

    _begin: Callable[..., Any]
    _end: Callable[..., Any]
    _n_in_main = 0  # how many times it is open in the main thread, where it was begun

    def __enter__(self) -> Any:
        if current_thread() is main_thread():
            handler = _signal.getsignal(SIGINT)
            if callable(handler) and handler is not _INTERRUPTS.handler:
                # A new one each time: what a caller keeps of it goes on to the handler that it replaced.
                _INTERRUPTS.handler = partial(_receive, handler)
                _signal.signal(SIGINT, _INTERRUPTS.handler)
            _INTERRUPTS.n_open += 1
            self._n_in_main += 1
        try:
            entered = self._begin()
        except BaseException:
            self._close(_getframe(1))
            raise
        if _INTERRUPTS.waiting:
            try:
                _INTERRUPTS.deliver(_getframe(1))
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        try:
            return self._end(kind, error, trace)
        finally:
            self._close(_getframe(1))

    def _close(self, around: FrameType) -> None:
        """Put the handler back after the last open context, and handle a signal that waits."""
        if self._n_in_main:  # Another thread may end it.
            self._n_in_main -= 1
            _INTERRUPTS.n_open = max(0, _INTERRUPTS.n_open - 1)
        if current_thread() is main_thread():
            handler = _INTERRUPTS.handler
            # Unless the caller has set another one since.
            if not _INTERRUPTS.n_open and handler is not None and _signal.getsignal(SIGINT) is handler:
                _signal.signal(SIGINT, handler.args[0])
        if _INTERRUPTS.waiting:
            _INTERRUPTS.deliver(around, not _INTERRUPTS.n_open)


class _OfGenerator(Restoring, contextlib.ContextDecorator):
    """What `restoring` makes of a generator function."""

    _again: Callable[[], Any]

    def _recreate_cm(self) -> Any:
        return self._again()


class _Unchanging(Restoring):
    """A context that changes nothing, at whose end a signal that has waited inside is handled."""

    def _begin(self) -> None: ...

    def _end(self, *error: object) -> None: ...


def restoring(function: Callable[P, Iterator[R]]) -> Callable[P, contextlib.AbstractContextManager[R]]:
    """As `contextlib.contextmanager`, for a context that changes a model and puts it back (see `Restoring`)."""
    make = contextlib.contextmanager(function)

    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Any:
        context, inner = _OfGenerator(), make(*args, **kwargs)
        context._begin, context._end = inner.__enter__, inner.__exit__
        context._again = partial(made, *args, **kwargs)
        return context

    return made


def held_whole(function: Callable[P, R]) -> Callable[P, R]:
    """Let Ctrl-C wait as long as a context is open in the function, which should be a short time."""
    _SECTIONS.add(inspect.unwrap(function).__code__)
    return function


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Let Ctrl-C wait until the function has ended, which should be soon."""
    held_whole(function)

    @wraps(function)
    def section(*args: P.args, **kwargs: P.kwargs) -> R:
        with _Unchanging():
            return function(*args, **kwargs)

    return section


def interruptible(function: Callable[P, R]) -> Callable[P, R]:
    """Let Ctrl-C end a function that takes long, although a section calls it."""
    _INTERRUPTIBLE.add(inspect.unwrap(function).__code__)
    return function


_SECTIONS |= {inspect.unwrap(method).__code__ for method in (Restoring.__enter__, Restoring.__exit__, Restoring._close)}


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

    def __init__(self, drop_hooks: Callable[[], None] | None = None, hooked: bool = False) -> None:
        # Whether a hook may be attached. It stays true after the last is removed, until a pass finds none.
        self.hooked = hooked
        self.step: StepState | None = None
        self._copies: dict[str, tuple[StepState, StepState]] = {}  # by branch: a step, and its copy for hooks
        self.branches: tuple[StepState, StepState] | None = None
        self.time: float | None = None
        self.origins: Int[Tensor, "batch"] | None = None
        # Removes the hooks of contexts that are open, or whose end was cut off; `None` if there are none.
        self.drop_hooks = drop_hooks
        self._busy = False
        self.holder: int | None = None
        self._depth = 0
        # The lock of each thread's forward passes. While it is locked, no other thread may hold the model; once it is,
        # the thread calls `require_free`. No signal can interrupt the beginning or the end of `with` a lock, so that a
        # pass needs no handler, which would slow it down.
        self.passes: defaultdict[int, Any] = defaultdict(RLock)
        _CLOCKS.add(self)

    @property
    def origin(self) -> Int[Tensor, "batch"] | None:
        """The first position of each row that is read in blocks, as the step says, then `at` or `telling`;
        `None` if neither says it."""
        block = None if self.step is None else self.step.block
        return self.origins if block is None else block.origin

    @property
    def step_for_hooks(self) -> StepState | None:
        """The step in tensors of its own, so that what a hook writes there changes no run; a copy for all its hooks."""
        if self.step is None:
            return None
        of, copy = self._copies.get(self.step.branch, (None, None))
        if of is not self.step:
            copy = self.step.repeat(1)
            self._copies[self.step.branch] = self.step, copy
        return copy

    def __reduce__(self) -> tuple[Any, tuple[Any, bool]]:
        # A copy of the model is idle, even if the original is running. Its next call drops the hooks of open contexts.
        return StepClock, (self.drop_hooks, self.hooked)

    @restoring
    def held(self) -> Iterator[None]:
        """Exclude other threads while hooks are attached; the same thread may enter again."""
        with _COUNTING:
            if self.holder not in (None, get_ident()):
                self._refuse_its_thread()
            # First the holder, then the passes: a pass locks first, and then asks for the holder.
            self.holder = get_ident()
            if not self._depth and len(self.passes) > 1 and self._is_passed_elsewhere():
                self.holder = None
                raise RuntimeError(
                    "another thread is running a forward pass on this model. Changing its hooks or starting "
                    "the denoising loop now would change its result. Use a lock, or load a second copy"
                )
            self._depth += 1
        try:
            if self._depth == 1 and self.drop_hooks is not None:
                self.drop_hooks()
            yield
        finally:
            with _COUNTING:
                self._depth = max(0, self._depth - 1)  # a holder that had ended is forgotten already
                if not self._depth:
                    self.holder = None

    def require_free(self) -> None:
        """Raise a `RuntimeError` if another thread holds the model."""
        with _COUNTING:  # a thread that is about to hold it may yet be refused
            if self.holder not in (None, get_ident()):
                self._refuse_its_thread()

    def _refuse_its_thread(self) -> None:
        """Raise a `RuntimeError`, unless the thread that holds the model has ended."""
        if self.holder in _current_frames():
            raise RuntimeError(_HELD)
        self._forget_holder()

    def _is_passed_elsewhere(self) -> bool:
        return any(_is_locked(lock) for thread, lock in list(self.passes.items()) if thread != get_ident())

    def forget_other_threads(self) -> None:
        """Drop what other threads were doing, which a copy of the process does not have. Their hooks are dropped by the
        next call."""
        self.passes = defaultdict(RLock, {get_ident(): self.passes[get_ident()]})
        if self.holder not in (None, get_ident()):
            self._forget_holder()

    def _forget_holder(self) -> None:
        self.holder, self._depth, self._busy = None, 0, False
        self.step = self.branches = None

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
                self._copies.clear()
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
        clock.forget_other_threads()
    _COUNTING.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_COUNTING.acquire, after_in_parent=_COUNTING.release, after_in_child=_begin_child)
