"""Reverse recall of what a pretrained model has read: lines of poems, and facts of Wikipedia.

Neither needs a training: "p2d" is the direction in which texts of the web have a pair, and "d2p" its reverse.

    poem_pairs      pairs of lines of famous Chinese poems (Nie et al. 2025, LLaDA, arXiv 2502.09992, appendix B.9): the
                    next line of a line, and the line before. The paper speaks of 496 pairs; the file in the authors'
                    repository, `data/poem_data.json`, has 469, two of which are equal. A record is
                    {"first": "窈窕淑女", "second": "君子好逑", "source": "诗经•周南•关雎"}.

    WikiReversal    facts of Wikipedia, each asked by its first entity and by its second one (Kitouni et al. 2024, "The
                    Factorization Curse", arXiv 2406.05183, appendix E). We know of no published file. The data set is
                    made, by the paper's algorithm 1, of GenWiki (Jin et al. 2020, COLING 2020.coling-main.217), whose
                    records have a text with slots, its entities, and triples of entity, relation and entity:
                    {"text": "<ENT_0> is a native of <ENT_1> .", "entities": ["Agostino Magliani", "Laurino"],
                    "graph": [["Agostino Magliani", "birthPlace", "Laurino"]], ...}

From GenWiki to WikiReversal:

1. A triple counts if both entities are in the text, the first before the second.
2. Of those that count, in all of the data, triples are left out where one entity and the relation do not determine the
   other entity. (A triple that does not count makes no other ambiguous.)
3. Each of the others gets two questions. The paper prints those of six relations, `QUESTIONS`; give your own for more
   of its 31. (It also drops relations with fewer than 500 triples, which none of the six has there.)
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diffusion_lens.data.download import fetch_from_web, read_text
from diffusion_lens.facts.fact import Direction, Fact
from diffusion_lens.settings import checked_arguments
from weight_conversion import JsonError, parse_json

POEMS_URL = (
    "https://raw.githubusercontent.com/ML-GSAI/LLaDA/b7e6c3565f194352da44b38dd12b6970597309f3/data/poem_data.json"
)
POEMS_SHA256 = "df31784cd2a5ab6c9c7a6096eaeaba023b99128f5b0122f4b6a595df182fa665"
POEMS = 469
# "What is the next line of ...?", "What is the line before ...?", and "Just write the line." (`eval_reverse.py`)
POEM_QUESTIONS = ("{}的下一句是什么？ 直接输出句子即可。", "{}的上一句是什么？ 直接输出句子即可。")
# Questions by the first and by the second entity of a relation, of the paper's table 10.
QUESTIONS: Mapping[str, tuple[str, str]] = {
    "birthPlace": ("Where was {} born?", "Who was born in {}?"),
    "spouse": ("Who is {}'s spouse?", "Who is married to {}?"),
    "PopulatedPlace/areaTotal": ("What is the total area of {}?", "Which populated place has a total area of {}?"),
    "title": ("What title does {} hold?", "Who holds the title of {}?"),
    "region": ("What region is {} located in?", "What or who is located in the {} region?"),
    "alias": ("What is {}'s alias?", "Whose alias is {}?"),
}
_POEM = ("first", "second")
_GENWIKI = ("text", "entities", "graph")
_SLOT = re.compile(r"<ENT_(\d+)>")
_SPACED_MARK = re.compile(r" (?=[.,;:?!)])|(?<=\() ")  # GenWiki's texts are divided into words.
_SHOWN = 8  # relations in a message
_HEAD = 2**16  # characters of a file that contain its first record


@checked_arguments
def poem_pairs(path: str | Path | None = None) -> list[Fact]:
    """Two facts for each pair of lines: the question for the next line (asked "p2d"), and for the one before ("d2p").

    The prompts are those of the authors' `eval_reverse.py`, without the chat template in which an instruct model reads
    them, and their criterion is that the written text contains the line. The id is that of the record, from 0, and of
    the direction: "poem-0012-d2p".

    Args:
        path: Path of a copy of `poem_data.json`, or of a file of that form. `None` downloads the authors' file and
            verifies its SHA-256.

    Raises:
        FileNotFoundError: There is no such file, or it is not in the cache and cannot be downloaded.
        ValueError: A record does not have two lines; the message names it and the fields that it has.
    """
    if path is None:
        file = fetch_from_web(POEMS_URL, by_hand="pass its path: poem_pairs('poem_data.json')", sha256=POEMS_SHA256)
    else:
        file = Path(path).expanduser()
    facts = []
    for number, (where, record) in enumerate(_records(file, _POEM)):
        first, second = (record[name] for name in _POEM)
        if not all(isinstance(line, str) and line.strip() for line in (first, second)):
            raise ValueError(f"{where} first is {first!r:.60} and second {second!r:.60}; each should be a line")
        facts += _both(f"poem-{number:04d}", (first, second), POEM_QUESTIONS)
    return facts


class Passage(NamedTuple):
    """A text of Wikipedia.

    Attributes:
        text: The text, with its entities in their slots.
        spans: First character of each entity in the text, and one past its last.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


