"""The command line `diffusion-lens`. Importing a module of commands registers them.

A command is a function with the decorator `command` (`options.py`), which makes its options. It loads a model
(`load_model.py`), calls the library, if asked on several workers (`workers.py`), says what was found and writes it
(`report.py`); `cost.py` is behind `--dry-run`. `app.py` turns errors into one line.
"""

from diffusion_lens.cli import (
    demo,
    denoise,
    dictionary,
    explore,
    finetune,
    lens,
    models,
    patch,
    plot,
    rome,
    signatures,
    trace,
)
from diffusion_lens.cli.app import app

__all__ = [
    "app",
    "demo",
    "denoise",
    "dictionary",
    "explore",
    "finetune",
    "lens",
    "models",
    "patch",
    "plot",
    "rome",
    "signatures",
    "trace",
]
