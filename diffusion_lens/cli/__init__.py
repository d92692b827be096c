"""The command line: `diffusion-lens`. A file a command; importing it registers the command."""

from diffusion_lens.cli import check, compare, demo, denoise, finetune, models, plot, recall, rome, trace
from diffusion_lens.cli.app import app

__all__ = ["app", "check", "compare", "demo", "denoise", "finetune", "models", "plot", "recall", "rome", "trace"]
