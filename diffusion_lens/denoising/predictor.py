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


class Predictor(ABC):
    """Logits for marked places; `passes` counts the forward passes of the network."""

    passes: int = 0

    @abstractmethod
    def __call__(self, state: StepState, places: Places) -> Float[Tensor, "place d_vocab_out"]:
        """Logits of the marked places in reading order."""


@dataclass
class Conditional(Predictor):
    """One forward pass over the canvas."""

    model: DiffusionTransformer
    canvas: Canvas

    def __call__(self, state: StepState, places: Places) -> Float[Tensor, "place d_vocab_out"]:
        return self.predict(state, state.tokens, places)

    def predict(self, state: StepState, tokens: Tokens, places: Places) -> Float[Tensor, "place d_vocab_out"]:
        """Logits of `places` on `tokens`, which the hooks see as `state`."""
        batch, rows = self.model.readout.locate(places)
        real = self.canvas.real
        if self.canvas.blank == UNREACHED:
            # What a causal row cannot see yet need not be run.
            reach = int(rows.max()) + 1
            tokens = tokens[:, :reach].clamp(min=0)
            real = None if real is None else real[:, :reach]
        self.model.clock.step = state
        self.passes += 1
        logits: Tensor = self.model(tokens, attention_mask=real, logits_at=(batch, rows))
        return logits


@dataclass
class Guided(Predictor):
    """Guidance around a `Conditional`: hooks see one branch at a time; without hooks both run as one batch."""

    inner: Conditional
    scale: float

    def __call__(self, state: StepState, places: Places) -> Float[Tensor, "place d_vocab_out"]:
        canvas = self.inner.canvas
        unprompted = state.tokens.masked_fill(canvas.given, canvas.blank)
        if self.inner.model.is_hooked:
            conditional = self.inner(state, places)
            unconditional = self.inner.predict(replace(state, branch="unconditional"), unprompted, places)
            self.inner.model.clock.step = state
        else:
            conditional, unconditional = self._together(state, unprompted, places)
        self.passes = self.inner.passes
        return unconditional + (self.scale + 1) * (conditional - unconditional)

    def _together(self, state: StepState, unprompted: Tokens, places: Places) -> tuple[Tensor, Tensor]:
        model, canvas = self.inner.model, self.inner.canvas
        both = torch.cat([state.tokens, unprompted])
        real = None if canvas.real is None else canvas.real.repeat(2, 1)
        self.inner.passes += 1
        logits = model(both, attention_mask=real, logits_at=model.readout.locate(places.repeat(2, 1)))
        conditional, unconditional = logits.chunk(2)
        return conditional, unconditional
