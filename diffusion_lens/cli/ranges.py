"""Ranges of numeric options. They are checked during parsing, before a model is loaded, and also in a dry run."""

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any, Any, Any], Any]
SEEDS = 2**64  # Number of seeds of torch's generators.
PORTS = 2**16


def at_least(least: int) -> Check:
    """Check that an integer, or each of several, is not smaller than `least`."""
    return _check(lambda number: number >= least, f"it must be at least {least}")


def not_negative(zero: str = "") -> Check:
    """Check that a number is finite and at least 0; the message may explain what 0 means."""
    return _check(
        lambda number: 0 <= number < math.inf, f"it must be a finite number, 0 {zero and f'({zero}) '}or more"
    )


def positive() -> Check:
    """Check that a number is finite and above 0."""
    return _check(lambda number: 0 < number < math.inf, "it must be a finite number above 0")


def seed() -> Check:
    """Check that an integer is a seed of torch's generators."""
    return _check(lambda number: 0 <= number < SEEDS, f"a seed is a whole number from 0 to {SEEDS - 1}")


def port() -> Check:
    """Check that an integer is a port, or 0 for a free one."""
    return _check(lambda number: 0 <= number < PORTS, f"a port is a whole number from 0 to {PORTS - 1}")


def _check(fits: Callable[[Any], bool], rule: str) -> Check:
    def check(context: Any, param: Any, value: Any) -> Any:  # Signature of a typer callback.
        for number in value if isinstance(value, list | tuple) else [value]:
            if number is not None and not fits(number):
                raise ValueError(f"{max(param.opts, key=len)} {number}; {rule}")
        return value

    return check
