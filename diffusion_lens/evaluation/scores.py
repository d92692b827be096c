"""Scores of a text against the expected one: those of SMDM's reversal evaluation, and the usual ones.

ML-GSAI/SMDM `evaluate_reverse.py` strips both texts and lowers their case, then asks whether the generation contains
the reference, and passes both to nltk's `sentence_bleu`. nltk expects lists of tokens; the script hands it strings, so
its BLEU counts characters. It is kept here under its own name, so that the published numbers have something to be
compared with; it is no BLEU in the usual sense, which `word_bleu` and `corpus_word_bleu` are.

All scores lie between 0 and 1 (papers print percent).
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

SCORES = {
    "contained": "answer contained in what was written (SMDM's accuracy)",
    "exact": "what was written is the answer (exact match)",
    "character_bleu": "character_bleu (SMDM)",
    "word_bleu": "sentence BLEU on words (sacrebleu)",
}


def check_score(score: str) -> None:
    """Refuse a score that is not one of `SCORES`."""
    if score not in SCORES:
        raise ValueError(f"there is no score {score!r}; choose {', '.join(SCORES)}")


def contained(reference: str, generation: str) -> bool:
    """Whether the generation holds the reference, whatever its case and outer spaces (SMDM's accuracy)."""
    return _plain(reference) in _plain(generation)


def exact(reference: str, generation: str) -> bool:
    """Whether the generation is the reference, but for outer spaces."""
    return generation.strip() == reference.strip()


def character_bleu(reference: str, generation: str) -> float:
    """SMDM's BLEU: nltk's `sentence_bleu([reference], generation)` on two strings, case and outer spaces aside.

    The geometric mean of the precisions of 1 to 4 characters, times the brevity penalty. As in nltk without smoothing
    (`SmoothingFunction.method0`), a precision of 0 counts as the smallest normal float, which leaves next to nothing;
    without a single common character the score is 0. So equal texts score 1 only from 4 characters on.
    """
    expected, written = _plain(reference), _plain(generation)
    precisions = [_precision(expected, written, n) for n in (1, 2, 3, 4)]
    if not precisions[0]:
        return 0.0
    logs = [math.log(precision or sys.float_info.min) / len(precisions) for precision in precisions]
    return min(1.0, math.exp(1 - len(expected) / len(written))) * math.exp(math.fsum(logs))


def word_bleu(reference: str, generation: str) -> float:
    """sacrebleu's BLEU of one text: tokenizer 13a, exponential smoothing, no orders that the text is too short for.

    Raises:
        ImportError: the extra `eval` is not installed.
    """
    score: float = _sacrebleu().sentence_score(generation, [reference]).score
    return min(1.0, score / 100)


def corpus_word_bleu(references: Sequence[str], generations: Sequence[str]) -> float:
    """sacrebleu's BLEU of a corpus, with the same settings: n-grams are counted over all texts before they are weighed.

    Where not one text has four words, such as among names, the orders that none reaches are left out too; sacrebleu's
    own default would say 0 of perfect answers.

    Raises:
        ValueError: not one generation a reference, or none.
        ImportError: the extra `eval` is not installed.
    """
    if len(references) != len(generations) or not references:
        raise ValueError(f"{len(generations)} generations for {len(references)} references; give one each")
    score: float = _sacrebleu().corpus_score(list(generations), [list(references)]).score
    return min(1.0, score / 100)


def _plain(text: str) -> str:
    return text.strip().lower()


def _precision(reference: str, generation: str, n: int) -> float:
    """Share of the generation's runs of n characters that the reference has too, each as often as it has it."""
    expected, written = _runs(reference, n), _runs(generation, n)
    return (written & expected).total() / max(1, written.total())


def _runs(text: str, n: int) -> "Counter[str]":
    return Counter(text[begun : begun + n] for begun in range(len(text) - n + 1))


def _sacrebleu() -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise ImportError("BLEU on words needs sacrebleu: pip install 'diffusion-lens[eval]'") from error
    return BLEU(effective_order=True)
