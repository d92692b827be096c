"""Activation patching: one run's states put into another's, cell by cell, exactly or by the gradient's estimate."""

from diffusion_lens.analysis.patching.grid import answer_probability, patch_grid
from diffusion_lens.analysis.patching.result import PatchGrid

__all__ = ["PatchGrid", "answer_probability", "patch_grid"]
