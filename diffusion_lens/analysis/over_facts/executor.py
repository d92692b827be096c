"""Long calls on the workers of an executor: processes of this machine, Dask, Slurm (submitit), MPI, Ray.

Any object with the `submit` of `concurrent.futures.Executor` will do: the standard pools, `LocalWorkers`, Dask's
`client.get_executor()`, the executors of submitit, mpi4py and loky. How workers start, queue and get their GPUs belongs
to these. Here a call is split into tasks, and each worker loads the model itself, and proves that it got the same
network. A future that ends with an error means that its worker died, or that something of its machine failed: the task
is submitted again. Errors of the computation are results (`_Outcome`).
"""

import hashlib
import multiprocessing
import os
import pickle
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import cloudpickle
import torch

from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer, load_source
from diffusion_lens.loading.source import Source
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import name_of, run_of
from diffusion_lens.records.results import differences, provenance
from diffusion_lens.settings import at_least

_POLL = 1.0  # seconds between two looks at futures


# ---- Executors


@runtime_checkable
class Submits(Protocol):
    """An executor: `concurrent.futures.Executor`, or one of submitit."""

    def submit(self, fn: Callable[..., Any], *args: Any) -> Any: ...


@dataclass(frozen=True)
class Workers:
    """How work is spread over workers, for `executor=`.

    Attributes:
        executor: The executor.
        facts_per_task: Number of facts in a task of a study, rounded up to whole batches; by default what is
            left of the study is split into `tasks`.
        retries: Number of times that a task whose worker died is submitted again. A worker that wrote a result to the
            folder of the study before it died, for example at the time limit of its job, does not count.
        device: Kind of device of the workers, "cpu" or "cuda"; by default that of the model.
        threads: Number of torch's threads in a worker; by default that of this process. On another number sums may
            differ in their last bits.
        ahead: Number of tasks that are submitted at a time where results are added up in order (`second_moment`), all
            but one of which this process may have to keep. By default as many as take 4 GiB, at least 4.
        tasks: Number of tasks of a study, without `facts_per_task`. A few for each worker let fast ones do more.
    """

    executor: Executor | Submits
    facts_per_task: int | None = None
    retries: int = 2
    device: str | None = None
    threads: int | None = None
    ahead: int | None = None
    tasks: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.executor, Submits):
            raise TypeError(f"executor={self.executor!r} has no submit(); give a concurrent.futures.Executor")
        for name in ("facts_per_task", "threads", "ahead", "tasks"):
            if getattr(self, name) is not None:
                at_least(1, name, getattr(self, name))
        at_least(0, "retries", self.retries)

    @classmethod
    def of(cls, executor: "Executor | Submits | Workers") -> "Workers":
        """An executor with the default settings; `Workers` are returned as they are."""
        return executor if isinstance(executor, Workers) else cls(executor)


Executes = Executor | Submits | Workers


def with_device(record: Mapping[str, Any], executor: Executes | None) -> dict[str, Any]:
    """The record of a call, with the device of the workers that compute it if they are given another."""
    device = None if executor is None else Workers.of(executor).device
    return {**record, **({} if device is None else {"device": device})}


class LocalWorkers(Executor):
    """An executor of processes on this machine that outlives the death of a process.

    The pool of the standard library breaks altogether when one of its processes is killed, for example for memory. Here
    every process is a pool of its own: its death costs its task, and the next task gets a new process. Of several GPUs,
    the processes take one each in turn.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._own = threading.local()
        self._places = iter(range(number))  # of the threads, one for each process
        self._ending = False
        self._pools: set[ProcessPoolExecutor] = set()
        self._threads = ThreadPoolExecutor(number, "worker", lambda: self._own.__setattr__("place", next(self._places)))

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
            spawn = multiprocessing.get_context("spawn")
            pool = self._own.pool = ProcessPoolExecutor(1, spawn, _begin_process, (self._own.place,))
            self._pools.add(pool)
        try:
            future = pool.submit(fn, *args, **kwargs)
            if self._ending:  # and `shutdown` did not see the process that was started by `submit`
                _terminate(pool)
            return future.result()
        except BrokenExecutor:
            self._own.pool = None
            self._pools.discard(pool)
            raise


# ---- Tasks


@runtime_checkable
class Task(Protocol):
    """A part of a call's work, which one worker computes: an object that `pickle` can store."""

    @property
    def name(self) -> str:
        """What error messages call it, after "the task"."""

    @property
    def size(self) -> int:
        """Number of steps of the progress bar."""

    @property
    def n_kept(self) -> int:
        """Number of these steps that earlier attempts have left in a folder, as far as this process sees."""

    def compute(self, model: Any) -> Any:
        """What the worker returns, an object that `pickle` can store, computed on its copy of the model if it has one.

        After an `OSError`, something of the worker's machine failed, and the task is tried again. Any other error ends
        the call.
        """


