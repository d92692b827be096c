"""JSON as the standard has it: no NaN and no infinity, which most readers refuse.

A number that is not finite is written as null, and the top of the document says under `not_finite` which ones they were
and why: `{"p": null, "not_finite": {"/p": "NaN"}}`. The keys are JSON pointers (RFC 6901). `from_json` puts the numbers
back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

NOT_FINITE = "not_finite"


def to_json(data: Any, indent: int | None = None) -> str:
    """A document, strict JSON.

    Args:
        data: mappings, lists, tuples, texts, numbers (numpy's too), None.

    Raises:
        TypeError: holds something else, such as a tensor; the text says where.
    """
    reasons: dict[str, str] = {}
    written = _plain(data, "", reasons)
    if reasons:
        if not isinstance(written, dict) or NOT_FINITE in written:
            raise ValueError(
                f"numbers that are not finite ({', '.join(reasons)}) need a mapping without {NOT_FINITE!r} around them"
            )
        written[NOT_FINITE] = reasons
    return json.dumps(written, indent=indent, allow_nan=False)


def from_json(text: str | bytes) -> Any:
    """What `to_json` wrote, numbers that are not finite put back."""
    return restore_numbers(json.loads(text))


def restore_numbers(data: Any) -> Any:
    """A document that is parsed already, its numbers that are not finite put back, in place."""
    reasons = data.pop(NOT_FINITE, None) if isinstance(data, dict) else None
    for pointer, reason in (reasons or {}).items():
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
        holder = data
        for part in path:
            holder = holder[_key(holder, part)]
        holder[_key(holder, last)] = float(reason)
    return data


def as_json(data: Any) -> Any:
    """`data` as it comes back from JSON: lists for tuples, texts for keys, plain numbers for numpy's.

    Raises:
        TypeError: as in `to_json`.
    """
    return from_json(to_json(data))


def _plain(value: Any, pointer: str, reasons: dict[str, str]) -> Any:
    if isinstance(value, str | bool | None):
        return value
    if isinstance(value, Mapping):
        texts = {_name(key): each for key, each in value.items()}
        return {name: _plain(each, f"{pointer}/{_escaped(name)}", reasons) for name, each in texts.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{pointer}/{i}", reasons) for i, each in enumerate(value)]
    if not isinstance(value, Real) and getattr(value, "ndim", None) == 0:
        return _plain(value.item(), pointer, reasons)  # numpy's booleans, arrays and tensors of one number
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        reasons[pointer] = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
        return None
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(
        f"{pointer or 'the document'} is a {type(value).__name__}{shape}, which JSON does not hold; give a plain "
        "number, text, list or mapping (of a tensor, .tolist())"
    )


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return str(int(key)) if isinstance(key, Integral) else str(key)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _key(holder: Any, part: str) -> Any:
    return int(part) if isinstance(holder, list) else part
