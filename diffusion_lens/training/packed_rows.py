"""Rows of documents that are drawn afresh for every batch.

A row is filled with one document after the other and cut at its length. All random numbers come from the generator of
the training, whose state is part of every checkpoint, so an interrupted training sees the same documents.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diffusion_lens.settings import at_least, whole_numbers
from diffusion_lens.training.batches import Batch, RowOrder, RowSource

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