@checked_arguments
@dataclass(frozen=True)
class WikiReversal:
    """The questions, and the texts from which a model can learn the answers.

    Attributes:
        facts: Two facts for each triple, one after the other: the question by its first entity (asked "p2d"), and by
            its second one ("d2p"). Ids are "wikireversal-00012-p2d", with the number of the triple.
        passages: Text of each triple; a text with several triples occurs several times.
        relations: Relation of each triple.
        without_questions: Number of triples of each other relation that the data have, for which there are no
            questions.
    """

    facts: tuple[Fact, ...]
    passages: tuple[Passage, ...]
    relations: tuple[str, ...]
    without_questions: dict[str, int]

    @classmethod
    def load(cls, path: str | Path, questions: Mapping[str, tuple[str, str]] | None = None) -> "WikiReversal":
        """Make the data set of a file of GenWiki, or of a folder of such files.

        Args:
            path: A `.json` file, such as `genwiki/train/fine/part_1.json`, or a folder of them. What is unambiguous in
                a part may not be so in the whole.
            questions: Question by the first and by the second entity of each relation, with {} in its place; by default
                `QUESTIONS`.

        Raises:
            FileNotFoundError: There is no such file or folder, or the folder has no `.json` file.
            ValueError: A relation does not have two questions, or one has no {}, a record does not have the form of
                GenWiki (the message names it and the fields that it has), or no triple has a question (the message
                names the relations).
        """
        asked = QUESTIONS if questions is None else questions
        if other := [pair for pair in asked.values() if isinstance(pair, str) or len(pair) != 2]:
            raise ValueError(
                f"a relation has two questions, by its first and by its second entity; got {other[0]!r:.80}"
            )
        if bare := [each for pair in asked.values() for each in pair if "{}" not in each]:
            raise ValueError(f"the question {bare[0]!r} has no {{}} in the place of its entity")
        triples: dict[tuple[str, str, str], Passage] = {}
        for where, record in _records(Path(path).expanduser(), _GENWIKI):
            for triple, passage in _triples(where, record):
                triples.setdefault(triple, passage)
        ends: dict[tuple[str, str, bool], set[str]] = defaultdict(set)
        for first, relation, second in triples:
            ends[first, relation, True].add(second)
            ends[second, relation, False].add(first)
        unambiguous = [
            (first, relation, second)
            for first, relation, second in triples
            if len(ends[first, relation, True]) == len(ends[second, relation, False]) == 1
        ]
        counts = Counter(relation for _, relation, _ in unambiguous)
        kept = [triple for triple in unambiguous if triple[1] in asked]
        if not kept:
            said = ", ".join(f"{name} ({count})" for name, count in counts.most_common(_SHOWN)) or "all ambiguous"
            raise ValueError(
                f"{path} has no triple with a question: its relations are {said}, and there are questions of "
                f"{', '.join(asked)}. Give others: questions={{'city': ('What city is {{}} in?', 'What is in {{}}?')}}"
            )
        facts = [
            fact
            for i, (first, relation, second) in enumerate(kept)
            for fact in _both(f"wikireversal-{i:05d}", (first, second), asked[relation], space=" ")
        ]
        others = {name: count for name, count in counts.items() if name not in asked}
        passages = tuple(triples[triple] for triple in kept)
        return cls(tuple(facts), passages, tuple(relation for _, relation, _ in kept), others)

    def rows(self) -> list[dict[str, Any]]:
        """Each passage once, as a row of `finetune`, with its entities for `mask_entities`."""
        return [
            {"prompt": "", "completion": passage.text, "entities": [list(span) for span in passage.spans]}
            for passage in dict.fromkeys(self.passages)
        ]


