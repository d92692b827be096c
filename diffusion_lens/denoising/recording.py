"""`Recording`: what a denoising run wrote, step by step, to be read, saved and drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.config import reached
from diffusion_lens.denoising.run import Run
from diffusion_lens.display import Result, Table, texts_of
from diffusion_lens.records import as_dataclass, load_result, save_result, shown_model
from diffusion_lens.settings import whole_number
from diffusion_lens.shapes import PosMask, Tokens

R = TypeVar("R", bound="Recording")

_TENSORS = ("tokens", "canvases", "revealed_at", "confidence", "given", "real")
_TEXTS = ("text", "completion")


@dataclass(frozen=True, eq=False)
class Recording(Result):
    """What a denoising run wrote, step by step.

    Columns of the data frame: batch, pos, token, given, revealed_at, confidence; a row for each position that is
    not padding.

    Attributes:
        tokens: Int[batch pos], the final canvas.
        canvases: Int[canvas batch pos], x_t before each step, and the final canvas. A position contains the mask id
            until it is revealed, or -1 until the text reaches it: on a causal model, and in blocks that are not open.
            Under uniform noise it contains a random token at first.
        revealed_at: Int[batch pos], step that revealed each position; -1 where it was given, or is still masked. Under
            uniform noise, the last step that changed it, or 0 if none did.
        confidence: Float[batch pos], probability of each token when it was revealed; 1 where it was given, 0 where it
            is still masked. Under uniform noise, the probability in the last step that it is the clean token.
        given: Bool[batch pos], positions that came with the prompt.
        real: Bool[batch pos], false at padding.
        text: Final canvas as text, one string for each row; empty strings where the model has no tokenizer.
        completion: What the run wrote of it, without the prompt and without special tokens; a text that grows ends at
            the first end token. Files that an earlier version saved contain none: it is then empty text.
        words: Text of every id that occurs.
        record: Sampler, steps, times, guidance, temperature, seeds, model, hash of the weights, hooks, modules,
            versions, forward passes and seconds; of a replay also its kind, and the network that wrote the replayed
            canvases.
    """

    tokens: Tokens
    canvases: Int[Tensor, "canvas batch pos"]
    revealed_at: Int[Tensor, "batch pos"]
    confidence: Float[Tensor, "batch pos"]
    given: PosMask
    real: PosMask
    text: list[str]
    completion: list[str]
    words: dict[int, str]
    record: dict[str, Any]

    @classmethod
    def of(cls: type[R], run: Run, record: dict[str, Any]) -> R:
        """The trajectory of a finished run."""
        model, canvas = run.model, run.canvas
        canvases = torch.stack(run.canvases)
        ids = canvases.unique().tolist()
        has_text = model.tokenizer is not None
        real = torch.ones_like(canvas.given) if canvas.real is None else canvas.real
        written = [row[inside] for row, inside in zip(run.tokens, real & ~canvas.given, strict=True)]
        return cls(
            tokens=run.tokens,
            canvases=canvases,
            revealed_at=run.revealed_at,
            confidence=run.confidence.nan_to_num(nan=1.0).masked_fill(
                (run.tokens == canvas.blank) | ~reached(run.tokens), 0.0
            ),
            given=canvas.given,
            real=real,
            text=[
                model.to_string(row[inside]) if has_text else "" for row, inside in zip(run.tokens, real, strict=True)
            ],
            completion=[model.to_completion(row) if has_text else "" for row in written],
            words=dict(zip(ids, model.words(ids), strict=True)),
            record=record,
        )

    @property
    def first_step(self) -> int:
        """Index of the first step: 0, or where a branch begins."""
        return int(self.record["first_step"])

    @property
    def n_steps(self) -> int:
        """Number of steps in this trajectory."""
        return self.canvases.shape[0] - 1

    @property
    def forward_passes(self) -> int:
        """Number of forward passes of the run; two guided branches in one batch count once."""
        return int(self.record["forward_passes"])

    @property
    def tokens_per_second(self) -> float:
        """Number of revealed tokens per second of the run."""
        return float((self.revealed_at >= self.first_step).sum()) / float(self.record["seconds"])

    @property
    def blank(self) -> int:
        """Id of positions not yet revealed: [MASK], or -1, which no position contains under uniform noise."""
        return int(self.record["blank"])

    @property
    def rewrites(self) -> bool:
        """Whether the noise is uniform, so that every position that was not given may change in every step."""
        return self.record.get("noise") == "uniform"

    @property
    def prompt(self) -> Tokens:
        """Int[batch pos], the given tokens, with every other position masked, or -1 where nothing is masked."""
        return self.tokens.masked_fill(~self.given, self.blank)

    def is_masked(self, canvases: Int[Tensor, "*batch pos"]) -> Bool[Tensor, "*batch pos"]:
        """The positions of canvases that are not yet revealed."""
        return (canvases == self.blank) | ~reached(canvases)

    def is_open(self, canvases: Int[Tensor, "*batch pos"]) -> Bool[Tensor, "*batch pos"]:
        """The positions of whole canvases that a step may write: those not yet revealed, under uniform noise all that
        were not given."""
        if not self.rewrites:
            return self.is_masked(canvases)
        return (~self.given & self.real).to(canvases.device).expand_as(canvases)

    def __len__(self) -> int:
        """Number of rows of the batch."""
        return self.tokens.shape[0]

    def __getitem__(self, row: int) -> Int[Tensor, "pos"]:
        """The tokens of one row, as of a batch of tokens that another library generates."""
        return self.tokens[row]

    def repeat(self: R, n: SupportsIndex) -> R:
        """`n` copies of the batch, one after the other, with the same seeds, to be replayed under hooks by row."""
        n = whole_number("n", n)
        if n < 1:
            raise ValueError(f"n={n}; the number of copies of each row must be at least 1")
        rows = {name: getattr(self, name).repeat(n, 1) for name in _TENSORS if name != "canvases"}
        return replace(
            self,
            **rows,
            canvases=self.canvases.repeat(1, n, 1),
            **{name: getattr(self, name) * n for name in _TEXTS},
            record=self._record_of([*range(len(self))] * n),
        )

    def row(self: R, index: int) -> R:
        """One row of a batch as a trajectory of its own; forward passes and seconds are still those of the batch."""
        rows = {name: getattr(self, name)[index, None] for name in _TENSORS if name != "canvases"}
        texts: dict[str, Any] = {name: [getattr(self, name)[index]] for name in _TEXTS}
        canvases = self.canvases[:, index, None]
        return replace(self, **rows, **texts, canvases=canvases, record=self._record_of([index]))

    def _record_of(self, rows: Sequence[int]) -> dict[str, Any]:
        """The record of a trajectory with these rows."""
        record = {**self.record, "seeds": [self.record["seeds"][row] for row in rows]}
        if any(isinstance(sigma, Sequence) for sigma in record.get("sigmas") or ()):
            record["sigmas"] = [
                [sigma[row] for row in rows] if isinstance(sigma, Sequence) else sigma for sigma in record["sigmas"]
            ]
        return record

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        texts = {name: getattr(self, name) for name in _TEXTS}
        return save_result(path, "trajectory", tensors, {**texts, "words": self.words, "record": self.record})

    @classmethod
    def load(cls: type[R], path: str | Path) -> R:
        """Read what `save` wrote."""
        tensors, record = load_result(path, "trajectory")
        words = {int(token): word for token, word in record["words"].items()}  # JSON's keys are strings
        # Files of earlier versions have no completions.
        missing = {"completion": [""] * len(record["text"])}
        return as_dataclass(cls, {**missing, **tensors, **record, "words": words})

    def str_canvases(self, row: int = 0) -> list[list[str]]:
        """The text at each position of one row, for every canvas."""
        return [[self.words[token] for token in canvas] for canvas in self.canvases[:, row].tolist()]

    def plot(self, row: int = 0, ax: Any = None, title: str | None = None) -> Any:
        """The canvas by step, tokens coloured by confidence; returns the matplotlib axes."""
        from diffusion_lens import plots  # when it is drawn: loading a model should not wait for it

        return plots.denoising_grid(*self._drawn(row), title=title, ax=ax)

    def to_html(self, row: int = 0) -> str:
        """The canvas by step as a self-contained HTML page, tokens coloured by confidence."""
        from diffusion_lens import plots

        return plots.canvas_table(f"{shown_model(self.record)}: {self.text[row] or 'a run'}", *self._drawn(row))

    def _table(self) -> Table:
        batch, n_pos = self.tokens.shape
        values = {
            "token": texts_of(self.tokens, self.words),
            "given": self.given,
            "revealed_at": self.revealed_at,
            "confidence": self.confidence,
        }
        return Table.of_cells({"batch": range(batch), "pos": range(n_pos)}, values).where(self.real)

    def _page(self, picture: str) -> str:
        """With the canvas of the first row by step, which takes less time than a picture."""
        from diffusion_lens import plots

        canvas = plots.canvas_fragment(*self._drawn(0)) if len(self) else ""
        return super()._page(canvas)

    def _drawn(self, row: int) -> tuple[list[list[str]], list[list[bool]], list[int], list[float], int]:
        """The data that the figures of one row show."""
        masked = self.is_masked(self.canvases[:, row]).tolist()
        revealed_at, confidence = self.revealed_at[row].tolist(), self.confidence[row].tolist()
        return self.str_canvases(row), masked, revealed_at, confidence, self.first_step

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        size = f"{batch} x {pos} positions, {self.n_steps} steps, {self.forward_passes} forward passes"
        return f"{type(self).__name__}({size})"
