"""Attention patterns: which key positions each query position sees. Padding is handled here and nowhere else."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from diffusion_lens.shapes import PosMask


@dataclass(frozen=True)
class Visibility:
    """The attention pattern of one forward pass.

    Attributes:
        allowed: Bool[batch_or_1 1 query key], true where a query sees a key; `None` if the fused kernel needs no mask,
            because every position sees all positions or, with `causal`, all earlier ones.
        causal: Whether the pattern is causal; used where `allowed` is `None`.
    """

    allowed: Bool[Tensor, "batch_or_1 1 query key"] | None
    causal: bool

    def dense(self, n_query: int, n_key: int, device: torch.device) -> Bool[Tensor, "batch_or_1 1 query key"]:
        """The pattern as a mask, for scores that hooks see."""
        if self.allowed is not None:
            return self.allowed
        full = torch.ones(1, 1, n_query, n_key, dtype=torch.bool, device=device)
        return full.tril() if self.causal else full

    def at(self, rows: Int[Tensor, "batch selected"], n_key: int) -> "Visibility":
        """The pattern of some query rows only."""
        if self.allowed is not None:
            batch = torch.arange(rows.shape[0], device=rows.device)[:, None]
            return Visibility(self.allowed[:, 0].expand(rows.shape[0], -1, -1)[batch, rows][:, None], causal=False)
        if self.causal:
            allowed = torch.arange(n_key, device=rows.device) <= rows[..., None]
            return Visibility(allowed[:, None], causal=False)
        return self


class AttentionPattern(ABC):
    """The key positions that each query position sees."""

    causal: bool

    @abstractmethod
    def between(self, n_pos: int, device: torch.device) -> Bool[Tensor, "query key"]:
        """The pattern among real tokens."""

    def visibility(self, n_pos: int, device: torch.device, real: PosMask | None, n_past: int = 0) -> Visibility:
        """The pattern of one forward pass.

        Padding is seen only by itself, because the softmax of a row that sees nothing is undefined.

        Args:
            n_pos: Number of query positions.
            device: Device of the mask.
            real: Bool[batch pos], false at padding; `None` without padding.
            n_past: Number of earlier positions, whose keys come from the cache.
        """
        if n_past:
            allowed = None if n_pos == 1 else self.between(n_past + n_pos, device)[None, None, n_past:]
            return Visibility(allowed, causal=False)
        if real is None:
            return Visibility(None, self.causal)
        itself = torch.eye(n_pos, dtype=torch.bool, device=device)
        allowed = self.between(n_pos, device) & real[:, None, :]
        return Visibility((allowed | itself)[:, None], self.causal)


class Bidirectional(AttentionPattern):
    """Every position sees every position: masked diffusion models."""

    causal = False

    def between(self, n_pos: int, device: torch.device) -> Bool[Tensor, "query key"]:
        return torch.ones(n_pos, n_pos, dtype=torch.bool, device=device)


class Causal(AttentionPattern):
    """A position sees itself and earlier positions: autoregressive models."""

    causal = True

    def between(self, n_pos: int, device: torch.device) -> Bool[Tensor, "query key"]:
        return torch.ones(n_pos, n_pos, dtype=torch.bool, device=device).tril()


PATTERNS: dict[str, AttentionPattern] = {"bidirectional": Bidirectional(), "causal": Causal()}
