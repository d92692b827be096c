"""Tasks on the workers of an executor: submitted, tried again when a worker dies, and collected.

A future that ends with an error means that its worker died, or that something of its machine failed: the task is
submitted again. Errors of the computation are results (`task.Outcome`).
"""

import pickle
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

import torch

from diffusion_lens.analysis.workers.executor import Workers
from diffusion_lens.analysis.workers.model_copy import ModelCopy
from diffusion_lens.analysis.workers.task import Task, packed, run_task
from diffusion_lens.model.transformer import DiffusionTransformer

T = TypeVar("T", bound=Task)
_POLL = 1.0  # seconds


def run_tasks(
    tasks: Sequence[T],
    model: DiffusionTransformer | None,
    workers: Workers,
    bar: Any,
    ahead: int | None = None,
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[tuple[T, Any]]:
    """Each task with its result.

    Args:
        model: Model of which each worker gets a copy; `None` if the tasks need none.
        bar: Progress bar, which moves as tasks end.
        ahead: If given, results come in the order of the tasks, and no task is submitted until fewer than this number
            of earlier ones have not been given out. By default all are submitted, and results come as tasks end.
        while_waiting: Called every second while no task ends.

    Raises:
        ValueError: The model or its hooks cannot be sent, or a worker gets another network.
        RuntimeError: A task was given up after its workers died, or the executor takes no more tasks.
        Exception: What a task raised.
    """
    if not tasks:
        return
    copy = None if model is None else ModelCopy.of(model, workers.device)
    sent = (copy, workers.threads or torch.get_num_threads())
    deaths: Counter[int] = Counter()  # of workers that had computed nothing that is kept, by number of the task
    kept: Counter[int] = Counter()
    running: dict[Any, int] = {}
    waiting: dict[int, Any] = {}  # results by number of the task, where an earlier one is still to come
    died: list[int] = []
    first = n_submitted = 0
    try:
        while True:
            end = len(tasks) if ahead is None else min(len(tasks), first + ahead)
            _submit([*died, *range(n_submitted, end)], tasks, sent, workers, running)
            died, n_submitted = [], end
            if not running:
                return
            for future in _ended(running, while_waiting):
                number = running.pop(future)
                try:
                    outcome = pickle.loads(future.result())
                except Exception as error:
                    n_kept = tasks[number].n_kept
                    if n_kept <= kept[number]:  # A task that reaches its time limit has computed something.
                        deaths[number] += 1
                    kept[number] = n_kept
                    if deaths[number] > workers.retries:
                        raise _given_up(tasks[number], deaths[number], error) from error
                    died.append(number)
                    continue
                if outcome.error is not None:
                    raise outcome.error
                bar.update(tasks[number].size)
                if ahead is None:
                    yield tasks[number], outcome.result
                else:
                    waiting[number] = outcome.result
            while first in waiting:
                yield tasks[first], waiting.pop(first)
                first += 1
    finally:
        for future in running:
            with suppress(Exception):  # one that cannot be cancelled does not keep the others
                future.cancel()


def _submit(
    numbers: Sequence[int], tasks: Sequence[Task], sent: tuple[Any, ...], workers: Workers, running: dict[Any, int]
) -> None:
    if not numbers:
        return
    # submitit sends what is submitted in one `batch` as one array of jobs.
    together: Callable[[], AbstractContextManager[Any]] = getattr(workers.executor, "batch", nullcontext)
    submitted = []
    try:
        with together():
            for number in numbers:
                # Dask answers equal calls by one future, which would end a second attempt by the error of the first.
                # `pickle` ignores bytes after the end of what it reads.
                content = packed((tasks[number], *sent)) + secrets.token_bytes(8)
                submitted.append(workers.executor.submit(run_task, content))
                running[submitted[-1]] = number  # at once, so that an interrupt between two submissions cancels it
    except (BrokenExecutor, RuntimeError) as error:
        broken = "A ProcessPoolExecutor breaks when one of its processes dies; LocalWorkers does not. "
        raise RuntimeError(
            f"the executor takes no more tasks: {error}. {broken if isinstance(error, BrokenExecutor) else ''}What was "
            "computed is in the folder of the call, if one was given: call again to compute the rest"
        ) from error
    if type(submitted[0]).__module__ == "submitit.slurm.slurm":
        from diffusion_lens.analysis.workers import slurm_queue  # which imports submitit

        slurm_queue.watch(submitted)


def _ended(running: Mapping[Any, int], while_waiting: Callable[[], None]) -> list[Any]:
    """The futures that have ended; waits until there is one."""
    while True:
        if all(isinstance(future, Future) for future in running):
            ended = list(wait(running, _POLL, FIRST_COMPLETED).done)
        elif not (ended := [future for future in running if future.done()]):
            time.sleep(_POLL)
        if ended:
            return ended
        while_waiting()


def _given_up(task: Task, deaths: int, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"the worker of the task {task.name} died {deaths} times, last with {type(error).__name__}: {error}. What "
        "was computed is in the folder of the call, if one was given: call again to compute the rest"
    )
