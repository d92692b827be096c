"""Activation patching: states of one run are copied into another, cell by cell; exactly, or estimated by gradients."""

from diffusion_lens.analysis.patching.grid import answer_probability, patch_grid
from diffusion_lens.analysis.patching.result import PatchGrid

__all__ = ["PatchGrid", "answer_probability", "patch_grid"]
