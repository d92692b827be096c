"""What a run of the denoising loop leaves behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.records import load_result, save_result
from diffusion_lens.shapes import Places, Tokens

_TENSORS = ("tokens", "canvases", "revealed_at", "confidence", "given")


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A finished run, with everything needed to look at it and to repeat it.

    Attributes:
        tokens: Int[batch pos], the final canvas.
        canvases: Int[step+1 batch pos], x_t before each step, and at the end. A place holds the mask id, or on a causal
            model -1, until it is revealed.
        revealed_at: Int[batch pos], the step in which a place was revealed; -1 where it was given.
        confidence: Float[batch pos], probability of the revealed token when it was revealed; 1 where it was given.
        given: Bool[batch pos], the places that came with the prompt.
        text: the final canvas as text, a string a row; empty strings when the model has no tokenizer.
        words: the text of every id that occurs.
        record: sampler, steps, times, guidance, temperature, seeds, model, weights' hash, versions, forward passes,
            seconds.
    """

    tokens: Tokens
    canvases: Int[Tensor, "step_plus_1 batch pos"]
    revealed_at: Int[Tensor, "batch pos"]
    confidence: Float[Tensor, "batch pos"]
    given: Places
    text: list[str]
    words: dict[int, str]
    record: dict[str, Any]

    @property
    def n_steps(self) -> int:
        """Steps of the run."""
        return self.canvases.shape[0] - 1

    @property
    def forward_passes(self) -> int:
        """Forward passes of the network that the run took; two guided branches in one batch count once."""
        return int(self.record["forward_passes"])

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return save_result(path, "trajectory", tensors, {"text": self.text, "words": self.words, "record": self.record})

    @classmethod
    def load(cls, path: str | Path) -> "Trajectory":
        """Read what `save` wrote."""
        tensors, record = load_result(path, "trajectory")
        fields: dict[str, Any] = {**tensors, **record}
        fields["words"] = {int(token): word for token, word in record["words"].items()}
        return cls(**fields)

    def str_canvases(self, row: int = 0) -> list[list[str]]:
        """The text of each place of one row, for every canvas."""
        return [[self.words[token] for token in canvas] for canvas in self.canvases[:, row].tolist()]

    def plot(self, row: int = 0, ax: Any = None, title: str | None = None) -> Any:
        """The canvas by step, tokens coloured by confidence; returns the matplotlib axes."""
        return plots.denoising_grid(
            self.str_canvases(row), self.revealed_at[row], self.confidence[row], title=title, ax=ax
        )

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        return f"Trajectory({batch} x {pos} places, {self.n_steps} steps, {self.forward_passes} forward passes)"
