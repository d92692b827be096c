"""Strict reading of JSON, and atomic writing of JSON files.

Repeated keys, half surrogate pairs and values nested too deep are refused: Python's reader would accept each of them
with a meaning that the file's author did not intend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weight_conversion.json_text import to_json
from weight_conversion.whole_files import renamed_when_whole

BLANKS = " \t\n\r"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """Text that is not valid under the strict rules of this module.

    Attributes:
        reason: Description of the error, which follows the name of the text: "is not valid JSON: ...".
        offset: Index of the character at which the reader stopped or the value begins.
    """

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"the text {reason}")
        self.reason, self.offset = reason, offset


def decode_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at index `start` of a text, and the index after its end.

    Raises:
        JsonError: No JSON value begins there, or the value repeats a key, is nested too deep, or contains half of a
            surrogate pair.
    """
    try:
        content, end = _DECODER.raw_decode(text, start)
        if _SURROGATE.search(text, start, end):
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
        raise JsonError(f"is not valid JSON: {error.msg}", error.pos) from None
    except ValueError as error:  # a number of thousands of digits
        raise JsonError(f"is not valid JSON: {error}", start) from None
    return content, end


def parse_json(text: str) -> Any:
    """The JSON value of a text that contains exactly one.

    Raises:
        JsonError: `decode_json` refuses the value, or text follows it.
    """
    if text.startswith("\ufeff"):
        raise JsonError("is not valid JSON: it begins with a BOM; save it as UTF-8 without one", 0)
    content, end = decode_json(text, len(text) - len(text.lstrip(BLANKS)))
    if rest := text[end:].lstrip(BLANKS):
        raise JsonError("is not valid JSON: text follows the end of the value", len(text) - len(rest))
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
        raise ValueError(
            f"{path} should contain one JSON object, {{...}}; it contains {_KINDS.get(type(content), 'null')}. Fetch "
            "it again"
        )
    return content


def write_json(data: Any, path: Path) -> None:
    """Write strict JSON (`json_text`) under a temporary name, then rename the file."""
    with renamed_when_whole(path) as temporary:
        temporary.write_text(to_json(data, indent=2) + "\n", encoding="utf-8")


_KINDS: Mapping[type, str] = {
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


class _RepeatedKey(Exception):
    """An object of JSON gives a key twice."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKey(next(key for key in keys if keys.count(key) > 1))
    return content


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)
