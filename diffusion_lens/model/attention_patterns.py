"""Attention patterns: which key positions each query position sees. Padding is handled here and nowhere else."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from diffusion_lens.shapes import PosMask
from weight_conversion import Context, Variant


@dataclass(frozen=True)
class Visibility:
    """The attention pattern of one forward pass.

    Attributes:
        allowed: Bool[#batch 1 query key], true where a query sees a key; `None` if the fused kernel needs no mask,
            because every position sees all positions or, with `causal`, all earlier ones.
        causal: Whether the pattern is causal; used where `allowed` is `None`.
    """

    allowed: Bool[Tensor, "#batch 1 query key"] | None
    causal: bool

    def dense(self, n_query: int, n_key: int, device: torch.device) -> Bool[Tensor, "#batch 1 query key"]:
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


@dataclass(frozen=True)
class AttentionPattern:
    """Attention by blocks: a position sees its own block of positions and all earlier ones.

    Attributes:
        block_size: Number of positions in a block: 1 is causal attention, `None` one block for the whole text, which is
            bidirectional attention.
    """

    block_size: int | None

    @staticmethod
    def of(variant: Variant) -> "AttentionPattern":
        """The pattern of a kind of model."""
        if variant.counts_from_prompt:
            return FromPrompt(variant.block_size, variant.block_context)
        return AttentionPattern(variant.block_size)

    @property
    def causal(self) -> bool:
        return self.block_size == 1

    def visibility(
        self,
        n_pos: int,
        device: torch.device,
        real: PosMask | None,
        n_past: int = 0,
        origin: Int[Tensor, "batch"] | None = None,
    ) -> Visibility:
        """The pattern of one forward pass.

        Padding is seen only by itself, because the softmax of a row that sees nothing is undefined.

        Args:
            n_pos: Number of query positions.
            device: Device of the mask.
            real: Bool[batch pos], false at padding; `None` without padding.
            n_past: Number of earlier positions, whose keys come from the cache.
            origin: Int[batch], the position of each row from which on blocks are counted, where it is not the first
                token; by default it is behind the last position.
        """
        if n_past:
            together = torch.arange(n_past + n_pos, device=device)
            return Visibility(None if n_pos == 1 else self.between(together)[None, None, n_past:], causal=False)
        if real is None:
            if self.causal or self.block_size is None or self.block_size >= n_pos:
                return Visibility(None, self.causal)
            return Visibility(self.between(torch.arange(n_pos, device=device))[None, None], causal=False)
        itself = torch.eye(n_pos, dtype=torch.bool, device=device)
        # Blocks are counted from the first real token, so that padding on the left shifts none of them.
        allowed = self.between(real.long().cumsum(dim=1) - 1) & real[:, None, :]
        return Visibility((allowed | itself)[:, None], self.causal)

    def beside_clean(self, n_pos: int, device: torch.device, real: PosMask | None) -> Visibility:
        """The pattern of a noisy text that is followed by the clean text, as models of blocks are trained.

        A noisy position sees the noisy positions of its block and the clean ones of earlier blocks. A clean position
        sees clean ones, as far as a finished text is seen. Sources: Arriola et al. 2025, BD3LM, arXiv 2503.09573;
        JetAstra/SDAR `block_attn_mask`.

        Args:
            n_pos: Number of positions of each of the two.
            real: Bool[batch pos], false at the padding of the text; `None` without padding.
        """
        assert self.block_size is not None
        numbers = torch.arange(n_pos, device=device)[None] if real is None else real.long().cumsum(dim=1) - 1
        blocks = numbers.div(self.block_size, rounding_mode="floor")
        query, key = blocks[:, :, None], blocks[:, None, :]
        finished = self._finished(numbers, blocks)
        noisy = torch.cat([key == query, key < query], dim=2)
        clean = torch.cat([torch.zeros_like(finished), finished], dim=2)
        allowed = torch.cat([noisy, clean], dim=1)
        if real is not None:
            itself = torch.eye(2 * n_pos, dtype=torch.bool, device=device)
            allowed = (allowed & real.repeat(1, 2)[:, None, :]) | itself
        return Visibility(allowed[:, None], causal=False)

    def between(self, positions: Int[Tensor, "*batch pos"]) -> Bool[Tensor, "*batch query key"]:
        """The pattern among real tokens with these numbers; its last axes are queries and keys."""
        if self.block_size is None:
            return torch.ones_like(positions, dtype=torch.bool)[..., None].expand(*positions.shape, positions.shape[-1])
        return self._finished(positions, positions.div(self.block_size, rounding_mode="floor"))

    def _finished(
        self, numbers: Int[Tensor, "*batch pos"], blocks: Int[Tensor, "*batch pos"]
    ) -> Bool[Tensor, "*batch query key"]:
        """The pattern among the tokens of a finished text, from their numbers and those of their blocks."""
        return blocks[..., None, :] <= blocks[..., :, None]


@dataclass(frozen=True)
class FromPrompt(AttentionPattern):
    """Attention by blocks that are counted from an origin (`model/block_origins.py`), behind the prompt.

    Attributes:
        context: How the positions before the origin see each other: "causal", each sees earlier ones only; or "prompt",
            each sees all of them.
    """

    context: Context = "causal"

    def visibility(
        self,
        n_pos: int,
        device: torch.device,
        real: PosMask | None,
        n_past: int = 0,
        origin: Int[Tensor, "batch"] | None = None,
    ) -> Visibility:
        """The context before the origin, then blocks that see all of themselves and everything before."""
        assert self.block_size is not None
        n_key = n_past + n_pos
        first = torch.full((1, 1), n_key, device=device) if origin is None else origin[:, None]
        numbers = torch.arange(n_key, device=device)[None]
        if real is not None:
            first, numbers = (real & (numbers < first)).sum(dim=1, keepdim=True), real.long().cumsum(dim=1) - 1
        blocks = (numbers - first).div(self.block_size, rounding_mode="floor").clamp(min=-1)
        query, key = blocks[:, n_past:, None], blocks[:, None, :]
        allowed = key <= query
        if self.context == "causal":
            allowed = torch.where(query < 0, numbers[:, None, :] <= numbers[:, n_past:, None], allowed)
        if real is not None:
            allowed = (allowed & real[:, None, :]) | torch.eye(n_pos, dtype=torch.bool, device=device)
        return Visibility(allowed[:, None], causal=False)

    def _finished(
        self, numbers: Int[Tensor, "*batch pos"], blocks: Int[Tensor, "*batch pos"]
    ) -> Bool[Tensor, "*batch query key"]:
        if self.context == "causal":
            return numbers[..., None, :] <= numbers[..., :, None]
        return super()._finished(numbers, blocks)
