"""Studies for the tests with real engines, hooks that stop workers, and what happens to a worker that has stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from diffusion_lens.analysis import average_indirect_effect
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.interventions import named

FACTS = toy_facts.load().facts()[:6]
STUDIES: dict[str, Callable[..., Any]] = {
    "aie": lambda model, **more: average_indirect_effect(model, FACTS, samples=2, known="all", **more),
    "recall": lambda model, **more: recall_by_steps(model, FACTS, [1, 4], temperature=0.5, batch_size=2, **more),
}
# Commands of the command line.
AIE = ["aie", "tiny-mdm", "--trained", "p2d", "--limit", "2", "--samples", "2", "--device", "cpu"]
RECALL = ["recall", "tiny-mdm", "--limit", "3", "--steps", "1", "--steps", "4", "--device", "cpu"]
PATIENCE = 240.0  # seconds: the longest that anything here waits

T = TypeVar("T")


def assert_same(one: Any, other: Any) -> None:
    """Equal to the bit."""
    ours, theirs = one.by_fact(), other.by_fact()
    assert list(ours) == list(theirs) == [fact.id for fact in FACTS]
    assert all(result.equals(theirs[fact_id]) for fact_id, result in ours.items())


def until(look: Callable[[], T], what: str, given_up: Event | None = None) -> T:
    """The first true value of a function, which is called again and again for some time."""
    deadline = time.monotonic() + PATIENCE
    while not (value := look()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        assert given_up is None or not given_up.is_set(), f"the study ended before there was {what}"
        time.sleep(0.05)
    return value


def files(folder: Path) -> list[Path]:
    """The results in the folder of a study."""
    return list(folder.glob("*.safetensors"))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextmanager
def accident(model: Any, folder: Path, strike: Callable[[int], None] = kill) -> Iterator[None]:
    """The first worker that runs the model stops in the middle of its task, and something happens to it.

    Args:
        strike: What happens, a function of the number of the stopped process.
    """
    marker = folder / "accident"

    def pid() -> int:
        return int(marker.read_text() or 0) if marker.exists() else 0

    with model.hooks(fwd_hooks=[("hook_embed", stop_once(str(marker)))]), meanwhile(pid, "a worker", strike):
        yield


@contextmanager
def interrupt(model: Any, study: Path) -> Iterator[None]:
    """All workers stop when the folder has its first result; then comes Ctrl-C. They go on when the block ends."""
    on = study.with_name("go on")
    try:
        with (
            model.hooks(fwd_hooks=[("hook_embed", stop_after_a_fact(str(study), str(on)))]),
            meanwhile(lambda: files(study), "a result", lambda _: os.kill(os.getpid(), signal.SIGINT)),
        ):
            yield
    finally:
        on.touch()


@contextmanager
def meanwhile(look: Callable[[], T], what: str, act: Callable[[T], None]) -> Iterator[None]:
    """Wait for something in a thread, and act on it while the block runs."""
    ended = Event()
    with ThreadPoolExecutor(1) as thread:
        action = thread.submit(lambda: act(until(look, what, ended)))
        try:
            yield
        finally:
            ended.set()
        action.result()


# The hooks are functions in functions, which cloudpickle sends as they are: workers cannot import this module.
def stop_once(marker: str, patience: float = PATIENCE) -> Callable[..., None]:
    def hook(activation: Any, hook: Any) -> None:
        import os
        import time

        try:
            file = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(file, str(os.getpid()).encode())
        time.sleep(patience)

    return named("stops once", hook)


def stop_after_a_fact(study: str, go_on: str, patience: float = PATIENCE) -> Callable[..., None]:
    def hook(activation: Any, hook: Any) -> None:
        import glob
        import os
        import time

        deadline = time.monotonic() + patience
        while glob.glob(study + "/*.safetensors") and not os.path.exists(go_on) and time.monotonic() < deadline:
            time.sleep(0.05)

    return named("stops after a fact", hook)


def tally(log: str) -> Callable[..., None]:
    """Notes the process, and how many forward passes its copy of the model has run."""

    def hook(activation: Any, hook: Any) -> None:
        import os
        import sys
        import weakref

        # Of this process. An attribute of the hook point would make the model another one.
        passes = vars(sys).setdefault("passes_by_copy", weakref.WeakKeyDictionary())
        passes[hook] = passes.get(hook, 0) + 1
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {passes[hook]}\n")

    return named("counts passes", hook)


def processes(marked: str) -> dict[int, str]:
    """The command lines of the processes that were started with a variable in their environment, this one excepted."""
    found = {}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        pid = int(environ.parent.name)
        with suppress(OSError):  # it has ended
            if pid != os.getpid() and marked.encode() in environ.read_bytes().split(b"\0"):
                found[pid] = (environ.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def reported(*arguments: str, out: Path) -> dict[str, Any]:
    """The numbers that a command of the command line reports."""
    asked = [sys.executable, "-m", "diffusion_lens", *arguments, "--out", str(out), "--json"]
    done = subprocess.run(asked, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    numbers: dict[str, Any] = json.loads(done.stdout)["results"]
    return numbers
