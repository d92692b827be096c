"""The one-layer experiment: does reverse recall need relative positions? See `one_layer.study`."""

from one_layer.objectives import OBJECTIVES
from one_layer.result import OneLayerStudy, Spread
from one_layer.study import one_layer_study
from one_layer.toy import DATA, MEASURES, VARIANTS, Cell, architecture, sentences, taught_pairs

__all__ = [
    "DATA",
    "MEASURES",
    "OBJECTIVES",
    "VARIANTS",
    "Cell",
    "OneLayerStudy",
    "Spread",
    "architecture",
    "one_layer_study",
    "sentences",
    "taught_pairs",
]
