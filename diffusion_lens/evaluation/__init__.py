"""How well a model answers, and how likely it finds an answer."""

from diffusion_lens.evaluation.exact_match import Answer, ExactMatch, exact_match

__all__ = ["Answer", "ExactMatch", "exact_match"]
