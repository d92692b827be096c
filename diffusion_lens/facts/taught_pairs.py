"""A sentence as trained, and the reverse question about it, on one model's canvas: `TaughtPair`.

The sentence links A to B: in "Ada Marsh was the brave pilot of Oslen." A is "Ada Marsh" and B "brave pilot of Oslen".
The reverse question asks for A: "the brave pilot of Oslen was Ada Marsh."

    model                       forward canvas                              reverse canvas
    masked diffusion model      [M] [M] was the brave pilot of Oslen.       the brave pilot of Oslen was [M] [M].
                                reads the last token of A                   reads the last token of A
    causal model                Ada Marsh was the brave pilot of Oslen.     the brave pilot of Oslen was Ada Marsh.
                                reads the last token of B                   reads the last token of A

Both canvases of a masked diffusion model hide A, as training does when the noise selects all tokens of A. A causal
model is trained on a sentence from left to right, so its forward canvas reads B. Its canvases hide nothing: the row
that predicts a token does not depend on that token or on those after it (teacher forcing). The source is the last token
of B. On the canvases that ask for A, the answer has to come from there.

This is the setting of Shin et al., "A Theoretical Analysis of Why Masked Diffusion Models Mitigate the Reversal Curse"
(arXiv 2602.02133), for spans of several tokens. The last token of a span stands for the span, because the last word of
a name or a description is usually the one that belongs to nobody else.

`match_facts` pairs facts about one person, one as trained and a question in the other direction; `lay_out_pairs` puts
such pairs on a model's canvas.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.facts.fact import Direction, Fact, check_row, mentions
from diffusion_lens.model.inputs import check_length
from diffusion_lens.model.noise import hidden_tokens
from diffusion_lens.model.text import check_known, token_spans
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import at_least, checked_arguments, whole_number

_FIRST, _LAST = re.compile(r"^\W+"), re.compile(r"\W+$")


class Sentence(NamedTuple):
    """A text with its spans of A and B: the index of the first character, and one past the last.

    Spaces and punctuation at the edges of a span do not belong to it: "Oslen." ends with the token of the place.
    """

    text: str
    a: tuple[int, int]
    b: tuple[int, int]

    @classmethod
    def of(cls, text: str, a: str, b: str) -> "Sentence":
        """The sentence in which A and B occur once, each in these words; otherwise a `ValueError`."""
        return cls(text, _find("a", a, text), _find("b", b, text))

    @classmethod
    def of_fact(cls, fact: Fact, asks_for_b: bool) -> "Sentence":
        """Prompt and answer of a fact as one text: the subject is A and the answer B, or the reverse.

        Within the answer, the span is the fact's person (if the prompt asks for the person, "d2p") or its description
        ("p2d"), if the answer contains it; otherwise the whole answer.

        Raises:
            ValueError: The prompt does not contain the subject, or contains it more than once without `subject_start`.
        """
        wanted = fact.person if fact.asked == "d2p" else fact.description if fact.asked == "p2d" else ""
        words = wanted if wanted and fact.answer.count(wanted) == 1 else fact.answer
        start = len(fact.prompt) + fact.answer.index(words)
        subject, answer = fact.subject_span, (start, start + len(words))
        a, b = (subject, answer) if asks_for_b else (answer, subject)
        return cls(fact.prompt + fact.answer, a, b)

    def locate(self, model: DiffusionTransformer) -> "LocatedSentence":
        """The tokens of the sentence, and the positions of its spans.

        Raises:
            ValueError: A span is empty, overlaps the other one, or has an edge inside a token; the last token of one
                occurs in the other; the tokenizer does not know a word; the text contains [MASK].
        """
        text = self.text
        check_known(model, text)
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


@dataclass(frozen=True, eq=False)
class TaughtCanvas:
    """A sentence on a model's canvas.

    Attributes:
        tokens: The sentence. On a masked diffusion model all tokens of A are [MASK], under uniform noise random tokens.
        row: Row of the logits that predicts the answer.
        answer_token: Id of the answer, the last token of A or of B.
        source: Position of the last token of B.
    """

    tokens: Int[Tensor, "pos"]
    row: int
    answer_token: int
    source: int

    def __post_init__(self) -> None:
        check_row("the tokens of a canvas", self.tokens)
        for name in ("row", "answer_token", "source"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        n_pos = self.tokens.shape[0]
        for name in ("row", "source"):
            if not 0 <= getattr(self, name) < n_pos:
                raise ValueError(f"{name}={getattr(self, name)} is outside the {n_pos} positions of the canvas")
        if self.answer_token < 0:
            raise ValueError(f"answer_token={self.answer_token} is not the id of a token")


@checked_arguments
@dataclass(frozen=True, eq=False)
class TaughtPair:
    """A sentence as trained (`forward`) and the reverse question about it, on one model's canvas.

    Attributes:
        id: Name for records.
        group: Person whom the pair is about, where facts or a data set name one. Pairs of one group are not
            independent of each other. A pair without a group stands alone.
    """

    forward: TaughtCanvas
    reverse: TaughtCanvas
    id: str = ""
    group: str = ""

    @classmethod
    @checked_arguments
    def of(
        cls,
        model: DiffusionTransformer,
        sentences: tuple[str, str],
        a: str,
        b: str,
        *,
        length: int | None = None,
        id: str = "",
    ) -> "TaughtPair":
        """The pair of two sentences that contain the same words of A and B.

        Args:
            sentences: The sentence as trained, and the reverse question with its answer.
            a, b: What the reverse question asks for, and what it mentions. Each occurs once in each sentence.
            model, length, id: As in `from_sentences`.

        Raises:
            ValueError: As in `from_sentences`; or a sentence lacks A or B, or contains one of them several times.
        """
        forward, reverse = (Sentence.of(text, a, b) for text in sentences)
        return cls.from_sentences(model, forward, reverse, length=length, id=id)

    @classmethod
    @checked_arguments
    def from_sentences(
        cls,
        model: DiffusionTransformer,
        forward: Sentence,
        reverse: Sentence,
        *,
        length: int | None = None,
        id: str = "",
    ) -> "TaughtPair":
        """The pair of two sentences whose spans are known.

        Args:
            model: Model on whose canvas the pair is laid out. Texts begin with BOS as the tokenizer does.
            forward: The sentence as trained.
            reverse: The reverse question with its answer.
            length: Number of positions of the canvases, filled with the end token as in training; by default
                `cfg.trained_length`. Where that is unknown, a canvas ends with its sentence.
            id: Name for records.

        Raises:
            ValueError: As in `Sentence.locate`; A or B ends with another token in the other sentence; a sentence is
                longer than the canvas; on a causal model, A does not precede B in the forward sentence or B does not
                precede A in the reverse one; the model is bidirectional and has no [MASK].
        """
        n_pos = model.cfg.trained_length if length is None else at_least(1, "length", length)
        of_forward, of_reverse = forward.locate(model), reverse.locate(model)
        for name, first, second in (("A", of_forward.a, of_reverse.a), ("B", of_forward.b, of_reverse.b)):
            ends = [of_forward.tokens[first[-1]], of_reverse.tokens[second[-1]]]
            if ends[0] != ends[1]:
                words = model.words(ends)
                raise ValueError(
                    f"{name} ends with the token {words[0]!r} in {forward.text!r} and with {words[1]!r} in "
                    f"{reverse.text!r}, so the sentences do not link the same tokens; write the last word of {name} "
                    "alike in both, with a space before it"
                )
        answer = of_forward.a
        if model.cfg.is_autoregressive:
            answer = of_forward.b
            _check_order(model, forward.text, ("A", of_forward.a), ("B", of_forward.b), "trained")
            _check_order(model, reverse.text, ("B", of_reverse.b), ("A", of_reverse.a), "asked in reverse")
        taught = _canvas(model, forward.text, of_forward, answer, n_pos)
        return cls(taught, _canvas(model, reverse.text, of_reverse, of_reverse.a, n_pos), id)

    @classmethod
    @checked_arguments
    def from_facts(
        cls, model: DiffusionTransformer, forward: Fact, reverse: Fact, *, length: int | None = None, id: str = ""
    ) -> "TaughtPair":
        """The pair of two facts about one person, its group. `data` has facts, and `match_facts` pairs them.

        Args:
            forward: A fact whose prompt and answer are a sentence of training. Its subject is A, its answer B.
            reverse: The reverse question. Its subject is B, its answer A.
            model, length, id: As in `from_sentences`.

        Raises:
            ValueError: As in `from_sentences` and `Sentence.of_fact`; or both facts ask in the same direction, or are
                about different people.
        """
        if forward.asked is not None and forward.asked == reverse.asked:
            raise ValueError(
                f"both facts ask {forward.asked}, {forward.prompt!r} and {reverse.prompt!r}; the second should ask in "
                "the other direction"
            )
        if forward.person and reverse.person and forward.person != reverse.person:
            raise ValueError(
                f"the facts are about {forward.person!r} and {reverse.person!r}; give two about one person"
            )
        taught, asked = Sentence.of_fact(forward, asks_for_b=True), Sentence.of_fact(reverse, asks_for_b=False)
        pair = cls.from_sentences(model, taught, asked, length=length, id=id)
        return replace(pair, group=forward.person or reverse.person)


FactPair = tuple[Fact, Fact]
OPPOSITE: dict[Direction, Direction] = {"p2d": "d2p", "d2p": "p2d"}
SHOWN = 3


@dataclass(frozen=True)
class LaidOutPairs:
    """Pairs that could be laid out on a model's canvas, in order, and reasons why the others could not be, by id."""

    pairs: list[TaughtPair]
    set_aside: dict[str, str]


