"""Strict JSON: text without NaN and infinity, which most readers refuse, and files that are read strictly.

A number that is not finite is written as null, and listed at the top level of the document under `not_finite` with its
value: `{"p": null, "not_finite": {"/p": "NaN"}}`. The keys are JSON pointers (RFC 6901). `from_json` restores the
numbers.

Repeated keys, half surrogate pairs and values nested too deep are refused in reading: Python's reader would accept each
of them with a meaning that the file's author did not intend.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

NOT_FINITE = "not_finite"
BLANKS = " \t\n\r"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def to_json(data: Any, indent: int | None = None) -> str:
    """A document as strict JSON.

    Args:
        data: Mappings, lists, tuples, strings, numbers (numpy's too) and None.

    Raises:
        TypeError: The data contains something else, such as a tensor; the message says where.
        ValueError: A text contains half of a surrogate pair.
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
    text = json.dumps(document, indent=indent, allow_nan=False)
    if _SURROGATE.search(text):
        try:
            json.dumps(document, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{error.object[max(error.start - 20, 0) : error.end + 20]!r} contains half of a surrogate pair, which "
                "no reader of JSON takes; write the whole character"
            ) from None
    return text


def from_json(text: str | bytes) -> Any:
    """The data that `to_json` wrote, with the numbers that are not finite restored."""
    return restore_numbers(json.loads(text))


def restore_numbers(data: Any) -> Any:
    """Restore, in place, the numbers that are not finite of a parsed document; returns the document.

    Raises:
        ValueError: The list of these numbers does not fit the document.
    """
    not_finite = data.pop(NOT_FINITE, None) if isinstance(data, dict) else None
    try:
        for pointer, number in (not_finite or {}).items():
            *path, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
            container = data
            for part in path:
                container = container[_key(container, part)]
            container[_key(container, last)] = float(number)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its list of numbers that are not finite does not fit: {not_finite!r:.60}") from error
    return data


def as_json(data: Any) -> Any:
    """`data` after a round trip through JSON: lists for tuples, strings for keys, plain numbers for numpy's."""
    return from_json(to_json(data))


class JsonError(ValueError):
    """Text that is not valid under the strict rules of this module.

    Attributes:
        reason: Description of the error, which follows the name of the text: "is not valid JSON: ...".
        offset: Index of the character at which the reader stopped or the value begins.
    """

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"the text {reason}")
        self.reason, self.offset = reason, offset


def parse_json(text: str) -> Any:
    """The JSON value of a text that contains exactly one.

    Raises:
        JsonError: The text is not such a value.
    """
    if text.startswith("\ufeff"):
        raise JsonError("is not valid JSON: it begins with a BOM; save it as UTF-8 without one", 0)
    start = len(text) - len(text.lstrip(BLANKS))
    try:
        content = _DECODER.decode(text)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except _RepeatedKey as error:
        reason = f"gives the key {error.args[0]!r} twice in one object; keep the correct one"
        raise JsonError(reason, start) from None
    except RecursionError:
        reason = "is not valid JSON for any file read here: its values are nested too deep; fetch it again"
        raise JsonError(reason, start) from None
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        reason = f"contains {half!r}, half of a surrogate pair; write the whole character, or remove it"
        raise JsonError(reason, start) from None
    except json.JSONDecodeError as error:
        what = "text follows the end of the value" if error.msg == "Extra data" else error.msg
        raise JsonError(f"is not valid JSON: {what}", error.pos) from None
    except ValueError as error:  # a number of thousands of digits
        raise JsonError(f"is not valid JSON: {error}", start) from None
    return content


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        ValueError: The file is not UTF-8, or `parse_json` refuses its text; the message names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    try:
        return parse_json(text)
    except JsonError as error:
        raise ValueError(f"{path} {error.reason} (line {text.count(chr(10), 0, error.offset) + 1})") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that contains one object; any other value raises a `ValueError` that names the file."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} should contain one JSON object, {{...}}; it contains {content!r:.60}. Fetch it again")
    return content


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


class _RepeatedKey(Exception):
    """An object of JSON gives a key twice."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise _RepeatedKey(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return content


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)