def kind_of_file(path: Path) -> str | None:
    """The data set, "poems" or "genwiki", if a .json file, or the first of a folder, begins with such a record."""
    file = next(iter(_files(path)), None)
    if file is None or file.suffix != ".json":
        return None
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        head = lines.read(_HEAD).lstrip()
    try:
        record, _ = json.JSONDecoder().raw_decode(head[1:].lstrip())
    except (ValueError, RecursionError):
        return None
    fields = set(record) if head.startswith("[") and isinstance(record, dict) else set()
    return "poems" if fields >= {*_POEM} else "genwiki" if fields >= {*_GENWIKI} else None


def outline_of_poems() -> list[Fact]:
    """The published questions with directions and placeholder lines but empty texts."""
    directions: Sequence[Direction] = ("p2d", "d2p")
    return [Fact("", "", "", trained="p2d", asked=asked, person=str(i)) for i in range(POEMS) for asked in directions]


def _both(name: str, pair: tuple[str, str], questions: tuple[str, str], space: str = "") -> list[Fact]:
    """The question by the first of a pair, and by the second."""
    first, second = pair
    ends: list[tuple[Direction, str, str]] = [("p2d", first, second), ("d2p", second, first)]
    return [
        Fact(
            prompt=question.replace("{}", subject),
            subject=subject,
            answer=f"{space}{answer}",
            id=f"{name}-{direction}",
            trained="p2d",
            asked=direction,
            person=first,
            description=second,
            template=question.replace("{}", "<subject>"),
            subject_start=question.index("{}"),
        )
        for (direction, subject, answer), question in zip(ends, questions, strict=True)
    ]


def _triples(where: str, record: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], Passage]]:
    """The forward triples of a record, each with its text."""
    text, entities, graph = (record[name] for name in _GENWIKI)
    is_list = isinstance(entities, list) and all(isinstance(entity, str) for entity in entities)
    of_three = isinstance(graph, list) and all(
        isinstance(triple, list) and [type(part) for part in triple] == [str, str, str] for triple in graph
    )
    slots = [int(slot) for slot in _SLOT.findall(text)] if isinstance(text, str) else [-1]
    if not is_list or not of_three or any(not 0 <= slot < len(entities) for slot in slots):
        raise ValueError(
            f"{where} is not one of GenWiki: text is {text!r:.60}, entities {entities!r:.60}, graph {graph!r:.60}; "
            'they should be a text with the slots "<ENT_0>", a list of the texts of the slots, and a list of triples'
        )
    filled, spans, begun = "", list[tuple[int, int]](), dict[str, int]()
    pieces = _SLOT.split(_SPACED_MARK.sub("", text))
    for i, piece in enumerate(pieces):
        entity = entities[int(piece)] if i % 2 else piece
        if i % 2:
            spans.append((len(filled), len(filled) + len(entity)))
            begun.setdefault(entity, len(filled))
        filled += entity
    passage = Passage(filled, tuple(span for span in spans if span[0] < span[1]))
    for first, relation, second in graph:
        if first in begun and second in begun and begun[first] < begun[second]:
            yield (first, relation, second), passage


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.json")) if path.is_dir() else [path] if path.is_file() else []


def _records(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The records of a .json file, or of those of a folder, each with its name for messages; all have these fields."""
    files = _files(path)
    if not files:
        raise FileNotFoundError(f"there is no file {path}, or no .json file in it")
    for file in files:
        try:
            records = parse_json(read_text(file))
        except JsonError as error:
            raise ValueError(f"{file} {error.reason}") from None
        if not isinstance(records, list) or not records:
            raise ValueError(f"{file} is not a list of records with the fields {', '.join(fields)}")
        for i, record in enumerate(records):
            if not isinstance(record, dict) or not set(fields) <= set(record):
                found = ", ".join(record) if isinstance(record, dict) else f"{record!r:.60}"
                raise ValueError(f"{file}, record {i}, has {found}; it should have {', '.join(fields)}")
            yield f"{file}, record {i},", record
