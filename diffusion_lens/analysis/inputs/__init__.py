"""From what users give to forward passes: one reading of texts, tokens, queries, facts and trajectories.

padding.py       rows of tokens, and which of them are real
clean_texts.py   texts, facts or tokens without [MASK], to which an analysis adds noise
forward_pass.py  one pass: tokens, padding, step, and the states that are read in it
given.py         the passes over any inputs, at the steps of trajectories
"""

from diffusion_lens.analysis.inputs.clean_texts import CleanTexts, Texts
from diffusion_lens.analysis.inputs.forward_pass import ForwardPass, check_vectors, readable_points
from diffusion_lens.analysis.inputs.given import Inputs, Readable, TextsOrRuns, texts_or_runs
from diffusion_lens.analysis.inputs.padding import padded

__all__ = [
    "CleanTexts",
    "ForwardPass",
    "Inputs",
    "Readable",
    "Texts",
    "TextsOrRuns",
    "check_vectors",
    "padded",
    "readable_points",
    "texts_or_runs",
]
