"""Numbers that a caller gives as settings: refused when they are of the wrong kind, and kept as Python's own.

NumPy's and torch's scalars are taken too; as they are, no result could record them.
"""

import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex


def whole_number(name: str, value: Any) -> int:
    """`value` as an int; a `TypeError` unless it is one. A bool counts as none, and so does a float like 3.0."""
    if not _is_bool(value):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}={value!r} is {_kind(value)}; it must be a whole number, written without a decimal point")


def whole_numbers(name: str, value: SupportsIndex | Iterable[SupportsIndex]) -> list[int]:
    """One whole number or several, as a list."""
    several = value.tolist() if hasattr(value, "tolist") else value  # of arrays and tensors
    if isinstance(several, Iterable) and not isinstance(several, str | bytes):
        return [whole_number(name, each) for each in several]
    return [whole_number(name, several)]


def plain_number(name: str, value: Any) -> float:
    """`value` as a float; a `TypeError` unless it is a single number. A bool counts as none."""
    if not _is_bool(value) and not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # the last two from arrays and tensors of several numbers
            pass
    raise TypeError(f"{name}={value!r} is {_kind(value)}; it must be a number")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _kind(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
