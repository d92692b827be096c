"""Scores of a text: SMDM's against nltk's own numbers, the usual ones against sacrebleu, and laws."""

import sys

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_lens.evaluation import character_bleu, contained, corpus_word_bleu, exact, word_bleu

# ASCII, since the case of some other letters depends on their neighbours.
TEXTS = st.text(alphabet="abcAB .,", max_size=12)

# nltk 3.10.4: sentence_bleu([reference.strip().lower()], generation.strip().lower()), as evaluate_reverse.py calls it.
NLTK = [
    (" Daphne Barrington", " Daphne Barrington.", 0.9391044157537525),
    (
        ' the acclaimed director of the virtual reality masterpiece, "A Journey Through Time.".',
        " the acclaimed director of the virtual reality masterpiece.",
        0.6221281662394542,
    ),
    (" Uriah Hawthorne", " the renowned composer of the world's first underwater symphony", 5.203419514073115e-155),
    ("abc", "abc", 1.2213386697554703e-77),
    ("abcdef", "abxdef", 7.262123179505913e-78),
    ("abcd", "zzzz", 0),
    ("Abc Def", "aBC dEFghi jkl", 0.4324227075463215),
    ("aaaa", "aaaaaaaa", 0.345720784641941),
    ("aaaaaaaa", "aaaa", 0.36787944117144233),
    ("abcd", "", 0),
    ("ab", "ba", 1.821831989445342e-231),
    ("brave pilot", "brave  pilot of Oslen", 0.4378643946008864),
]


@pytest.mark.parametrize(("reference", "generation", "expected"), NLTK)
def test_character_bleu_is_what_nltk_makes_of_strings(reference, generation, expected):
    assert character_bleu(reference, generation) == pytest.approx(expected, rel=1e-12, abs=0)


@settings(max_examples=30)
@given(TEXTS, TEXTS)
def test_character_bleu_is_a_share(a, b):
    score = character_bleu(a, b)
    assert 0 <= score <= 1
    common = set(a.strip().lower()) & set(b.strip().lower())
    assert (score > 0) == bool(common)
    assert (score == 1) == (a.strip().lower() == b.strip().lower() and len(b.strip()) >= 4)


@settings(max_examples=30)
@given(TEXTS, TEXTS, TEXTS)
def test_what_surrounds_an_answer_does_not_hide_it(before, answer, after):
    assert contained(answer, before + answer + after)
    assert contained(answer, f" {before}{answer.swapcase()}{after}\n")


@settings(max_examples=30)
@given(TEXTS, TEXTS)
def test_containment_both_ways_is_equality(a, b):
    same = a.strip().lower() == b.strip().lower()
    assert (contained(a, b) and contained(b, a)) == same
    assert exact(a, b) == exact(b, a) == (a.strip() == b.strip())
    assert contained(a, b) or not exact(a, b)


def test_an_answer_cut_short_or_in_pieces_is_not_contained():
    assert contained(" Ada Marsh", "he met ada marsh, they say")
    assert not contained("Ada Marsh", "Ada")
    assert not contained("Ada Marsh", "Ada the Marsh")
    assert not exact("Ada Marsh", "ada marsh")


SENTENCES = [
    ("the brave pilot of Oslen.", "the brave pilot of Oslen."),
    ("the brave pilot of Oslen.", "the calm pilot of Oslen, they say."),
    ("Ada Marsh", "Ada Marsh"),
    ("Ada Marsh", "Ada Marden"),
]


@pytest.mark.parametrize(("reference", "generation"), SENTENCES)
def test_word_bleu_is_sacrebleu_of_generation_and_reference(reference, generation):
    assert word_bleu(reference, generation) == pytest.approx(
        sacrebleu.sentence_bleu(generation, [reference]).score / 100
    )


def test_corpus_bleu_is_that_of_the_corpus():
    references, generations = ([pair[i] for pair in SENTENCES] for i in (0, 1))
    score = corpus_word_bleu(references, generations)
    assert score == pytest.approx(sacrebleu.corpus_bleu(generations, [references]).score / 100)
    assert score != pytest.approx(sum(map(word_bleu, references, generations)) / 4, abs=0.01)
    assert corpus_word_bleu(references, references) == 1
    assert corpus_word_bleu(["Ada Marsh", "Ben Lell"], ["Ada Marsh", "Ben Lell"]) == 1
    with pytest.raises(ValueError, match="1 generations for 2 references"):
        corpus_word_bleu(["a", "b"], ["a"])


def test_without_sacrebleu_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    assert character_bleu("Ada Marsh", "Ada Marsh") == 1
    with pytest.raises(ImportError, match=r"diffusion-lens\[eval\]"):
        word_bleu("Ada Marsh", "Ada Marsh")
