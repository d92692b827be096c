"""Child processes of the tests, which are copies of this one."""

import ctypes
import gc
import multiprocessing
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import TypeVar

T = TypeVar("T")


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


def measured_apart(*measurements: Callable[[], T]) -> list[T]:
    """The results of functions that measure the growth of resident memory, each called in a copy of this process.

    The copy first returns free memory to the system, because memory that is used again hides how much a call needs, and
    collects no garbage of its parent meanwhile, which would hide it too.
    """
    results = []
    for measure in measurements:
        receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

        def work(measure: Callable[[], T] = measure, sender: Connection = sender) -> None:
            gc.disable()
            ctypes.CDLL(None).malloc_trim(0)
            sender.send(measure())

        with forked(work):
            assert receiver.poll(timeout=120)
            results.append(receiver.recv())
    return results


def measured_afresh(measure: Callable[[], T]) -> T:
    """The result of such a function in a new process, whose heap has no gaps that this one's tests have left.

    What is allocated between gaps takes more pages: a trace took 17 to 20 MB in new processes, and up to 28 MB in
    copies of one that had run hundreds of tests.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure).result(timeout=120)
