"""The logits of a step: one forward pass of the model, or two under guidance.

Unsupervised classifier-free guidance (Nie et al. 2024, arXiv 2410.18514, eq. 9) takes the logits u + (1 + w)(c - u),
where c is of the canvas and u of the same canvas with everything given masked.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.hooks.step import StepState
from diffusion_lens.model.attention import HeldCache, KeyValueCache, LayerKeyValues
from diffusion_lens.model.hooking import has_module_hooks
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer


def guide(
    conditional: Float[Tensor, "*selected d_vocab_out"],
    unconditional: Float[Tensor, "*selected d_vocab_out"],
    scale: float,
) -> Float[Tensor, "*selected d_vocab_out"]:
    """Guided logits, u + (1 + w)(c - u)."""
    return unconditional + (scale + 1) * (conditional - unconditional)


class Predictor(ABC):
    """Computes the logits of selected positions, with another predictor inside or by itself."""

    inner: "Predictor"

    @property
    def passes(self) -> int:
        """Forward passes of the network so far."""
        return self.inner.passes

    def held(self) -> tuple[Sequence[LayerKeyValues], PosMask] | None:
        """Keys and values after the last pass, and Bool[batch pos], the positions at which later passes read them
        instead of computing them; `None` without a cache."""
        return None

    @abstractmethod
    def __call__(self, state: StepState, positions: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        """Logits of the selected positions, in reading order."""


@dataclass
class Conditional(Predictor):
    """One forward pass over the canvas."""

    model: DiffusionTransformer
    canvas: Canvas
    passes: int = 0

    def __call__(
        self, state: StepState, positions: PosMask, tokens: Tokens | None = None, real: PosMask | None = None
    ) -> Float[Tensor, "selected d_vocab_out"]:
        """Logits of `positions`, with `state` as `hook.step`; on `tokens` in place of the step's, padded as `real`."""
        if tokens is None:
            tokens, real = state.tokens, self.canvas.real
        batch, rows = self.model.readout.locate(positions, real, state.block)
        if self.canvas.reach is not None:
            # Nothing behind the block of the last row that is read changes it. A hook sees the whole canvas all the
            # same.
            whole = self.model.is_hooked
            extent = tokens.shape[1] if whole else self.canvas.extent((batch % len(self.canvas.tokens), rows))
            tokens = self.model.cfg.readable(tokens)[:, :extent]
            real = None if real is None else real[:, :extent]
        self.model.clock.step = state
        logits: Tensor = self.model(tokens, attention_mask=real, logits_at=(batch, rows))
        self.passes += 1
        return logits


