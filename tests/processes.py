"""Child processes of the tests: copies of this one that are killed while they work, and new ones."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path


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


MEASURE = """
import json, os, sys
from benchmark_scripts import benchmark
load_memory, causal_trace = benchmark("load_memory"), benchmark("causal_trace")
for call in sys.argv[1:]:
    if os.fork() == 0:
        print(json.dumps(eval(call)), flush=True)
        os._exit(0)
    os.wait()
"""


def measured_in_a_new_process(*calls: str) -> list[dict[str, float]]:
    """Results of calls of scripts of `benchmarks/`, such as "load_memory.measure(...)", in copies of one new process.

    In an old process, memory that was freed would hide how much a call needs.
    """
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", MEASURE, *calls]
    lines = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout.splitlines()
    assert len(lines) == len(calls)
    return [json.loads(line) for line in lines]
