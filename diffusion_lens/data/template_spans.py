"""Names and descriptions that no file marks, found by what rows of one kind have in common.

A table of questions is made by filling the slot of each template with each person's words. So

    the rows of one person share the person's name and little else:    `shared_words`
    the rows of one template share all but what fills its slot:        `slot_spans`

Both go by what nine rows in ten hold, so that one odd row is found out and does not spoil the others. A slot begins and
ends with a whole word. Its article belongs to it, even where all the people's descriptions begin with the same one;
"being" before it does not: "Walking the path of being [the renowned composer of ...]," beside "Walking the path of
[designing ...],". A quoted title belongs to it with both its quotes, ["Abyssal Melodies."]; other marks at its end do
not.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from diffusion_lens.facts import Fact

AGREEING = 0.9  # share of the rows that makes something common to them
MARKS = ".,:;?"
QUOTES = "\"'"

_WORD = re.compile(r"[\w-]")
_GLUE_AT_END = re.compile(r"(?<![\w-])((being|the|an?)\s+)+$", re.IGNORECASE)
_CLOSING = re.compile(r'[.,:;?!]*"')
_BEING = re.compile(r"being\s+", re.IGNORECASE)


def shared_words(texts: Sequence[str]) -> str:
    """The longest run of words in nine of ten texts, "" where there is none; marks around it are not part of it."""
    counts = Counter(run for text in texts for run in _runs(text))
    common = [run for run, count in counts.items() if count >= AGREEING * len(texts)]
    return max(common, key=lambda run: (len(run.split()), run), default="")


def slot_spans(texts: Sequence[str]) -> list[tuple[int, int] | None]:
    """Where each text fills the slot of the template they were all made from: first character, and one past the last.

    None for a text that the others' template does not fit, or that fills it with nothing, and for all where nothing
    with a word in it is common. Words which all fill in at the slot's edge are taken for the template's, articles
    excepted; so a slot needs people who differ.
    """
    before = _shared_start(texts)
    before = _GLUE_AT_END.sub("", _cut_at_word(before, texts))
    rests = [text[len(before) :] for text in texts if text.startswith(before)]
    backwards = [rest[::-1] for rest in rests]
    after = _cut_at_word(_shared_start(backwards), backwards)[::-1]
    return [_span(text, before, after) for text in texts]


def fact_about(span: tuple[int, int], prompt: str, answer: str, **rest: Any) -> Fact:
    """The fact whose subject is this span of the prompt.

    Args:
        rest: other fields of the `Fact`.
    """
    start, stop = span
    subject = prompt[start:stop]
    is_once = prompt.find(subject) == prompt.rfind(subject)
    template = f"{prompt[:start]}<subject>{prompt[stop:]}"
    return Fact(prompt, subject, answer, template=template, subject_start=None if is_once else start, **rest)


def _runs(text: str) -> set[str]:
    words = text.split()
    pairs = ((i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return {" ".join(words[i:j]).strip(MARKS + QUOTES) for i, j in pairs} - {""}


def _shared_start(texts: Sequence[str]) -> str:
    """The longest start that nine in ten share; sorted, texts with the same start are neighbours."""
    ordered = sorted(texts)
    needed = math.ceil(AGREEING * len(texts))
    ends = range(max(needed, 1) - 1, len(texts))
    return max((_common_start(ordered[i - needed + 1], ordered[i]) for i in ends), key=len, default="")


def _common_start(one: str, other: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


def _cut_at_word(start: str, texts: Sequence[str]) -> str:
    """Without the word that a text goes on writing."""
    goes_on = any(_WORD.match(text, len(start)) for text in texts if text.startswith(start))
    while goes_on and start and _WORD.match(start[-1]):
        start = start[:-1]
    return start


def _span(text: str, before: str, after: str) -> tuple[int, int] | None:
    if not (text.startswith(before) and text.endswith(after) and _WORD.search(before + after)):
        return None
    start, stop = len(before), len(text) - len(after)
    if being := _BEING.match(text, start, max(start, stop)):
        start = being.end()
    if text[start:stop].count('"') % 2:  # all the people's titles begin or end alike
        if text[start - 1 : start] == '"':
            start -= 1
        elif closing := _CLOSING.match(text, stop):
            stop = closing.end()
    filled = text[start:stop]
    start += len(filled) - len(filled.lstrip())
    stop = start + len(filled.strip().rstrip(MARKS))
    return (start, stop) if start < stop else None
