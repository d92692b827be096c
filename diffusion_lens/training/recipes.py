"""Training recipes: number of steps, learning rate, regularisation and precision."""

import math
from dataclasses import dataclass
from typing import Any

from diffusion_lens.settings import plain_number, whole_number

PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True)
class TrainingConfig:
    """A training recipe. The defaults are those of the bundled models; `smdm_reverse` is SMDM's fine-tuning.

    Attributes:
        steps: Number of updates of the weights.
        batch_size: Rows per update, over all processes. Each pass over the rows shuffles them again.
        lr: Highest learning rate. The warm-up reaches it, then a cosine decays it to `lr_end`.
        lr_end: Learning rate at the end of the cosine, at step `steps`.
        betas: Betas of AdamW.
        weight_decay: Weight decay of AdamW on matrices and embeddings.
        decay_norms: Whether weight decay applies to the norms too.
        warmup: Number of steps of the linear warm-up.
        warmup_from: Number of the first step in the warm-up: 1 starts at lr / warmup, 0 starts at 0.
        clip: Largest norm of the gradient.
        accumulate: Number of parts into which each process divides its rows, to hold the activations of one part only.
        mixed_precision: Precision of autocast, "no", "bf16" or "fp16" (not on a CPU). The weights keep their dtype.
        seed: Seed of the order of the rows and of the noise.
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
        if not self.clip > 0:  # This also rejects NaN.
            raise ValueError(f"clip is {self.clip}; it must be above 0 (float('inf') turns clipping off)")
        if self.warmup_from not in (0, 1):
            raise ValueError(f"warmup_from is {self.warmup_from}; it must be 0 or 1")
        if self.mixed_precision not in PRECISIONS:
            raise ValueError(f"mixed_precision is {self.mixed_precision!r}; it must be one of {', '.join(PRECISIONS)}")
        if self.accumulate > self.batch_size:
            raise ValueError(f"{self.batch_size} rows cannot be divided into accumulate={self.accumulate} parts")

    @classmethod
    def for_epochs(cls, epochs: int | float, n_rows: int, batch_size: int = 64, **settings: Any) -> "TrainingConfig":
        """The recipe with as many steps as full batches fit into `epochs` passes over `n_rows` rows."""
        if not math.isfinite(epochs) or batch_size < 1:
            raise ValueError(f"epochs={epochs}, batch_size={batch_size}; give a finite number and at least 1 row")
        steps = int(n_rows * epochs / batch_size)
        if steps < 1:
            raise ValueError(f"{epochs} passes over {n_rows} rows do not fill one batch of {batch_size}")
        return cls(steps=steps, batch_size=batch_size, **settings)

    def lr_at(self, step: int) -> float:
        """Learning rate of update `step`, where 0 is the first."""
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

    The recipe takes `int(n_rows * epochs / batch_size)` steps. The learning rate rises from 0 to 2e-4 in 200 steps and
    then follows a cosine to 2e-5. Betas are (0.9, 0.95), weight decay is 0.1 on all weights, the gradient norm is
    clipped to 1, and autocast uses bfloat16. The batch size is 64 in the script and 32 in the paper (Nie et al. 2024,
    arXiv 2410.18514, appendix B.5). The authors published no such script for the AR baseline; their script for it on
    other data (`sft/finetune_ar.py`) uses the same settings.

    Four details differ from the script. The masking rates t of a batch are stratified (see `hide`); theirs are
    independent. A batch may contain rows of two passes; theirs drops the last rows of a pass. Rows are cut to the
    longest row of the whole batch; they cut each device's part separately. Where they accumulate two parts (1028M,
    batch 64, 8 devices), their learning rate is half a step ahead.
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
