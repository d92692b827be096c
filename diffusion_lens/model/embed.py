"""Embedding of tokens and positions into the residual stream, and unembedding into logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffusion_lens.model.linear import linear, rows_of
from diffusion_lens.shapes import Resid, Tokens


class Embed(nn.Module):
    """Tokens to vectors: one row per token, including [MASK]."""

    def __init__(self, d_vocab: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_vocab, d_model, device="meta"))

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        return self.weight

    def forward(self, tokens: Tokens) -> Resid:
        return rows_of(self.weight, tokens)


class PosEmbed(nn.Module):
    """Positions to vectors: one learned row per position of the context."""

    def __init__(self, n_ctx: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_ctx, d_model, device="meta"))

    @property
    def W_pos(self) -> Float[Tensor, "pos d_model"]:
        return self.weight

    def forward(self, positions: Int[Tensor, "batch pos"]) -> Resid:
        return rows_of(self.weight, positions)


class Unembed(nn.Module):
    """Normalised residual stream to logits."""

    def __init__(self, d_model: int, d_vocab_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_vocab_out, d_model, device="meta"))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(d_vocab_out, device="meta")) if bias else None)

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab_out"]:
        return self.weight.T

    @property
    def b_U(self) -> Float[Tensor, "d_vocab_out"]:
        return self.weight.new_zeros(self.weight.shape[0]) if self.bias is None else self.bias

    def forward(self, resid: Float[Tensor, "*rest d_model"]) -> Float[Tensor, "*rest d_vocab_out"]:
        return linear(resid, self.weight, self.bias)
