"""The public name of `plots.pages`."""

from diffusion_lens.plots.pages import step_slider, write_page

__all__ = ["step_slider", "write_page"]
