"""Facts from the user's files and from ROME's: .json, .jsonl, .csv, or a folder of such files.

A fact has a prompt, the subject in the prompt, and the answer with its leading space. It may have the other fields of
`Fact`. The cells of a .csv file are separated by commas, semicolons or tabs. Errors name the file and the line.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any

from diffusion_lens.data.json_lines import JsonLineError, parse_json_lines, read_lines
from diffusion_lens.data.rome_facts import bake, counterfact, known_1000
from diffusion_lens.facts import Fact
from weight_conversion import JsonError, decode_json

DELIMITERS = (",", ";", "\t")  # Spreadsheets write ";" in locales where the comma is the decimal mark.
NEEDED = ("prompt", "subject", "answer")
FIELDS = tuple(field.name for field in fields(Fact))
CHOICES = {"trained": ("p2d", "d2p", "both"), "asked": ("p2d", "d2p")}
EXAMPLE = '{"prompt": "The Eiffel Tower is in", "subject": "The Eiffel Tower", "answer": " Paris"}'
SHAPE = {
    ".json": f"A .json file contains a list of facts, [{EXAMPLE}, ...]",
    ".jsonl": f"A .jsonl file contains one fact per line, {EXAMPLE}",
    ".csv": 'A .csv file begins with the line prompt,subject,answer; each fact is a line such as "The Eiffel Tower is '
    'in","The Eiffel Tower"," Paris"',
}

# Readers of ROME's files, by a field that all records of such a file have and our facts do not.
ROME: dict[str, Callable[[Path], list[Fact]]] = {
    "reverse_qa": lambda path: [request.true for request in bake(path)],
    "requested_rewrite": lambda path: [request.true for request in counterfact(path)],
    "attribute": known_1000,
}


def read_facts(path: str | Path) -> list[Fact]:
    """The facts of a file, or of all fact files in a folder, sorted by file name.

    A `.json` file may also be ROME's `known_1000.json` or `counterfact.json`, or a file of BAKE. The facts are then the
    requests with their true objects.

    Raises:
        ValueError: There are no facts, an entry is not a fact, or a fact occurs twice (two facts are equal if their ids
            are equal or, without ids, all their fields). The message names the file and the line.
    """
    path = Path(path).expanduser()
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SHAPE)
        if not files:
            raise ValueError(f"the folder {path} contains no {', '.join(SHAPE)} file of facts. {SHAPE['.jsonl']}")
    facts: dict[Fact | str, tuple[Fact, str]] = {}
    for fact, location in (entry for file in files for entry in _read(file)):
        first, first_location = facts.setdefault(fact.id or fact, (fact, location))
        if first is not fact:
            clash = f"has the id {fact.id!r}, as" if fact.id else f"{fact.prompt!r:.60} repeats"
            cure = "give each fact its own id, or keep one" if fact.id else "keep one"
            raise ValueError(f"{location}: the fact {clash} that of {first_location}; {cure}")
    return [fact for fact, _ in facts.values()]


def _read(path: Path) -> Iterator[tuple[Fact, str]]:
    """The facts of a file, each with its location for error messages."""
    if path.suffix not in SHAPE:
        kind = f"a {path.suffix!r} file" if path.suffix else "a file without an ending"
        raise ValueError(f"{path} is {kind}; a file of facts should end in {', '.join(SHAPE)}. {SHAPE['.jsonl']}")
    text = "\n".join(read_lines(path)).removeprefix("\ufeff")
    records = list(_READERS[path.suffix](text, path))
    if not records:
        raise ValueError(f"{path} contains no facts. {SHAPE[path.suffix]}")
    first = records[0][1]
    rome = [read for field, read in ROME.items() if isinstance(first, Mapping) and field in first]
    facts = rome[0](path) if rome and path.suffix == ".json" else [_fact(*record, path) for record in records]
    for (line, _), fact in zip(records, facts, strict=True):
        yield fact, f"{path}, line {line}"


def _json(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """The records of a JSON list, each with the number of its first line."""
    start = _skip(text, 0)
    if text[start : start + 1] != "[":
        raise ValueError(f"{path}, line {_line(text, start)}: there is no list. {SHAPE['.json']}")
    start = _skip(text, start + 1)
    while text[start : start + 1] != "]":
        try:
            record, end = decode_json(text, start)
        except JsonError as error:
            raise _refused(path, _line(text, error.offset), error.reason) from None
        yield _line(text, start), record
        start = _skip(text, end)
        if text[start : start + 1] not in (",", "]"):
            raise _refused(path, _line(text, start), "is not valid JSON: a comma or a closing bracket is missing")
        start = _skip(text, start + (text[start] == ","))
    if (rest := _skip(text, start + 1)) < len(text):
        raise _refused(path, _line(text, rest), "is not valid JSON: text follows the end of the list")


def _json_lines(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    try:
        yield from parse_json_lines(text)
    except JsonLineError as error:
        raise _refused(path, error.line, error.reason) from None


def _csv(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    delimiter = _delimiter(text)
    if line := _line_with_space_before_quotation(text, delimiter):
        raise ValueError(
            f"{path}, line {line}: a cell has a space before its quotation mark, so that the mark would be part of the "
            f"text; begin the cell with the mark. {SHAPE['.csv']}"
        )
    rows = csv.reader(StringIO(text, newline=""), strict=True, delimiter=delimiter)
    try:
        header = [name.strip() for name in next(rows, [])]
        if missing := [name for name in NEEDED if name not in header]:
            raise ValueError(f"{path}, line 1: the header lacks {', '.join(missing)}. {SHAPE['.csv']}")
        if repeated := [name for name in header if name and header.count(name) > 1]:
            raise ValueError(
                f"{path}, line 1: the header names the column {repeated[0]!r} twice; keep one. {SHAPE['.csv']}"
            )
        line = rows.line_num + 1
        for row in rows:
            if len(row) > len(header):
                raise ValueError(
                    f"{path}, line {line}: {len(row)} cells in a row with {len(header)} columns; put texts with commas "
                    f"in quotation marks. {SHAPE['.csv']}"
                )
            if any(row):
                yield line, {name: cell for name, cell in zip(header, row, strict=False) if cell or name in NEEDED}
            line = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: this is not CSV ({error}). {SHAPE['.csv']}") from None


def _line_with_space_before_quotation(text: str, delimiter: str) -> int:
    """The first line with a cell such as ` "Paris"`, which CSV reads with its quotation marks; 0 if there is none."""
    quoted = re.compile(f'(^|{delimiter})"(?:[^"]|"")*"', re.MULTILINE)
    bare = quoted.sub(lambda cell: cell[1] + "\n" * cell[0].count("\n"), text)
    found = re.search(f'(?:^|{delimiter}) +"', bare, re.MULTILINE)
    return _line(bare, found.start()) if found else 0


def _delimiter(text: str) -> str:
    """The delimiter that occurs most often in the header."""
    header = text.split("\n", 1)[0]
    return max(DELIMITERS, key=header.count)


_READERS: dict[str, Callable[[str, Path], Iterator[tuple[int, Any]]]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".csv": _csv,
}


def _fact(line: int, record: Any, path: Path) -> Fact:
    if (problem := _problem(record)) is not None:
        raise ValueError(f"{path}, line {line}: {problem}. {SHAPE[path.suffix]}")
    values = dict(record)
    if "subject_start" in values:
        values["subject_start"] = int(values["subject_start"])
    return Fact(**values)


def _problem(record: Any) -> str | None:
    """The reason why a record is not a fact, or `None` if it is one."""
    if not isinstance(record, Mapping):
        return f"{record!r:.60} is not a fact"
    if missing := [name for name in NEEDED if name not in record]:
        return f"the fact has no {' and no '.join(missing)}"
    if unknown := [name for name in record if name not in FIELDS]:
        near = get_close_matches(unknown[0], FIELDS, n=1)
        cure = f" (nearest: {near[0]})" if near else ": leave it out"
        return f"a fact has no field {unknown[0]!r}{cure}; its fields are {', '.join(FIELDS)}"
    for name, value in record.items():
        if name == "subject_start":
            if not re.fullmatch(r"\d+", str(value)):
                return f"subject_start is {value!r:.60}, not the index of a character"
        elif name in CHOICES:
            if value is not None and value not in CHOICES[name]:
                return f"{name} is {value!r:.60}; it must be one of {', '.join(CHOICES[name])}, or be left out"
        elif not isinstance(value, str):
            return f"{name} is {value!r:.60}, not text"
        elif name in NEEDED and not value.strip():
            return f"{name} is empty"
    return None


def _refused(path: Path, line: int, problem: str) -> ValueError:
    return ValueError(f"{path}, line {line} {problem}. {SHAPE[path.suffix]}")


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _skip(text: str, offset: int) -> int:
    """Offset of the next character that is not whitespace."""
    while text[offset : offset + 1].isspace():
        offset += 1
    return offset
