"""Losses, and a small trainer."""

from diffusion_lens.training.objectives import autoregressive_loss, masked_diffusion_loss, own_loss
from diffusion_lens.training.trainer import TrainingConfig, TrainingRecord, train

__all__ = [
    "TrainingConfig",
    "TrainingRecord",
    "autoregressive_loss",
    "masked_diffusion_loss",
    "own_loss",
    "train",
]
