"""Pictures, as matplotlib axes: drawn, returned, never shown. Needs the extra `plot`.

The numbers of a picture lie in the result that drew it: every result has a `save` of its own.
"""

from diffusion_lens.plots.axes import ABSENT, HUES, RESTORED, Figure, panels, readable, row_labels, short_answer
from diffusion_lens.plots.canvas_html import canvas_table
from diffusion_lens.plots.curves import effect_curves
from diffusion_lens.plots.heat_maps import denoising_grid, heat_map, labelled_map, trace_panels
from diffusion_lens.plots.pages import step_slider, write_page
from diffusion_lens.plots.representations import paired_scatter, probability_by_layer, similarity_curve, spectra

__all__ = [
    "ABSENT",
    "HUES",
    "RESTORED",
    "Figure",
    "canvas_table",
    "denoising_grid",
    "effect_curves",
    "heat_map",
    "labelled_map",
    "paired_scatter",
    "panels",
    "probability_by_layer",
    "readable",
    "row_labels",
    "short_answer",
    "similarity_curve",
    "spectra",
    "step_slider",
    "trace_panels",
    "write_page",
]
