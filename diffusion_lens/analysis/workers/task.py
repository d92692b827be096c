"""A task: a chunk of the facts of a study, and its computation in a worker."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.analysis.resumable import FactFolder, study_digest
from diffusion_lens.analysis.workers.job import Compute, Job
from diffusion_lens.analysis.workers.model_copy import AnotherNetwork, ModelCopy


@dataclass(frozen=True)
class SharedFolder:
    """The folder of a study, for workers that can see it.

    Attributes:
        path: Absolute path.
        digest: Digest of the study's record, by which a worker recognises the folder.
    """

    path: Path
    digest: str

    def open(self) -> FactFolder | None:
        """The folder, or `None` if this machine has no such folder or another one at this path."""
        try:
            folder = FactFolder.open(self.path)
        except (OSError, ValueError):
            return None
        return folder if study_digest(folder.record) == self.digest else None


@dataclass(frozen=True)
class Done:
    """What became of one fact.

    Attributes:
        fact: Id of the fact.
        result: Its result; `None` if the worker has written it to the study's folder, or failed.
        error: Why it failed, or `None`.
    """

    fact: str
    result: Any = None
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a worker returns.

    Attributes:
        done: What became of each fact.
        refused: Why the worker cannot compute anything of this study, or `None`.
    """

    done: Sequence[Done] = ()
    refused: str | None = None


@dataclass(frozen=True)
class Task:
    """Some batches of a study.

    Attributes:
        job: What is computed of these facts.
        batches: Ids of the facts that are computed together.
        model: The model; `None` in a study that trains its own.
        folder: Folder of the study; `None` if nothing is written.
        threads: Number of torch's threads.
    """

    job: Job
    batches: Sequence[Sequence[str]]
    model: ModelCopy | None
    folder: SharedFolder | None
    threads: int

    @property
    def n_facts(self) -> int:
        """Number of facts."""
        return sum(map(len, self.batches))


def run_task(task: Task) -> Outcome:
    """Compute a task in this process. A fact that raises an error does not stop the others.

    Facts that are in the folder already, from an earlier attempt, are not computed again.
    """
    folder = task.folder.open() if task.folder else None
    try:
        with _threads(task.threads), task.model.ready() if task.model else nullcontext() as model:
            compute = task.job.on(model)
            return Outcome([done for batch in task.batches for done in _of_batch(compute, batch, folder)])
    except AnotherNetwork as error:
        return Outcome(refused=str(error))


def _of_batch(compute: Compute, batch: Sequence[str], folder: FactFolder | None) -> Iterator[Done]:
    missing = [fact_id for fact_id in batch if folder is None or not folder.has(fact_id)]
    try:
        results = compute(batch) if missing else [None] * len(batch)
    except Exception as error:  # whatever it is, it belongs to these facts and not to the others
        yield from (Done(fact_id, error=f"{type(error).__name__}: {error}") for fact_id in batch)
        return
    for fact_id, result in zip(batch, results, strict=True):
        if folder is None:
            yield Done(fact_id, result)
            continue
        if fact_id in missing:
            folder.save(fact_id, result)
        yield Done(fact_id)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
