"""How well a model answers, and how likely it finds an answer."""

from diffusion_lens.evaluation.exact_match import Answer, ExactMatch, exact_match
from diffusion_lens.evaluation.likelihood import NLLEstimate, chain_rule_nll, monte_carlo_nll

__all__ = ["Answer", "ExactMatch", "NLLEstimate", "chain_rule_nll", "exact_match", "monte_carlo_nll"]