def match_facts(
    taught: Sequence[Fact], asked: Sequence[Fact], trained: Direction = "p2d", *, per_person: int = 1
) -> list[FactPair]:
    """Pairs of a fact as trained and a question in the other direction, about the same person and description.

    Args:
        taught: Facts whose prompt and answer are sentences of training.
        asked: Questions; they may be the same list.
        trained: The one direction of training of the people, "p2d" or "d2p".
        per_person: Largest number of pairs for each person and description. The first consists of the first fact and
            the first question, and so on.

    Raises:
        ValueError: `trained` is not a direction, or there is no pair.
    """
    if trained not in OPPOSITE:
        raise ValueError(f"trained={trained!r}; it must be 'p2d' or 'd2p', the one direction of training")
    at_least(1, "per_person", per_person)
    questions: dict[tuple[str, str], list[Fact]] = {}
    sentences: dict[tuple[str, str], list[Fact]] = {}
    for facts, way, found in ((asked, OPPOSITE[trained], questions), (taught, trained, sentences)):
        for fact in facts:
            if fact.trained == trained and fact.asked == way:
                found.setdefault((fact.person, fact.description), []).append(fact)
    pairs = [
        pair
        for key, facts in sentences.items()
        for pair in list(zip(facts, questions.get(key, ()), strict=False))[:per_person]
    ]
    if not pairs:
        raise ValueError(
            f"no person is trained {trained} only and has both a fact that asks {trained} and a question that asks "
            f"{OPPOSITE[trained]}; pairs are made of facts with the same person and description, trained {trained}"
        )
    return pairs


