"""What the loop asks of a model: logits for the places of a canvas, after guidance.

Unsupervised classifier-free guidance (Nie et al. 2024, arXiv 2410.18514, eq. 9): logits = u + (1 + w)(c - u), where u
comes from the same canvas with everything given masked.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.model.text import UNREACHED
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import Places, Tokens
from diffusion_lens.step_state import StepState


def guide(
    conditional: Float[Tensor, "*place d_vocab_out"], unconditional: Float[Tensor, "*place d_vocab_out"], scale: float
) -> Float[Tensor, "*place d_vocab_out"]:
    """Guided logits, u + (1 + w)(c - u)."""
    return unconditional + (scale + 1) * (conditional - unconditional)


class Predictor(ABC):
    """Logits for marked places."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """Forward passes of the network so far."""

    @abstractmethod
    def __call__(self, state: StepState, places: Places) -> Float[Tensor, "place d_vocab_out"]:
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

    def __call__(self, state: StepState, places: Places) -> Float[Tensor, "place d_vocab_out"]:
        return self.predict(state, state.tokens, places, self.canvas.real)

    def predict(
        self, state: StepState, tokens: Tokens, places: Places, real: Places | None
    ) -> Float[Tensor, "place d_vocab_out"]:
        """Logits of `places` on `tokens`, which the hooks see as `state`."""
        batch, rows = self.model.readout.locate(places)
        if self.canvas.blank == UNREACHED:
            # What a causal row cannot see yet need not be run.
            reach = int(rows.max()) + 1
            tokens = tokens[:, :reach].clamp(min=0)
            real = None if real is None else real[:, :reach]
        self.model.clock.step = state
        logits: Tensor = self.model(tokens, attention_mask=real, logits_at=(batch, rows))
        self._passes += 1
        return logits


@dataclass
class Guided(Predictor):
    """Guidance around a `Conditional`: hooks see one branch at a time; without hooks both run as one batch."""

    inner: Conditional
    scale: float

    @property
    def passes(self) -> int:
        return self.inner.passes

    def __call__(self, state: StepState, places: Places) -> Float[Tensor, "place d_vocab_out"]:
        canvas, predict = self.inner.canvas, self.inner.predict
        unprompted = state.tokens.masked_fill(canvas.given, canvas.blank)
        if self.inner.model.is_hooked:
            conditional = predict(state, state.tokens, places, canvas.real)
            unconditional = predict(replace(state, branch="unconditional"), unprompted, places, canvas.real)
            self.inner.model.clock.step = state
        else:
            real = None if canvas.real is None else canvas.real.repeat(2, 1)
            both = predict(state, torch.cat([state.tokens, unprompted]), places.repeat(2, 1), real)
            conditional, unconditional = both.chunk(2)
        return guide(conditional, unconditional, self.scale)
