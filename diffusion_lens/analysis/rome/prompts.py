"""Requests: one prompt alone and after prefixes, and many prompts as one batch.

ROME averages key and value over contexts: the request itself, and the request after short texts that the model wrote
(`get_context_templates` of kmeng01/rome). These prompts differ in length. They are padded on the right, and an
attention mask hides the padding, so the results of a row do not depend on the others, on a bidirectional model either.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusion_lens.analysis.answer import check_answer
from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.prepare import denoise
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
        tokens: Int[batch pos], padded on the right, so that every position keeps its number.
        real: Bool[batch pos], attention mask, false at padding; `None` where there is no padding.
    """

    tokens: Tokens
    real: PosMask | None

    @classmethod
    def of(cls, model: DiffusionTransformer, rows: Sequence[Tensor]) -> "PromptBatch":
        """Rows of tokens, Int[pos] each; padding inside a row is padding here too."""
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
    """Sample short texts from the model, each ending in ". ", which ROME puts before a request.

    Args:
        lengths: Number of new tokens of each text, and of the denoising steps that write it.
        start: Words with which every text begins.
        temperature: Temperature of the sampling; at 0 all texts of one length would be the same.
        seed: Seed of the random number generator; text i has its own seed, made of this one and i.
    """
    lengths = [at_least(1, "lengths", length) for length in whole_numbers("lengths", lengths)]
    if not lengths:
        raise ValueError("lengths is empty: give the length of each prefix, or use no prefixes at all")
    texts: dict[int, str] = {}
    for length in dict.fromkeys(lengths):
        rows = [i for i, own_length in enumerate(lengths) if own_length == length]
        canvas = lay_out(model, [start] * len(rows), max_new_tokens=length)
        settings = DenoiseSettings(steps=length, temperature=temperature, seed=[own_seed(seed, i) for i in rows])
        trajectory = denoise(model, canvas, settings)
        for i, tokens in zip(rows, trajectory.tokens.tolist(), strict=True):
            words = model.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            texts[i] = " ".join(words.split())
    return [f"{texts[i]}. " for i in range(len(lengths))]


def query_with_prefixes(
    model: DiffusionTransformer,
    fact: Fact,
    prefixes: Sequence[str],
    *,
    length: int | None = None,
    first_tokens: int | None = None,
    occurrence: int | None = None,
    prepend_bos: bool | None = None,
) -> list[Query]:
    """The plain request, then the request after each prefix, as `compute_key` and `optimize_value` take them.

    Args:
        length: Length of every canvas of a masked diffusion model, prefix and prompt included; by default, as in
            `average_indirect_effect`, the length that it was trained on, if that is known.
        first_tokens, occurrence, prepend_bos: The same as in `Fact.to_query`; mentions, and the fact's `subject_start`,
            are counted in the fact's own prompt.

    Raises:
        ValueError: `Fact.to_query` refuses the fact, or the tokenizer splits the object differently after a prefix.
    """
    layout = CanvasLayout(length, first_tokens=first_tokens, occurrence=occurrence)
    return lay_out_request(model, fact, prefixes, layout, prepend_bos)


def lay_out_request(
    model: DiffusionTransformer,
    fact: Fact,
    prefixes: Sequence[str],
    layout: CanvasLayout,
    prepend_bos: bool | None = None,
) -> list[Query]:
    """The plain request and the request after each prefix, like `query_with_prefixes`, on canvases of this layout."""
    start, _ = fact.subject_characters(layout.occurrence)
    layout = replace(layout, occurrence=None)  # The mention is given by its first character, which a prefix moves.
    queries = []
    for prefix in ["", *prefixes]:
        prefixed = replace(fact, prompt=prefix + fact.prompt, subject_start=len(prefix) + start)
        queries.append(layout.query(model, prefixed, prepend_bos=prepend_bos))
    check_object(model, queries)
    return queries


def as_request(queries: Request) -> list[Query]:
    """A request as a list of queries.

    Raises:
        ValueError: The request is empty.
        TypeError: The request contains something other than queries.
    """
    request = [queries] if isinstance(queries, Query) else list(queries)
    if not request:
        raise ValueError("the request is empty: give at least the plain prompt, as a Query")
    if wrong_types := [type(query).__name__ for query in request if not isinstance(query, Query)]:
        raise TypeError(
            f"a request consists of queries, not of {wrong_types[0]}; query_with_prefixes(model, fact, []) makes one"
        )
    return request


def check_object(model: DiffusionTransformer, request: Sequence[Query]) -> None:
    """Raise a `ValueError` unless all prompts of a request have the same object, in the same tokens."""
    for i, query in enumerate(request):
        check_answer(model, query, f"queries[{i}]")
        if query.answer_tokens != request[0].answer_tokens:
            raise ValueError(
                f"the object is {model.words(request[0].answer_tokens)} in the plain request and "
                f"{model.words(query.answer_tokens)} in queries[{i}]: either another object, or the tokenizer splits "
                "it differently there; leave that prefix out, or end it with a space or a full stop"
            )
