"""Alias of `diffusion_lens.plots.pages`, kept for existing imports."""

from diffusion_lens.plots.pages import step_slider, write_page

__all__ = ["step_slider", "write_page"]
