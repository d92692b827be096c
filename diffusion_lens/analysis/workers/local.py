"""Worker processes on this machine."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any


class LocalWorkers(Executor):
    """An executor of processes on this machine that outlives the death of a process.

    The pool of the standard library breaks altogether when one of its processes is killed, for example for memory. Here
    every process is a pool of its own: its death costs its task, and the next task gets a new process.

    Args:
        number: Number of processes.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._own = threading.local()
        self._ending = False
        self._pools: set[ProcessPoolExecutor] = set()
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="worker")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a process; its future raises `BrokenProcessPool` if that process dies."""
        return self._threads.submit(self._run, fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes; without `wait`, also those in the middle of a task."""
        self._threads.shutdown(wait=False, cancel_futures=cancel_futures or not wait)
        if not wait:
            self._ending = True
            for pool in list(self._pools):
                _terminate(pool)
        self._threads.shutdown(wait=True)
        with ThreadPoolExecutor(self.number) as threads:  # side by side: an interpreter takes seconds to end
            list(threads.map(ProcessPoolExecutor.shutdown, list(self._pools)))

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool | None:
        self.shutdown(wait=kind is None)
        return None

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pool: ProcessPoolExecutor | None = getattr(self._own, "pool", None)
        if pool is None:
            pool = self._own.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin)
            self._pools.add(pool)
        try:
            future = pool.submit(fn, *args, **kwargs)
            if self._ending:  # and `shutdown` did not see the process that was started by `submit`
                _terminate(pool)
            return future.result()
        except BrokenProcessPool:
            self._own.pool = None
            self._pools.discard(pool)
            raise


def _terminate(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.terminate()


def _begin() -> None:
    """Leave interrupts to the process that waits for the results, which ends the others; do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
