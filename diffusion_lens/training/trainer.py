"""A small trainer: AdamW, warm-up and cosine, every draw from one seed.

Weight decay acts on matrices and embeddings, not on norms (as in ML-GSAI/SMDM and nanoGPT). Random numbers come from a
generator of the run's own: a seed gives the same weights bit for bit (on one machine, with one number of threads), and
nobody else's random numbers move.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_result, provenance, save_result
from diffusion_lens.training.objectives import Objective, own_loss


@dataclass(frozen=True)
class TrainingConfig:
    """A recipe.

    Attributes:
        steps: updates of the weights.
        batch_size: rows an update sees; the rows are shuffled anew in each pass over them.
        lr: highest learning rate, reached after `warmup` steps, then down a cosine to 0.
        weight_decay: AdamW's, on matrices and embeddings.
        clip: largest norm of the gradient.
        seed: of the order of the rows and of the noise.
    """

    steps: int
    batch_size: int = 64
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.3
    warmup: int = 100
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup}; it must not be negative")

    def lr_at(self, step: int) -> float:
        """Learning rate of update `step`, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, eq=False)
class TrainingRecord:
    """What a run did.

    Attributes:
        config: its recipe.
        losses: Float[step], the loss of every step.
        record: seconds, threads, model, hash of the trained weights, versions.
    """

    config: TrainingConfig
    losses: Float[Tensor, "step"]
    record: dict[str, Any]

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        settings = {"config": asdict(self.config), "record": self.record}
        return save_result(path, "training record", {"losses": self.losses}, settings)

    @classmethod
    def load(cls, path: str | Path) -> "TrainingRecord":
        """Read what `save` wrote."""
        tensors, settings = load_result(path, "training record")
        config = {**settings["config"], "betas": tuple(settings["config"]["betas"])}
        return cls(TrainingConfig(**config), tensors["losses"], settings["record"])


def train(
    model: DiffusionTransformer,
    tokens: Int[Tensor, "row pos"],
    config: TrainingConfig,
    *,
    objective: Objective | None = None,
    progress: bool = True,
) -> TrainingRecord:
    """Train `model` in place on rows of tokens.

    The model comes back in the mode it came in (training or evaluation) and without gradients, exception or not.

    Args:
        objective: loss of (model, batch, generator); by default the model's own.
        progress: show a progress bar.
    """
    loss_of = objective or own_loss
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.AdamW(_groups(model, config.weight_decay), lr=config.lr, betas=config.betas)
    batches = _batches(tokens.to(model.cfg.device), config.batch_size, generator)
    losses: list[float] = []
    begun = time.perf_counter()
    with _training(model), tqdm(total=config.steps, desc=model.cfg.model_name, disable=not progress) as bar:
        for step in range(config.steps):
            for group in optimizer.param_groups:
                group["lr"] = config.lr_at(step)
            loss = loss_of(model, next(batches), generator)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            losses.append(loss.item())
            bar.update()
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    record = {
        "seconds": time.perf_counter() - begun,
        "threads": torch.get_num_threads(),
        **provenance(model, model.cfg),
    }
    return TrainingRecord(config, torch.tensor(losses), record)


def _groups(model: DiffusionTransformer, weight_decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _batches(rows: Tensor, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches without end. A batch may straddle two passes, so that all are full."""
    order = torch.empty(0, dtype=torch.long)
    while True:
        while len(order) < batch_size:
            order = torch.cat([order, torch.randperm(len(rows), generator=generator)])
        yield rows[order[:batch_size].to(rows.device)]
        order = order[batch_size:]


@contextmanager
def _training(model: DiffusionTransformer) -> Iterator[None]:
    was_training = model.training
    model.train()
    try:
        with torch.enable_grad():
            yield
    finally:
        model.zero_grad()
        model.train(was_training)
