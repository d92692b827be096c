"""Batches of items by length, such as prompts."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")


def by_length(items: Sequence[T], length: Callable[[T], int], size: int, mixed: bool = False) -> list[list[T]]:
    """`items` sorted by length, at most `size` in one batch; unless `mixed`, only equally long ones share one.

    Raises:
        ValueError: `size` is less than 1.
    """
    if size < 1:
        raise ValueError(f"batch_size={size}; a batch holds at least 1")
    ordered = sorted(items, key=length)
    groups = [ordered] if mixed else [list(group) for _, group in groupby(ordered, key=length)]
    return [group[start : start + size] for group in groups for start in range(0, len(group), size)]
