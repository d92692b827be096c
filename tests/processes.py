"""Child processes of the tests: copies of this one that are killed while they work, and programs that get Ctrl-C."""

import multiprocessing
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event


class Stuck:
    """A point that a child process reaches and does not leave until it is killed."""

    def __init__(self) -> None:
        self._reached: Event = multiprocessing.get_context("fork").Event()

    def wait_forever(self) -> None:
        self._reached.set()
        time.sleep(600)

    def reached(self) -> bool:
        return self._reached.wait(timeout=120)


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[multiprocessing.process.BaseProcess]:
    """A copy of this process that does `work`; on leaving it is killed by SIGKILL if it still works."""
    child = multiprocessing.get_context("fork").Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none of its parent's
        child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join(timeout=60)


def hears_ctrl_c() -> None:
    """For `preexec_fn`: the child of a shell's background job would ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
