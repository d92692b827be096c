"""The inputs of a patch grid: the models of the clean and the corrupted run, and the tokens that they read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.analysis.patching.metrics import UNREAD, Reading
from diffusion_lens.analysis.patching.runs import Side
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_tokens, warn_of_another_network
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, pick_indices, whole_numbers

Patchable = str | Sequence[str] | Tensor | Query | Trajectory


@dataclass(frozen=True, eq=False)
class PatchInputs:
    """The clean and the corrupted input, with the models that read them.

    Attributes:
        source: Model that reads the clean input.
        clean: Clean input.
        model: Model that reads the corrupted input; its activations are patched.
        corrupted: Corrupted input.
        steps: Steps of the two trajectories; `None` where the inputs are not trajectories.
    """

    source: DiffusionTransformer
    clean: Patchable
    model: DiffusionTransformer
    corrupted: Patchable
    steps: list[int] | None

    @classmethod
    def of(
        cls,
        source: DiffusionTransformer,
        clean: Patchable,
        model: DiffusionTransformer,
        corrupted: Patchable,
        steps: Iterable[Whole] | None,
    ) -> "PatchInputs":
        """The inputs, with steps as callers give them."""
        return cls(source, clean, model, corrupted, None if steps is None else whole_numbers("steps", steps))

    def pick_layers(self, layers: Iterable[Whole] | None) -> list[int]:
        """The layers to sweep.

        Raises:
            ValueError: A layer that one of the models lacks, or no layers for models of different depths.
        """
        n_clean, n_corrupted = self.source.cfg.n_layers, self.model.cfg.n_layers
        if layers is None and n_clean != n_corrupted:
            raise ValueError(
                f"{self.source.cfg.model_name!r} has {n_clean} layers and {self.model.cfg.model_name!r} {n_corrupted}: "
                "select the layers to patch with layers=[...]"
            )
        return pick_indices("layers", layers, min(n_clean, n_corrupted))

    def canvas_provenances(self) -> dict[str, Any] | None:
        """The networks that wrote the two trajectories, for the record; `None` for other inputs.

        Raises:
            ValueError: A trajectory of another architecture or tokenizer than those of the model that reads it.

        Warns:
            UserWarning: A trajectory that another network wrote.
        """
        if not (isinstance(self.clean, Trajectory) and isinstance(self.corrupted, Trajectory)):
            return None
        for reader, trajectory in ((self.source, self.clean), (self.model, self.corrupted)):
            require_same_tokens(trajectory.record, reader)
        warn_of_another_network(
            {
                "clean trajectory": (self.clean.record, self.source),
                "corrupted trajectory": (self.corrupted.record, self.model),
            }
        )
        return {
            "clean": canvas_provenance(self.clean.record),
            "corrupted": canvas_provenance(self.corrupted.record),
        }

    def describe(
        self, reading: Reading, sides: Sequence[tuple[Side, Side]], written_by: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The metric and the inputs, for the record.

        Args:
            sides: Both sides, of each step if there are steps.
            written_by: The networks of `canvas_provenances`.
        """
        return {
            "metric": reading.name,
            "logits_at": reading.rows,
            "clean_tokens": [side.tokens.tolist() for side, _ in sides],
            "corrupted_tokens": [side.tokens.tolist() for _, side in sides],
            "trajectory": written_by,
        }

    def sides(self, reading: Reading) -> list[tuple[Side, Side]]:
        """The clean and the corrupted side of the grid, or of each step's grid.

        The metric's rows are rows of the corrupted run. The metric is also computed in the clean run if that run has
        the same layout.

        Raises:
            ValueError: Steps without trajectories or the reverse, or runs with different numbers of rows.
        """
        pairs = self._sides(reading)
        n_clean, n_corrupted = (side.tokens.shape[0] for side in pairs[0])
        if n_clean != n_corrupted:
            raise ValueError(
                f"the clean run has {n_clean} rows and the corrupted run {n_corrupted}: give both the same number of "
                "rows, since row i of the one is patched into row i of the other"
            )
        return [
            (clean if clean.extent == corrupted.extent else replace(clean, reading=UNREAD), corrupted)
            for clean, corrupted in pairs
        ]

    def _sides(self, reading: Reading) -> list[tuple[Side, Side]]:
        source, clean, model, corrupted = self.source, self.clean, self.model, self.corrupted
        is_same_layout = source.readout is model.readout and source.cfg.d_vocab_out == model.cfg.d_vocab_out
        if isinstance(clean, Trajectory) and isinstance(corrupted, Trajectory):
            if not self.steps:
                raise ValueError("a trajectory has one canvas per step: select steps to patch, such as steps=[0]")
            if len(set(self.steps)) < len(self.steps):
                raise ValueError(f"steps={self.steps} contains duplicates; give each once")
            is_same_layout &= all(
                torch.equal(getattr(clean, name).cpu(), getattr(corrupted, name).cpu()) for name in ("given", "real")
            )
            clean_reading = reading if is_same_layout else UNREAD
            return [
                (Side.at_step(source, clean, step, clean_reading), Side.at_step(model, corrupted, step, reading))
                for step in self.steps
            ]
        if self.steps is not None or isinstance(clean, Trajectory) or isinstance(corrupted, Trajectory):
            raise ValueError(
                "steps= requires two trajectories from model.denoise(...): pass one as clean and one as corrupted"
            )
        return [(Side.of(source, clean, reading if is_same_layout else UNREAD), Side.of(model, corrupted, reading))]
