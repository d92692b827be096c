"""Executors that run every task in this process, from a pickle of it, and to which accidents happen."""

import pickle
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Here(Executor):
    """Runs every task in this process from a pickle of it. The first tasks end as if their worker had died."""

    def __init__(self, deaths: int = 0) -> None:
        self.deaths, self.n_tasks = deaths, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.n_tasks += 1
        function, (received,) = pickle.loads(pickle.dumps((fn, args)))
        assert isinstance(received, bytes)  # multiprocessing would send each tensor by a file descriptor of its own
        try:
            if self.n_tasks <= self.deaths:
                raise OSError("the node went away")
            result = function(received)
            assert isinstance(result, bytes)
            future.set_result(result)
        except Exception as error:
            future.set_exception(error)
        return future


class Interrupted(Here):
    """Ctrl-C is pressed when the second task is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.n_tasks == 1:
            raise KeyboardInterrupt
        return super().submit(fn, *args, **kwargs)
