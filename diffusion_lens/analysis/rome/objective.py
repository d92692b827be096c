"""The objective of the search for v*: the canvases that it reads, and the rows of their logits.

The object is read on each prompt of the request. On a causal model it is teacher-forced. On a masked diffusion model
its positions are masked, and with "partial" states also partly revealed. A value that was optimised for a completely
masked object may fail as soon as the first token of the object is revealed.

    masked    no token of the object is revealed
    partial   the same, and its first 1, 2, … tokens revealed, and its last 1, 2, … tokens; equal weights for all states

A further prompt, "{subject} is a", measures how much other knowledge about the subject changes (the essence).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from diffusion_lens.analysis.rome.prompts import check_object
from diffusion_lens.facts import Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.noise import hidden_tokens

ESSENCE = "{} is a"
DISTRIBUTION = -1


class Read(NamedTuple):
    """One row of a canvas's logits, and its weight in the loss.

    Attributes:
        row: Index of the row.
        token: Token that is scored there, or `DISTRIBUTION` if the whole distribution should stay as it is.
        weight: Weight of the row.
    """

    row: int
    token: int
    weight: float


class ReadCanvas(NamedTuple):
    """A canvas, and the rows of its logits that are read."""

    query: Query
    reads: list[Read]


@dataclass(frozen=True, eq=False)
class ValueObjective:
    """The canvases on which the loss of one request is computed.

    Attributes:
        objects: Canvases on which the object is read, the plain request first.
        essences: A list with the canvas of the essence, or an empty list.
    """

    objects: list[ReadCanvas]
    essences: list[ReadCanvas]

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        request: Sequence[Query],
        essence: Query | None,
        essence_at: str,
        over_states: str,
    ) -> "ValueObjective":
        """The objective of a request; without an essence it has no KL term."""
        check_object(model, request)
        objects = []
        for query in request:
            states = STATES[over_states](model, query)
            for state in states:
                weight = 1 / (len(request) * len(states) * len(state.answer_tokens))
                rows = model.readout.rows(torch.tensor(state.answer_positions)).tolist()
                pairs = zip(rows, state.answer_tokens, strict=True)
                objects.append(ReadCanvas(state, [Read(row, token, weight) for row, token in pairs]))
        if essence is None:
            return cls(objects, [])
        rows = ESSENCE_ROWS[essence_at](model, essence)
        return cls(objects, [ReadCanvas(essence, [Read(row, DISTRIBUTION, 1 / len(rows)) for row in rows])])


def default_essence(model: DiffusionTransformer, query: Query) -> Query:
    """Builds the prompt "{subject} is a".

    On a diffusion model, a [MASK] or under uniform noise a random token is appended, and the prediction is read there.

    Raises:
        ValueError: The model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(
            f"{model.cfg.model_name!r} has no tokenizer to write '{ESSENCE}' with: pass essence=, a Query over its "
            "tokens with the subject marked, or kl_factor=0.0 for a search without an essence"
        )
    subject = model.to_string(query.tokens[slice(*query.subject)]).strip()
    text = ESSENCE.format(subject)
    of_subject = [i for i, (start, stop) in enumerate(model.token_spans(text)) if start < len(subject) and stop > 0]
    # `encode` does not warn of unknown words: the caller did not choose the words of the template.
    tokens = [*model.encode(text), *([] if model.cfg.grows else hidden_tokens(model.cfg, 1, text))]
    return Query(torch.tensor(tokens), (of_subject[0], of_subject[-1] + 1), (), ())


def _masked(model: DiffusionTransformer, query: Query) -> list[Query]:
    return [query]


def _partial(model: DiffusionTransformer, query: Query) -> list[Query]:
    n_tokens = len(query.answer_tokens)
    if model.cfg.grows:
        return [query]  # Teacher forcing includes every state already.
    hidden = [range(n_revealed, n_tokens) for n_revealed in range(n_tokens)]
    hidden += [range(n_tokens - n_revealed) for n_revealed in range(1, n_tokens)]
    return [_hide_only(query, tokens) for tokens in hidden]


def _hide_only(query: Query, hidden: Sequence[int]) -> Query:
    """The canvas with the object revealed except for the tokens `hidden`, which become the answer of the query."""
    tokens = query.tokens.clone()
    for i, (position, token) in enumerate(zip(query.answer_positions, query.answer_tokens, strict=True)):
        if i not in hidden:
            tokens[position] = token
    positions = tuple(query.answer_positions[i] for i in hidden)
    return Query(tokens, query.subject, positions, tuple(query.answer_tokens[i] for i in hidden))


def _at_readout(model: DiffusionTransformer, essence: Query) -> list[int]:
    positions = list(essence.answer_positions)
    if not positions:
        real = model.real_positions(essence.tokens.to(model.cfg.device)[None])
        end = len(essence.tokens) if real is None else int(real[0].nonzero().max()) + 1
        if model.cfg.has_mask:
            positions = (essence.tokens == model.cfg.blank).nonzero().flatten().tolist()
        else:
            positions = [end if model.cfg.grows else end - 1]
    if not positions:
        raise ValueError(
            "the essence has no position to read: end it with a [MASK], give it answer_positions, or use "
            "essence_at='subject_last'"
        )
    rows: list[int] = model.readout.rows(torch.tensor(positions)).tolist()
    return rows


def _at_subject_last(model: DiffusionTransformer, essence: Query) -> list[int]:
    return [essence.subject[1] - 1]


STATES: dict[str, Callable[[DiffusionTransformer, Query], list[Query]]] = {"masked": _masked, "partial": _partial}
ESSENCE_ROWS: dict[str, Callable[[DiffusionTransformer, Query], list[int]]] = {
    "readout": _at_readout,
    "subject_last": _at_subject_last,
}
