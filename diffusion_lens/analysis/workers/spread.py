"""Spread the facts of a study over the workers of an executor, and collect their results.

Any object with the `submit` of `concurrent.futures.Executor` will do: the standard pools, `LocalWorkers`, Dask's
`client.get_executor()`, the executors of submitit, mpi4py and loky. A future that ends with an error means that its
worker died (errors of single facts are results): the task is submitted again, and where the study has a folder that
workers see, only what is missing is computed again.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from tqdm.auto import tqdm

from diffusion_lens.analysis.resumable import FactFolder, study_digest
from diffusion_lens.analysis.workers.job import Job
from diffusion_lens.analysis.workers.model_copy import ModelCopy
from diffusion_lens.analysis.workers.task import Done, SharedFolder, Task, run_task
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import at_least

TASKS = 64  # of a study, by default
_POLL = 1.0  # seconds


@runtime_checkable
class Submits(Protocol):
    """An executor: `concurrent.futures.Executor`, or one of submitit."""

    def submit(self, fn: Callable[..., Any], *args: Any) -> Any: ...


@dataclass(frozen=True)
class Workers:
    """How a study is spread over workers, for `executor=`.

    Attributes:
        executor: The executor.
        facts_per_task: Number of facts in a task, rounded up to whole batches; by default a 64th of the study.
        retries: Number of times that a task whose worker died is submitted again.
        device: Kind of device of the workers, "cpu" or "cuda"; by default that of the model.
        threads: Number of torch's threads in a worker; by default that of this process. Sums may have another order,
            and their last bits may differ, on another number of threads.
    """

    executor: Executor | Submits
    facts_per_task: int | None = None
    retries: int = 2
    device: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.executor, Submits):
            raise TypeError(f"executor={self.executor!r} has no submit(); give a concurrent.futures.Executor")
        for name in ("facts_per_task", "threads"):
            if getattr(self, name) is not None:
                at_least(1, name, getattr(self, name))
        at_least(0, "retries", self.retries)

    @classmethod
    def of(cls, executor: "Executor | Submits | Workers") -> "Workers":
        """An executor with the default settings; `Workers` are returned as they are."""
        return executor if isinstance(executor, Workers) else cls(executor)


Executes = Executor | Submits | Workers


@dataclass(frozen=True)
class Work:
    """What is spread.

    Attributes:
        model: Model of the study; `None` if it trains its own.
        job: What is computed.
        batches: Ids of the facts that are computed together.
        neighbours: Groups of facts that share work, so that a task should contain whole groups.
        folder: Folder of the study; `None` if nothing is written.
        unit: What the progress bar calls a fact.
    """

    model: DiffusionTransformer | None
    job: Job
    batches: Sequence[Sequence[str]]
    neighbours: Sequence[Sequence[str]]
    folder: FactFolder | None
    unit: str

    def tasks(self, workers: Workers) -> list[Task]:
        """The tasks, of batches that are not in the folder yet.

        Raises:
            ValueError: The model or its hooks cannot be had by other processes.
        """
        has = self.folder.has if self.folder else lambda fact_id: False
        batches = [batch for batch in self.batches if not all(has(fact_id) for fact_id in batch)]
        if not batches:
            return []
        place = {fact_id: i for i, group in enumerate(self.neighbours) for fact_id in group}
        batches.sort(key=lambda batch: place.get(batch[0], 0))
        size = workers.facts_per_task or -(-sum(map(len, batches)) // TASKS)
        model = None if self.model is None else ModelCopy.of(self.model, workers.device)
        shared = SharedFolder(self.folder.path.absolute(), study_digest(self.folder.record)) if self.folder else None
        threads = workers.threads or torch.get_num_threads()
        return [
            Task(self.job.part([fact_id for batch in chunk for fact_id in batch]), chunk, model, shared, threads)
            for chunk in _chunks(batches, size)
        ]


def spread(
    work: Work, executor: Executes, load: Callable[[Path], Any], progress: bool
) -> tuple[list[tuple[str, Any]], dict[str, str]]:
    """Compute what is not in the folder yet on the workers.

    Args:
        load: Function that reads the result of a fact from its file.

    Returns:
        The results of all facts with their ids, and the errors of the facts that failed.

    Raises:
        ValueError: A worker does not get the network of the study.
        RuntimeError: A task was given up after its workers died, or the executor takes no more tasks. What was
            computed is in the folder.
    """
    workers = Workers.of(executor)
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    tasks = work.tasks(workers)
    n_facts = sum(map(len, work.batches))
    with tqdm(total=n_facts, desc=f"{work.unit}s", unit=work.unit, disable=not progress) as bar:
        bar.update(n_facts - sum(task.n_facts for task in tasks))
        for done in _run(tasks, workers, bar):
            if done.error is not None:
                failed[done.fact] = done.error
            elif work.folder is None:
                results[done.fact] = done.result
            elif done.result is not None and not work.folder.has(done.fact):
                work.folder.save(done.fact, done.result)
    if work.folder is None:
        return list(results.items()), failed
    ids = [fact_id for batch in work.batches for fact_id in batch if fact_id not in failed]
    if unseen := [fact_id for fact_id in ids if not work.folder.has(fact_id)]:
        raise RuntimeError(
            f"workers have written {len(unseen)} {work.unit}s to {work.folder.path} that this process does not see, "
            f"first {unseen[0]!r}. A network file system may show them later: call again"
        )
    return [(fact_id, load(work.folder.file(fact_id))) for fact_id in ids], failed


def _run(tasks: Sequence[Task], workers: Workers, bar: Any) -> Iterator[Done]:
    """What became of every fact, task by task as they end."""
    attempts = dict.fromkeys(range(len(tasks)), 0)
    running: dict[Any, int] = {}
    try:
        _submit(range(len(tasks)), tasks, workers, running)
        while running:
            died = []
            for future in _ended(running):
                number = running.pop(future)
                try:
                    outcome = future.result()
                except Exception as error:
                    attempts[number] += 1
                    if attempts[number] > workers.retries:
                        raise _given_up(tasks[number], attempts[number], error) from error
                    died.append(number)
                    continue
                if outcome.refused:
                    raise ValueError(outcome.refused)
                bar.update(tasks[number].n_facts)
                yield from outcome.done
            _submit(died, tasks, workers, running)
    finally:
        for future in running:
            future.cancel()


def _submit(numbers: Sequence[int] | range, tasks: Sequence[Task], workers: Workers, running: dict[Any, int]) -> None:
    if not numbers:
        return
    # submitit sends what is submitted in one `batch` as one array of jobs.
    together: Callable[[], AbstractContextManager[Any]] = getattr(workers.executor, "batch", nullcontext)
    try:
        with together():
            futures = [(workers.executor.submit(run_task, tasks[number]), number) for number in numbers]
    except (BrokenExecutor, RuntimeError) as error:
        raise RuntimeError(
            f"the executor takes no more tasks: {error}. A ProcessPoolExecutor breaks when one of its processes dies; "
            "LocalWorkers does not. What was computed is in out=, if it was given: call again to compute the rest"
        ) from error
    running.update(futures)


def _ended(running: Mapping[Any, int]) -> list[Any]:
    """The futures that have ended; waits until there is one."""
    if all(isinstance(future, Future) for future in running):
        return list(wait(running, return_when=FIRST_COMPLETED).done)
    while not (ended := [future for future in running if future.done()]):
        time.sleep(_POLL)
    return ended


def _chunks(batches: Sequence[Sequence[str]], size: int) -> Iterator[list[Sequence[str]]]:
    """Consecutive batches with at least so many facts; the last chunk may have fewer."""
    chunk: list[Sequence[str]] = []
    for batch in batches:
        chunk.append(batch)
        if sum(map(len, chunk)) >= size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _given_up(task: Task, attempts: int, error: Exception) -> RuntimeError:
    first = next(iter(task.batches[0]))
    return RuntimeError(
        f"the worker of the task that begins with {first!r} died {attempts} times, last with {type(error).__name__}: "
        f"{error}. What was computed is in out=, if it was given; call again to compute the rest"
    )
