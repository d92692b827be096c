"""Fictional people trained in one direction or both: experiment 1 of Berglund et al. 2023, "The Reversal Curse".

arXiv 2309.12288; data set `lberglund/reversal_curse` (MIT). The training texts describe 30 people name first ("p2d",
person to description), 30 others description first ("d2p"), and 30 more in both directions, each direction in 30
templates. The test uses ten other templates. A query against the only direction of training is a reverse query.

Two conventions name the same questions. Berglund's files, and `Fact.trained`, give the direction in which the PEOPLE
were trained. The columns of SMDM's tables (arXiv 2410.18514) give the direction of the QUESTION, description to name
(DtN) or name to description (NtD):

    file                        trained  asked  SMDM's column
    p2d_prompts_test            p2d      p2d    NtD same
    d2p_reverse_prompts_test    d2p      p2d    NtD reverse
    d2p_prompts_test            d2p      d2p    DtN same
    p2d_reverse_prompts_test    p2d      d2p    DtN reverse

So "DtN reverse" (92%) concerns people trained name first. Reading it as "trained on DtN, queried in reverse" exchanges
the two reverse numbers. An independent evaluation of the checkpoint did so and reported an error in the paper (A. Rai
2025: 90% for p2d people and 29.7% for d2p people at 32 steps; the paper: DtN reverse 92%, NtD reverse 37%).

The files mark neither names nor descriptions, and templates change the words: "the renowned composer of ..." is also
"composing ..." and "The renowned composer of ...". The questions were made by filling the slot of each template with
the words of each person. Hence

    the rows of one person share the person's name and little else:             `shared_words`
    the rows of one template share everything except the words in the slot:     `slot_spans`

Both require agreement of nine rows in ten, so that one odd row is detected and does not affect the others. A slot
begins and ends at a word boundary. It includes its article, even if the descriptions of all people begin with the same
article. It excludes "being" before it: "Walking the path of being [the renowned composer of ...]," next to "Walking the
path of [designing ...],". A quoted title is included with both quotation marks, ["Abyssal Melodies."]; other
punctuation at the end of the slot is not. The description of a person is the most frequent wording in the person's
rows. Answers are the completions of the files; in `both_prompts_test`, text may follow the name.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from diffusion_lens.data.download import fetch_from_hub, read_json_lines
from diffusion_lens.data.toy_facts import Trained
from diffusion_lens.facts.fact import Direction, Fact
from diffusion_lens.settings import checked_arguments
from weight_conversion import sha256_of_file

AGREEING = 0.9  # Share of rows that must agree.
MARKS = ".,:;?"
QUOTES = "\"'"

_WORD = re.compile(r"[\w-]")
_GLUE_AT_END = re.compile(r"(?<![\w-])((being|the|an?)\s+)+$", re.IGNORECASE)
_CLOSING = re.compile(r'[.,:;?!]*"')
_BEING = re.compile(r"being\s+", re.IGNORECASE)

REPO = "lberglund/reversal_curse"
REVISION = "2b0a35c0f1730a60957319f9b25f4858e7012e44"
FOLDER = "name_description_dataset"
ROW = 'A row is {"prompt": text, "completion": text}'


class _File(NamedTuple):
    rows: int
    sha256: str


FILES = {
    "p2d_prompts_train": _File(900, "8a20b9c259b67bc9c3a0f1823d132c844f98d84589d79b108a0ae0c5aa2a2391"),
    "d2p_prompts_train": _File(900, "2d66551577306f164e9b0fd372dd997af0e90bb62690d00a2cab818ae65e47a1"),
    "both_prompts_train": _File(1800, "a389f60360e5ec1862abba47f9530c916a59483d1f6cb55015bf45197e880db5"),
    "all_prompts_train": _File(3600, "ea7156bb2f46e67ddadb485a7faff23551251b233011b2531ae36a3217f4fae2"),
    "p2d_prompts_test": _File(300, "269fe15363c3bd1cb59cfdf4e6464f35d548d4cb786e6f7b1db84f260788e8f8"),
    "d2p_prompts_test": _File(300, "67705c9ebd77fc030998677acae33af9f22cf4b80bb7443d4ef7e5c9c1d727c4"),
    "both_prompts_test": _File(600, "6499aebaae627f7f26e6d237ef9b4cc7c8db227a29acc60332b05950ea89b004"),
    "p2d_reverse_prompts_test": _File(300, "963fa595ce19b330cdf07058313f3e8570b57545260256414bcb74a60c959553"),
    "d2p_reverse_prompts_test": _File(300, "8c79da9791788ffbe77dc876ae2e34cc00f980e08c946bda188367ae1cd6ea61"),
}


class _Row(NamedTuple):
    line: int
    prompt: str
    completion: str


class _Part(NamedTuple):
    """Rows of a file with one direction of training and of query: all rows, or the first or second half."""

    file: str
    trained: Trained
    asked: Direction
    templates: int
    half: int | None = None

    def select(self, rows: list[_Row]) -> list[_Row]:
        middle = len(rows) // 2
        return rows if self.half is None else rows[middle:] if self.half else rows[:middle]


# The order of the rows in `all_prompts_train`.
_TRAINING = (
    _Part("p2d_prompts_train", "p2d", "p2d", 30),
    _Part("d2p_prompts_train", "d2p", "d2p", 30),
    _Part("both_prompts_train", "both", "p2d", 30, half=0),
    _Part("both_prompts_train", "both", "d2p", 30, half=1),
)
_TEST = (
    _Part("p2d_prompts_test", "p2d", "p2d", 10),
    _Part("p2d_reverse_prompts_test", "p2d", "d2p", 10),
    _Part("d2p_reverse_prompts_test", "d2p", "p2d", 10),
    _Part("d2p_prompts_test", "d2p", "d2p", 10),
    _Part("both_prompts_test", "both", "p2d", 10, half=0),
    _Part("both_prompts_test", "both", "d2p", 10, half=1),
)


@checked_arguments
@dataclass(frozen=True)
class ReversalCurse:
    """The questions and the training sentences. Files are read on demand; `load` opens them."""

    folder: Path | None = None

    @classmethod
    def load(cls, folder: str | Path | None = None) -> "ReversalCurse":
        """Open the files of a folder, or the published files, each downloaded into the hub's cache when it is used.

        The published files have the commit `REVISION`, and their SHA-256 is verified. A folder may contain other people
        in the same format; `check` tests whether it is the published data set.

        Raises:
            FileNotFoundError: The folder does not exist.
        """
        path = None if folder is None else Path(folder).expanduser()
        if path is not None and not path.is_dir():
            raise FileNotFoundError(f"there is no folder {path}; it should contain {', '.join(FILES)}, each .jsonl")
        return cls(path)

    def check(self) -> None:
        """Compare all nine files with the published ones.

        Raises:
            ValueError: The SHA-256 of a file differs; the message names all of these files.
        """
        differing = [file for file in FILES if sha256_of_file(self._path(file)) != FILES[file].sha256]
        if differing:
            raise ValueError(
                f"{self.folder or REPO} is not the published data set: another SHA-256 have {', '.join(differing)}"
            )

    def facts(self, trained: str | None = None, asked: str | None = None, held_out: bool = True) -> list[Fact]:
        """Questions, ordered by direction of training, direction of the query, person and template.

        The id consists of file and row, from 0: "p2d_reverse_prompts_test-0012" is person 1 in template 2 of 10.

        Args:
            trained: Direction of training of the selected people, "p2d", "d2p" or "both". `None` selects all.
            asked: Direction of the query, "p2d" or "d2p". `None` selects both.
            held_out: Whether to use the ten templates of the test, or the thirty of training without reverse queries.

        Raises:
            FileNotFoundError: A file is not in the folder or cannot be downloaded.
            ValueError: No question matches, or a file does not have the expected form (the message names the lines).
        """
        parts = _TEST if held_out else _TRAINING
        chosen = [part for part in parts if trained in (None, part.trained) and asked in (None, part.asked)]
        if not chosen:
            there = ", ".join(f"({part.trained!r}, {part.asked!r})" for part in parts)
            raise ValueError(
                f"no questions are trained={trained!r}, asked={asked!r} with held_out={held_out}; there are {there}"
            )
        return [fact for part in chosen for fact in self._facts(part)]

    def training(self) -> list[Fact]:
        """The rows of `all_prompts_train` in order, on which SMDM is fine-tuned."""
        return self.facts(held_out=False)

    def _facts(self, part: _Part) -> list[Fact]:
        rows, n = part.select(self._rows(part.file)), part.templates
        if not rows or len(rows) % n:
            raise ValueError(
                f"{part.file}.jsonl has {part.asked} questions in {len(rows)} rows, which is not a multiple of its {n} "
                "templates"
            )
        prompts, wordings = [row.prompt for row in rows], [row.completion for row in rows]
        people = [slice(start, start + n) for start in range(0, len(rows), n)]
        naming = prompts if part.asked == "p2d" else wordings
        names = [name for person in people for name in [shared_words(naming[person])] * n]
        spans: list[tuple[int, int]] = [(0, 0)] * len(rows)
        if part.asked == "p2d":
            starts = [prompt.find(name) for prompt, name in zip(prompts, names, strict=True)]
            spans = [(start, start + len(name)) for start, name in zip(starts, names, strict=True)]
        else:
            for i in range(n):
                spans[i::n] = [span or (0, 0) for span in slot_spans(prompts[i::n])]
            wordings = [prompt[slice(*span)] for prompt, span in zip(prompts, spans, strict=True)]
        lost = [
            row.line
            for row, name, text, (start, stop) in zip(rows, names, naming, spans, strict=True)
            if not name or name not in text or start == stop
        ]
        if lost:
            raise ValueError(
                f"{part.file}.jsonl: the subject was not found in the lines {lost[:20]}; the {n} consecutive rows of a "
                "person must share the name, and the rows of a template must share everything but the subject"
            )
        descriptions = [text for person in people for text in [_most_frequent(wordings[person])] * n]
        return [
            fact_about(
                span,
                row.prompt,
                row.completion,
                id=f"{part.file}-{row.line - 1:04d}",
                trained=part.trained,
                asked=part.asked,
                person=name,
                description=description,
            )
            for row, span, name, description in zip(rows, spans, names, descriptions, strict=True)
        ]

    def _rows(self, file: str) -> list[_Row]:
        path, rows = self._path(file), []
        for line, row in read_json_lines(path, ROW):
            texts = [row.get(key) for key in ("prompt", "completion")] if isinstance(row, dict) else [None]
            if not all(isinstance(text, str) and text.strip() for text in texts):
                raise ValueError(
                    f"{path}, line {line}: a row is {{'prompt': text, 'completion': text}}, not {row!r:.80}"
                )
            rows.append(_Row(line, *texts))
        return rows

    def _path(self, file: str) -> Path:
        if self.folder is None:
            return fetch_from_hub(
                REPO,
                f"{FOLDER}/{file}.jsonl",
                revision=REVISION,
                sha256=FILES[file].sha256,
                by_hand="pass its folder, which must contain the other .jsonl files too: ReversalCurse.load(folder)",
            )
        path = self.folder / f"{file}.jsonl"
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path}; fetch it from {FOLDER}/ of the data set {REPO} on the hub")
        return path


def outline(held_out: bool = True) -> list[Fact]:
    """The published questions, or training rows, with directions and placeholder people but empty texts."""
    return [
        Fact("", "", "", trained=part.trained, asked=part.asked, person=f"{part.trained} {row // part.templates}")
        for part in (_TEST if held_out else _TRAINING)
        for row in range(len(part.select([_Row(0, "", "")] * FILES[part.file].rows)))
    ]


def _most_frequent(texts: Sequence[str]) -> str:
    """The most frequent text. Texts that begin with an article take precedence, as the others are verb phrases."""
    plain = [text.strip().rstrip(MARKS) for text in texts]
    nouns = Counter(text[0].lower() + text[1:] for text in plain if text.lower().startswith(("the ", "a ", "an ")))
    return (nouns or Counter(plain)).most_common(1)[0][0]


def shared_words(texts: Sequence[str]) -> str:
    """The longest phrase that nine in ten texts contain, without punctuation around it; "" if there is none."""
    counts = Counter(phrase for text in texts for phrase in _phrases(text))
    common = [phrase for phrase, count in counts.items() if count >= AGREEING * len(texts)]
    return max(common, key=lambda phrase: (len(phrase.split()), phrase), default="")


def slot_spans(texts: Sequence[str]) -> list[tuple[int, int] | None]:
    """Span of the slot in each text, given that all texts were made from one template.

    A span is the index of its first character and one past its last. It is `None` for a text that does not match the
    template of the others or leaves the slot empty, and for all texts if they share no word. Words that all texts share
    at the edge of the slot count as part of the template, except articles: the texts must be about different people.
    """
    before = _shared_start(texts)
    before = _GLUE_AT_END.sub("", _cut_at_word(before, texts))
    rests = [text[len(before) :] for text in texts if text.startswith(before)]
    mirrored = [rest[::-1] for rest in rests]
    after = _cut_at_word(_shared_start(mirrored), mirrored)[::-1]
    return [_span(text, before, after) for text in texts]


def fact_about(span: tuple[int, int], prompt: str, answer: str, **rest: Any) -> Fact:
    """The fact whose subject is this span of the prompt: index of its first character, and one past its last."""
    start, stop = span
    subject = prompt[start:stop]
    is_once = prompt.find(subject) == prompt.rfind(subject)
    template = f"{prompt[:start]}<subject>{prompt[stop:]}"
    return Fact(prompt, subject, answer, template=template, subject_start=None if is_once else start, **rest)


def _phrases(text: str) -> set[str]:
    words = text.split()
    pairs = ((i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return {" ".join(words[i:j]).strip(MARKS + QUOTES) for i, j in pairs} - {""}


def _shared_start(texts: Sequence[str]) -> str:
    """The longest prefix that nine in ten texts share. Texts with a common prefix are neighbours in sorted order."""
    ordered = sorted(texts)
    needed = math.ceil(AGREEING * len(texts))
    ends = range(max(needed, 1) - 1, len(texts))
    return max((_common_start(ordered[i - needed + 1], ordered[i]) for i in ends), key=len, default="")


def _common_start(one: str, other: str) -> str:
    equal = takewhile(lambda letters: letters[0] == letters[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in equal)


def _cut_at_word(start: str, texts: Sequence[str]) -> str:
    """`start` without its last word if the word continues in any of the texts."""
    continues = any(_WORD.match(text, len(start)) for text in texts if text.startswith(start))
    while continues and start and _WORD.match(start[-1]):
        start = start[:-1]
    return start


def _span(text: str, before: str, after: str) -> tuple[int, int] | None:
    if not (text.startswith(before) and text.endswith(after) and _WORD.search(before + after)):
        return None
    start, stop = len(before), len(text) - len(after)
    if being := _BEING.match(text, start, max(start, stop)):
        start = being.end()
    if text[start:stop].count('"') % 2:  # One quotation mark is common to all texts, so it fell outside the slot.
        if text[start - 1 : start] == '"':
            start -= 1
        elif closing := _CLOSING.match(text, stop):
            stop = closing.end()
    filled = text[start:stop]
    start += len(filled) - len(filled.lstrip())
    stop = start + len(filled.strip().rstrip(MARKS))
    return (start, stop) if start < stop else None
