"""Training rows, the order in which a training visits them, and the loss terms of a batch."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.loss_batch import LossBatch
from diffusion_lens.losses import masked_batch, next_token_batch
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Tokens


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one update.

    Attributes:
        tokens: Int[batch pos], the token ids.
        real: Bool[batch pos], the positions that are not padding. `None` means all.
        answers: Bool[batch pos], the positions that count in the loss. `None` means all that the model's own loss
            counts.
    """

    tokens: Tokens
    real: PosMask | None
    answers: PosMask | None

    def question(self, model: DiffusionTransformer, generator: torch.Generator) -> LossBatch:
        """The inputs and targets of the model's own loss.

        A masked diffusion model also predicts the end tokens that fill a row, as in SMDM's fine-tuning. The AR baseline
        predicts the row's own tokens and the first end token.
        """
        if model.cfg.grows:
            return next_token_batch(model, self.tokens, real=self.real, counted=self.answers)
        return masked_batch(model, self.tokens, real=self.answers, generator=generator)


class RowSource(ABC):
    """Where the trainer takes its batches from: rows that it visits in passes, or rows drawn afresh.

    A batch may depend on the order alone, with its generator. Its state is saved, so that a training can be resumed.
    """

    @property
    @abstractmethod
    def n_rows(self) -> int | None:
        """Number of rows of a pass. `None` if rows are drawn afresh."""

    @abstractmethod
    def next_batch(self, order: "RowOrder", batch_size: int, device: str | torch.device | None) -> Batch:
        """The rows of the next update, of which `batch_size` is the number."""

    @abstractmethod
    def sha256(self) -> str:
        """Hexadecimal SHA-256 that identifies the data."""


@dataclass(frozen=True, eq=False)
class TrainingRows(RowSource):
    """Rows of tokens, padded on the right.

    Attributes:
        tokens: Int[batch pos], the token ids.
        lengths: Int[batch], the number of real tokens of each row, including the end token. Batches are cut to their
            longest row. `None` means that every token counts, padding included.
        answers: Int[batch], the position at which each row's answer begins, if only answers count. Requires `lengths`.
    """

    tokens: Int[Tensor, "batch pos"]
    lengths: Int[Tensor, "batch"] | None = None
    answers: Int[Tensor, "batch"] | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or not self.tokens.numel():
            raise ValueError(f"there is nothing to train on: the rows of tokens are {list(self.tokens.shape)}")
        if self.answers is not None and self.lengths is None:
            raise ValueError("answers= requires lengths=, the length of each row")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_rows(self) -> int:
        """Number of rows of a pass."""
        return len(self)

    def next_batch(self, order: "RowOrder", batch_size: int, device: str | torch.device | None) -> Batch:
        """The next rows of the pass."""
        return self.pick(order.take(batch_size), device)

    def pick(self, rows: Int[Tensor, "batch"], device: str | torch.device | None) -> Batch:
        """The batch of these rows, cut to the longest of them."""
        if self.lengths is None:
            return Batch(self.tokens[rows].to(device), None, None)
        lengths = self.lengths[rows]
        pos = torch.arange(int(lengths.max()))
        answers = None if self.answers is None else (pos >= self.answers[rows][:, None]).to(device)
        return Batch(self.tokens[rows, : len(pos)].to(device), (pos < lengths[:, None]).to(device), answers)

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of all the data that a training reads."""
        digest = hashlib.sha256()
        for name, tensor in vars(self).items():
            if tensor is not None:
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()


class RowOrder:
    """An endless random order of rows in which every pass visits each row once.

    A batch may contain rows of two passes, so that all batches are full.

    Attributes:
        n_rows: Number of rows of the data; `None` if a training draws its rows afresh and uses only `generator`.
        generator: Random number generator of the training.
        left: Rows of the current pass that no batch contains yet.
    """

    def __init__(self, n_rows: int | None, generator: torch.Generator) -> None:
        self.n_rows = n_rows
        self.generator = generator
        self.left = torch.empty(0, dtype=torch.long)

    def take(self, batch_size: int) -> Int[Tensor, "batch"]:
        """The next `batch_size` rows."""
        assert self.n_rows, "there are no rows to visit in passes"
        while len(self.left) < batch_size:
            self.left = torch.cat([self.left, torch.randperm(self.n_rows, generator=self.generator)])
        taken, self.left = self.left[:batch_size], self.left[batch_size:]
        return taken
