"""Spans of names and descriptions in questions that do not mark them.

The questions of a data set were made by filling the slot of each template with the words of each person. Hence

    the rows of one person share the person's name and little else:             `shared_words`
    the rows of one template share everything except the words in the slot:     `slot_spans`

Both functions require agreement of nine rows in ten, so that one odd row is detected and does not affect the others. A
slot begins and ends at a word boundary. It includes its article, even if the descriptions of all people begin with the
same article. It excludes "being" before it: "Walking the path of being [the renowned composer of ...]," next to
"Walking the path of [designing ...],". A quoted title is included with both quotation marks, ["Abyssal Melodies."];
other punctuation at the end of the slot is not.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from diffusion_lens.facts import Fact

AGREEING = 0.9  # Share of rows that must agree.
MARKS = ".,:;?"
QUOTES = "\"'"

_WORD = re.compile(r"[\w-]")
_GLUE_AT_END = re.compile(r"(?<![\w-])((being|the|an?)\s+)+$", re.IGNORECASE)
_CLOSING = re.compile(r'[.,:;?!]*"')
_BEING = re.compile(r"being\s+", re.IGNORECASE)


def shared_words(texts: Sequence[str]) -> str:
    """The longest phrase that nine in ten texts contain, without punctuation around it; "" if there is none."""
    counts = Counter(phrase for text in texts for phrase in _phrases(text))
    common = [phrase for phrase, count in counts.items() if count >= AGREEING * len(texts)]
    return max(common, key=lambda phrase: (len(phrase.split()), phrase), default="")


def slot_spans(texts: Sequence[str]) -> list[tuple[int, int] | None]:
    """Span of the slot in each text, given that all texts were made from one template.

    A span is the index of its first character and one past its last. It is `None` for a text that does not match the
    template of the others or leaves the slot empty. All spans are `None` if the texts share no word. Words that all
    texts share at the edge of the slot count as part of the template, except articles, so the texts must be about
    different people.
    """
    before = _shared_start(texts)
    before = _GLUE_AT_END.sub("", _cut_at_word(before, texts))
    rests = [text[len(before) :] for text in texts if text.startswith(before)]
    mirrored = [rest[::-1] for rest in rests]
    after = _cut_at_word(_shared_start(mirrored), mirrored)[::-1]
    return [_span(text, before, after) for text in texts]


def fact_about(span: tuple[int, int], prompt: str, answer: str, **rest: Any) -> Fact:
    """The fact whose subject is this span of the prompt.

    Args:
        span: Index of the subject's first character, and one past its last.
        prompt: Text before the answer.
        answer: Answer, with its leading space.
        rest: Other fields of `Fact`.
    """
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
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


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
