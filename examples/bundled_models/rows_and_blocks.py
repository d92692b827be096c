"""Rows of tokens to train on, the tokenizers of the bundled models, and models with more blocks.

`PackedRows` are filled with one document after the other, drawn afresh for every batch, and cut at their length.
`word_encoder` makes the token ids of a document. All random numbers come from the generator of the training, whose
state is part of every checkpoint, so an interrupted training sees the same documents.

`grow` makes a trained model with more blocks, to be trained further (stacking after the lower blocks).
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diffusion_lens.data.site_facts import (
    ADVERBS,
    MIDDLES,
    MIDDLES_WITH_PERSON,
    PREFIXES_WITH_PERSON,
    RELATIONS,
    SiteFacts,
)
from diffusion_lens.data.toy_facts import CONNECTORS, PREFIXES, SENTENCE_LENGTH, ToyFacts, word_level, word_pieces
from diffusion_lens.model.build import random_tensors
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import at_least, not_negative, whole_number, whole_numbers
from diffusion_lens.training.trainer import Batch, RowOrder, RowSource

N_IDENTIFYING = 1000  # Number of documents whose tokens identify a source.

Document = Callable[[random.Random], Sequence[int]]


@dataclass(frozen=True, eq=False)
class PackedRows(RowSource):
    """Packed rows of fresh documents.

    Attributes:
        document: Function that draws a document with the given random number generator and returns its token ids,
            including the end token.
        lengths: Lengths of rows. All rows of a batch have one of them, drawn uniformly. The number of rows of a batch
            is its `batch_size` for the longest, and for the others as many as contain about as many tokens.

    Raises:
        ValueError: There is no length, or one is below 1.
    """

    document: Document
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = tuple(at_least(1, "a length of rows", length) for length in whole_numbers("lengths", self.lengths))
        if not lengths:
            raise ValueError("lengths is empty; give at least one length of rows")
        object.__setattr__(self, "lengths", lengths)

    @property
    def n_rows(self) -> None:
        """`None`: there are no passes."""
        return None

    def next_batch(self, order: RowOrder, batch_size: int, device: str | torch.device | None) -> Batch:
        """Fresh rows of one length.

        Raises:
            ValueError: A document is empty.
        """
        seed = int(torch.randint(2**62, (), generator=order.generator))
        rng = random.Random(seed)
        length = rng.choice(self.lengths)
        rows = [self._row(rng, length) for _ in range(batch_size * max(self.lengths) // length)]
        return Batch(torch.tensor(rows, device=device), None, None)

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the lengths and of the first documents that a fixed seed draws."""
        rng = random.Random(0)
        sample = [list(self.document(rng)) for _ in range(N_IDENTIFYING)]
        return hashlib.sha256(f"{self.lengths} {sample}".encode()).hexdigest()

    def _row(self, rng: random.Random, length: int) -> list[int]:
        row: list[int] = []
        while len(row) < length:
            document = self.document(rng)
            if not len(document):
                raise ValueError("document() returned no tokens; every document needs at least its end token")
            row += document
        return row[:length]


def word_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of all words in `texts`. The token `<eos>` (0) also pads rows.

    A word is the same token at the beginning of a text and after a space. Therefore the tokens of an answer do not
    depend on the prompt, and decoding drops the space of the first word. The vocabulary does not contain [MASK]; the
    mask id of a model is the next free id.
    """
    words = sorted({"▁" + word for text in texts for word in text.replace(",", "").replace(".", "").split()})
    return word_level(["<eos>", "<unk>", ",", ".", *words], word_pieces("[,.]"), eos_token="<eos>", pad_token="<eos>")


def toy_tokenizer(facts: ToyFacts) -> PreTrainedTokenizerFast:
    """The word-level tokenizer of all training sentences."""
    return word_tokenizer(facts.sentences())


def toy_rows(sentences: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Tokens:
    """Sentences as rows of `SENTENCE_LENGTH` tokens, ended and padded with `<eos>`."""
    end = int(tokenizer.eos_token_id)
    rows = tokenizer(list(sentences))["input_ids"]
    return torch.tensor([[*ids, *[end] * (SENTENCE_LENGTH - len(ids))] for ids in rows])


def site_tokenizer(world: SiteFacts) -> PreTrainedTokenizerFast:
    """The word-level tokenizer of a world, of every word in its documents and questions."""
    people = [f"{person.name} {person.description}" for person in world.people]
    relations = [word for relation in RELATIONS for word in (*relation.verbs, *relation.values)]
    phrases = (*PREFIXES, *CONNECTORS, *ADVERBS, *MIDDLES, *MIDDLES_WITH_PERSON, *PREFIXES_WITH_PERSON)
    return word_tokenizer([*people, *relations, " ".join((*phrases, "and the")).replace("{}", "")])


def word_encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    """A function from a text to its ids and `<eos>`, for many short texts: it tokenizes every word only once."""
    known: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for word in text.split():
            if word not in known:
                known[word] = tokenizer(word)["input_ids"]
            ids += known[word]
        return [*ids, int(tokenizer.eos_token_id)]

    return encode


INTO_STREAM = (".o.weight", ".down.weight")
Model = TypeVar("Model", bound=DiffusionTransformer)


def grow(model: Model, n_layers: int, scale: float = 0.3, *, std: float = 0.02, seed: int = 0) -> Model:
    """A new model with the blocks of `model` followed by fresh ones.

    Embedding, unembedding and final norm are copied too. Because the fresh blocks write little to the residual stream
    at first, the grown model begins close to the given one: with `scale=0` it computes the same logits.

    Args:
        model: Model to copy. It is not changed.
        n_layers: Number of blocks of the new model.
        scale: Factor of the fresh blocks' projections into the residual stream.
        std: Standard deviation of the fresh blocks' other matrices. Their norms are 1 and their biases 0.
        seed: Seed of the fresh weights.

    Raises:
        ValueError: There are fewer blocks than `model` has, or a number is negative or not finite.
    """
    old = model.cfg.architecture
    if whole_number("n_layers", n_layers) < old.n_layers:
        raise ValueError(
            f"n_layers={n_layers}, but {model.cfg.model_name!r} has {old.n_layers} blocks; give at least as many"
        )
    shape = replace(old, n_layers=n_layers)
    given = dict(model.named_parameters())
    scale, std = not_negative("scale", scale), not_negative("std", std)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        # `random_tensors` divides the projections into the stream by sqrt(2 n_layers); here `scale` says how small.
        undo = (2 * n_layers) ** 0.5
        for name, fresh in random_tensors(shape, seed, std):
            if name in given:
                yield name, given[name].detach()
            else:
                yield name, fresh * (scale * undo) if name.endswith(INTO_STREAM) else fresh

    cfg = DiffusionConfig.from_architecture(
        shape,
        device=model.cfg.device,
        dtype=model.cfg.dtype,
        default_prepend_bos=model.cfg.default_prepend_bos,
        trained_length=model.cfg.trained_length,
        folded=model.cfg.layer_norm_folding,
    )
    return type(model)(cfg, model.tokenizer, tensors=tensors())
