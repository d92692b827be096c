"""Two sets of vectors of the same facts, forward and reverse, and how alike they are."""

from diffusion_lens.analysis.representations.comparison import Comparison, Comparisons
from diffusion_lens.analysis.representations.forward_reverse import compare, compare_along

__all__ = ["Comparison", "Comparisons", "compare", "compare_along"]
