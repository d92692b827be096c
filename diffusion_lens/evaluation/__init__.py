"""Evaluation: scores of texts, likelihoods of answers, and recall of facts by number of denoising steps."""

from diffusion_lens.evaluation.likelihood import AnswerRanks, NLLEstimate, chain_rule_nll, monte_carlo_nll, rank_answer
from diffusion_lens.evaluation.recall import Recall, Reply
from diffusion_lens.evaluation.recall_by_steps import RecallSettings, recall_by_steps, recall_facts
from diffusion_lens.evaluation.scores import character_bleu, contained, corpus_word_bleu, exact, word_bleu

__all__ = [
    "AnswerRanks",
    "NLLEstimate",
    "Recall",
    "RecallSettings",
    "Reply",
    "chain_rule_nll",
    "character_bleu",
    "contained",
    "corpus_word_bleu",
    "exact",
    "monte_carlo_nll",
    "rank_answer",
    "recall_by_steps",
    "recall_facts",
    "word_bleu",
]
