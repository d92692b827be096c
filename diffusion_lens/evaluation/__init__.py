"""Evaluation: scores of texts, likelihoods of answers, and recall of facts by number of denoising steps."""

from diffusion_lens.evaluation.chain_rule import AnswerRanks, NLLByOrder, chain_rule_nll, nll_by_order, rank_answer
from diffusion_lens.evaluation.likelihood import NLLEstimate, monte_carlo_nll
from diffusion_lens.evaluation.recall import (
    Recall,
    Reply,
    character_bleu,
    contained,
    corpus_word_bleu,
    exact,
    word_bleu,
)
from diffusion_lens.evaluation.recall_by_steps import RecallSettings, recall_by_steps, recall_facts

__all__ = [
    "AnswerRanks",
    "NLLByOrder",
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
    "nll_by_order",
    "rank_answer",
    "recall_by_steps",
    "recall_facts",
    "word_bleu",
]
