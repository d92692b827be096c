"""Texts on canvases with known noise levels.

A canvas is a text of which each position is masked, or under uniform noise replaced by a token drawn from all, with
probability t, the noise level of the canvas. Its random numbers depend on the seed and on the index of the text only,
so the canvases of two calls with one seed are the same, whatever the batches are. The canvas of a model of next tokens
is the text itself, t = 0.

Positions of a prepended BOS, of a fact's prompt and of padding are never masked, and do not count.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffusion_lens.analysis.dictionaries.noise import Mask, Span
from diffusion_lens.analysis.inputs import CleanTexts, padded
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.seeds import own_seed
from diffusion_lens.shapes import PosMask, Tokens


@dataclass(frozen=True, eq=False)
class CanvasBatch:
    """Some canvases, padded on the right.

    Attributes:
        tokens: Int[batch pos], the clean texts.
        noisy: Int[batch pos], the canvases.
        real: Bool[batch pos], false at padding.
        editable: Bool[batch pos], positions that count.
        masked: Bool[batch pos], positions that are masked, or replaced by noise.
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
        model: Model that reads them.
        texts: Clean texts.
        spans: Noise level of each canvas of a text, between these bounds.
        seed: Seed of the noise.
    """

    model: DiffusionTransformer
    texts: CleanTexts
    spans: tuple[Span, ...]
    seed: int

    def __len__(self) -> int:
        return len(self.texts.tokens) * len(self.spans)

    def batches(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[CanvasBatch]:
        """The canvases from `start` to `stop`, by default to the last, `size` at a time."""
        end = len(self) if stop is None else stop
        return (self._batch(first, min(first + size, end)) for first in range(start, end, size))

    def n_selected(self, mask: Mask) -> list[int]:
        """Number of positions of each canvas that `mask` selects."""
        counts = []
        for row, editable in enumerate(self.texts.editable):
            n_editable = int(editable.sum())
            for level in range(len(self.spans)):
                n_masked = 0 if mask == "all" else int(self._masked(row, level)[1].sum())
                counts.append(n_masked if mask == "masked" else n_editable - n_masked)
        return counts

    def _batch(self, start: int, stop: int) -> CanvasBatch:
        rows, levels = zip(*(divmod(canvas, len(self.spans)) for canvas in range(start, stop)), strict=True)
        tokens, real = padded(self.model, [self.texts.tokens[row] for row in rows])
        editable = pad_sequence([self.texts.editable[row] for row in rows], batch_first=True)
        noise = [self._noise(row, level) for row, level in zip(rows, levels, strict=True)]
        t = torch.stack([of_row[0] for of_row in noise])
        masked, replaced = (pad_sequence([of_row[i] for of_row in noise], batch_first=True) for i in (1, 2))
        noisy = torch.where(masked, replaced, tokens)
        device, texts = self.model.cfg.device, [self.texts.indices[row] for row in rows]
        numbers = (torch.tensor(values) for values in (rows, texts, levels))
        return CanvasBatch(*(x.to(device) for x in (tokens, noisy, real, editable, masked, t)), *numbers)

    def _noise(self, row: int, level: int) -> tuple[Float[Tensor, ""], Bool[Tensor, "_"], Int[Tensor, "_"]]:
        """Noise level of a canvas, its masked positions, and what stands there."""
        t, masked, generator = self._masked(row, level)
        tokens, noise = self.texts.tokens[row], self.model.head.noise
        return t, masked, tokens if noise is None else noise.replacements(tokens, generator)

    def _masked(self, row: int, level: int) -> tuple[Float[Tensor, ""], Bool[Tensor, "_"], torch.Generator]:
        """Noise level of a canvas, its masked positions, and the generator of what stands there."""
        seed, (low, high) = own_seed(self.seed, f"{self.texts.indices[row]}/{level}"), self.spans[level]
        editable = self.texts.editable[row]
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(1 + len(editable), generator=generator)
        t = low + (high - low) * uniform[0]
        return t, (uniform[1:] < t) & editable, generator
