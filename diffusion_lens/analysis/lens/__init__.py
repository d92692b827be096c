"""The logit lens by step: what the network would predict if it ended after each layer, at each step of the loop."""

from diffusion_lens.analysis.lens.lens import LogitLens, logit_lens
from diffusion_lens.analysis.lens.tuned import Translators, fit_translators

__all__ = ["LogitLens", "Translators", "fit_translators", "logit_lens"]
