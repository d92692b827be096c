"""A sentence that links A to B, and the tokens of both."""

import re
from typing import NamedTuple

from diffusion_lens.facts import Fact
from diffusion_lens.model.transformer import DiffusionTransformer

_FIRST, _LAST = re.compile(r"^\W+"), re.compile(r"\W+$")


class LocatedSentence(NamedTuple):
    """The tokens of a sentence, and the positions of A's and of B's tokens."""

    tokens: list[int]
    a: range
    b: range


class Sentence(NamedTuple):
    """A text with its spans of A and B: the index of the first character, and one past the last.

    Spaces and punctuation at the edges of a span do not belong to it: "Oslen." ends with the token of the place.
    """

    text: str
    a: tuple[int, int]
    b: tuple[int, int]

    @classmethod
    def of(cls, text: str, a: str, b: str) -> "Sentence":
        """The sentence in which A and B occur once, each in these words.

        Raises:
            ValueError: The text lacks A or B, or contains one of them several times.
        """
        return cls(text, _find("a", a, text), _find("b", b, text))

    @classmethod
    def of_fact(cls, fact: Fact, asks_for_b: bool) -> "Sentence":
        """Prompt and answer of a fact as one text, with the subject of the prompt as one span.

        The other span is within the answer: the fact's person (if the prompt asks for the person, "d2p") or its
        description ("p2d"), if the answer contains it; otherwise the whole answer.

        Args:
            asks_for_b: Whether the answer is B, and the subject A.

        Raises:
            ValueError: The prompt does not contain the subject, or contains it more than once without `subject_start`.
        """
        wanted = fact.person if fact.asked == "d2p" else fact.description if fact.asked == "p2d" else ""
        words = wanted if wanted and fact.answer.count(wanted) == 1 else fact.answer
        start = len(fact.prompt) + fact.answer.index(words)
        subject, answer = fact.subject_span, (start, start + len(words))
        return cls(fact.prompt + fact.answer, *((subject, answer) if asks_for_b else (answer, subject)))

    def locate(self, model: DiffusionTransformer) -> LocatedSentence:
        """The tokens of the sentence, and the positions of its spans.

        Raises:
            ValueError: A span is empty, overlaps the other one, or has an edge inside a token; the last token of one
                occurs in the other; the tokenizer does not know a word; the text contains [MASK].
        """
        text = self.text
        model.check_known(text)
        tokens = model.encode(text)
        if model.cfg.has_mask and model.cfg.mask_token_id in tokens:
            raise ValueError(f"the sentence {text!r} contains [MASK]; write the words of A, which are masked here")
        a, b = (_positions(model, text, name, span) for name, span in (("A", self.a), ("B", self.b)))
        if a[0] <= b[-1] and b[0] <= a[-1]:
            raise ValueError(f"A and B overlap in {text!r}; each must have tokens of its own")
        for one, other, names in ((a, b, "AB"), (b, a, "BA")):
            if (last := tokens[one[-1]]) in [tokens[i] for i in other]:
                raise ValueError(
                    f"{names[0]} ends with the token {model.words([last])[0]!r}, which {names[1]} contains too in "
                    f"{text!r}, so the answer could be copied; choose a pair without a common word"
                )
        return LocatedSentence(tokens, a, b)


def _positions(model: DiffusionTransformer, text: str, name: str, span: tuple[int, int]) -> range:
    start, stop = span
    if not 0 <= start < stop <= len(text):
        raise ValueError(f"the span of {name}, {span}, is empty or outside the text {text!r}")
    words = _LAST.sub("", text[start:stop])
    stop = start + len(words)
    start = stop - len(_FIRST.sub("", words))
    if start == stop:
        raise ValueError(f"the span of {name} in {text!r} has no letter or digit")
    spans = model.token_spans(text)
    inside = [i for i, (first, end) in enumerate(spans) if first < stop and end > start]
    if not inside:
        raise ValueError(f"the tokenizer of {model.cfg.model_name!r} drops {text[start:stop]!r} from {text!r}")
    before, after = text[spans[inside[0]][0] : start], text[stop : spans[inside[-1]][1]]
    if before.strip() or after.strip():
        first, end = spans[inside[0] if before.strip() else inside[-1]]
        raise ValueError(
            f"the tokenizer merges {name}, {text[start:stop]!r}, with the text around it into the token "
            f"{text[first:end].strip()!r} in {text!r}; write the sentence with a space between them"
        )
    return range(inside[0], inside[-1] + 1)


def _find(name: str, words: str, text: str) -> tuple[int, int]:
    """The span of words that occur once in a text."""
    if not words.strip():
        raise ValueError(f"{name}={words!r} is empty; give the words of the sentence {text!r}")
    starts = [start for start in range(len(text)) if text.startswith(words, start)]
    if not starts:
        raise ValueError(f"{name}={words!r} does not occur in {text!r}; give the words of the sentence")
    if len(starts) > 1:
        raise ValueError(
            f"{name}={words!r} occurs {len(starts)} times in {text!r}, beginning at the characters {starts}; pass the "
            "spans to TaughtPair.from_sentences"
        )
    return starts[0], starts[0] + len(words)
