"""A sentence as trained and the reverse question about it, on a model's canvas; `pair.py` says which, and why."""

from diffusion_lens.taught_pairs.matching import LaidOutPairs, lay_out_pairs, match_facts, pairs_in_common
from diffusion_lens.taught_pairs.pair import TaughtCanvas, TaughtPair
from diffusion_lens.taught_pairs.sentences import Sentence

__all__ = ["LaidOutPairs", "Sentence", "TaughtCanvas", "TaughtPair", "lay_out_pairs", "match_facts", "pairs_in_common"]