T = TypeVar("T", bound=Task)


def run_tasks(
    tasks: Sequence[T],
    model: DiffusionTransformer | None,
    workers: Workers,
    bar: Any,
    ahead: int | None = None,
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[tuple[T, Any]]:
    """Each task with its result. What still runs is cancelled when the caller stops, by Ctrl-C too.

    Args:
        ahead: If given, results come in the order of the tasks, and no task is submitted until fewer than this number
            of earlier ones have not been given out. By default all are submitted, and results come as tasks end.

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
                        raise RuntimeError(
                            f"the worker of the task {tasks[number].name} died {deaths[number]} times, last with "
                            f"{type(error).__name__}: {error}. What was computed is in the folder of the call, if one "
                            "was given: call again to compute the rest"
                        ) from error
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


# ---- In a worker


_ONE_TASK = threading.Lock()  # The tasks of a process share its copy of the model, to which each attaches the hooks.
_LOADED: dict[str, HookedDiffusionTransformer] = {}  # the model that this process keeps
_PLACE: list[int] = []  # number of this process among `LocalWorkers`


class AnotherNetwork(ValueError):
    """A worker cannot compute with the network of the study; its message says why."""


def run_task(sent: bytes) -> bytes:
    """Compute a task. A process with several threads computes one at a time.

    Tasks and results travel as bytes: the task, how a worker gets its model (`None` if it needs none), and the number
    of torch's threads; and the outcome. If tensors were left to the executor, `multiprocessing` would send each by a
    file descriptor of its own, and a process may open about a thousand.
    """
    task, copy, threads = pickle.loads(sent)
    try:
        with _ONE_TASK, torch_threads(threads), copy.ready() if copy else nullcontext() as model:
            return packed(_Outcome(task.compute(model)))
    except OSError:
        raise
    except Exception as error:
        return packed(_Outcome(error=_as_sent(error)))


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch use this number of threads until the block ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def packed(content: Any) -> bytes:
    """A pickle, also of objects that `__main__` or a notebook defines; `pickle.loads` reads it."""
    pickled: bytes = cloudpickle.dumps(content)
    return pickled


@dataclass(frozen=True)
class ModelCopy:
    """A model as a worker loads it, and what proves that it is the same network.

    A worker loads the model by the arguments of the `from_pretrained` call that gave it, attaches the same (pickled)
    hooks, and compares what the study records of the network, before each task. On the CPU, weights that the file has
    in the model's dtype at a multiple of 64 bytes, as our files do, stay mapped from it, so that the workers of one
    machine share them. A model that was loaded with a `device_map` repeats the map.
    """

    source: Source
    device: str
    hooks: bytes
    network: dict[str, Any]

    @classmethod
    def of(cls, model: DiffusionTransformer, device: str | None) -> "ModelCopy":
        """What other processes need to load this model."""
        source: Source | None = getattr(model, "source", None)
        if source is None:
            raise ValueError(
                "workers load the model themselves, and this one was not loaded by from_pretrained: write it with "
                "model.save_pretrained(folder), and run the study on HookedDiffusionTransformer.from_pretrained(folder)"
            )
        network = provenance(model, model.cfg)
        del network["device"]
        if device is not None and source.device_map is not None:
            raise ValueError(
                f"the workers' device={device!r} does not fit a model that was loaded with device_map="
                f"{source.device_map!r}: workers place their copies by the same map, so leave device= out"
            )
        dtype = str(model.cfg.dtype).removeprefix("torch.")
        kind = device or str(model.cfg.device).partition(":")[0]
        return cls(replace(source.anywhere(), dtype=dtype), kind, _hooks_of(model), network)

    @contextmanager
    def ready(self) -> Iterator[HookedDiffusionTransformer]:
        """This process's copy of the model, with the hooks attached until the block ends."""
        try:
            model = self._load()
        except (OSError, ValueError) as error:
            raise AnotherNetwork(
                f"a worker cannot load {str(self.source.name_or_path)!r}: {error}. All workers need the same files at "
                "the same path, or the same cache of the hub"
            ) from error
        with ExitStack() as contexts:
            contexts.enter_context(model.hooks(fwd_hooks=pickle.loads(self.hooks)))
            if "time" in self.network:
                contexts.enter_context(model.at_time(self.network["time"]))
            if "blocks_from" in self.network:
                contexts.enter_context(model.at_block(self.network["blocks_from"]))
            contexts.enter_context(run_of(model))
            here = provenance(model, model.cfg)
            if different := "; ".join(differences(self.network, here, self.network)):
                raise AnotherNetwork(
                    f"a worker that loads {str(self.source.name_or_path)!r} gets another network than the study was "
                    f"called with ({different}; there is the study, here the worker). If the model was changed after "
                    "it was loaded, write it with model.save_pretrained(folder), and run the study on the model loaded "
                    "from there"
                )
            yield model

    def _load(self) -> HookedDiffusionTransformer:
        key = hashlib.sha256(pickle.dumps((self.source, self.device))).hexdigest()
        if key not in _LOADED:
            _LOADED.clear()
            device = None if self.source.device_map is not None else self.device
            if device == "cuda" and _PLACE and torch.cuda.device_count() > 1:
                device = f"cuda:{_PLACE[0] % torch.cuda.device_count()}"
            _LOADED[key] = load_source(self.source, device, mapped=True)
        return _LOADED[key]


# ---- Private helpers


@dataclass(frozen=True)
class _Outcome:
    """What a worker returns: the result of its task, or the error with which the call ends."""

    result: Any = None
    error: Exception | None = None


def _submit(
    numbers: Sequence[int], tasks: Sequence[Task], sent: tuple[Any, ...], workers: Workers, running: dict[Any, int]
) -> None:
    # submitit sends what is submitted in one `batch` as one array of jobs.
    together: Any = getattr(workers.executor, "batch", nullcontext)
    try:
        with together() if numbers else nullcontext():
            for number in numbers:
                # Dask answers equal calls by one future, which would end a second attempt by the error of the first.
                # `pickle` ignores bytes after the end of what it reads.
                content = packed((tasks[number], *sent)) + secrets.token_bytes(8)
                # Noted at once, so that an interrupt between two submissions cancels it.
                running[workers.executor.submit(run_task, content)] = number
    except (BrokenExecutor, RuntimeError) as error:
        broken = "A ProcessPoolExecutor breaks when one of its processes dies; LocalWorkers does not. "
        raise RuntimeError(
            f"the executor takes no more tasks: {error}. {broken if isinstance(error, BrokenExecutor) else ''}What was "
            "computed is in the folder of the call, if one was given: call again to compute the rest"
        ) from error


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


def _hooks_of(model: DiffusionTransformer) -> bytes:
    hooks = [(name, handle.user_hook) for name, point in model.hook_dict.items() for handle in point.fwd_hooks]
    for name, hook in hooks:
        try:
            packed(hook)
        except Exception as error:
            raise ValueError(
                f"the hook {name_of(hook)} at {name!r} cannot be sent to workers ({error}): let it refer to "
                "nothing that belongs to this process, or run the study without executor="
            ) from error
    return packed(hooks)


def _as_sent(error: Exception) -> Exception:
    """The error itself, if a pickle of it can be read again; otherwise one that says the same."""
    try:
        pickle.loads(packed(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _begin_process(place: int) -> None:
    """Leave interrupts to the process that waits for the results, which ends the others; do not outlive it."""
    _PLACE.append(place)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _terminate(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.terminate()
