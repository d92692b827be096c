"""Standard JSON, without NaN and infinity, which most readers refuse.

A number that is not finite is written as null, and listed at the top level of the document under `not_finite` with its
value: `{"p": null, "not_finite": {"/p": "NaN"}}`. The keys are JSON pointers (RFC 6901). `from_json` restores the
numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

NOT_FINITE = "not_finite"


def to_json(data: Any, indent: int | None = None) -> str:
    """A document as strict JSON.

    Args:
        data: Mappings, lists, tuples, strings, numbers (numpy's too) and None.

    Raises:
        TypeError: The data contains something else, such as a tensor; the message says where.
    """
    not_finite: dict[str, str] = {}
    document = _plain(data, "", not_finite)
    if not_finite:
        if not isinstance(document, dict) or NOT_FINITE in document:
            raise ValueError(
                f"numbers that are not finite ({', '.join(not_finite)}) need a mapping without {NOT_FINITE!r} around "
                "them"
            )
        document[NOT_FINITE] = not_finite
    return json.dumps(document, indent=indent, allow_nan=False)


def from_json(text: str | bytes) -> Any:
    """The data that `to_json` wrote, with the numbers that are not finite restored."""
    return restore_numbers(json.loads(text))


def restore_numbers(data: Any) -> Any:
    """Restore, in place, the numbers that are not finite of a parsed document; returns the document."""
    not_finite = data.pop(NOT_FINITE, None) if isinstance(data, dict) else None
    for pointer, number in (not_finite or {}).items():
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
        container = data
        for part in path:
            container = container[_key(container, part)]
        container[_key(container, last)] = float(number)
    return data


def as_json(data: Any) -> Any:
    """`data` after a round trip through JSON: lists for tuples, strings for keys, plain numbers for numpy's.

    Raises:
        TypeError: As in `to_json`.
    """
    return from_json(to_json(data))


def _plain(value: Any, pointer: str, not_finite: dict[str, str]) -> Any:
    """`value` in plain Python types; numbers that are not finite are noted in `not_finite` by their pointer."""
    if isinstance(value, str | bool | None):
        return value
    if isinstance(value, Mapping):
        items = {_name(key): item for key, item in value.items()}
        return {name: _plain(item, f"{pointer}/{_escaped(name)}", not_finite) for name, item in items.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{pointer}/{i}", not_finite) for i, item in enumerate(value)]
    if not isinstance(value, Real) and getattr(value, "ndim", None) == 0:
        return _plain(value.item(), pointer, not_finite)  # numpy's booleans, arrays and tensors of one number
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        not_finite[pointer] = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
        return None
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(
        f"{pointer or 'the document'} is a {type(value).__name__}{shape}, which JSON cannot represent; give a plain "
        "number, string, list or mapping (for a tensor, .tolist())"
    )


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return str(int(key)) if isinstance(key, Integral) else str(key)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _key(container: Any, part: str) -> Any:
    return int(part) if isinstance(container, list) else part
