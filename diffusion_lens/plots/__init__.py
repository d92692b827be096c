"""Figures as matplotlib axes. Functions draw and return them, and never show them. Requires the extra `plot`.

A figure does not store its numbers. The result that drew it does, and `save` writes them.
"""

from diffusion_lens.pages import step_slider, write_page
from diffusion_lens.plots.axes import HUES, RESTORED, one_axes, panels, readable
from diffusion_lens.plots.bars import share_bars
from diffusion_lens.plots.canvas_grid import denoising_grid
from diffusion_lens.plots.canvas_html import canvas_fragment, canvas_table
from diffusion_lens.plots.circuits import edge_map, kept_by_size
from diffusion_lens.plots.curves import effect_curves, level_curves
from diffusion_lens.plots.heat_maps import heat_map, labelled_map, trace_panels
from diffusion_lens.plots.lines import labelled_lines
from diffusion_lens.plots.notebook import CELL, Figure, css_size, figure_of, png_of
from diffusion_lens.plots.representations import paired_scatter, probability_by_layer, similarity_curve, spectra
from diffusion_lens.plots.signatures import Curve, SignaturePanels, signature_panels
from diffusion_lens.plots.token_maps import token_map
from diffusion_lens.plots.training import training_panels

__all__ = [
    "CELL",
    "HUES",
    "RESTORED",
    "Curve",
    "Figure",
    "SignaturePanels",
    "canvas_fragment",
    "canvas_table",
    "css_size",
    "denoising_grid",
    "edge_map",
    "effect_curves",
    "figure_of",
    "heat_map",
    "kept_by_size",
    "labelled_lines",
    "labelled_map",
    "level_curves",
    "one_axes",
    "paired_scatter",
    "panels",
    "png_of",
    "probability_by_layer",
    "readable",
    "share_bars",
    "signature_panels",
    "similarity_curve",
    "spectra",
    "step_slider",
    "token_map",
    "trace_panels",
    "training_panels",
    "write_page",
]
