"""JSON files: read strictly, written whole or not at all.

A key that stands twice, a text that no file can hold and a value nested past all use are refused with the file's name,
because each of them would otherwise be taken for something that the file's author did not mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weight_conversion.json_text import to_json
from weight_conversion.whole_files import renamed_when_whole

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        ValueError: the text is no JSON, gives a key twice, nests too deep, or holds half of a surrogate pair (the
            message names the file).
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=_without_repeats)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except _RepeatedKey as error:
        raise ValueError(
            f"{path} gives the key {error.args[0]!r} twice in one object; keep the one that holds"
        ) from None
    except RecursionError:
        raise ValueError(
            f"{path} is not valid JSON for any file read here: its values are nested too deep; fetch it again"
        ) from None
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{path} holds {error.object[error.start : error.end]!r}, half of a surrogate pair, which is no text; "
            "write the whole character, or take it out"
        ) from None
    except ValueError as error:  # a syntax error, bytes that are no UTF-8, a number of thousands of digits
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return content


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
