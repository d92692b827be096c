"""Who sees whom. Padding enters here, and nowhere else."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from diffusion_lens.shapes import PosMask


@dataclass(frozen=True)
class Visibility:
    """What every layer of one forward pass needs to know of the pattern.

    `allowed` is `None` when the fused kernel knows the pattern by itself: everything, or, if `causal`, the past.
    """

    allowed: Bool[Tensor, "batch_or_1 1 query key"] | None
    causal: bool

    def dense(self, n_query: int, n_key: int, device: torch.device) -> Bool[Tensor, "batch_or_1 1 query key"]:
        """The pattern written out, for scores that somebody looks at."""
        if self.allowed is not None:
            return self.allowed
        everything = torch.ones(1, 1, n_query, n_key, dtype=torch.bool, device=device)
        return everything.tril() if self.causal else everything

    def at(self, rows: Int[Tensor, "batch selected"], n_key: int) -> "Visibility":
        """The pattern of some query rows only."""
        if self.allowed is not None:
            batch = torch.arange(rows.shape[0], device=rows.device)[:, None]
            return Visibility(self.allowed[:, 0].expand(rows.shape[0], -1, -1)[batch, rows][:, None], causal=False)
        if self.causal:
            seen = torch.arange(n_key, device=rows.device) <= rows[..., None]
            return Visibility(seen[:, None], causal=False)
        return self


class AttentionPattern(ABC):
    """Which key places a query place may look at."""

    causal: bool

    @abstractmethod
    def between(self, n_pos: int, device: torch.device) -> Bool[Tensor, "query key"]:
        """The pattern among real tokens."""

    def visibility(self, n_pos: int, device: torch.device, real: PosMask | None, n_past: int = 0) -> Visibility:
        """The pattern of one forward pass; `real` is false at padding, `None` where there is none.

        Nobody sees padding, except padding itself: a row that sees nothing has no softmax. With `n_past` places run
        before, the queries are the places after them.
        """
        if n_past:
            seen = None if n_pos == 1 else self.between(n_past + n_pos, device)[None, None, n_past:]
            return Visibility(seen, causal=False)
        if real is None:
            return Visibility(None, self.causal)
        itself = torch.eye(n_pos, dtype=torch.bool, device=device)
        seen = self.between(n_pos, device) & real[:, None, :]
        return Visibility((seen | itself)[:, None], self.causal)


class Bidirectional(AttentionPattern):
    """Every place sees every place: masked diffusion models."""

    causal = False

    def between(self, n_pos: int, device: torch.device) -> Bool[Tensor, "query key"]:
        return torch.ones(n_pos, n_pos, dtype=torch.bool, device=device)


class Causal(AttentionPattern):
    """A place sees itself and what came before: autoregressive models."""

    causal = True

    def between(self, n_pos: int, device: torch.device) -> Bool[Tensor, "query key"]:
        return torch.ones(n_pos, n_pos, dtype=torch.bool, device=device).tril()


PATTERNS: dict[str, AttentionPattern] = {"bidirectional": Bidirectional(), "causal": Causal()}
