"""Invented surnames and places, so that no word is known from other texts."""

# Word lists are easier to read as text:
# ruff: noqa: SIM905

import random
from collections.abc import Collection

_ONSETS = "b d f g h k l m n p r s t v w br dr fl gr kr pl sk st tr".split()
_VOWELS = "a e i o u au ei".split()
_SURNAME_ENDINGS = "rsh rner lden ndall rrick sser ckett mbley nton pling".split()
_PLACE_ENDINGS = "lsen rholm mburg ndale sport vik rgate lstad nmoor thaven".split()


def surnames(rng: random.Random, count: int, taken: Collection[str] = ()) -> list[str]:
    """`count` distinct surnames (onset + vowel + ending) that are not in `taken`."""
    return _invent(rng, _SURNAME_ENDINGS, count, taken)


def places(rng: random.Random, count: int, taken: Collection[str] = ()) -> list[str]:
    """`count` distinct names of places that are not in `taken`. None of them is a surname."""
    return _invent(rng, _PLACE_ENDINGS, count, taken)


def _invent(rng: random.Random, endings: list[str], count: int, taken: Collection[str]) -> list[str]:
    words = [onset + vowel + ending for onset in _ONSETS for vowel in _VOWELS for ending in endings]
    return rng.sample([word.capitalize() for word in words if word.capitalize() not in taken], count)
