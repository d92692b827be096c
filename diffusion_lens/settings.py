"""Checks of numeric settings. Each returns the value as a plain Python number.

NumPy's and torch's scalars are accepted too; they are converted because results record settings as JSON.
"""

import math
import operator
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, SupportsFloat, SupportsIndex, TypeVar

# Annotations of such settings: plain Python numbers, NumPy's scalars, or a tensor of one number.
Whole = SupportsIndex
Real = SupportsFloat

P = ParamSpec("P")
R = TypeVar("R")

_RECEIVERS = ("self", "cls")


def naming_the_nearest(function: Callable[P, R]) -> Callable[P, R]:
    """Make the `TypeError` of an unknown keyword suggest the nearest one, or list all if none has a similar name."""
    known = keywords_of(function)
    called = "model" if function.__name__ == "forward" else function.__name__

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords(called, kwargs, known)
        return function(*args, **kwargs)

    return checked


def keywords_of(*functions: Callable[..., Any]) -> dict[str, None]:
    """Names of the arguments that these functions take by keyword, in order, as the keys of a dictionary."""
    parameters = [p for function in functions for p in signature(function).parameters.values()]
    by_keyword = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return dict.fromkeys(name for name in by_keyword if name not in _RECEIVERS)


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether a function has `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in signature(function).parameters.values())


def check_keywords(called: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise a `TypeError` for the first unknown keyword of a call; it suggests the nearest, or lists all."""
    if unknown := [name for name in given if name not in known]:
        near = get_close_matches(unknown[0], known, n=1)
        hint = f"the nearest is {near[0]!r}" if near else f"it takes {', '.join(known)}"
        raise TypeError(f"{called}() got an unexpected keyword argument {unknown[0]!r}; {hint}")


def whole_number(name: str, value: Any) -> int:
    """`value` as an int; a `TypeError` unless it is a whole number. Bools and floats such as 3.0 are refused."""
    if not _is_bool(value):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}={value!r} is {_kind(value)}; it must be a whole number, written without a decimal point")


def whole_numbers(name: str, value: SupportsIndex | Iterable[SupportsIndex]) -> list[int]:
    """One whole number or several, as a list."""
    plain = value.tolist() if hasattr(value, "tolist") else value  # Arrays and tensors have `tolist`.
    if isinstance(plain, Iterable) and not isinstance(plain, str | bytes):
        return [whole_number(name, number) for number in plain]
    return [whole_number(name, plain)]


def plain_number(name: str, value: Any) -> float:
    """`value` as a float; a `TypeError` unless it is a single number. A bool is refused."""
    if not _is_bool(value) and not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # Arrays and tensors of several numbers raise the last two.
            pass
    raise TypeError(f"{name}={value!r} is {_kind(value)}; it must be a number")


def yes_or_no(name: str, value: Any) -> bool:
    """`value`; a `TypeError` unless it is a bool, because a text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is {_kind(value)}; it must be True or False")
    return value


def at_least(least: int, name: str, value: Any, reason: str = "") -> int:
    """`value` as an int; a `ValueError`, which may end with a reason, if it is below `least`."""
    number = whole_number(name, value)
    if number < least:
        raise ValueError(f"{name}={number}; it must be at least {least}{reason and f', because {reason}'}")
    return number


def not_negative(name: str, value: Any, zero: str = "") -> float:
    """`value` as a float; a `ValueError`, which may explain what 0 means, unless it is finite and 0 or more."""
    number = plain_number(name, value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name}={number}; it must be a finite number, 0 {zero and f'({zero}) '}or more")
    return number


def pick_layer(layer: Whole, n_layers: int) -> int:
    """The index of a layer; negative numbers count from the end. A `ValueError` if there is no such layer."""
    number = whole_number("layer", layer)
    if not -n_layers <= number < n_layers:
        raise ValueError(
            f"layer={number} is not one of the layers 0 to {n_layers - 1} of this model; negative numbers down to "
            f"{-n_layers} count from the end"
        )
    return number % n_layers


def pick_indices(name: str, indices: Iterable[Whole] | None, size: int) -> list[int]:
    """Positions or layers as indices from 0 to `size` - 1; negative numbers count from the end, `None` selects all.

    Raises:
        ValueError: There is no index, one is out of range, or one is given twice.
    """
    if indices is None:
        return list(range(size))
    numbers = [whole_number(name, index) for index in indices]
    if not numbers or any(not -size <= index < size for index in numbers):
        raise ValueError(f"{name}={numbers}; give numbers from 0 to {size - 1}, or negative ones from the end")
    resolved = [index % size for index in numbers]
    if len(set(resolved)) < len(resolved):
        raise ValueError(f"{name}={numbers} contains duplicates; give each once")
    return resolved


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _kind(value: Any) -> str:
    """The type of a value with its article, such as "a float"."""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
