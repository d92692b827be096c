"""Scores of a text against the expected one: those of SMDM's reversal evaluation, and the standard ones.

ML-GSAI/SMDM `evaluate_reverse.py` strips both texts and lowers their case. It then checks whether the generation
contains the reference, and passes both to nltk's `sentence_bleu`. nltk expects lists of tokens, but the script passes
strings, so its BLEU counts characters. This score is available as `character_bleu`, for comparison with the published
numbers. The standard BLEU scores are `word_bleu` and `corpus_word_bleu`.

All scores lie between 0 and 1 (papers print percent).
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from diffusion_lens.settings import checked_arguments

SCORES = {
    "contained": "answer contained in what was written (SMDM's accuracy)",
    "exact": "what was written is the answer (exact match)",
    "character_bleu": "character_bleu (SMDM)",
    "word_bleu": "sentence BLEU on words (sacrebleu)",
}


def check_score(score: str) -> None:
    """Raise a `ValueError` unless the score is one of `SCORES`."""
    if score not in SCORES:
        raise ValueError(f"there is no score {score!r}; choose one of {', '.join(SCORES)}")


@checked_arguments
def contained(reference: str, generation: str) -> bool:
    """Whether the generation contains the reference, ignoring case and outer spaces (SMDM's accuracy)."""
    return _plain(reference) in _plain(generation)


@checked_arguments
def exact(reference: str, generation: str) -> bool:
    """Whether the generation equals the reference, ignoring outer spaces."""
    return generation.strip() == reference.strip()


@checked_arguments
def character_bleu(reference: str, generation: str) -> float:
    """SMDM's BLEU: nltk's `sentence_bleu([reference], generation)` on two strings, ignoring case and outer spaces.

    The score is the geometric mean of the precisions of 1 to 4 characters, times the brevity penalty. As in nltk
    without smoothing (`SmoothingFunction.method0`), a precision of 0 counts as the smallest normal float, so the score
    is almost 0; without a common character it is exactly 0. Equal texts score 1 only if they have 4 characters or more.
    """
    expected, written = _plain(reference), _plain(generation)
    precisions = [_precision(expected, written, n) for n in (1, 2, 3, 4)]
    if not precisions[0]:
        return 0.0
    logs = [math.log(precision or sys.float_info.min) / len(precisions) for precision in precisions]
    return min(1.0, math.exp(1 - len(expected) / len(written))) * math.exp(math.fsum(logs))


@checked_arguments
def word_bleu(reference: str, generation: str) -> float:
    """sacrebleu's BLEU of one text, with tokenizer 13a and exponential smoothing, up to the order that the text allows.

    Raises:
        ImportError: The extra `eval` is not installed.
    """
    score: float = _sacrebleu().sentence_score(generation, [reference]).score
    return min(1.0, score / 100)


@checked_arguments
def corpus_word_bleu(references: Sequence[str], generations: Sequence[str]) -> float:
    """sacrebleu's BLEU of a corpus, with the same settings; n-grams are counted over all texts together.

    Orders that no text reaches are left out: among names, for example, no text may have four words, and sacrebleu's
    default would then score perfect answers 0.

    Raises:
        ValueError: There is not one generation for each reference, or there are none.
        ImportError: The extra `eval` is not installed.
    """
    if len(references) != len(generations) or not references:
        given = f"{len(generations)} generations for {len(references)} references"
        raise ValueError(f"{given}; give one generation for each reference, and at least one")
    score: float = _sacrebleu().corpus_score(list(generations), [list(references)]).score
    return min(1.0, score / 100)


def _plain(text: str) -> str:
    return text.strip().lower()


def _precision(reference: str, generation: str, n: int) -> float:
    """Share of the generation's n-grams of characters that the reference has too (clipped counts, as in BLEU)."""
    texts = (reference, generation)
    expected, written = (Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in texts)
    return (written & expected).total() / max(1, written.total())


def _sacrebleu() -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise ImportError("BLEU on words needs sacrebleu: pip install 'diffusion-lens[eval]'") from error
    return BLEU(effective_order=True)
