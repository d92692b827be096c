"""Figures as matplotlib axes. Functions draw and return them, and never show them. Requires the extra `plot`.

A figure does not store its numbers. The result that drew it does, and `save` writes them.
"""

from diffusion_lens.pages import step_slider, write_page
from diffusion_lens.plots.axes import (
    CELL,
    HUES,
    RESTORED,
    Figure,
    css_size,
    figure_of,
    one_axes,
    panels,
    png_of,
    readable,
)
from diffusion_lens.plots.canvas import canvas_fragment, canvas_table, denoising_grid, difference_grid
from diffusion_lens.plots.curves import (
    Curve,
    SignaturePanels,
    effect_curves,
    kept_by_size,
    labelled_lines,
    level_curves,
    paired_scatter,
    probability_by_layer,
    ranked_means,
    reliability,
    share_bars,
    shares_by_number,
    signature_panels,
    similarity_curve,
    spectra,
)
from diffusion_lens.plots.maps import edge_map, heat_map, labelled_map, token_map, trace_panels

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
    "difference_grid",
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
    "ranked_means",
    "readable",
    "reliability",
    "share_bars",
    "shares_by_number",
    "signature_panels",
    "similarity_curve",
    "spectra",
    "step_slider",
    "token_map",
    "trace_panels",
    "write_page",
]
