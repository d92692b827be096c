"""The steps after which a training evaluates its model."""

from collections.abc import Collection
from typing import Any

from diffusion_lens.settings import whole_number


def evaluation_steps(every: int | Collection[Any], n_steps: int) -> frozenset[int]:
    """The numbers of completed steps, from 1 to `n_steps`, after which there is an evaluation; the last always is one.

    Args:
        every: Number of steps between evaluations, or the numbers of steps themselves.
        n_steps: Number of steps of the training.

    Raises:
        ValueError: There are no steps between evaluations, or a number is not a whole one from 1 to `n_steps`.
    """
    if not isinstance(every, Collection):
        if every < 1:
            raise ValueError(f"evaluate_every is {every}; it must be at least 1")
        return frozenset((*range(every, n_steps + 1, every), n_steps))
    if wrong := [each for each in every if not _is_step(each, n_steps)]:
        raise ValueError(
            f"evaluate_every contains {wrong[0]!r}; give whole numbers from 1 to {n_steps}, the number of steps, or "
            "one number of steps between evaluations"
        )
    return frozenset((*map(int, every), n_steps))


def _is_step(value: Any, n_steps: int) -> bool:
    try:
        return 1 <= whole_number("evaluate_every", value) <= n_steps
    except TypeError:
        return False
