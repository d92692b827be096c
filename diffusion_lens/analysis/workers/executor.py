"""Executors, and how work is spread over their workers.

Any object with the `submit` of `concurrent.futures.Executor` will do: the standard pools, `LocalWorkers`, Dask's
`client.get_executor()`, the executors of submitit, mpi4py and loky.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from diffusion_lens.settings import at_least


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
        threads: Number of torch's threads in a worker; by default that of this process. Sums may have another order,
            and their last bits may differ, on another number of threads.
        ahead: Number of tasks that are submitted at a time where results are added up in order (`second_moment`), the
            first that has not ended included. This process may have to keep the results of all but that one. By
            default as many as take 4 GiB, at least 4.
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
