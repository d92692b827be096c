"""Analyses by step and layer: the canvases that are read, the budget, the record, and results with these axes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.engine.batching import reserved, row_bytes
from diffusion_lens.analysis.engine.inputs import Inputs, Readable, SharedPass, passes_of
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import PicturedResult, Saved, provenance
from diffusion_lens.settings import Whole, pick_indices, whole_number

# 8 + 1 + 1 of the result, and as many of the canvases to be read.
BYTES_OF_A_POSITION = 20


@dataclass(frozen=True, eq=False)
class ReadCanvases:
    """The canvases that the passes of a result read.

    Attributes:
        tokens: Int[*step batch pos], -1 where a growing text has not been reached.
        masked: Bool[*step batch pos], positions that contain [MASK]; under uniform noise those that the step may write.
        present: Bool[*step batch pos], positions that contain a token or [MASK].
        given: Bool[batch pos], positions of the prompt of a run; false without a run.
        final: Int[batch pos], the final canvas of the run; without a run the tokens that were read.
        words: Text of every id that occurs.
    """

    tokens: Int[Tensor, "*step batch pos"]
    masked: Bool[Tensor, "*step batch pos"]
    present: Bool[Tensor, "*step batch pos"]
    given: PosMask
    final: Tokens
    words: dict[int, str]

    @property
    def groups(self) -> dict[str, Bool[Tensor, "*step batch pos"]]:
        """Positions by group: "masked" contains [MASK] or may be noise, "prompt" is another given token, and "written"
        a token that the run has written, or without a run any other token."""
        masked = self.masked & self.present
        prompt = self.given.expand_as(masked) & ~masked & self.present
        return {"masked": masked, "prompt": prompt, "written": self.present & ~masked & ~prompt}

    def labels(self, row: int) -> list[str]:
        """The final tokens of a row as labels of a picture."""
        return [plots.readable(self.words[token]) for token in self.final[row].tolist()]


class ByStep(PicturedResult, Saved):
    """Base of results with an axis for steps, which those of a single pass lack, and one for layers."""

    ENTRIES: ClassVar[Mapping[str, Any]] = {"steps": list[int] | None, "layers": list[int], "n_steps": int | None}
    AXES: ClassVar[tuple[tuple[str, str | int], ...]] = (("*step", "steps"), ("layer", "layers"))

    record: dict[str, Any]

    @property
    def steps(self) -> tuple[int, ...] | None:
        """The steps; `None` for a single pass."""
        return None if self.record["steps"] is None else tuple(self.record["steps"])

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers."""
        return tuple(self.record["layers"])

    @property
    def _extent(self) -> str:
        """The steps and layers in words."""
        steps = "one pass" if self.steps is None else f"{len(self.steps)} steps of {self.record['n_steps']}"
        return f"{steps}, {len(self.layers)} layers"

    def _index(self, axis: str, number: Whole) -> int:
        """The place of a "layer" or "step" among those that were read; negative numbers count from their end."""
        read, chosen = self.layers if axis == "layer" else self.steps or (0,), whole_number(axis, number)
        if chosen not in read and not -len(read) <= chosen < 0:
            raise ValueError(f"{axis}={chosen} was not read; give one of {list(read)}, or negative ones from their end")
        return read.index(chosen) if chosen in read else chosen % len(read)

    def _step_axis(self) -> dict[str, Any]:
        """The axis of steps of the data frame, if there is one."""
        return {} if self.steps is None else {"step": self.steps}


@dataclass(frozen=True, eq=False)
class Reading:
    """Inputs that an analysis reads in some layers, and if they are a trajectory, at some steps."""

    given: Inputs
    steps: list[int] | None
    layers: list[int]
    batch: int
    pos: int

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        inputs: Readable,
        steps: Whole | Iterable[Whole] | None,
        layers: Iterable[Whole] | None,
        attention_mask: Tensor | None = None,
    ) -> "Reading":
        """One trajectory or other inputs, with steps and layers as a caller gives them, in ascending order of steps."""
        given = Inputs.of(model, inputs, attention_mask=attention_mask)
        assert given.trajectory is not None or not given.trajectories  # several are refused
        chosen = given.pick_steps(steps)
        picked = None if chosen is None else sorted(chosen)
        batch, pos = next(given.at(None if picked is None else picked[0])).tokens.shape
        return cls(given, picked, pick_indices("layers", layers, model.cfg.n_layers), batch, pos)

    @property
    def n_steps(self) -> int:
        """Number of canvases that are read."""
        return 1 if self.steps is None else len(self.steps)

    def require_memory(self, n_bytes: int, max_bytes: int, name: str, advice: str, explicit: bool = True) -> None:
        """Raise a `ValueError` if the result, the canvases and a pass take more than `max_bytes`.

        Args:
            n_bytes: Bytes of the tensors of the result, and of what is kept beside a pass.
            name: What takes them, for the message, with its verb.
            advice: How to need less.
            explicit: Whether hooks see scores or patterns of the attention.
        """
        one_pass = reserved(
            self.given.model.cfg, self.batch * row_bytes(self.given.model.cfg, self.pos, 0, 0, explicit)
        )
        needed = n_bytes + self.n_steps * self.batch * self.pos * BYTES_OF_A_POSITION + one_pass
        if needed > max_bytes:
            raise ValueError(
                f"{name} {needed:,} bytes, of which {one_pass:,} are for one forward pass, but max_bytes is "
                f"{max_bytes:,}: {advice}"
            )

    def read(self, reduce: Callable[[SharedPass], None], name: str, progress: bool) -> ReadCanvases:
        """Let `reduce` run each pass, in the order of the steps. Returns the canvases."""
        model, shape = self.given.model, (self.n_steps, self.batch, self.pos)
        tokens = torch.empty(shape, dtype=torch.long)
        masked, present = (torch.empty(shape, dtype=torch.bool) for _ in range(2))
        with tqdm(total=self.n_steps, desc=name, unit="step", disable=not progress) as bar:
            for one in passes_of(self.given, self.steps):
                reduce(one)
                for index, canvas in one.served.items():
                    tokens[index], masked[index], present[index] = canvas.tokens, canvas.masked, canvas.present
                    bar.update()
        run = self.given.trajectory
        final = tokens[0] if run is None else run.tokens.cpu()
        ids = sorted({*tokens.unique().tolist(), *final.unique().tolist()})
        first = 0 if self.steps is None else slice(None)
        return ReadCanvases(
            tokens=tokens[first],
            masked=masked[first],
            present=present[first],
            given=torch.zeros_like(final, dtype=torch.bool) if run is None else run.given.cpu(),
            final=final,
            words=dict(zip(ids, model.words(ids), strict=True)),
        )

    def record(self) -> dict[str, Any]:
        """The entries of a record that the inputs make."""
        return {
            "steps": self.steps,
            "n_steps": self.given.n_steps,
            "layers": self.layers,
            "inputs": self.given.describe(),
            **provenance(self.given.model, self.given.model.cfg),
        }

    def without_steps(self, x: Tensor) -> Tensor:
        """A tensor of the result, without its first axis for inputs that have no steps."""
        return x[0] if self.steps is None else x
