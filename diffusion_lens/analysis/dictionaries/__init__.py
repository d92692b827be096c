"""Dictionaries, such as sparse autoencoders (SAEs): their training data, splices, and what a splice costs the model."""

from diffusion_lens.analysis.dictionaries.canvases import NoiseRange
from diffusion_lens.analysis.dictionaries.examples import FeatureExamples, feature_examples
from diffusion_lens.analysis.dictionaries.loss import DictionaryLoss, Estimate, dictionary_loss
from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary
from diffusion_lens.analysis.dictionaries.splice import Dictionary, splice
from diffusion_lens.analysis.dictionaries.store import ActivationStore, activations
from diffusion_lens.analysis.dictionaries.train import train_dictionary

__all__ = [
    "ActivationStore",
    "Dictionary",
    "DictionaryLoss",
    "Estimate",
    "FeatureExamples",
    "NoiseRange",
    "SparseDictionary",
    "activations",
    "dictionary_loss",
    "feature_examples",
    "splice",
    "train_dictionary",
]
