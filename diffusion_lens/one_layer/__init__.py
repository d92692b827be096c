"""The one-layer experiment: does reverse recall need relative positions? See `diffusion_lens.one_layer.study`."""

from diffusion_lens.one_layer.measures import MEASURES
from diffusion_lens.one_layer.result import OneLayerStudy, Spread
from diffusion_lens.one_layer.study import one_layer_study
from diffusion_lens.one_layer.toy import DATA, VARIANTS, Cell, architecture, sentences, taught_pairs

__all__ = [
    "DATA",
    "MEASURES",
    "VARIANTS",
    "Cell",
    "OneLayerStudy",
    "Spread",
    "architecture",
    "one_layer_study",
    "sentences",
    "taught_pairs",
]