def lay_out_pairs(
    model: DiffusionTransformer, fact_pairs: Sequence[FactPair], *, length: int | None = None
) -> LaidOutPairs:
    """Pairs of `match_facts` on the model's canvas, of a `length` as in `TaughtPair.from_sentences`.

    Those that the model cannot be given are set aside with the reason.

    Raises:
        ValueError: No pair can be laid out, or two pairs have one id.
    """
    pairs: list[TaughtPair] = []
    set_aside: dict[str, str] = {}
    names: set[str] = set()
    for number, (forward, reverse) in enumerate(fact_pairs):
        pair_id = "+".join(fact.id for fact in (forward, reverse) if fact.id) or f"pair-{number:04d}"
        if pair_id in names:
            raise ValueError(f"two pairs have the id {pair_id!r}; give each fact an id of its own")
        names.add(pair_id)
        try:
            pairs.append(TaughtPair.from_facts(model, forward, reverse, length=length, id=pair_id))
        except ValueError as error:
            set_aside[pair_id] = str(error)
    if not pairs:
        shown = _first(set_aside) or "there are none"
        raise ValueError(f"none of the {len(fact_pairs)} pairs can be laid out for the model; {shown}")
    return LaidOutPairs(pairs, set_aside)


def pairs_in_common(laid_out: Mapping[str, LaidOutPairs]) -> dict[str, LaidOutPairs]:
    """Of the same pairs by name of the model, those that every model can be given; the others are set aside for all.

    Raises:
        ValueError: The models have no pair in common.
    """
    set_aside = {
        pair_id: f"{name}: {reason}" if len(laid_out) > 1 else reason
        for name, of_model in reversed([*laid_out.items()])
        for pair_id, reason in of_model.set_aside.items()
    }
    common = {
        name: LaidOutPairs([pair for pair in of_model.pairs if pair.id not in set_aside], set_aside)
        for name, of_model in laid_out.items()
    }
    if not all(each.pairs for each in common.values()):
        raise ValueError(f"no pair can be laid out for all of {', '.join(laid_out)}; {_first(set_aside)}")
    return common


