"""Rows of tokens, and which of them are real: padding is neither read nor counted."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Tokens


def read_tokens(
    model: DiffusionTransformer, tokens: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tokens, PosMask]:
    """`model.checked_tokens` with a mask also where there is no padding."""
    tokens, real = model.checked_tokens(tokens, attention_mask)
    return tokens, torch.ones_like(tokens, dtype=torch.bool) if real is None else real


def require_no_mask(attention_mask: Tensor | None) -> None:
    """Raise a `ValueError` if a mask is given for an input other than tokens."""
    if attention_mask is not None:
        raise ValueError("attention_mask= belongs to tokens: texts, facts, queries and trajectories know their padding")


def padded(model: DiffusionTransformer, rows: Sequence[Tensor]) -> tuple[Tokens, PosMask]:
    """Rows of tokens, Int[pos] each, padded on the right, and Bool[batch pos], false at padding."""
    real = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)
    return pad_sequence(list(rows), batch_first=True, padding_value=model.pad_id), real


def sha256_of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the shapes and values of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()
