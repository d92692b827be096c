"""Turns of the requests of a session: one computes at a time, says how far it is, and ends when nobody waits for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

Cancelled = Callable[[], bool]
_ATTENTION = 0.1  # seconds after which a request that waits for its turn asks whether it is cancelled


class RequestCancelledError(Exception):
    """Nobody waits for the result of a request any more."""


def never() -> bool:
    """A request that is not cancelled."""
    return False


class Turns:
    """Lets one request compute at a time: hooks of two requests on one model must not mix.

    Attributes:
        progress: What the present request does, how many parts are done, and how many there are: {"what": "denoising",
            "done": 3, "of": 16}; empty where nothing is computed. Other threads may read it.
    """

    def __init__(self) -> None:
        self.progress: dict[str, str | int] = {}
        self._lock = RLock()
        self._cancelled: Cancelled = never  # of the request whose turn it is

    @contextmanager
    def turn(self, cancelled: Cancelled = never) -> Iterator[None]:
        """The turn of a request: no other computes in the meantime.

        Args:
            cancelled: Whether nobody waits for the result any more. It is asked before the turn and at every part.

        Raises:
            RequestCancelledError: The request is cancelled.
        """
        while not self._lock.acquire(timeout=_ATTENTION):
            _require_wanted(cancelled)
        before = self._cancelled, self.progress
        try:
            self._cancelled = cancelled
            self.go_on()
            yield
        finally:
            self._cancelled, self.progress = before
            self._lock.release()

    def go_on(self) -> None:
        """Raise a `RequestCancelledError` if the request whose turn it is was cancelled."""
        _require_wanted(self._cancelled)

    def at(self, what: str, done: int, of: int) -> None:
        """Say how far the present request is; then as `go_on`."""
        self.progress = {"what": what, "done": done, "of": of}
        self.go_on()


def _require_wanted(cancelled: Cancelled) -> None:
    if cancelled():
        raise RequestCancelledError("the request was cancelled")