def _first(set_aside: Mapping[str, str]) -> str:
    return "; ".join(f"{pair_id!r}: {reason}" for pair_id, reason in list(set_aside.items())[:SHOWN])


class LocatedSentence(NamedTuple):
    """The tokens of a sentence, and the positions of those of A and of B."""

    tokens: list[int]
    a: range
    b: range


def _check_order(
    model: DiffusionTransformer, text: str, first: tuple[str, range], second: tuple[str, range], use: str
) -> None:
    """Raise a `ValueError` unless the first span ends before the second begins."""
    if first[1][-1] >= second[1][0]:
        raise ValueError(
            f"{second[0]} comes before {first[0]} in {text!r}, the sentence that is {use}. {model.cfg.model_name!r} is "
            f"causal and predicts {second[0]} from what comes before it: write {first[0]} first"
        )


def _canvas(
    model: DiffusionTransformer, text: str, sentence: LocatedSentence, answer: range, n_pos: int | None
) -> TaughtCanvas:
    """The canvas of a sentence, of which the last token of one span is read."""
    tokens = list(sentence.tokens)
    if not model.cfg.is_autoregressive:
        tokens[sentence.a[0] : sentence.a[-1] + 1] = hidden_tokens(model.cfg, len(sentence.a), text)
    n_pos = len(tokens) if n_pos is None else n_pos
    if len(tokens) > n_pos:
        origin = ", on which the model was trained" if n_pos == model.cfg.trained_length else ""
        raise ValueError(
            f"{text!r} has {len(tokens)} tokens, more than length={n_pos}{origin}; give length={len(tokens)} or more"
        )
    check_length(n_pos, model.cfg)
    if len(tokens) < n_pos:
        end = model.tokenizer.eos_token_id
        if end is None:
            raise ValueError(
                f"the tokenizer of {model.cfg.model_name!r} has no end token to fill {n_pos} positions with; give the "
                f"length of the sentence, length={len(tokens)}"
            )
        tokens += [int(end)] * (n_pos - len(tokens))
    row = model.readout.rows(torch.tensor(answer[-1]))
    return TaughtCanvas(
        tokens=torch.tensor(tokens, device=model.cfg.device),
        row=int(row),
        answer_token=sentence.tokens[answer[-1]],
        source=sentence.b[-1],
    )


def _positions(model: DiffusionTransformer, text: str, name: str, span: tuple[int, int]) -> range:
    start, stop = span
    if not 0 <= start < stop <= len(text):
        raise ValueError(f"the span of {name}, {span}, is empty or outside the text {text!r}")
    words = _LAST.sub("", text[start:stop])
    stop = start + len(words)
    start = stop - len(_FIRST.sub("", words))
    if start == stop:
        raise ValueError(f"the span of {name} in {text!r} has no letter or digit")
    spans = token_spans(model, text)
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
    starts = mentions(words, text)
    if not starts:
        raise ValueError(f"{name}={words!r} does not occur in {text!r}; give the words of the sentence")
    if len(starts) > 1:
        raise ValueError(
            f"{name}={words!r} occurs {len(starts)} times in {text!r}, beginning at the characters {starts}; pass the "
            "spans to TaughtPair.from_sentences"
        )
    return starts[0], starts[0] + len(words)
