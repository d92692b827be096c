"""Texts without [MASK], to which analyses add noise, or which a model without [MASK] reads as they are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from diffusion_lens.analysis.inputs.padding import read_tokens, require_no_mask, sha256_of
from diffusion_lens.analysis.resumable import name_facts
from diffusion_lens.analysis.usable_facts import UsableFacts
from diffusion_lens.facts import Fact
from diffusion_lens.model.inputs import check_length
from diffusion_lens.model.transformer import DiffusionTransformer

Texts = str | Sequence[str] | Sequence[Fact] | Tensor


@dataclass(frozen=True, eq=False)
class CleanTexts:
    """Texts as tokens, without padding, on the CPU.

    Attributes:
        tokens: Int[pos] of each text.
        editable: Bool[pos] of each text, false at a prepended BOS and at the prompt of a fact.
        indices: Index of each text in the list that was given.
        set_aside: Facts that the model cannot be queried for, with the reasons.
    """

    tokens: list[Int[Tensor, "_"]]
    editable: list[Bool[Tensor, "_"]]
    indices: list[int]
    set_aside: dict[str, str]

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        texts: Texts,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
    ) -> "CleanTexts":
        """Texts, facts or rows of tokens, as tokens.

        Raises:
            ValueError: There is no text, one is empty or too long or contains [MASK], or the model can be queried for
                none of the facts.
            TypeError: The texts are of different kinds, or of none of these.
        """
        if isinstance(texts, Tensor):
            found = _of_tokens(model, texts, attention_mask)
        else:
            require_no_mask(attention_mask)
            given: list[Any] = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [texts]
            if not given:
                raise ValueError("there is no text: the list is empty")
            if all(isinstance(text, Fact) for text in given):
                found = _of_facts(model, given, prepend_bos)
            elif all(isinstance(text, str) for text in given):
                found = _of_strings(model, given, prepend_bos)
            else:
                kinds = sorted({type(text).__name__ for text in given})
                raise TypeError(f"the texts are of the types {kinds}; give strings, facts, or a tensor Int[batch pos]")
        for index, row in zip(found.indices, found.tokens, strict=True):
            if not bool(model.cfg.writable(row).all()):
                raise ValueError(f"text {index} contains [MASK] or an id that is no token; give clean texts")
        return found

    def between(self, start: int, stop: int) -> "CleanTexts":
        """The usable texts from `start` to `stop`."""
        part = slice(start, stop)
        return CleanTexts(self.tokens[part], self.editable[part], self.indices[part], {})

    def describe(self) -> dict[str, Any]:
        """The texts, for a record: their number, a digest of what is read, and the facts that are left out."""
        return {
            "kind": "texts",
            "rows": len(self.tokens),
            "tokens_sha256": sha256_of([torch.tensor(self.indices), *self.tokens, *self.editable]),
            "set_aside": self.set_aside,
        }


def _of_strings(model: DiffusionTransformer, texts: Sequence[str], prepend_bos: bool | None) -> CleanTexts:
    n_bos = len(model.encode("", prepend_bos))
    tokens, editable = [], []
    for index, text in enumerate(texts):
        try:
            row = model.tokenize(text, prepend_bos)[0][0].cpu()
            check_length(len(row), model.cfg)
        except ValueError as error:
            raise ValueError(f"text {index}: {error}") from error
        tokens.append(row)
        editable.append(torch.arange(len(row)) >= n_bos)
    return CleanTexts(tokens, editable, list(range(len(texts))), {})


def _of_facts(model: DiffusionTransformer, facts: Sequence[Fact], prepend_bos: bool | None) -> CleanTexts:
    def prepare(fact: Fact) -> tuple[list[int], list[int]]:
        prompt, answer = fact.tokenize(model, prepend_bos)
        check_length(len(prompt) + len(answer), model.cfg)
        return prompt, answer

    usable = UsableFacts.of(facts, prepare)
    place = {fact_id: index for index, fact_id in enumerate(name_facts(facts))}
    tokens = [torch.tensor(prompt + answer) for prompt, answer in usable.prepared.values()]
    editable = [torch.arange(len(prompt + answer)) >= len(prompt) for prompt, answer in usable.prepared.values()]
    return CleanTexts(tokens, editable, [place[fact_id] for fact_id in usable.facts], usable.set_aside)


def _of_tokens(model: DiffusionTransformer, tokens: Tensor, attention_mask: Tensor | None) -> CleanTexts:
    tokens, real = (x.cpu() for x in read_tokens(model, tokens, attention_mask))
    rows = [row[is_real] for row, is_real in zip(tokens, real, strict=True)]
    return CleanTexts(rows, [torch.ones(len(row), dtype=torch.bool) for row in rows], list(range(len(rows))), {})
