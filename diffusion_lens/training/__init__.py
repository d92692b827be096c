"""Losses, and a small trainer."""

from diffusion_lens.training.objectives import OBJECTIVES, autoregressive_loss, masked_diffusion_loss
from diffusion_lens.training.trainer import TrainingConfig, TrainingRecord, train

__all__ = [
    "OBJECTIVES",
    "TrainingConfig",
    "TrainingRecord",
    "autoregressive_loss",
    "masked_diffusion_loss",
    "train",
]
