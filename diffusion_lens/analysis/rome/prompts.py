"""Requests: one prompt plain and after prefixes, and many of them as one batch.

ROME averages key and value over contexts: the request itself, and the request after short texts that the model wrote
(`get_context_templates` of kmeng01/rome). Prompts then differ in length. They are padded on the right and the padding
is hidden by an attention mask, so that a row computes what it computes alone, on a bidirectional model too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusion_lens.analysis.answer import check_answer
from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.facts import Fact, Query
from diffusion_lens.model.inputs import check_length
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.seeds import own_seed
from diffusion_lens.settings import Whole, at_least, whole_numbers
from diffusion_lens.shapes import PosMask, Tokens

Request = Query | Sequence[Query]


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Queries as rows of one batch.

    Attributes:
        tokens: Int[batch pos], padded on the right, so that every place keeps its number.
        real: Bool[batch pos], false at padding: the attention mask. `None` when there is none.
    """

    tokens: Tokens
    real: PosMask | None

    @classmethod
    def of(cls, model: DiffusionTransformer, rows: Sequence[Tensor]) -> "PromptBatch":
        """Rows of tokens, Int[pos] each; padding that a row brings along is padding here, as where it runs alone."""
        lengths = torch.tensor([len(row) for row in rows], device=model.cfg.device)
        check_length(int(lengths.max()), model.cfg)
        tokens = torch.full((len(rows), int(lengths.max())), model.pad_id, device=model.cfg.device)
        real = torch.arange(tokens.shape[1], device=model.cfg.device) < lengths[:, None]
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row.to(model.cfg.device)
            own = model.real_positions(tokens[i : i + 1, : len(row)])
            if own is not None:
                real[i, : len(row)] = own[0]
        return cls(tokens, None if bool(real.all()) else real)


def sample_prefixes(
    model: DiffusionTransformer,
    lengths: Iterable[Whole] = (5,) * 10 + (10,) * 10,
    *,
    start: str = "The",
    temperature: float = 1.0,
    seed: int = 0,
) -> list[str]:
    """Short texts by the model itself, each ending in ". ", as ROME puts them before a request.

    Args:
        lengths: new tokens of each text; a masked diffusion model takes as many steps.
        start: how every text begins.
        temperature: of the sampling; 0 would write one text again and again.
        seed: text i is drawn with a seed of its own, made of this one and i: no other seed gives the same text again.
    """
    lengths = [at_least(1, "lengths", length) for length in whole_numbers("lengths", lengths)]
    if not lengths:
        raise ValueError("lengths is empty: name the length of each prefix, or go without prefixes")
    texts: dict[int, str] = {}
    for length in dict.fromkeys(lengths):
        rows = [i for i, each in enumerate(lengths) if each == length]
        canvas = lay_out(model, [start] * len(rows), max_new_tokens=length)
        settings = DenoiseSettings(steps=length, temperature=temperature, seed=[own_seed(seed, i) for i in rows])
        trajectory = denoise(model, canvas, settings)
        for i, tokens in zip(rows, trajectory.tokens.tolist(), strict=True):
            words = model.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            texts[i] = " ".join(words.split())
    return [f"{texts[i]}. " for i in range(len(lengths))]


def ask_with_prefixes(
    model: DiffusionTransformer,
    fact: Fact,
    prefixes: Sequence[str],
    *,
    length: int | None = None,
    first_tokens: int | None = None,
    occurrence: int | None = None,
    prepend_bos: bool | None = None,
) -> list[Query]:
    """The plain request, then the request after each prefix: what `compute_key` and `optimize_value` take.

    Args:
        length: places of every canvas of a masked diffusion model, those of prefix and prompt included; by default, as
            in `average_indirect_effect`, the length that it was trained on, if that is known.
        first_tokens, occurrence, prepend_bos: as in `Fact.to_query`; mentions, and the fact's `subject_start`, are
            counted in the fact's own prompt.

    Raises:
        ValueError: as in `Fact.to_query`, or an object that the tokenizer splits differently after a prefix.
    """
    queries = []
    for prefix in ["", *prefixes]:
        asked, mention = replace(fact, prompt=prefix + fact.prompt), occurrence
        if occurrence is None:
            asked = replace(asked, subject_start=len(prefix) + fact.subject_span[0])
        else:
            mention = occurrence + sum(asked.prompt.startswith(fact.subject, i) for i in range(len(prefix)))
        layout = CanvasLayout(length, first_tokens=first_tokens, occurrence=mention)
        queries.append(layout.query(model, asked, prepend_bos=prepend_bos))
    check_object(model, queries)
    return queries


def as_request(queries: Request) -> list[Query]:
    """A request as the list that it is.

    Raises:
        ValueError: an empty one.
        TypeError: not queries.
    """
    request = [queries] if isinstance(queries, Query) else list(queries)
    if not request:
        raise ValueError("the request is empty: give at least the plain prompt, as a Query")
    if strangers := [type(query).__name__ for query in request if not isinstance(query, Query)]:
        raise TypeError(
            f"a request is made of queries, not of {strangers[0]}; ask_with_prefixes(model, fact, []) makes one"
        )
    return request


def check_object(model: DiffusionTransformer, request: Sequence[Query]) -> None:
    """Raise a `ValueError` unless all prompts of a request ask for one object, in the same tokens, and can be read."""
    for i, query in enumerate(request):
        check_answer(model, query, f"queries[{i}]")
        if query.answer_tokens != request[0].answer_tokens:
            raise ValueError(
                f"the object is {model.words(request[0].answer_tokens)} in the plain request and "
                f"{model.words(query.answer_tokens)} in queries[{i}]: either another object, or the tokenizer splits "
                "it differently there; leave that prefix out, or end it with a space or a full stop"
            )
