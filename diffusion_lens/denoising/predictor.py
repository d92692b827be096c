"""What the loop asks of a model: logits for the places of a canvas, after guidance.

Unsupervised classifier-free guidance (Nie et al. 2024, arXiv 2410.18514, eq. 9): logits = u + (1 + w)(c - u), where u
comes from the same canvas with everything given masked.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.model.kv_cache import KeyValueCache
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.step_state import StepState


def guide(
    conditional: Float[Tensor, "*selected d_vocab_out"],
    unconditional: Float[Tensor, "*selected d_vocab_out"],
    scale: float,
) -> Float[Tensor, "*selected d_vocab_out"]:
    """Guided logits, u + (1 + w)(c - u)."""
    return unconditional + (scale + 1) * (conditional - unconditional)


class Predictor(ABC):
    """Logits for marked places."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """Forward passes of the network so far."""

    @abstractmethod
    def __call__(self, state: StepState, places: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        """Logits of the marked places in reading order."""


@dataclass
class Conditional(Predictor):
    """One forward pass over the canvas."""

    model: DiffusionTransformer
    canvas: Canvas
    _passes: int = 0

    @property
    def passes(self) -> int:
        return self._passes

    def __call__(self, state: StepState, places: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        return self.predict(state, state.tokens, places, self.canvas.real)

    def predict(
        self, state: StepState, tokens: Tokens, places: PosMask, real: PosMask | None
    ) -> Float[Tensor, "selected d_vocab_out"]:
        """Logits of `places` on `tokens`, which the hooks see as `state`."""
        batch, rows = self.model.readout.locate(places, real)
        if self.canvas.grows:
            # What a causal row cannot see yet need not be run; but a hook sees the whole canvas.
            reach = tokens.shape[1] if self.model.is_hooked else int(rows.max()) + 1
            tokens = tokens[:, :reach].clamp(min=0)
            real = None if real is None else real[:, :reach]
        self.model.clock.step = state
        logits: Tensor = self.model(tokens, attention_mask=real, logits_at=(batch, rows))
        self._passes += 1
        return logits


@dataclass
class Guided(Predictor):
    """Guidance around a `Conditional`: both branches run as one batch, and hook points show one branch at a time.

    Hooks of torch on other modules would be shown both at once, so with these the branches run one after the other.
    """

    inner: Conditional
    scale: float

    @property
    def passes(self) -> int:
        return self.inner.passes

    def __call__(self, state: StepState, places: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        canvas, clock = self.inner.canvas, self.inner.model.clock
        unprompted, other = state.tokens.masked_fill(canvas.given, canvas.blank), replace(state, branch="unconditional")
        if self.inner.model.has_module_hooks:
            conditional = self.inner(state, places)
            try:
                unconditional = self.inner.predict(other, unprompted, places, canvas.real)
            finally:
                clock.step = state
            return guide(conditional, unconditional, self.scale)
        real = None if canvas.real is None else canvas.real.repeat(2, 1)
        clock.branches = (state, other)
        try:
            both = self.inner.predict(state, torch.cat([state.tokens, unprompted]), places.repeat(2, 1), real)
        finally:
            clock.branches, clock.step = None, state
        conditional, unconditional = both.chunk(2)
        return guide(conditional, unconditional, self.scale)


@dataclass
class LeftToRightCached(Predictor):
    """One token's work a step on a causal model: keys and values are kept while nothing is hooked.

    Hooks see the whole canvas, so a step with hooks runs all of it; so do padded rows, and rows that stand at different
    places.
    """

    inner: Conditional

    def __post_init__(self) -> None:
        self._held = KeyValueCache(self.inner.model.cfg.n_layers)
        self._tokens: Tokens = self.inner.canvas.tokens[:, :0]
        self._passes = 0

    @property
    def passes(self) -> int:
        return self._passes + self.inner.passes

    def __call__(self, state: StepState, places: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        model, canvas = self.inner.model, self.inner.canvas
        batch, rows = model.readout.locate(places)
        together = len(batch) == places.shape[0] and bool((rows == rows[0]).all())
        if model.is_hooked or canvas.real is not None or not together:
            return self.inner(state, places)
        tokens = state.tokens[:, : int(rows[0]) + 1]
        done = self._held.n_pos
        if done >= tokens.shape[1] or not torch.equal(tokens[:, :done], self._tokens):
            self._held, done = KeyValueCache(model.cfg.n_layers), 0
        logits: Tensor = model(tokens[:, done:], past_kv_cache=self._held, logits_at=[-1])
        self._tokens, self._passes = tokens, self._passes + 1
        return logits[:, 0]


@dataclass
class FirstGiven(Predictor):
    """Logits of the first step as they are given, those of later steps as another predictor computes them.

    Attributes:
        inner: The predictor of later steps.
        logits: Float[batch selected d_vocab_out], of the first step, after guidance.
        positions: The positions that they predict.
    """

    inner: Predictor
    logits: Float[Tensor, "batch selected d_vocab_out"]
    positions: Sequence[int]
    _is_first: bool = True

    @property
    def passes(self) -> int:
        return self.inner.passes

    def __call__(self, state: StepState, places: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        if not self._is_first:
            return self.inner(state, places)
        self._is_first = False
        given: Tensor = self.logits[places[:, list(self.positions)]]
        return given


def predictor_for(model: DiffusionTransformer, canvas: Canvas, cfg_scale: float) -> Predictor:
    """The predictor of a run: guided, cached on a causal model, or plain."""
    if cfg_scale:
        return Guided(Conditional(model, canvas), cfg_scale)
    if canvas.grows:
        return LeftToRightCached(Conditional(model, canvas))
    return Conditional(model, canvas)
