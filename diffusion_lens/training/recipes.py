"""Recipes: how long, how fast and with what noise a model is trained."""

import math
from dataclasses import dataclass
from typing import Any

from diffusion_lens.settings import plain_number, whole_number

PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True)
class TrainingConfig:
    """A recipe. The defaults are those of the tiny pair; `smdm_reverse` has the authors' fine-tuning.

    Attributes:
        steps: updates of the weights.
        batch_size: rows an update sees, over all processes; the rows are shuffled anew in each pass over them.
        lr: highest learning rate, reached after `warmup` steps, then down a cosine to `lr_end`.
        lr_end: where the cosine would end, at step `steps`.
        betas: AdamW's.
        weight_decay: AdamW's, on matrices and embeddings.
        decay_norms: let the norms decay too.
        warmup: steps of a learning rate that rises linearly.
        warmup_from: what the first step counts as in the warm-up: 1 gives it lr / warmup, 0 gives it 0.
        clip: largest norm of the gradient.
        accumulate: parts into which each process cuts its rows, to hold the activations of one part at a time.
        mixed_precision: "no", "bf16" or "fp16" (not on a CPU); the weights stay as they are.
        seed: of the order of the rows and of the noise.
    """

    steps: int
    batch_size: int = 64
    lr: float = 3e-3
    lr_end: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.3
    decay_norms: bool = False
    warmup: int = 100
    warmup_from: int = 1
    clip: float = 1.0
    accumulate: int = 1
    mixed_precision: str = "no"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "warmup", "accumulate", "seed"):
            whole_number(name, getattr(self, name))
        for name in ("lr", "lr_end", "weight_decay", "clip"):
            plain_number(name, getattr(self, name))
        for name in ("steps", "batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("warmup", "lr", "lr_end", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a finite number, and not negative")
        if not self.clip > 0:  # NaN is not either
            raise ValueError(f"clip is {self.clip}; it must be above 0 (float('inf') does not clip)")
        if self.warmup_from not in (0, 1):
            raise ValueError(f"warmup_from is {self.warmup_from}; it must be 0 or 1")
        if self.mixed_precision not in PRECISIONS:
            raise ValueError(f"mixed_precision is {self.mixed_precision!r}; it must be one of {', '.join(PRECISIONS)}")
        if self.accumulate > self.batch_size:
            raise ValueError(f"{self.batch_size} rows cannot be cut into accumulate={self.accumulate} parts")

    @classmethod
    def for_epochs(cls, epochs: int | float, n_rows: int, batch_size: int = 64, **settings: Any) -> "TrainingConfig":
        """A recipe of as many steps as whole batches fit into `epochs` passes over `n_rows` rows."""
        if not math.isfinite(epochs) or batch_size < 1:
            raise ValueError(f"epochs={epochs}, batch_size={batch_size}; give a finite number and at least 1 row")
        steps = int(n_rows * epochs / batch_size)
        if steps < 1:
            raise ValueError(f"{epochs} passes over {n_rows} rows do not fill one batch of {batch_size}")
        return cls(steps=steps, batch_size=batch_size, **settings)

    def lr_at(self, step: int) -> float:
        """Learning rate of update `step`, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + self.warmup_from) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr_end + (self.lr - self.lr_end) * (1 + math.cos(math.pi * done)) / 2


def smdm_reverse(
    n_rows: int = 3600,
    epochs: int | float = 10,
    batch_size: int = 64,
    *,
    accumulate: int = 1,
    mixed_precision: str = "bf16",
    seed: int = 3407,
) -> TrainingConfig:
    """SMDM's fine-tuning on the reversal curse (ML-GSAI/SMDM `sft/finetune_mdm_reverse.py`).

    Steps `int(n_rows * epochs / batch_size)`, learning rate 0 to 2e-4 in 200 steps, then down a cosine to 2e-5, betas
    (0.9, 0.95), weight decay 0.1 on all weights, gradient norm clipped to 1, bfloat16 autocast. The script's batch is
    64, the paper's (Nie et al. 2024, arXiv 2410.18514, appendix B.5) 32. The authors published no such script for the
    twin; the one that they have for it (`sft/finetune_ar.py`, on other data) takes the same settings.

    What differs here: the rows' t are stratified (see `losses.hide`) where theirs are independent; a batch may
    straddle two passes where theirs drops a pass's last rows; rows are cut to the longest of the whole batch where they
    cut each device's part of it; and their learning rate is half a step ahead where they accumulate two parts (1028M,
    batch 64, 8 devices).
    """
    return TrainingConfig.for_epochs(
        epochs,
        n_rows,
        batch_size,
        lr=2e-4,
        lr_end=2e-5,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        decay_norms=True,
        warmup=200,
        warmup_from=0,
        clip=1.0,
        accumulate=accumulate,
        mixed_precision=mixed_precision,
        seed=seed,
    )
