"""Losses, a trainer for both variants on one or several devices, and `adapt`, from a causal model to its twin."""

from diffusion_lens.model.loss import autoregressive_loss, masked_diffusion_loss, own_loss
from diffusion_lens.training.adapt import Adaptation, adapt
from diffusion_lens.training.finetune import finetune
from diffusion_lens.training.trainer import RowSource, TrainingConfig, TrainingRecord, TrainingRows, smdm_reverse, train

__all__ = [
    "Adaptation",
    "RowSource",
    "TrainingConfig",
    "TrainingRecord",
    "TrainingRows",
    "adapt",
    "autoregressive_loss",
    "finetune",
    "masked_diffusion_loss",
    "own_loss",
    "smdm_reverse",
    "train",
]
