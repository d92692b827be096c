"""The command line `diffusion-lens`. Each command has its own module, and importing the module registers it."""

from diffusion_lens.cli import (
    aie,
    check,
    compare,
    demo,
    denoise,
    explore,
    finetune,
    lens,
    models,
    one_layer,
    patch,
    plot,
    recall,
    rome,
    signatures,
    trace,
)
from diffusion_lens.cli.app import app

__all__ = [
    "aie",
    "app",
    "check",
    "compare",
    "demo",
    "denoise",
    "explore",
    "finetune",
    "lens",
    "models",
    "one_layer",
    "patch",
    "plot",
    "recall",
    "rome",
    "signatures",
    "trace",
]
