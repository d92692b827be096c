"""Tasks of any kind on an executor: their order, their errors, and how many are on their way."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
from executors import Here
from tqdm import tqdm

from diffusion_lens.analysis import Workers
from diffusion_lens.analysis.over_facts.executor import run_tasks


@dataclass
class Square:
    """A task without a model."""

    number: int
    error: Callable[[], Exception] | None = None
    name = "of a number"
    size = 2
    n_kept = 0

    def compute(self, model: None) -> int:
        if self.error is not None:
            raise self.error()
        return self.number**2


class Backwards(Here):
    """Ends every few tasks together; the first of them only after the next few were submitted, if there are more."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self.together, self.late = together, list[tuple[Any, ...]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.late.append((future, fn, args))
        if len(self.late) == self.together:
            for waiting, function, sent in reversed(self.late):
                waiting.set_result(super().submit(function, *sent).result())
            self.late.clear()
        return future


def collect(tasks: list[Square], pool: Here, ahead: int | None = None, **settings: Any) -> tuple[list[Any], int]:
    """Numbers with their squares as they come, and the largest number of tasks that were ahead of what had come."""
    came, most = [], 0
    with tqdm(total=2 * len(tasks), disable=True) as bar:
        for task, square in run_tasks(tasks, None, Workers(pool, **settings), bar, ahead):
            most = max(most, pool.n_tasks - len(came))
            came.append((task.number, square))
    return came, most


@pytest.mark.parametrize("deaths", [0, 2])
def test_results_come_in_order_and_few_wait(deaths: int) -> None:
    tasks = [Square(number) for number in range(8)]
    expected = [(number, number**2) for number in range(8)]
    for ahead in (1, 3, 99):
        came, most = collect(tasks, Here(deaths), ahead)
        assert came == expected
        assert most <= ahead + deaths
    assert collect(tasks, Backwards(4), 4) == (expected, 4)
    assert sorted(collect(tasks, Backwards(4))[0]) == expected
    assert collect([], Here()) == ([], 0)


class Unsendable(Exception):
    """Its pickle cannot be read."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize(
    ("error", "kind", "message", "n_tasks"),
    [
        (lambda: ZeroDivisionError("a mistake"), ZeroDivisionError, "^a mistake$", 1),
        (lambda: Unsendable(1, 2), RuntimeError, "^Unsendable: 1 and 2$", 1),
        (lambda: OSError("disk full"), RuntimeError, "task of a number died 3 times, last with OSError: disk full", 3),
    ],
)
def test_errors_end_the_call_but_those_of_a_machine_are_tried_again(
    error: Callable[[], Exception], kind: type[Exception], message: str, n_tasks: int
) -> None:
    pool = Here()
    with pytest.raises(kind, match=message):
        collect([Square(1, error)], pool)
    assert pool.n_tasks == n_tasks


def test_an_interrupt_between_two_submissions_cancels_the_first() -> None:
    submitted: list[Future[Any]] = []

    class Interrupted(Here):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if submitted:
                raise KeyboardInterrupt
            submitted.append(Future())
            return submitted[0]

    with pytest.raises(KeyboardInterrupt):
        collect([Square(1), Square(2)], Interrupted())
    assert submitted[0].cancelled()
