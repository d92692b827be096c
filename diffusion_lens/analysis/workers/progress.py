"""The progress bar of a study whose facts are computed by workers."""

import os
import time
from collections.abc import Iterable
from types import TracebackType

from tqdm.auto import tqdm

from diffusion_lens.analysis.resumable import FactFolder

_INTERVAL = 1.0  # seconds between two looks at the folder
_SHARE = 0.05  # of the time, at most, that a slow file system is read


class Progress:
    """A bar that also moves while long tasks run: it counts the files that workers have written to the study's folder.

    Args:
        ids: The facts of this process's share of the study.
        folder: Folder of the study; without one, the bar moves when tasks end.
        unit: What the bar calls a fact.
        shown: Whether there is a bar.
    """

    def __init__(self, ids: Iterable[str], folder: FactFolder | None, unit: str, shown: bool) -> None:
        ids = list(ids)
        self._folder = folder if shown else None
        self._files = {folder.file(fact_id).name for fact_id in ids} if folder and shown else set()
        self._ended = 0
        self._next_look = 0.0
        self._bar = tqdm(total=len(ids), desc=f"{unit}s", unit=unit, disable=not shown)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, n_facts: int) -> None:
        """Count facts of a task that has ended, or that are in the folder from an earlier call."""
        self._ended += n_facts
        self._show(self._ended)

    def look(self) -> None:
        """Count the files in the folder, unless that was done a moment ago."""
        now = time.monotonic()
        if self._folder is None or now < self._next_look:
            return
        with os.scandir(self._folder.path) as entries:
            self._show(sum(entry.name in self._files for entry in entries))
        self._next_look = now + max(_INTERVAL, (time.monotonic() - now) / _SHARE)

    def _show(self, n_facts: int) -> None:
        # Facts that failed have no file, and tasks that still run have files: what is larger counts.
        self._bar.update(max(0, n_facts - self._bar.n))
