"""What a prompt may be about, and what may follow it: suggestions for a fact that is traced.

Subjects are names of the session's facts that occur in the prompt, the longest first, and then capitalised words.
Answers are those of facts with this prompt, and then what each model wrote after it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from diffusion_lens.facts.fact import Fact, mentions
from diffusion_lens.model.text import token_spans
from diffusion_lens.model.transformer import DiffusionTransformer

MOST = 8  # suggestions of each kind
_ARTICLES = ("the", "a", "an")
_WORD = re.compile(r"[^\W\d_][\w'’-]*")


def subjects_of(models: Sequence[DiffusionTransformer], prompt: str, facts: Sequence[Fact]) -> list[dict[str, Any]]:
    """Subjects that occur in a prompt, each as {"text", "spans", "why"}: its text, by the index of each model its first
    token's position on that model's canvas and one past its last, and where it comes from. A model whose tokenizer does
    not know the prompt has no span."""
    tokens = {str(index): spans for index, model in enumerate(models) if (spans := _token_spans(model, prompt))}
    names = sorted({name for fact in facts for name in (fact.subject, fact.person) if name.strip()}, key=len)
    found = [(start, start + len(name), "a subject of the table") for name in names for start in mentions(name, prompt)]
    found.sort(key=lambda span: (span[0] - span[1], span[0]))
    subjects: dict[str, dict[str, Any]] = {}  # by their places
    for start, stop, why in (*found, *((*span, "capitalised") for span in capitalised(prompt))):
        within = {
            index: [i for i, (first, last) in enumerate(spans) if first < stop and last > start]
            for index, spans in tokens.items()
        }
        places = {index: [inside[0], inside[-1] + 1] for index, inside in within.items() if inside}
        if places and str(places) not in subjects:
            subjects[str(places)] = {"text": prompt[start:stop], "spans": places, "why": why}
    return list(subjects.values())[:MOST]


def _token_spans(model: DiffusionTransformer, prompt: str) -> list[tuple[int, int]]:
    """First character, and one past the last, of each token; none where the model's tokenizer refuses the prompt."""
    try:
        return list(token_spans(model, prompt))
    except ValueError:
        return []


def capitalised(prompt: str) -> Iterator[tuple[int, int]]:
    """First character, and one past the last, of each span of words that begin with a capital letter."""
    span: tuple[int, int] | None = None
    for word in _WORD.finditer(prompt):
        is_name = word[0][0].isupper() and word[0].lower() not in _ARTICLES
        if is_name and span is not None and prompt[span[1] : word.start()] == " ":
            span = span[0], word.end()
            continue
        if span is not None:
            yield span
        span = word.span() if is_name else None
    if span is not None:
        yield span


def answers_of(prompt: str, facts: Sequence[Fact], written: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Answers to a prompt, each as {"text", "why"}, with the leading space that the prompt leaves to them.

    Args:
        written: Name of a model, and what it wrote after the prompt, for each run.
    """
    found = [(fact.answer, "an answer of the table") for fact in facts if fact.prompt == prompt]
    said = [(name, text.strip()) for name, text in written if any(map(str.isalnum, text))]
    found += [(text if prompt[-1:].isspace() else f" {text}", f"{name} wrote this") for name, text in said]
    answers: dict[str, list[str]] = {}
    for text, why in found:  # Two models may write the same, and the answer of a fact; one may write it twice.
        if why not in answers.setdefault(text, []):
            answers[text].append(why)
    return [{"text": text, "why": "; ".join(reasons)} for text, reasons in answers.items()][:MOST]
