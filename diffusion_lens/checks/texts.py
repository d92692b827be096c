"""The texts of the checks: a page in the public domain, and ten facts that every model should know.

The page is the opening of Jane Austen's "Pride and Prejudice" (1813). If a tokenizer does not know its words, as the
bundled models' do not, the texts are training sentences and facts of that pair of bundled models whose words it knows.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from diffusion_lens.catalogue import BUNDLED
from diffusion_lens.data import site_facts, toy_facts
from diffusion_lens.data.site_documents import Documents
from diffusion_lens.facts import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

SHUFFLE_SEED = 0
# Enough tokens to show the effect of word order; one or two rows in any published context.
MOST_TOKENS = 512
# Share of unknown tokens above which a tokenizer does not fit the page. Tokenizers of bytes or pieces know all words.
MOST_UNKNOWN = 0.5
N_SENTENCES = 32
PAGE = "pride_and_prejudice.txt"
# The capitals have different first letters, so that the answers have different first tokens.
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
    """A page and ten facts.

    Attributes:
        name: Description of the page.
        pieces: Pieces of the page, which are read separately.
        facts: Facts to query.
        ending: Text after an answer, which is on the canvas of an MDM in a query by one pass.
        length: Length in positions of the rows and canvases in training, which were filled with the end token; `None`
            if the model takes any length.
    """

    name: str
    pieces: tuple[str, ...]
    facts: tuple[Fact, ...]
    ending: str
    length: int | None

    def shuffled(self) -> tuple[str, ...]:
        """The pieces with shuffled words, in the same order on every machine."""
        generator = random.Random(SHUFFLE_SEED)
        pieces = []
        for piece in self.pieces:
            words = piece.split()
            generator.shuffle(words)
            pieces.append(" ".join(words))
        return tuple(pieces)


@dataclass(frozen=True)
class Page:
    """The page in order and shuffled, both as Int[batch pos] of the same shape."""

    ordered: Tensor
    shuffled: Tensor


def texts_for(model: HookedDiffusionTransformer) -> Texts:
    """The page and the facts for a model, depending on the words that its tokenizer knows."""
    page = (files("diffusion_lens") / "assets" / "check" / PAGE).read_text(encoding="utf-8")
    facts = tuple(
        Fact(f"The capital of {country} is", country, f" {city}", id=f"capital-{country}")
        for country, city in CAPITALS.items()
    )
    if _share_unknown(model, page) < MOST_UNKNOWN:
        return Texts('the opening of "Pride and Prejudice"', (page,), facts, ".", None)
    return min(
        (_site_texts(N_SENTENCES), _toy_texts(N_SENTENCES)),
        key=lambda texts: _share_unknown(model, " ".join(texts.pieces)),
    )


def read_page(model: HookedDiffusionTransformer, texts: Texts) -> Page:
    """The page in the model's tokens."""
    ordered, shuffled = (_rows(model, pieces, texts.length) for pieces in (texts.pieces, texts.shuffled()))
    n_pos = min(ordered.shape[1], shuffled.shape[1])
    n_row = min(len(ordered), len(shuffled))
    return Page(ordered[:n_row, :n_pos], shuffled[:n_row, :n_pos])


@cache
def _toy_texts(n_sentences: int) -> Texts:
    """Training sentences and facts of the tiny pair."""
    toy = toy_facts.load()
    sentences = toy.sentences()
    # Both tiny models know facts that are queried in the trained direction. First names differ, so answers do too.
    people = {fact.person.split()[0]: fact for fact in toy.facts(trained="d2p", asked="d2p")[::5]}
    facts = tuple(people.values())[: len(CAPITALS)]
    stride = len(sentences) // n_sentences - 1  # not a multiple of the 20 templates, so that all of them occur
    pieces = tuple(sentences[::stride][:n_sentences])
    return Texts(f"{n_sentences} sentences of the bundled models", pieces, facts, "", toy_facts.SENTENCE_LENGTH)


@cache
def _site_texts(n_rows: int) -> Texts:
    """Training documents and attributes of the site pair; the documents fill rows, as in training."""
    world = site_facts.load()
    documents, rng = Documents(world, 0.5, 0.05, 0.5), random.Random(0)
    length = BUNDLED["site-mdm"].trained_length
    # The shortest document, a tag, has five tokens with its end token.
    pieces = tuple(" <eos> ".join(documents(rng) for _ in range(length // 5 + 1)) for _ in range(n_rows))
    by_answer = {fact.answer: fact for fact in world.facts("attribute")[::61]}
    facts = tuple(by_answer.values())[: len(CAPITALS)]
    return Texts(f"{n_rows} rows of the bundled models", pieces, facts, "", length)


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


def _share_unknown(model: HookedDiffusionTransformer, text: str) -> float:
    ids = _ids(model, text)
    return ids.count(model.tokenizer.unk_token_id) / len(ids)


def _ids(model: HookedDiffusionTransformer, text: str) -> list[int]:
    # `to_tokens` would warn of unknown words.
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])
