"""Contexts that change a model and put it back, also when Ctrl-C arrives at any point of them.

Python handles a signal between any two bytecodes of the main thread, so that a `KeyboardInterrupt` may cut off an
`__exit__` or a `finally` before its first line. While one of these contexts is open, SIGINT has a handler that looks at
the frame that it interrupts. Inside a section (the beginning or the end of a context, or a function that is
`uninterrupted`), the signal waits for the end of the section; everywhere else the previous handler is called at once. A
context that a signal interrupts as it begins is ended before the interrupt is raised.
"""

import _signal  # type: ignore[import-not-found]  # `signal` makes enumerations of handlers, many times as slow
import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from signal import SIGINT
from sys import _getframe
from threading import current_thread, main_thread
from types import CodeType, FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

import torch.autograd.grad_mode

P = ParamSpec("P")
R = TypeVar("R")

_SECTIONS: set[CodeType] = set()
_INTERRUPTIBLE: set[CodeType] = set()
# Python code that runs as other contexts begin and end. A signal waits there too, for the end of the next section.
_OTHER_CONTEXTS = (contextlib.__file__, torch.autograd.grad_mode.__file__)


class _Interrupts:
    """The handler of SIGINT while a context is open."""

    def __init__(self) -> None:
        self.before: Any = None  # the handler that it replaced
        self.taken = False
        self.waiting = False

    def take(self) -> bool:
        """Become the handler, in the main thread; false if it is already, or if no Python code handles SIGINT."""
        if self.taken or current_thread() is not main_thread():
            return False
        handler = _signal.getsignal(SIGINT)
        if not callable(handler):
            return False
        if handler != self.receive:
            self.before = handler
            _signal.signal(SIGINT, self.receive)
        self.taken = True
        return True

    def give(self, taken: bool, around: FrameType) -> None:
        """At the end of a section: put the handler back if this section's context has `taken` it, and handle a signal
        that waits."""
        if current_thread() is not main_thread():
            return
        if taken:
            self.taken = False
            if _signal.getsignal(SIGINT) == self.receive:  # unless the caller has set another one
                _signal.signal(SIGINT, self.before)
        if self.waiting:
            self.deliver(around, taken)

    def deliver(self, around: FrameType, at_once: bool = False) -> None:
        """Handle a signal that waits, unless there is a section around this one too that is going to do so."""
        if current_thread() is main_thread() and (at_once or not _in_section(around)):
            self.waiting = False
            self.before(SIGINT, around)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, or let it wait."""
        self.waiting = _in_section(frame) or (frame is not None and frame.f_code.co_filename in _OTHER_CONTEXTS)
        if not self.waiting:
            self.before(number, frame)


_INTERRUPTS = _Interrupts()


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
    _taken = False

    def __enter__(self) -> Any:
        # Only the outermost context takes the signal.
        taken = not _INTERRUPTS.taken and _INTERRUPTS.take()
        try:
            entered = self._begin()
        except BaseException:
            _INTERRUPTS.give(taken, _getframe(1))
            raise
        self._taken = taken
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
            if self._taken and current_thread() is main_thread():
                _INTERRUPTS.taken = False
                if _signal.getsignal(SIGINT) == _INTERRUPTS.receive:  # unless the caller has set another one
                    _signal.signal(SIGINT, _INTERRUPTS.before)
            if _INTERRUPTS.waiting:
                _INTERRUPTS.deliver(_getframe(1), self._taken)


class _OfGenerator(Restoring):
    """What `restoring` makes of a generator function."""


def restoring(function: Callable[P, Iterator[R]]) -> Callable[P, contextlib.AbstractContextManager[R]]:
    """As `contextlib.contextmanager`, for a context that changes a model and puts it back (see `Restoring`)."""
    make = contextlib.contextmanager(function)

    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Any:
        context, inner = _OfGenerator(), make(*args, **kwargs)
        context._begin, context._end = inner.__enter__, inner.__exit__
        return context

    return made


def held_whole(function: Callable[P, R]) -> Callable[P, R]:
    """Let Ctrl-C wait as long as a context is open in the function, which should be a short time."""
    _SECTIONS.add(inspect.unwrap(function).__code__)
    return function


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Let Ctrl-C wait until the function has ended, which should be soon."""

    @wraps(function)
    def section(*args: P.args, **kwargs: P.kwargs) -> R:
        taken = _INTERRUPTS.take()
        try:
            return function(*args, **kwargs)
        finally:
            _INTERRUPTS.give(taken, _getframe(1))

    _SECTIONS.add(section.__code__)  # type: ignore[attr-defined]
    return section


def interruptible(function: Callable[P, R]) -> Callable[P, R]:
    """Let Ctrl-C end a function that takes long, although a section calls it."""
    _INTERRUPTIBLE.add(inspect.unwrap(function).__code__)
    return function


_SECTIONS |= {inspect.unwrap(method).__code__ for method in (Restoring.__enter__, Restoring.__exit__)}
