"""A training run on disk: what it is, and where it stands.

`run.json` says what the run is: its recipe, the hashes of its data and of the weights it starts from. While it goes on,
`checkpoint.safetensors` holds all that the next step depends on: weights, AdamW's moments, the random generator, the
rows left in this pass, the losses so far. That one file is replaced whole, so whatever ends a run, it goes on from
there, on a CPU bit for bit. (The learning rate needs no memory: it is a function of the step.)
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_lens.losses import Objective
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import open_result, provenance, read_run, require_same_run, save_result
from diffusion_lens.training.batches import RowOrder, TrainingRows
from diffusion_lens.training.recipes import TrainingConfig
from weight_conversion import as_json, write_json

KIND = "training checkpoint"


@dataclass(eq=False)
class RunState:
    """Where a run stands.

    Attributes:
        weights: the model's parameters by name.
        optimizer: AdamW over them.
        order: the rows to come, and the generator of the run.
        scaler: of float16 gradients, or `None`.
        losses: of every step so far.
        evaluations: what `evaluate` said, each with its step.
        starts: where, and at which step, the run was begun and gone on with.
        seconds: spent so far.
    """

    weights: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    order: RowOrder
    scaler: torch.amp.GradScaler | None = None
    losses: list[float] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write everything to one file, which is replaced whole."""
        tensors: dict[str, Tensor] = {
            "generator": self.order.generator.get_state(),
            "rows_left": self.order.left,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
        }
        for name, weight in self.weights.items():
            tensors[f"weights.{name}"] = weight
            for key, value in self.optimizer.state.get(weight, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        record = {
            "evaluations": self.evaluations,
            "starts": self.starts,
            "seconds": self.seconds,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }
        save_result(path, KIND, tensors, record)

    def restore(self, path: Path) -> None:
        """Go back to where `save` was called."""
        tensors, record = open_result(path, KIND)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(tensors[f"weights.{name}"])
        for label, value in tensors.items():
            if label.startswith("optimizer."):
                _, key, name = label.split(".", 2)
                weight = self.weights[name]
                # AdamW counts steps on the CPU, wherever the weights are.
                moment = value.clone() if value.dim() == 0 else value.to(weight.device, copy=True)
                self.optimizer.state[weight][key] = moment
        self.order.generator.set_state(tensors["generator"].clone())
        self.order.left = tensors["rows_left"].clone()
        self.losses = tensors["losses"].tolist()
        self.evaluations, self.starts = record["evaluations"], record["starts"]
        self.seconds = record["seconds"]
        if self.scaler is not None:
            self.scaler.load_state_dict(record["scaler"])


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def run(self) -> Path:
        """What the run is."""
        return self.path / "run.json"

    @property
    def checkpoint(self) -> Path:
        """Where it stands, while it goes on."""
        return self.path / "checkpoint.safetensors"

    def start(self, run: Mapping[str, Any], write: bool) -> None:
        """Begin this run here, or go on with it; only one process of several may `write`.

        Raises:
            ValueError: the folder holds another run; the text says in what it differs.
        """
        run = as_json(run)
        if self.run.exists():
            require_same_run(read_run(self.run), run, str(self.path))
        if not write:
            return
        if not self.run.exists():
            write_json(run, self.run)
        # What a process that was killed while it wrote has left behind.
        for part in self.path.glob(f".{self.checkpoint.name}.*.part"):
            part.unlink()

    def resume(self, state: RunState) -> None:
        """Take `state` to the last checkpoint, if there is one."""
        if self.checkpoint.exists():
            state.restore(self.checkpoint)


def describe_run(
    model: DiffusionTransformer, rows: TrainingRows, config: TrainingConfig, objective: Objective | None = None
) -> dict[str, Any]:
    """What a run is, as `run.json` holds it: all that its numbers depend on but the machine."""
    return {
        "config": asdict(config),
        "objective": "own" if objective is None else getattr(objective, "__qualname__", repr(objective)),
        "rows": len(rows),
        "data_sha256": rows.sha256(),
        **provenance(model, model.cfg),
    }
