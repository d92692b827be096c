"""The command line `diffusion-lens`. Each command has its own module, and importing the module registers it."""

from diffusion_lens.cli import (
    check,
    compare,
    demo,
    denoise,
    finetune,
    models,
    one_layer,
    plot,
    recall,
    rome,
    signatures,
    trace,
)
from diffusion_lens.cli.app import app

__all__ = [
    "app",
    "check",
    "compare",
    "demo",
    "denoise",
    "finetune",
    "models",
    "one_layer",
    "plot",
    "recall",
    "rome",
    "signatures",
    "trace",
]
