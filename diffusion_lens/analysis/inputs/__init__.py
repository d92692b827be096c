"""From what users give to forward passes: one reading of texts, tokens, queries, facts and trajectories.

padding.py       rows of tokens, and which of them are real
clean_texts.py   texts, facts or tokens without [MASK], to which an analysis adds noise
forward_pass.py  one pass: tokens, padding, step, and the states that are read in it
given.py         the passes over any inputs, at the steps of trajectories
shared_passes.py passes that stand for several canvases
"""

from diffusion_lens.analysis.inputs.clean_texts import CleanTexts, Texts
from diffusion_lens.analysis.inputs.forward_pass import ForwardPass, check_vectors, readable_points
from diffusion_lens.analysis.inputs.given import Inputs, Readable, TextsOrRuns, texts_or_runs
from diffusion_lens.analysis.inputs.padding import padded
from diffusion_lens.analysis.inputs.shared_passes import SharedPass, passes_of, shared_passes

__all__ = [
    "CleanTexts",
    "ForwardPass",
    "Inputs",
    "Readable",
    "SharedPass",
    "Texts",
    "TextsOrRuns",
    "check_vectors",
    "padded",
    "passes_of",
    "readable_points",
    "shared_passes",
    "texts_or_runs",
]
