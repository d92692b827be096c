"""Other objectives of the AR network: what it is trained on for each sentence, and how it is asked then.

All of them predict the next token with causal attention. They differ in the rows that they make of a sentence "A is B",
anew for each update. Marks are tokens that the network reads and never has to predict.

    ar-masked     the sentence, with each token that is read masked with probability t ~ U(0, 1): the noise of an MDM
                  without its attention. (Our control; no paper is known to us.)
    ar-reversed   half of the time "B is A", the sentence from its end (Golovneva et al. 2024, "Reverse Training to
                  Nurse the Reversal Curse", arXiv 2403.13799). With entities of one token it is the reverse question.
    ar-segments   half of the time each of the two borders between tokens is cut with probability 1/2 (so 3/8 of the
                  rows have a cut), and the segments are put in reverse order with a mark between them, "B [REV] A is"
                  (random segment reversal of the same paper)
    ar-fill       half of the time a random part, which one in four times is empty, is moved to the end,
                  "[PRE] [SUF] is B [MID] A" (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in
                  the Middle", arXiv 2207.14255, PSM)
    ar-permuted   the tokens in a random order, each after a mark of its position, "[3] B [1] A [2] is": permutation
                  language modelling as in XLNet (Yang et al. 2019, arXiv 1906.08237), with the position of the token to
                  predict as a token of its own, as in σ-GPT (Pannatier et al. 2024, arXiv 2404.09562)

An MDM learns A from "[M] is B", the sentence without its first token. Some of these networks can be asked for the same
(`Objective.infill`), so that learning it can be told apart from answering "B is".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.model.shapes import Tokens
from diffusion_lens.model.transformer import DiffusionTransformer

N_FACTS = 64
IS, MASK = 0, 2 * N_FACTS + 1
PRE, SUF, MID, REV, FIRST, SECOND, THIRD = MARKS = tuple(range(MASK + 1, MASK + 8))
LONGEST = 6  # tokens of a row
NOTHING = -100  # no target: torch's cross-entropy ignores it
_DRAWN = 4  # random numbers for each sentence


class Row(NamedTuple):
    """What is read, and the token to predict after each of them, or `NOTHING`."""

    tokens: list[int]
    targets: list[int]


class Asked(NamedTuple):
    """A canvas for a question.

    Attributes:
        tokens: The tokens, with the answer behind the row where it is part of a sentence.
        row: Row of the logits that predicts the answer.
        first, last: Positions of the first and the last of the two entities.
    """

    tokens: list[int]
    row: int
    first: int
    last: int


def _read(tokens: Sequence[int]) -> Row:
    """The tokens themselves; marks are not predicted."""
    following = [*tokens[1:], NOTHING]
    return Row(list(tokens), [token if token < MASK else NOTHING for token in following])


def _masked(sentence: Sequence[int], u: Sequence[float]) -> Row:
    tokens = [MASK if x < u[0] else token for x, token in zip(u[1:], sentence, strict=True)]
    return Row(tokens, _read(sentence).targets)


def _reversed(sentence: Sequence[int], u: Sequence[float]) -> Row:
    return _read(sentence if u[0] < 0.5 else sentence[::-1])


def _segments(sentence: Sequence[int], u: Sequence[float]) -> Row:
    ends = [0, *(i for i in (1, 2) if u[0] >= 0.5 and u[i] < 0.5), 3]
    pieces = [[REV, *sentence[start:stop]] for start, stop in pairwise(ends)]
    return _read([token for piece in reversed(pieces) for token in piece][1:])


def _fill(sentence: Sequence[int], u: Sequence[float]) -> Row:
    if u[0] < 0.5:
        return _read(sentence)
    start, stop = sorted(int(4 * x) for x in u[1:3])
    return _read([PRE, *sentence[:start], SUF, *sentence[stop:], MID, *sentence[start:stop]])


def _permuted(sentence: Sequence[int], u: Sequence[float]) -> Row:
    order = sorted(range(3), key=lambda i: u[i])
    return _read([token for i in order for token in ((FIRST, SECOND, THIRD)[i], sentence[i])])


def plain_question(first: int, last: int) -> Asked:
    """The sentence "first is last"."""
    return Asked([first, IS, last], 1, 0, 2)


def _with_positions(first: int, last: int) -> Asked:
    return Asked([FIRST, first, SECOND, IS, THIRD, last], 4, 1, 5)


@dataclass(frozen=True)
class Objective:
    """One objective.

    Attributes:
        title: Its name in tables.
        row: What is trained on, from a sentence and four random numbers between 0 and 1.
        infill: Tokens after which the network gives the first entity of the sentence whose last one is given; `None`
            if the objective has no such rows.
        ask: The sentence as a question.
    """

    title: str
    row: Callable[[Sequence[int], Sequence[float]], Row]
    infill: Callable[[int], list[int]] | None = None
    ask: Callable[[int, int], Asked] = plain_question

    def loss(self, model: DiffusionTransformer, sentences: Tokens, generator: torch.Generator | None) -> Tensor:
        """Mean cross-entropy of the targets, of rows drawn anew."""
        drawn = torch.rand((len(sentences), _DRAWN), generator=generator).tolist()
        rows = [self.row(sentence, u) for sentence, u in zip(sentences.tolist(), drawn, strict=True)]
        longest = max(len(row.tokens) for row in rows)
        tokens = torch.tensor([row.tokens + [IS] * (longest - len(row.tokens)) for row in rows])
        targets = torch.tensor([row.targets + [NOTHING] * (longest - len(row.targets)) for row in rows])
        logits: Float[Tensor, "batch pos d_vocab_out"] = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOTHING)


OBJECTIVES = {
    "ar-masked": Objective("AR, masked input", _masked),
    "ar-reversed": Objective("AR, reversed texts", _reversed, lambda last: [last, IS]),
    "ar-segments": Objective("AR, reversed segments", _segments, lambda last: [IS, last, REV]),
    "ar-fill": Objective("AR, fill in the middle", _fill, lambda last: [PRE, SUF, IS, last, MID]),
    "ar-permuted": Objective("AR, permuted", _permuted, lambda last: [SECOND, IS, THIRD, last, FIRST], _with_positions),
}
