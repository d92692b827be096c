"""What every model should find likely, and know: a page of public domain, and ten facts.

The page opens Jane Austen's "Pride and Prejudice" (1813). A tokenizer that has no words for it, as the embedded pair's,
is asked from that pair's own data: 16 of its training sentences and ten of its people.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

from diffusion_lens.data import toy_facts
from diffusion_lens.facts import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

SHUFFLE_SEED = 0
# Enough for the order of words to show, and one or two rows in any published context.
MOST_TOKENS = 512
# A tokenizer of words that knows fewer than half of a page's is not made for it; one of bytes or pieces knows all.
MOST_UNKNOWN = 0.5
N_SENTENCES = 32
PAGE = "pride_and_prejudice.txt"
# First letters differ, so that the answers' first tokens do too.
CAPITALS = {
    "France": "Paris",
    "England": "London",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Austria": "Vienna",
    "Cuba": "Havana",
}


@dataclass(frozen=True)
class Texts:
    """A page in pieces that are read apart, and ten questions.

    Attributes:
        name: what the page is.
        pieces: of the page.
        facts: the questions.
        ending: what follows an answer, and stands on the canvas of an MDM when it is asked in one pass.
        length: places of the rows and canvases that the model was trained on, filled with the end token; `None` where
            any length does.
    """

    name: str
    pieces: tuple[str, ...]
    facts: tuple[Fact, ...]
    ending: str
    length: int | None

    def shuffled(self) -> tuple[str, ...]:
        """The pieces with the words of each in another order, the same on every machine."""
        draw = random.Random(SHUFFLE_SEED)
        pieces = []
        for piece in self.pieces:
            words = piece.split()
            draw.shuffle(words)
            pieces.append(" ".join(words))
        return tuple(pieces)


@dataclass(frozen=True)
class Page:
    """The same words in order and shuffled, in rows of equally many tokens, Int[batch pos] both."""

    ordered: Tensor
    shuffled: Tensor


def texts_for(model: HookedDiffusionTransformer) -> Texts:
    """The page and the facts that the model's tokenizer has words for."""
    page = (files("diffusion_lens") / "assets" / "check" / PAGE).read_text(encoding="utf-8")
    facts = tuple(
        Fact(f"The capital of {country} is", country, f" {city}", id=f"capital-{country}")
        for country, city in CAPITALS.items()
    )
    ids = _ids(model, page)
    if ids.count(model.tokenizer.unk_token_id) < MOST_UNKNOWN * len(ids):
        return Texts('the opening of "Pride and Prejudice"', (page,), facts, ".", None)
    toy = toy_facts.load()
    sentences = toy.sentences()
    # Told and asked in the same direction, which both models of the pair know. A first name each: answers must differ.
    people = {fact.person.split()[0]: fact for fact in toy.facts(trained="d2p", asked="d2p")[::5]}
    facts = tuple(people.values())[: len(CAPITALS)]
    every = len(sentences) // N_SENTENCES - 1  # no multiple of the 20 templates, so that they take turns
    pieces = tuple(sentences[::every][:N_SENTENCES])
    return Texts(f"{N_SENTENCES} sentences of the embedded pair", pieces, facts, "", toy_facts.SENTENCE_LENGTH)


def read_page(model: HookedDiffusionTransformer, texts: Texts) -> Page:
    """The page in the model's tokens."""
    ordered, shuffled = (_rows(model, pieces, texts.length) for pieces in (texts.pieces, texts.shuffled()))
    n_pos = min(ordered.shape[1], shuffled.shape[1])
    n_row = min(len(ordered), len(shuffled))
    return Page(ordered[:n_row, :n_pos], shuffled[:n_row, :n_pos])


def _rows(model: HookedDiffusionTransformer, pieces: Sequence[str], length: int | None) -> Tensor:
    if length is not None:
        end = int(model.tokenizer.eos_token_id)
        rows = [[*_ids(model, piece), *[end] * length][:length] for piece in pieces]
        return torch.tensor(rows, device=model.cfg.device)
    start = [model.tokenizer.bos_token_id] if model.cfg.default_prepend_bos and model.tokenizer.bos_token_id else []
    ids = [*start, *(token for piece in pieces for token in _ids(model, piece))][:MOST_TOKENS]
    n_pos = min(model.cfg.n_ctx, len(ids))
    n_row = len(ids) // n_pos
    return torch.tensor(ids[: n_row * n_pos], device=model.cfg.device).view(n_row, n_pos)


def _ids(model: HookedDiffusionTransformer, text: str) -> list[int]:
    # Not through `to_tokens`, which need not take text with unknown words.
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])
