"""Figures as matplotlib axes. Functions draw and return them, and never show them. Requires the extra `plot`.

A figure does not store its numbers. The result that drew it does, and `save` writes them.
"""

from diffusion_lens.pages import step_slider, write_page
from diffusion_lens.plots.axes import HUES, RESTORED, Figure, panels, readable
from diffusion_lens.plots.bars import share_bars
from diffusion_lens.plots.canvas_html import canvas_table
from diffusion_lens.plots.circuits import edge_map, kept_by_size
from diffusion_lens.plots.curves import effect_curves, level_curves
from diffusion_lens.plots.heat_maps import denoising_grid, heat_map, labelled_map, trace_panels
from diffusion_lens.plots.lines import labelled_lines
from diffusion_lens.plots.representations import paired_scatter, probability_by_layer, similarity_curve, spectra
from diffusion_lens.plots.signatures import Curve, SignaturePanels, signature_panels
from diffusion_lens.plots.token_maps import token_map
from diffusion_lens.plots.training import training_panels

__all__ = [
    "HUES",
    "RESTORED",
    "Curve",
    "Figure",
    "SignaturePanels",
    "canvas_table",
    "denoising_grid",
    "edge_map",
    "effect_curves",
    "heat_map",
    "kept_by_size",
    "labelled_lines",
    "labelled_map",
    "level_curves",
    "paired_scatter",
    "panels",
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
