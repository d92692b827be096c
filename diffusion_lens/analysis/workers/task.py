"""A task, and its computation in a worker.

Tasks and results travel as bytes. If tensors were left to the executor, `multiprocessing` would send each by a file
descriptor of its own, and a process may open about a thousand.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import cloudpickle
import torch

from diffusion_lens.analysis.workers.model_copy import ModelCopy

_ONE_TASK = Lock()  # The tasks of a process share its copy of the model, to which each attaches the hooks.


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
        """What the worker returns; an object that `pickle` can store.

        Args:
            model: The worker's copy of the model; `None` in a study that trains its own.

        Raises:
            OSError: Something of the worker's machine failed. The task is tried again.
            Exception: The call cannot be computed. It ends with this error.
        """


@dataclass(frozen=True)
class Outcome:
    """What a worker returns: the result of its task, or the error with which the call ends."""

    result: Any = None
    error: Exception | None = None


def packed(content: Any) -> bytes:
    """A pickle, also of objects that `__main__` or a notebook defines; `pickle.loads` reads it."""
    pickled: bytes = cloudpickle.dumps(content)
    return pickled


def run_task(sent: bytes) -> bytes:
    """Compute a task. A process with several threads computes one at a time.

    Args:
        sent: Packed: the task, how a worker gets its model (`None` if it needs none), the number of torch's threads.

    Returns:
        The outcome, packed.
    """
    task, copy, threads = pickle.loads(sent)
    return packed(_outcome(task, copy, threads))


def _outcome(task: Task, copy: ModelCopy | None, threads: int) -> Outcome:
    try:
        with _ONE_TASK, torch_threads(threads), copy.ready() if copy else nullcontext() as model:
            return Outcome(task.compute(model))
    except OSError:
        raise
    except Exception as error:
        return Outcome(error=_as_sent(error))


def _as_sent(error: Exception) -> Exception:
    """The error itself, if a pickle of it can be read again; otherwise one that says the same."""
    try:
        pickle.loads(packed(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch use this number of threads until the block ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