@dataclass
class Guided(Predictor):
    """Guidance around a `Conditional`: both branches form one batch, and hook points show one branch at a time.

    Torch's own hooks on other modules would see both branches at once, so with these each branch is a pass of its own.
    """

    inner: Conditional
    scale: float

    def __call__(self, state: StepState, positions: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        canvas, clock = self.inner.canvas, self.inner.model.clock

        # 1. The unconditional branch: the same canvas with everything given masked.
        unprompted, other = state.tokens.masked_fill(canvas.given, canvas.blank), replace(state, branch="unconditional")

        # 2. Two passes where a module carries a hook of torch's own.
        if has_module_hooks(self.inner.model):
            conditional = self.inner(state, positions)
            try:
                unconditional = self.inner(other, positions, unprompted, canvas.real)
            finally:
                clock.step = state
            return guide(conditional, unconditional, self.scale)

        # 3. Otherwise one pass over both branches; `clock.branches` tells the hook points which half is which.
        real = None if canvas.real is None else canvas.real.repeat(2, 1)
        clock.branches = (state, other)
        try:
            both = self.inner(state, positions.repeat(2, 1), torch.cat([state.tokens, unprompted]), real)
        finally:
            clock.branches, clock.step = None, state
        conditional, unconditional = both.chunk(2)
        return guide(conditional, unconditional, self.scale)


class Cached(Predictor):
    """A model that writes block after block, with the keys and values of filled blocks, which later ones do not change.

    A step computes only the positions after the blocks that all rows have filled. Hooks see the whole canvas, so a step
    with hooks computes all of it. So does a step of padded rows, and one that hooks of the loop see after the canvas is
    filled.

    Args:
        inner: The predictor of steps that compute the whole canvas.
        first_hooks: Hooks of passes that begin at the first position, which are not hooks of the run: they change
            nothing at positions that the prompt does not contain.
    """

    inner: Conditional

    def __init__(self, inner: Conditional, first_hooks: Sequence[tuple[str, Any]] = ()) -> None:
        self.inner, self.first_hooks = inner, first_hooks
        self._cache = KeyValueCache(inner.model.cfg.n_layers)
        self._tokens: Tokens = inner.canvas.tokens[:, :0]

    def begin(self, layers: Sequence[LayerKeyValues], tokens: Tokens) -> None:
        """Start with the keys and values of these tokens, Int[batch pos], with which the canvases begin."""
        self._cache.layers[:] = layers
        self._tokens = tokens

    def held(self) -> tuple[Sequence[LayerKeyValues], PosMask]:
        given = self.inner.canvas.given
        places = torch.arange(given.shape[1], device=given.device).expand_as(given)
        return self._cache.layers, places < self._cache.n_pos

    def __call__(self, state: StepState, positions: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        model, canvas = self.inner.model, self.inner.canvas
        if model.is_hooked or canvas.real is not None or not bool(positions.any()):
            return self.inner(state, positions)

        # 1. Keep what is cached of the tokens with which the canvas still begins, as far as the rows that are read.
        batch, rows = model.readout.locate(positions, block=state.block)
        size = model.cfg.final_together or 1
        n_cached = min(self._cache.n_pos, int(rows.min()) // size * size)
        if not torch.equal(state.tokens[:, :n_cached], self._tokens[:, :n_cached]):
            n_cached = 0
        self._cache.keep(n_cached)

        # 2. Compute the positions after the cached ones, and keep those in blocks that are filled.
        tokens = model.cfg.readable(state.tokens)[:, : canvas.extent((batch, rows))]
        with model.hooks(fwd_hooks=list(self.first_hooks)) if self.first_hooks and not n_cached else nullcontext():
            logits: Tensor = model(
                tokens[:, n_cached:], past_kv_cache=self._cache, logits_at=(batch, rows - n_cached), attention_mask=None
            )
        n_filled = min(canvas.n_filled(state.tokens), tokens.shape[1])
        self._cache.keep(n_filled)
        self._tokens = state.tokens[:, :n_filled]
        self.inner.passes += 1
        return logits


class ApproximatelyCached(Predictor):
    """A model of full attention that reads keys and values outside the open block as its first step left them.

    The first step of a block, in which all of it is masked, computes the whole canvas. Later ones renew the keys and
    values of the block; with the cache "prefix", also those after it. Nothing else is computed, unless something is
    hooked, a row is padded, rows are in different blocks or a token is read before its block: then the whole canvas is,
    and reads the same keys and values. What hooks see and change at a position that is not renewed is therefore read by
    no other position. Source: Wu et al. 2025, Fast-dLLM, arXiv 2505.22618, section 3.2.
    """

    inner: Conditional

    def __init__(self, inner: Conditional, sampler: Sampler) -> None:
        self.inner, self.sampler = inner, sampler
        self._cache = HeldCache(inner.model.cfg.n_layers)
        self._starts: Tensor | None = None
        self._held = torch.zeros_like(inner.canvas.given)

    def held(self) -> tuple[Sequence[LayerKeyValues], PosMask]:
        return self._cache.layers, self._held

    def __call__(self, state: StepState, positions: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        model, canvas = self.inner.model, self.inner.canvas
        # 1. The span that each row renews: the open block and, unless these are held too, the positions after it.
        inside = torch.ones_like(canvas.given) if canvas.real is None else canvas.real
        block = self.sampler.open_block(inside & ~canvas.given, state.masked)
        n_pos = block.shape[1]
        places = torch.arange(n_pos, device=block.device).expand_as(block)
        starts, stops = places.masked_fill(~block, n_pos).amin(dim=1), torch.full_like(places[:, 0], n_pos)
        if self.sampler.approximate_cache == "dual":
            stops = places.masked_fill(~block, -1).amax(dim=1) + 1
        span = (places >= starts[:, None]) & (places < stops[:, None])

        # 2. All of a row that opens a block.
        writes = block.any(dim=1)
        opens = writes & ~(block & ~state.masked).any(dim=1)
        if self._starts is not None:
            opens |= writes & (starts != self._starts)
        elif bool((writes & ~opens).any()):
            raise ValueError(
                f"step {state.index} is inside a block, and what the approximate cache held there is not recorded: "
                "begin with a step that opens a block, or give sampler= without approximate_cache"
            )
        renewed = span | opens[:, None]
        self._starts, self._held = starts, inside & ~span & writes[:, None]

        # 3. The span alone, if it is that of all rows and contains all rows of the logits that are read.
        batch, rows = model.readout.locate(positions, canvas.real)
        start, stop, spans = 0, n_pos, torch.stack([starts, stops], dim=1)[writes].unique(dim=0).tolist()
        whole = model.is_hooked or canvas.real is not None or model.positions.biases_scores or bool(opens.any())
        earliest = 1 if model.cfg.causal_first else 0  # the first token attends otherwise than what is cached behind it
        inside_span = len(spans) == 1 and spans[0][0] <= int(rows.min()) and int(rows.max()) < spans[0][1]
        if inside_span and not whole and spans[0][0] >= earliest:
            ((start, stop),) = spans
        self._cache.renew(renewed, start)
        logits: Tensor = model(
            state.tokens[:, start:stop],
            attention_mask=canvas.real,
            past_kv_cache=self._cache,
            logits_at=(batch, rows - start),
        )
        self.inner.passes += 1
        return logits


class Repeating(Predictor):
    """No second pass for a canvas that the last step left as it was, where the network reads the same time or none.

    Hooks see every step, so a step with hooks is computed again.
    """

    def __init__(self, model: DiffusionTransformer, inner: Predictor) -> None:
        self.model, self.inner = model, inner
        self._last: tuple[StepState, Tensor] | None = None

    def __call__(self, state: StepState, positions: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        if self._last is not None:
            before, logits = self._last
            same_time = not self.model.cfg.time_conditioning or before.sigma == state.sigma
            if same_time and torch.equal(before.tokens, state.tokens) and not self.model.is_hooked:
                return logits
        logits = self.inner(state, positions)
        self._last = state, logits
        return logits


@dataclass
class FirstGiven(Predictor):
    """Logits of the first step as they are given, those of later steps as another predictor computes them.

    Attributes:
        inner: The predictor of later steps.
        first_step: Index of the first step.
        logits: Float[batch selected d_vocab_out], of the first step, after guidance.
        positions: The positions that they predict.
    """

    inner: Predictor
    first_step: int
    logits: Float[Tensor, "batch selected d_vocab_out"]
    positions: Sequence[int]

    def __call__(self, state: StepState, positions: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        if state.index != self.first_step:
            return self.inner(state, positions)
        logits: Tensor = self.logits[positions[:, list(self.positions)]]
        return logits


def predictor_for(model: DiffusionTransformer, canvas: Canvas, cfg_scale: float, sampler: Sampler) -> Predictor:
    """The predictor of a run: with guidance, with a key/value cache where a text has filled blocks or the sampler has
    an approximate one, or plain."""
    conditional = Conditional(model, canvas)
    if cfg_scale:
        return Guided(conditional, cfg_scale)
    if sampler.approximate_cache:
        return ApproximatelyCached(conditional, sampler)
    # At another time, a network that reads the time computes other keys and values of filled blocks.
    caches = canvas.reach is not None and model.cfg.final_together is not None and not model.cfg.time_conditioning
    plain = Cached(conditional) if caches else conditional
    return Repeating(model, plain) if sampler.may_change_nothing else plain
