"""Rows to train on, the order in which a run goes through them, and what a batch of them asks of a model."""

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.losses import LossQuestion, ask_masked, ask_next
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Tokens


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one update.

    Attributes:
        tokens: Int[batch pos].
        real: the places that are not padding; `None`: all of them.
        answers: the places that count; `None`: all that count by the model's own loss.
    """

    tokens: Tokens
    real: PosMask | None
    answers: PosMask | None

    def ask(self, model: DiffusionTransformer, generator: torch.Generator) -> LossQuestion:
        """The question of the model's own loss.

        A masked diffusion model is also asked for the end tokens that fill a row, as in SMDM's fine-tuning; its twin
        for a row's own tokens, the first end token included.
        """
        if not model.cfg.has_mask:
            return ask_next(model, self.tokens, real=self.real, counted=self.answers)
        return ask_masked(model, self.tokens, real=self.answers, generator=generator)


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Rows of tokens, filled on the right.

    Attributes:
        tokens: Int[row pos].
        lengths: real tokens of each row, the end token included; batches are cut to the longest. `None`: rows are whole
            as they are, filling included.
        answers: the place where each row's answer begins, if only answers count (needs `lengths`).
    """

    tokens: Int[Tensor, "row pos"]
    lengths: Int[Tensor, "row"] | None = None
    answers: Int[Tensor, "row"] | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or not self.tokens.numel():
            raise ValueError(f"there is nothing to train on: the rows of tokens are {list(self.tokens.shape)}")
        if self.answers is not None and self.lengths is None:
            raise ValueError("answers= says where answers begin; lengths= must say where rows end")

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, rows: Int[Tensor, "batch"], device: str | torch.device | None) -> Batch:
        """These rows, cut to the longest of them."""
        if self.lengths is None:
            return Batch(self.tokens[rows].to(device), None, None)
        lengths = self.lengths[rows]
        pos = torch.arange(int(lengths.max()))
        answers = None if self.answers is None else (pos >= self.answers[rows][:, None]).to(device)
        return Batch(self.tokens[rows, : len(pos)].to(device), (pos < lengths[:, None]).to(device), answers)

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of all that a run sees of its data."""
        digest = hashlib.sha256()
        for name, held in vars(self).items():
            if held is not None:
                digest.update(f"{name} {held.dtype} {list(held.shape)}".encode())
                digest.update(held.cpu().contiguous().numpy().data)
        return digest.hexdigest()


class RowOrder:
    """Rows in a random order without end, each once a pass; a batch may straddle two passes, so that all are full.

    Attributes:
        left: rows of the pass that were drawn but not taken yet: the position in the data.
    """

    def __init__(self, n_rows: int, generator: torch.Generator) -> None:
        self.n_rows = n_rows
        self.generator = generator
        self.left = torch.empty(0, dtype=torch.long)

    def take(self, batch_size: int) -> Int[Tensor, "batch"]:
        """The next rows."""
        while len(self.left) < batch_size:
            self.left = torch.cat([self.left, torch.randperm(self.n_rows, generator=self.generator)])
        taken, self.left = self.left[:batch_size], self.left[batch_size:]
        return taken
