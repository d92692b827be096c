"""Sorts items, such as prompts, into batches by length."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")


def by_length(items: Sequence[T], length: Callable[[T], int], size: int, mixed: bool = False) -> list[list[T]]:
    """Batches of at most `size` items, sorted by length. Unless `mixed`, all items of a batch have the same length.

    Raises:
        ValueError: `size` is less than 1.
    """
    if size < 1:
        raise ValueError(f"batch_size={size}; it must be at least 1")
    ordered = sorted(items, key=length)
    groups = [ordered] if mixed else [list(group) for _, group in groupby(ordered, key=length)]
    return [group[start : start + size] for group in groups for start in range(0, len(group), size)]
