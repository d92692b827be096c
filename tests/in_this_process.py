"""An executor without workers."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class InThisProcess(Executor):
    """Calls each function at once. Instead of `LocalWorkers` it takes the number of workers, and counts the calls."""

    n_calls = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        type(self).n_calls += 1
        future.set_result(fn(*args, **kwargs))
        return future
