"""Texts on canvases with known noise levels.

A canvas is a text of which each position is masked with probability t, the noise level of the canvas. Its random
numbers depend on the seed and on the index of the text only, so the canvases of two calls with one seed are the same,
whatever the batches are. The canvas of a model without [MASK] that writes from left to right is the text itself, t = 0.

Positions of a prepended BOS, of a fact's prompt and of padding are never masked, and do not count.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.dictionaries.noise import Mask, Span
from diffusion_lens.analysis.resumable import name_facts
from diffusion_lens.analysis.usable_facts import UsableFacts
from diffusion_lens.facts import Fact
from diffusion_lens.model.inputs import check_attention_mask, check_length, check_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.seeds import own_seed
from diffusion_lens.settings import Whole, whole_number
from diffusion_lens.shapes import PosMask, Tokens

Texts = str | Sequence[str] | Sequence[Fact] | Tensor


@dataclass(frozen=True, eq=False)
class CleanTexts:
    """Texts as tokens, without padding.

    Attributes:
        tokens: Int[pos] of each text.
        editable: Bool[pos] of each text, positions that may be masked and that count.
        indices: Index of each text in the list that was given.
        set_aside: Facts that the model cannot be queried for, with the reasons.
    """

    tokens: list[Int[Tensor, "_"]]
    editable: list[Bool[Tensor, "_"]]
    indices: list[int]
    set_aside: dict[str, str]

    @classmethod
    def of(
        cls, model: DiffusionTransformer, texts: Texts, attention_mask: Tensor | None, prepend_bos: bool | None
    ) -> "CleanTexts":
        """Texts, facts or rows of tokens, as tokens.

        Raises:
            ValueError: There is no text, one is empty or too long or contains [MASK], or the model can be queried for
                none of the facts.
            TypeError: The texts are of different kinds, or of none of these.
        """
        if isinstance(texts, Tensor):
            found = _of_tokens(model, texts, attention_mask)
        elif attention_mask is not None:
            raise ValueError("attention_mask= marks the padding of token rows; texts and facts need none")
        else:
            given: list[Any] = [texts] if isinstance(texts, str) else list(texts)
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

    def sha256(self) -> str:
        """SHA-256 of the tokens and of the positions that count."""
        digest = hashlib.sha256()
        for index, row, editable in zip(self.indices, self.tokens, self.editable, strict=True):
            digest.update(f"{index} {len(row)} ".encode())
            digest.update(row.numpy().data)
            digest.update(editable.numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class CanvasBatch:
    """Some canvases, padded on the right.

    Attributes:
        tokens: Int[batch pos], the clean texts.
        noisy: Int[batch pos], the canvases.
        real: Bool[batch pos], false at padding.
        editable: Bool[batch pos], positions that count.
        masked: Bool[batch pos], positions that are masked.
        t: Float[batch], noise level.
        rows: Int[batch], place of each text among the usable ones; `texts`: its index in the list that was given.
        levels: Int[batch], place of its noise level among the spans.
    """

    tokens: Tokens
    noisy: Tokens
    real: PosMask
    editable: PosMask
    masked: PosMask
    t: Float[Tensor, "batch"]
    rows: Int[Tensor, "batch"]
    texts: Int[Tensor, "batch"]
    levels: Int[Tensor, "batch"]

    def selected(self, mask: Mask) -> PosMask:
        """The positions that `mask` selects."""
        if mask == "all":
            return self.editable
        return self.masked if mask == "masked" else self.editable & ~self.masked


@dataclass(frozen=True, eq=False)
class Canvases:
    """All canvases of a call: each text at each noise level, text by text.

    Attributes:
        texts: Clean texts.
        spans: Noise level of each canvas of a text, between these bounds.
        seed: Seed of the noise.
        blank: Token at masked positions.
        device: Device of the batches.
    """

    texts: CleanTexts
    spans: tuple[Span, ...]
    seed: int
    blank: int
    device: str | None

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        texts: Texts,
        spans: tuple[Span, ...],
        seed: Whole,
        attention_mask: Tensor | None,
        prepend_bos: bool | None,
    ) -> "Canvases":
        """The canvases of texts; see `CleanTexts.of`."""
        clean = CleanTexts.of(model, texts, attention_mask, prepend_bos)
        return cls(clean, spans, whole_number("seed", seed), model.cfg.blank, model.cfg.device)

    def __len__(self) -> int:
        return len(self.texts.tokens) * len(self.spans)

    def batches(self, size: int, start: int = 0) -> Iterator[CanvasBatch]:
        """The canvases from `start` on, `size` at a time."""
        return (self._batch(first, min(first + size, len(self))) for first in range(start, len(self), size))

    def _batch(self, start: int, stop: int) -> CanvasBatch:
        rows, levels = zip(*(divmod(canvas, len(self.spans)) for canvas in range(start, stop)), strict=True)
        shape = (stop - start, max(len(self.texts.tokens[row]) for row in rows))
        tokens, t = torch.zeros(shape, dtype=torch.long), torch.zeros(len(rows))
        real, editable, masked = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))
        for i, (row, level) in enumerate(zip(rows, levels, strict=True)):
            n_pos = len(self.texts.tokens[row])
            tokens[i, :n_pos], real[i, :n_pos], editable[i, :n_pos] = (
                self.texts.tokens[row],
                True,
                self.texts.editable[row],
            )
            t[i], masked[i, :n_pos] = self._noise(row, level)
        texts = [self.texts.indices[row] for row in rows]
        noisy = tokens.masked_fill(masked, self.blank)
        numbers = (torch.tensor(values) for values in (rows, texts, levels))
        return CanvasBatch(*(x.to(self.device) for x in (tokens, noisy, real, editable, masked, t)), *numbers)

    def _noise(self, row: int, level: int) -> tuple[Float[Tensor, ""], Bool[Tensor, "_"]]:
        """Noise level and masked positions of a canvas."""
        seed, (low, high) = own_seed(self.seed, f"{self.texts.indices[row]}/{level}"), self.spans[level]
        editable = self.texts.editable[row]
        uniform = torch.rand(1 + len(editable), generator=torch.Generator().manual_seed(seed))
        t = low + (high - low) * uniform[0]
        return t, (uniform[1:] < t) & editable


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
    tokens = check_tokens(tokens, model.cfg)
    if attention_mask is None:
        real = model.checked_real_positions(tokens)
    else:
        real = check_attention_mask(attention_mask, tokens.shape[0], tokens.shape[1], tokens.device)
    kept = [row if real is None else row[real[i]] for i, row in enumerate(tokens)]
    rows = [row.cpu().clone() for row in kept]
    return CleanTexts(rows, [torch.ones(len(row), dtype=torch.bool) for row in rows], list(range(len(rows))), {})
