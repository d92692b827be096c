"""The logit lens by step: what the network would predict if it ended after each layer, at each step of the loop."""

from diffusion_lens.analysis.lens.by_step import logit_lens
from diffusion_lens.analysis.lens.fitting import fit_translators
from diffusion_lens.analysis.lens.result import LogitLens
from diffusion_lens.analysis.lens.translators import Translators

__all__ = ["LogitLens", "Translators", "fit_translators", "logit_lens"]
