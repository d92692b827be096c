"""Training losses, and a trainer for both variants on one or several devices."""

from diffusion_lens.losses import autoregressive_loss, masked_diffusion_loss, own_loss
from diffusion_lens.training.batches import TrainingRows
from diffusion_lens.training.finetune import finetune
from diffusion_lens.training.recipes import TrainingConfig, smdm_reverse
from diffusion_lens.training.trainer import TrainingRecord, train

__all__ = [
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
