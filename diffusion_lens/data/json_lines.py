"""Reading of text files by line, and of files with one JSON value per line (JSON Lines)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weight_conversion import JsonError, parse_json


class JsonLineError(ValueError):
    """A line that is not valid JSON.

    Attributes:
        line: Number of the line, counted from 1.
        reason: Description of the error.
    """

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}, {reason}")
        self.line = line
        self.reason = reason


def read_lines(path: Path) -> list[str]:
    """The lines of a text file. Only line feeds end a line, because JSON texts may contain the other separators.

    Raises:
        ValueError: The file is not UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error


def parse_json_lines(text: str) -> Iterator[tuple[int, Any]]:
    """The values of a text in JSON Lines format, each with the number of its line. Empty lines are skipped.

    Raises:
        JsonLineError: A line is not valid JSON.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except JsonError as error:
                raise JsonLineError(number, error.reason) from None


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The values of a JSON Lines file, each with the number of its line.

    Raises:
        ValueError: The file is not UTF-8 text.
        JsonLineError: A line is not valid JSON.
    """
    return parse_json_lines("\n".join(read_lines(path)))
