"""What the numbers of a command may be, checked as they are read: before a model is loaded, and in a dry run too."""

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any, Any, Any], Any]
SEEDS = 2**64  # those of torch's generators


def at_least(least: int) -> Check:
    """The check of a whole number, or of each of several."""
    return _check(lambda number: number >= least, f"it must be at least {least}")


def not_negative() -> Check:
    """The check of a finite number, 0 or more."""
    return _check(lambda number: 0 <= number < math.inf, "it must be a finite number, 0 or more")


def positive() -> Check:
    """The check of a finite number above 0."""
    return _check(lambda number: 0 < number < math.inf, "it must be a finite number above 0")


def seed() -> Check:
    """The check of a seed."""
    return _check(lambda number: 0 <= number < SEEDS, f"a seed is a whole number from 0 to {SEEDS - 1}")


def _check(fits: Callable[[Any], bool], rule: str) -> Check:
    def check(context: Any, param: Any, value: Any) -> Any:  # as typer calls it, by position
        for number in value if isinstance(value, list | tuple) else [value]:
            if number is not None and not fits(number):
                raise ValueError(f"{max(param.opts, key=len)} {number}; {rule}")
        return value

    return check
