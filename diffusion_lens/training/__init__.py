"""Training losses, and a trainer for both variants on one or several devices."""

from diffusion_lens.model.loss import autoregressive_loss, masked_diffusion_loss, own_loss
from diffusion_lens.training.finetune import finetune
from diffusion_lens.training.trainer import RowSource, TrainingConfig, TrainingRecord, TrainingRows, smdm_reverse, train

__all__ = [
    "RowSource",
    "TrainingConfig",
    "TrainingRecord",
    "TrainingRows",
    "autoregressive_loss",
    "finetune",
    "masked_diffusion_loss",
    "own_loss",
    "smdm_reverse",
    "train",
]
