"""A training on disk: its identity and its current state.

`run.json` identifies the training by its recipe, the hash of its data and the hash of its initial weights. Until the
training is complete, `checkpoint.safetensors` contains everything that the next step depends on: the weights, AdamW's
moments, the state of the random generator, the remaining rows of this pass and the losses so far. The file is replaced
atomically, so a training can be resumed after any interruption. On a CPU the result is then bit-identical. (The
learning rate is a function of the step and needs no state.)
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
from diffusion_lens.training.batches import RowOrder, RowSource
from diffusion_lens.training.recipes import TrainingConfig
from weight_conversion import as_json, write_json

KIND = "training checkpoint"


@dataclass(eq=False)
class RunState:
    """The current state of a training.

    Attributes:
        weights: Parameters of the model by name.
        optimizer: AdamW over the weights.
        order: Order of the remaining rows, with the random number generator of the training.
        scaler: Gradient scaler for float16, or `None`.
        losses: Loss of every step so far.
        evaluations: Results of `evaluate`, each with its step.
        starts: Step, device, threads and processes of each start and resumption.
        seconds: Elapsed training time in seconds.
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
        """Write everything to one file, which is replaced atomically."""
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
        """Restore the state that `save` wrote."""
        tensors, record = open_result(path, KIND)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(tensors[f"weights.{name}"])
        for label, value in tensors.items():
            if label.startswith("optimizer."):
                _, key, name = label.split(".", 2)
                weight = self.weights[name]
                # AdamW keeps its step count on the CPU, whatever the device of the weights.
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
    """The folder of one training."""

    path: Path

    @property
    def run(self) -> Path:
        """File that identifies the training."""
        return self.path / "run.json"

    @property
    def checkpoint(self) -> Path:
        """File with the state of an incomplete training."""
        return self.path / "checkpoint.safetensors"

    def start(self, run: Mapping[str, Any], write: bool) -> None:
        """Start or resume this training in the folder. Only one of several processes may `write`.

        Raises:
            ValueError: The folder contains another training; the message names the differences.
        """
        run = as_json(run)
        if self.run.exists():
            require_same_run(read_run(self.run), run, str(self.path))
        if not write:
            return
        if not self.run.exists():
            write_json(run, self.run)
        # Remove partial files of a process that was killed while it wrote.
        for part in self.path.glob(f".{self.checkpoint.name}.*.part"):
            part.unlink()

    def resume(self, state: RunState) -> None:
        """Restore `state` from the last checkpoint, if there is one."""
        if self.checkpoint.exists():
            state.restore(self.checkpoint)


def describe_run(
    model: DiffusionTransformer, rows: RowSource, config: TrainingConfig, objective: Objective | None = None
) -> dict[str, Any]:
    """The identity of a training, as in `run.json`: everything that its numbers depend on except the machine."""
    return {
        "config": asdict(config),
        "objective": "own" if objective is None else getattr(objective, "__qualname__", repr(objective)),
        "rows": rows.n_rows,
        "data_sha256": rows.sha256(),
        **provenance(model, model.cfg),
    }
