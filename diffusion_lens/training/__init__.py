"""Training losses, and a trainer for both variants on one or several devices."""

from diffusion_lens.losses import autoregressive_loss, masked_diffusion_loss, own_loss
from diffusion_lens.training.batches import RowSource, TrainingRows
from diffusion_lens.training.finetune import finetune
from diffusion_lens.training.growing import grow
from diffusion_lens.training.packed_rows import PackedRows
from diffusion_lens.training.recipes import TrainingConfig, smdm_reverse
from diffusion_lens.training.shaped_loss import EarlyExit, EdgeDropout, ShapedLoss, Targets
from diffusion_lens.training.trainer import TrainingRecord, train

__all__ = [
    "EarlyExit",
    "EdgeDropout",
    "PackedRows",
    "RowSource",
    "ShapedLoss",
    "Targets",
    "TrainingConfig",
    "TrainingRecord",
    "TrainingRows",
    "autoregressive_loss",
    "finetune",
    "grow",
    "masked_diffusion_loss",
    "own_loss",
    "smdm_reverse",
    "train",
]
