"""Dictionaries, such as sparse autoencoders (SAEs): their training data, splices, and what a splice costs the model."""

from diffusion_lens.analysis.dictionaries.collecting import activations
from diffusion_lens.analysis.dictionaries.loss import dictionary_loss
from diffusion_lens.analysis.dictionaries.loss_result import DictionaryLoss, Estimate
from diffusion_lens.analysis.dictionaries.noise import NoiseRange
from diffusion_lens.analysis.dictionaries.splicing import Dictionary, splice
from diffusion_lens.analysis.dictionaries.store import ActivationStore

__all__ = [
    "ActivationStore",
    "Dictionary",
    "DictionaryLoss",
    "Estimate",
    "NoiseRange",
    "activations",
    "dictionary_loss",
    "splice",
]
