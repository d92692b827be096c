"""Average indirect effects: a causal trace of every fact in a list, averaged by what the tokens are."""

from diffusion_lens.analysis.average_effects.average import AverageEffect, average_indirect_effect, merge

__all__ = ["AverageEffect", "average_indirect_effect", "merge"]
