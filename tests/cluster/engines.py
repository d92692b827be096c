"""Studies for the tests with real engines, and an accident that kills a worker in the middle of a task."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusion_lens.analysis import average_indirect_effect
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import recall_by_steps

FACTS = toy_facts.load().facts()[:6]
STUDIES: dict[str, Callable[..., Any]] = {
    "aie": lambda model, **more: average_indirect_effect(model, FACTS, samples=2, known="all", **more),
    "recall": lambda model, **more: recall_by_steps(model, FACTS, [1, 4], temperature=0.5, batch_size=2, **more),
}


def assert_same(one: Any, other: Any) -> None:
    """Equal to the bit."""
    ours, theirs = one.by_fact(), other.by_fact()
    assert list(ours) == list(theirs) == [fact.id for fact in FACTS]
    assert all(result.equals(theirs[fact_id]) for fact_id, result in ours.items())


class Accident:
    """A hook that stops the first worker that runs it, so that it can be killed in the middle of a task."""

    def __init__(self, folder: Path) -> None:
        self.marker = folder / "accident"

    @contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Attach the hook, and kill the worker that stops at it."""
        killer = threading.Thread(target=self._kill)
        killer.start()
        with model.hooks(fwd_hooks=[("hook_embed", stop_once(str(self.marker)))]):
            yield
        killer.join()

    def _kill(self) -> None:
        while not self.marker.exists() or not (pid := self.marker.read_text()):
            time.sleep(0.1)
        os.kill(int(pid), signal.SIGKILL)


def stop_once(marker: str) -> Callable[..., None]:
    def hook(activation: Any, hook: Any) -> None:
        import os
        import time

        try:
            file = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(file, str(os.getpid()).encode())
        time.sleep(600)

    return hook
