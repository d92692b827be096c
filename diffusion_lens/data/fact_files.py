"""Facts from the user's files and from ROME's: .json, .jsonl, .csv, or a folder of such files.

A fact has a prompt, the subject in the prompt, and the answer with its leading space. It may have the other fields of
`Fact`. The cells of a .csv file are separated by commas, semicolons or tabs. Errors name the file and the line, or the
number of the record in a .json file.

`open_source` opens facts by the name of a data set or by path, with the canvas length and settings of its authors.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from diffusion_lens.data import celebrities, pretrained_reversals, site_facts, toy_facts
from diffusion_lens.data.download import read_json_lines, read_text
from diffusion_lens.data.pretrained_reversals import WikiReversal, kind_of_file, poem_pairs
from diffusion_lens.data.reversal_curse import FILES, ReversalCurse, outline
from diffusion_lens.data.rome_facts import KNOWN_FACTS, bake, counterfact, known_1000
from diffusion_lens.facts.fact import Direction, Fact
from diffusion_lens.facts.taught_pairs import match_facts
from diffusion_lens.loading.catalogue import BUNDLED
from diffusion_lens.settings import at_least, checked_arguments
from weight_conversion import JsonError, parse_json

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


@checked_arguments
def read_facts(path: str | Path) -> list[Fact]:
    """The facts of a file, or of all fact files in a folder, sorted by file name.

    A `.json` file may also be ROME's `known_1000.json` or `counterfact.json`, or a file of BAKE. The facts are then the
    requests with their true objects.

    Raises:
        ValueError: There are no facts, an entry is not a fact, or a fact occurs twice (two facts are equal if their ids
            are equal or, without ids, all their fields). The message names the file and the place.
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
    try:
        records = list(_READERS[path.suffix](path))
        if not records:
            raise ValueError(f"{path} contains no facts. {SHAPE[path.suffix]}")
        first = records[0][1]
        rome = [read for field, read in ROME.items() if isinstance(first, Mapping) and field in first]
        facts = rome[0](path) if rome and path.suffix == ".json" else [_fact(*record) for record in records]
    except _FactError as error:
        raise ValueError(f"{path}, {error}. {SHAPE[path.suffix]}") from None
    for (place, _), fact in zip(records, facts, strict=True):
        yield fact, f"{path}, {place}"


