"""Many refusals in one test: every wrong value is tried, and those that are not refused are listed together."""

import re
from collections.abc import Callable, Iterable
from typing import Any


def unrefused(
    call: Callable[..., Any], cases: Iterable[tuple[dict[str, Any], str]], error: type[Exception] = ValueError
) -> list[str]:
    """The cases (options, message) in which `call(**options)` does not raise this error with this message."""
    offenders = []
    for options, message in cases:
        try:
            call(**options)
        except error as refusal:
            if not re.search(message, str(refusal)):
                offenders.append(f"{options}: expected {message!r}, got {str(refusal)!r}")
        else:
            offenders.append(f"{options}: accepted, expected {message!r}")
    return offenders
