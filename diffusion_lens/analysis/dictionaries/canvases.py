"""Texts on canvases with known noise levels, and the positions that a dictionary is for: masked, unmasked, or all.

A canvas is a text of which each position is masked, or under uniform noise replaced by a token drawn from all (which
may be the token itself), with probability t, the noise level of the canvas. Its random numbers depend on the seed and
on the index of the text only, so the canvases of two calls with one seed are the same, whatever the batches are. The
canvas of a model of next tokens is the text itself, t = 0.

Positions of a prepended BOS, of a fact's prompt and of padding are never masked, and do not count.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffusion_lens.analysis.engine.inputs import CleanTexts, Inputs, padded
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Real, Settings, at_least, own_seed, plain_number, setting

Mask = Literal["masked", "unmasked", "all"]
Span = tuple[float, float]  # Lowest and highest noise level.


def _level(name: str, value: Any) -> float:
    level = plain_number(name, value)
    if not 0 <= level <= 1:
        raise ValueError(f"{name}={level}; a noise level is the probability of being masked, between 0 and 1")
    return level


@dataclass(frozen=True)
class NoiseRange(Settings):
    """Noise levels between two bounds; each level is equally likely.

    The default bounds are those of training (`hide`); the sparse autoencoders of DLM-Scope (arXiv 2602.05859, its
    published code) are trained between 0.05 and 0.5.
    """

    low: float = setting(1e-3, "Lowest noise level.", _level)
    high: float = setting(1.0, "Highest noise level.", _level)
    samples: int = setting(
        1,
        "Number of canvases per text. Each has its own one of `samples` equal parts of the range, so that together "
        "they cover the range evenly.",
        partial(at_least, 1),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise ValueError(
                f"low={self.low} and high={self.high}; low must be below high (for one level: t={self.low})"
            )

    @property
    def spans(self) -> tuple[Span, ...]:
        """Bounds of each part."""
        ends = [self.low + (self.high - self.low) * i / self.samples for i in range(self.samples)] + [self.high]
        return tuple(pairwise(ends))


Noise = Real | Sequence[Real] | NoiseRange | None


def spans_of(model: DiffusionTransformer, t: Noise, default: NoiseRange) -> tuple[Span, ...]:
    """The noise levels of a text's canvases: one, several, or parts of a range.

    Raises:
        ValueError: A level is not between 0 and 1, there is none, or the model predicts next tokens.
    """
    if model.cfg.is_autoregressive:
        if t is not None:
            raise ValueError(f"t={t}: {model.cfg.model_name!r} has no [MASK], so its texts have no noise; leave out t")
        return ((0.0, 0.0),)
    if t is None or isinstance(t, NoiseRange):
        return (t or default).spans
    levels = levels_of(t)
    if not levels:
        raise ValueError("t is empty; give a noise level between 0 and 1, several, or a NoiseRange")
    return tuple((level, level) for level in levels)


def levels_of(t: Real | Sequence[Real]) -> list[float]:
    """One noise level or several; a `ValueError` if one is not between 0 and 1."""
    plain: Any = t.tolist() if hasattr(t, "tolist") else t
    return [_level("t", level) for level in (plain if isinstance(plain, Iterable) else [plain])]


def check_mask(model: DiffusionTransformer, mask: str, spans: Sequence[Span]) -> Mask:
    """`mask`, if it is known and the canvases can have such positions; a `ValueError` otherwise."""
    if mask not in ("masked", "unmasked", "all"):
        raise ValueError(f"mask={mask!r}; it must be 'masked', 'unmasked' or 'all'")
    if mask != "all" and model.cfg.is_autoregressive:
        raise ValueError(f"mask={mask!r}: {model.cfg.model_name!r} has no [MASK]; use mask='all'")
    only = {"masked": 0.0, "unmasked": 1.0}.get(mask)
    if only is not None and all(span == (only, only) for span in spans):
        raise ValueError(f"mask={mask!r} selects nothing at the noise level t={only:g}; give another t")
    return mask  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class CanvasBatch:
    """Some canvases, padded on the right."""

    tokens: Tokens  # the clean texts
    noisy: Tokens  # the canvases
    real: PosMask
    editable: PosMask  # positions that count
    masked: PosMask  # positions that are masked, or replaced by noise
    t: Float[Tensor, "batch"]  # noise level
    rows: Int[Tensor, "batch"]  # place of each text among the usable ones
    texts: Int[Tensor, "batch"]  # its index in the list that was given
    levels: Int[Tensor, "batch"]  # place of its noise level among the spans

    @property
    def share(self) -> Float[Tensor, "batch"]:
        """Share of the positions of each canvas that are masked."""
        return self.masked.sum(dim=1) / self.real.sum(dim=1)

    def selected(self, mask: Mask) -> PosMask:
        """The positions that `mask` selects."""
        if mask == "all":
            return self.editable
        return self.masked if mask == "masked" else self.editable & ~self.masked


@dataclass(frozen=True, eq=False)
class Canvases:
    """All canvases of a call: each text at each noise level, text by text."""

    model: DiffusionTransformer
    texts: CleanTexts
    spans: tuple[Span, ...]  # bounds of the noise level of each canvas of a text
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
        clean = [self.texts.tokens[row] for row in rows]
        tokens, real = padded(self.model, clean)
        editable = pad_sequence([self.texts.editable[row] for row in rows], batch_first=True)
        t, masked, generators = zip(*map(self._masked, rows, levels), strict=True)
        is_masked, noisy, noise = pad_sequence(list(masked), batch_first=True), tokens, self.model.head.noise
        if noise is not None:
            replaced = [noise.replacements(*each) for each in zip(clean, generators, strict=True)]
            noisy = torch.where(is_masked, pad_sequence(replaced, batch_first=True), tokens)
        device, texts = self.model.cfg.device, [self.texts.indices[row] for row in rows]
        numbers = (torch.tensor(values) for values in (rows, texts, levels))
        return CanvasBatch(
            *(x.to(device) for x in (tokens, noisy, real, editable, is_masked, torch.stack(t))), *numbers
        )

    def _masked(self, row: int, level: int) -> tuple[Float[Tensor, ""], Bool[Tensor, "_"], torch.Generator]:
        """Noise level of a canvas, its masked positions, and the generator of what stands there."""
        low, high = self.spans[level]
        editable = self.texts.editable[row]
        generator = torch.Generator().manual_seed(own_seed(self.seed, f"{self.texts.indices[row]}/{level}"))
        uniform = torch.rand(1 + len(editable), generator=generator)
        t = low + (high - low) * uniform[0]
        return t, (uniform[1:] < t) & editable, generator


@dataclass(frozen=True, eq=False)
class RunCanvases:
    """The canvases of runs in place of noise: a level is a step, and the text is what the run wrote in the end."""

    inputs: Inputs
    texts: CleanTexts
    spans: tuple[Span, ...]  # time of each step, twice

    @classmethod
    def of(cls, model: DiffusionTransformer, runs: Sequence[Trajectory]) -> "RunCanvases":
        """The canvases of all steps.

        Raises:
            ValueError: The runs are of a causal model, have different steps, or hand predictions on from step to step.
        """
        if model.cfg.is_autoregressive or any(run.handed is not None for run in runs):
            raise ValueError(
                f"the canvases of these runs are not all that {model.cfg.model_name!r} reads at a step, or it predicts "
                "no masked token; give texts"
            )
        inputs, rows = Inputs.of(model, list(runs)), [(run, row) for run in runs for row in range(len(run.tokens))]
        tokens = [run.tokens[row][run.real[row]].cpu() for run, row in rows]
        editable = [~run.given[row][run.real[row]].cpu() for run, row in rows]
        times = [(time, time) for time in runs[0].record["times"][runs[0].first_step : -1]]
        return cls(inputs, CleanTexts(tokens, editable, list(range(len(rows))), {}), tuple(times))

    def __len__(self) -> int:
        return len(self.texts.tokens) * len(self.spans)

    def batches(self, size: int) -> Iterator[CanvasBatch]:
        """All canvases, at most `size` at a time: those of one run at one step."""
        for level, step in enumerate(self.inputs.pick_steps(None) or ()):
            n_before = 0
            for run, read in zip(self.inputs.trajectories, self.inputs.at(step), strict=True):
                tokens, open_ = run.tokens.to(read.tokens.device), ~run.given.to(read.tokens.device) & read.real
                for rows in torch.arange(len(tokens)).split(size):
                    t, levels = torch.full((len(rows),), self.spans[level][0]), torch.full_like(rows, level)
                    of_rows = {"tokens": tokens, "noisy": read.tokens, "real": read.real, "editable": open_}
                    of_rows = {name: x[rows] for name, x in {**of_rows, "masked": read.masked}.items()}
                    numbers = {"rows": n_before + rows, "texts": n_before + rows, "levels": levels}
                    yield CanvasBatch(**of_rows, t=t.to(tokens.device), **numbers)
                n_before += len(tokens)