class _FactError(Exception):
    """A place in a file, "line 3", with the problem, which continues it."""

    def __init__(self, place: str | int, problem: str) -> None:
        super().__init__(f"{place if isinstance(place, str) else f'line {place}'}{problem}")


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of a JSON list, by their number."""
    text = read_text(path)
    try:
        content = parse_json(text)
    except JsonError as error:
        raise _FactError(_line(text, error.offset), f" {error.reason}") from None
    if not isinstance(content, list):
        raise _FactError(_line(text, 0), ": there is no list")
    yield from ((f"record {i}", record) for i, record in enumerate(content, 1))


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    text = read_text(path)
    header_line = text.split("\n", 1)[0]
    delimiter = max(DELIMITERS, key=header_line.count)
    if line := _line_with_space_before_quotation(text, delimiter):
        problem = "a cell has a space before its quotation mark, so that the mark would be part of the text"
        raise _FactError(line, f": {problem}; begin the cell with the mark")
    rows = csv.reader(StringIO(text, newline=""), strict=True, delimiter=delimiter)
    try:
        header = [name.strip() for name in next(rows, [])]
        if missing := [name for name in NEEDED if name not in header]:
            raise _FactError(1, f": the header lacks {', '.join(missing)}")
        if repeated := [name for name in header if name and header.count(name) > 1]:
            raise _FactError(1, f": the header names the column {repeated[0]!r} twice; keep one")
        line = rows.line_num + 1
        for row in rows:
            if len(row) > len(header):
                problem = f": {len(row)} cells in a row with {len(header)} columns"
                raise _FactError(line, f"{problem}; put texts with commas in quotation marks")
            if any(row):
                yield (
                    f"line {line}",
                    {name: cell for name, cell in zip(header, row, strict=False) if cell or name in NEEDED},
                )
            line = rows.line_num + 1
    except csv.Error as error:
        raise _FactError(rows.line_num, f": this is not CSV ({error})") from None


def _line_with_space_before_quotation(text: str, delimiter: str) -> int:
    """The first line with a cell such as ` "Paris"`, which CSV reads with its quotation marks; 0 if there is none."""
    quoted = re.compile(f'(^|{delimiter})"(?:[^"]|"")*"', re.MULTILINE)
    bare = quoted.sub(lambda cell: cell[1] + "\n" * cell[0].count("\n"), text)
    found = re.search(f'(?:^|{delimiter}) +"', bare, re.MULTILINE)
    return _line(bare, found.start()) if found else 0


_READERS: dict[str, Callable[[Path], Iterable[tuple[str, Any]]]] = {
    ".json": _json,
    ".jsonl": lambda path: ((f"line {i}", record) for i, record in read_json_lines(path, SHAPE[".jsonl"])),
    ".csv": _csv,
}


def _fact(place: str, record: Any) -> Fact:
    if (problem := _problem(record)) is not None:
        raise _FactError(place, f": {problem}")
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
            if not re.fullmatch(r"\d{1,9}", str(value)):
                return f"subject_start is {value!r:.60}, not the index of a character"
        elif name in CHOICES:
            if value is not None and value not in CHOICES[name]:
                return f"{name} is {value!r:.60}; it must be one of {', '.join(CHOICES[name])}, or be left out"
        elif not isinstance(value, str):
            return f"{name} is {value!r:.60}, not text"
        elif name in NEEDED and not value.strip():
            return f"{name} is empty"
    return None


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


T = TypeVar("T")

# Length of the canvas and numbers of steps in SMDM's evaluation (ML-GSAI/SMDM `evaluate_reverse.py`).
STUDY_LENGTH = 52
STUDY_STEPS = (1, 2, 4, 8, 16, 32)
SITE_LENGTH = 16  # 8 positions after the longest prompt.


@dataclass(frozen=True)
class FactSource:
    """Questions with the settings that their authors use.

    Attributes:
        name: Name of the data set, or its path.
        facts: Questions, with the directions of training and of the query if the data set has directions.
        training: Training texts (prompt and answer), if any.
        length: Number of positions of the canvas, including the prompt. `None` adds as many masked positions as the
            answer has tokens.
        cfg_scale: Weight of classifier-free guidance.
        steps: Numbers of denoising steps for a recall curve.
        reverse: Reverse questions in the words of the training texts, if any.
    """

    name: str
    facts: Sequence[Fact]
    training: Sequence[Fact] = ()
    length: int | None = STUDY_LENGTH
    cfg_scale: float = 0.8
    steps: tuple[int, ...] = STUDY_STEPS
    reverse: Sequence[Fact] = ()

    def fact_pairs(
        self, trained: Direction = "p2d", *, per_person: int = 1, limit: int | None = None
    ) -> list[tuple[Fact, Fact]]:
        """Pairs of a training text and a reverse question about the same person, for `lay_out_pairs`.

        A data set without training texts pairs its own facts, of which some must be queried as they are trained.

        Args:
            trained, per_person: As in `match_facts`.
            limit: Largest number of pairs, spread evenly. `None` selects all.

        Raises:
            ValueError: There is no pair.
        """
        pairs = match_facts(self.training or self.facts, self.reverse or self.facts, trained, per_person=per_person)
        return _spread(pairs, limit)

    def pick(self, trained: str | None = None, asked: str | None = None, limit: int | None = None) -> list[Fact]:
        """A selection of the questions.

        Args:
            trained: Direction of training, "p2d", "d2p" or "both". `None` selects all.
            asked: Direction of the query, "p2d" or "d2p". `None` selects all.
            limit: Largest number of facts per pair of directions, spread evenly. `None` selects all.

        Raises:
            ValueError: No question matches.
        """
        cells: dict[tuple[str | None, str | None], list[Fact]] = {}
        for fact in self.facts:
            if trained in (None, fact.trained) and asked in (None, fact.asked):
                cells.setdefault((fact.trained, fact.asked), []).append(fact)
        if not cells:
            have = ", ".join(sorted({f"trained {fact.trained} queried {fact.asked}" for fact in self.facts}))
            wanted = f"trained {trained or 'in any direction'} and queried {asked or 'in any direction'}"
            raise ValueError(f"{self.name} has no fact {wanted}; it has {have}")
        picked = {id(fact) for cell in cells.values() for fact in _spread(cell, limit)}
        return [fact for fact in self.facts if id(fact) in picked]


@cache
def _toy() -> FactSource:
    toy = toy_facts.load()
    return _of_people("toy", toy.facts(), toy.facts(held_out=False), toy_facts.SENTENCE_LENGTH)


@cache
def _site() -> FactSource:
    world = site_facts.load()
    taught = world.facts("description", held_out=False)
    return _of_people("site", world.facts("description"), taught, SITE_LENGTH)


def _of_people(name: str, questions: Sequence[Fact], taught: Sequence[Fact], length: int) -> FactSource:
    """Invented people, with held-out questions and the words of training in both directions."""
    training = tuple(fact for fact in taught if fact.trained in ("both", fact.asked))
    reverse = tuple(fact for fact in taught if fact.is_reverse)
    return FactSource(name, tuple(questions), training, length, 0.0, (1, 2, 4, 8), reverse)


def _reversal_curse(folder: Path | None = None) -> FactSource:
    data = ReversalCurse.load(folder)
    return FactSource(str(folder or "reversal-curse"), data.facts(), data.training())


def _of_any_length(name: str, facts: Sequence[Fact]) -> FactSource:
    return FactSource(name, facts, length=None, cfg_scale=0.0)


SOURCES: dict[str, Callable[[], FactSource]] = {
    "site": _site,
    "site-attributes": lambda: FactSource(
        "site-attributes", site_facts.load().facts("attribute"), (), SITE_LENGTH, 0.0, (1, 2, 4)
    ),
    "toy": _toy,
    "reversal-curse": _reversal_curse,
    "known-1000": lambda: _of_any_length("known-1000", known_1000()),
    "parent-child": lambda: _of_any_length("parent-child", celebrities.parent_child()),
    "poems": lambda: _of_any_length("poems", poem_pairs()),
}
# Outlines of the data sets that are downloaded: the same number of facts and directions, with empty texts.
OUTLINES: dict[str, Callable[[], FactSource]] = {
    "reversal-curse": lambda: FactSource("reversal-curse", outline(), outline(held_out=False)),
    "known-1000": lambda: _of_any_length("known-1000", [Fact("", "", "") for _ in range(KNOWN_FACTS)]),
    "parent-child": lambda: _of_any_length("parent-child", celebrities.outline()),
    "poems": lambda: _of_any_length("poems", pretrained_reversals.outline_of_poems()),
}


def open_source(name_or_path: str, *, outline_only: bool = False) -> FactSource:
    """Open a data set by its name or its files, or the user's own facts (see `fact_files`).

    The files may be a folder of the reversal curse, `parent_child_pairs.csv`, LLaDA's `poem_data.json`, or a file or
    folder of GenWiki, of which WikiReversal is made.

    Args:
        name_or_path: Name of a data set, or path of a file or folder.
        outline_only: Whether to return the outline of a data set that would be downloaded. Its facts have directions
            but empty texts, which suffices to estimate the cost of a command.

    Raises:
        ValueError: The name is unknown, the file does not contain facts, or the data set's loader refuses it.
        FileNotFoundError: The data set is not on this machine and cannot be downloaded.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path in SOURCES:
        return (OUTLINES if outline_only and name_or_path in OUTLINES else SOURCES)[name_or_path]()
    if path.is_dir() and any((path / f"{name}.jsonl").is_file() for name in FILES):
        return _reversal_curse(path)
    if path.is_file() and celebrities.is_parent_child(path):
        return _of_any_length(str(path), celebrities.parent_child(path))
    if (kind := kind_of_file(path)) is not None:
        return _of_any_length(str(path), poem_pairs(path) if kind == "poems" else WikiReversal.load(path).facts)
    if path.exists():
        return _of_any_length(str(path), read_facts(path))
    near = get_close_matches(name_or_path, SOURCES, n=1, cutoff=0.0)
    raise ValueError(
        f"{name_or_path!r} is not a data set, file or folder; data sets are {', '.join(SOURCES)} (nearest: {near[0]})"
    )


def default_source(model_name: str) -> str:
    """Name of the default data set of a model; models whose names begin like a bundled pair's have that pair's."""
    data = {name.split("-")[0]: model.data for name, model in BUNDLED.items()}
    return data.get(model_name.lower().split("-")[0], "reversal-curse")


def _spread(items: Sequence[T], limit: int | None) -> list[T]:
    if limit is None or at_least(1, "limit", limit) >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]
