"""Checks of the numbers that callers give as settings, which return them as Python's own numbers.

NumPy's and torch's scalars are accepted too; without the conversion, no result could record them.
"""

import math
import operator
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, SupportsFloat, SupportsIndex, TypeVar

# Annotations of such settings: Python's own numbers, NumPy's, or a tensor of one number.
Whole = SupportsIndex
Real = SupportsFloat

P = ParamSpec("P")
R = TypeVar("R")


def naming_the_nearest(function: Callable[P, R]) -> Callable[P, R]:
    """Let the `TypeError` of an unknown keyword suggest one of a similar name, or list all where none is similar."""
    known = [name for name in signature(function).parameters if name != "self"]
    called = "model" if function.__name__ == "forward" else function.__qualname__

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if unknown := [name for name in kwargs if name not in known]:
            near = get_close_matches(unknown[0], known, n=1)
            hint = f"the nearest is {near[0]!r}" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"{called}() got an unexpected keyword argument {unknown[0]!r}; {hint}")
        return function(*args, **kwargs)

    return checked


def whole_number(name: str, value: Any) -> int:
    """`value` as an int; a `TypeError` unless it is a whole number. A bool is refused, and so is a float like 3.0."""
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
        return [whole_number(name, number) for number in several]
    return [whole_number(name, several)]


def plain_number(name: str, value: Any) -> float:
    """`value` as a float; a `TypeError` unless it is a single number. A bool is refused."""
    if not _is_bool(value) and not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # the last two from arrays and tensors of several numbers
            pass
    raise TypeError(f"{name}={value!r} is {_kind(value)}; it must be a number")


def yes_or_no(name: str, value: Any) -> bool:
    """`value`; a `TypeError` unless it is a bool, because a text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is {_kind(value)}; it must be True or False")
    return value


def at_least(least: int, name: str, value: Any) -> int:
    """`value` as an int; a `ValueError` where it is below `least`."""
    number = whole_number(name, value)
    if number < least:
        raise ValueError(f"{name}={number}; it must be at least {least}")
    return number


def not_negative(name: str, value: Any) -> float:
    """`value` as a float; a `ValueError` unless it is finite and 0 or more."""
    number = plain_number(name, value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name}={number}; it must be a finite number, 0 or more")
    return number


def pick_layer(layer: Whole, n_layers: int) -> int:
    """The index of a layer, negative ones counted from the end; a `ValueError` where there is no such layer."""
    number = whole_number("layer", layer)
    if not -n_layers <= number < n_layers:
        raise ValueError(
            f"layer={number} is not one of the layers 0 to {n_layers - 1} of this model, or a negative one from the end"
        )
    return number % n_layers


def pick_indices(name: str, indices: Iterable[Whole] | None, size: int) -> list[int]:
    """Positions or layers as indices from 0 to `size` - 1: all by default, negative ones counted from the end.

    Raises:
        ValueError: no index, one out of range, or one given twice.
    """
    if indices is None:
        return list(range(size))
    given = [whole_number(name, index) for index in indices]
    if not given or any(not -size <= index < size for index in given):
        raise ValueError(f"{name}={given}; they are numbers from 0 to {size - 1}, or negative ones from the end")
    resolved = [index % size for index in given]
    if len(set(resolved)) < len(resolved):
        raise ValueError(f"{name}={given} names one twice; give each once")
    return resolved


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _kind(value: Any) -> str:
    """The type of a value with its article, such as "a float"."""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
