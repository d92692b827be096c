"""What a study computes, without the model: a plain object that another process can be sent."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

Compute = Callable[[Sequence[str]], Sequence[Any]]


@runtime_checkable
class Job(Protocol):
    """The computation of a study, which `pickle` can store. Its numbers depend on the ids of a batch alone."""

    def part(self, ids: Sequence[str]) -> "Job":
        """The same job with what these facts need and nothing else, so that little is sent."""

    def on(self, model: Any) -> Compute:
        """The function that computes the results of a batch of facts, in order, on a model.

        Args:
            model: The model of the study; `None` in a study that trains its own.
        """
