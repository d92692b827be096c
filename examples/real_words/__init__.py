"""The study on real facts: a causal model and its diffusion twin, which know the same facts. See `real_words.study`."""

from real_words.associations import log_odds
from real_words.questions import Questions, Relation
from real_words.study import Settings, real_words_study

__all__ = ["Questions", "Relation", "Settings", "log_odds", "real_words_study"]
