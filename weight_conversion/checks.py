"""Checks of the numbers in a description of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")

# Upper bound of a count, so that a damaged config cannot exhaust the memory before a tensor is read.
MOST = 2**31 - 1
# Upper bound of the other numbers: an integer in JSON may be too large for a float.
LARGEST = 1e30


def check_positive(name: str, value: object) -> None:
    """Raise a `ValueError` unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0")


def check_count(name: str, count: object, most: int = MOST) -> None:
    """Raise a `ValueError` unless `count` is a whole number from 1 to `most`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} is {count!r}; it must be a whole number, at least 1")
    if count > most:
        raise ValueError(f"{name} is too large; it must be at most {most:,}")


def check_flag(name: str, value: object) -> None:
    """Raise a `ValueError` unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise a `ValueError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def part_from(cls: type[T], data: object, source: str) -> T:
    """A dataclass from a mapping of its fields; a `ValueError` names unknown and missing keys of `source`."""
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    required = {field.name for field in fields(cls) if field.default is MISSING}  # type: ignore[arg-type]
    if not isinstance(data, Mapping):
        raise ValueError(f"{source} is {data!r}; it must be a mapping of {sorted(names)}")
    if unknown := sorted(map(str, set(data) - names)):
        raise ValueError(f"{source} has keys that are not understood: {unknown}")
    if missing := sorted(required - set(data)):
        raise ValueError(f"{source} lacks {missing}; add them")
    values: dict[str, Any] = dict(data)
    return cls(**values)
