"""JSON read strictly, and files of it written whole or not at all.

A key that stands twice, a text that no file can hold and a value nested past all use are refused, because each of them
would otherwise be taken for something that the file's author did not mean.
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
    """Text that is no JSON as it is read here.

    Attributes:
        said: what is wrong, to follow the name of the text: "is not valid JSON: ...".
        place: the character at which the reader stopped, or the value begins.
    """

    def __init__(self, said: str, place: int) -> None:
        super().__init__(f"the text {said}")
        self.said, self.place = said, place


def decode_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at a character of a text, and the character after its end.

    Raises:
        JsonError: no JSON value begins there, or it gives a key twice, nests too deep, or holds half of a surrogate
            pair.
    """
    try:
        content, end = _DECODER.raw_decode(text, start)
        if _SURROGATE.search(text, start, end):
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except _RepeatedKey as error:
        said = f"gives the key {error.args[0]!r} twice in one object; keep the one that holds"
        raise JsonError(said, start) from None
    except RecursionError:
        said = "is not valid JSON for any file read here: its values are nested too deep; fetch it again"
        raise JsonError(said, start) from None
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        said = f"holds {half!r}, half of a surrogate pair, which is no text; write the whole character, or take it out"
        raise JsonError(said, start) from None
    except json.JSONDecodeError as error:
        raise JsonError(f"is not valid JSON: {error.msg}", error.pos) from None
    except ValueError as error:  # a number of thousands of digits
        raise JsonError(f"is not valid JSON: {error}", start) from None
    return content, end


def parse_json(text: str) -> Any:
    """The one JSON value that a text holds.

    Raises:
        JsonError: as in `decode_json`, or text that follows it.
    """
    if text.startswith("\ufeff"):
        raise JsonError("is not valid JSON: it begins with a BOM, which plain UTF-8 has not", 0)
    content, end = decode_json(text, len(text) - len(text.lstrip(BLANKS)))
    if rest := text[end:].lstrip(BLANKS):
        raise JsonError("is not valid JSON: text follows the end of the value", len(text) - len(rest))
    return content


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        ValueError: bytes that are no UTF-8, or what `parse_json` refuses; the message names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    try:
        return parse_json(text)
    except JsonError as error:
        raise ValueError(f"{path} {error.said} (line {text.count(chr(10), 0, error.place) + 1})") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds one object; anything else in it is a `ValueError` that names the file."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} should hold one JSON object, {{...}}; it holds {_KINDS.get(type(content), 'null')}. Fetch it again"
        )
    return content


def write_json(data: Any, path: Path) -> None:
    """Write strict JSON (`json_text`) under a temporary name, then rename."""
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
    """A key that stands twice in one object."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKey(next(key for key in keys if keys.count(key) > 1))
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)
