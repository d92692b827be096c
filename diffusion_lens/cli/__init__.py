"""The command line: `diffusion-lens`. A file a command; importing it registers the command."""

from diffusion_lens.cli import compare, demo, denoise, finetune, models, plot, recall, rome, trace
from diffusion_lens.cli.app import app

__all__ = ["app", "compare", "demo", "denoise", "finetune", "models", "plot", "recall", "rome", "trace"]
