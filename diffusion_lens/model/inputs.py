"""What may enter the network, checked before anything runs."""

import torch
from torch import Tensor

from diffusion_lens.config import DiffusionConfig


def check_tokens(tokens: Tensor, cfg: DiffusionConfig) -> Tensor:
    """Token ids as Int64[batch pos] on the model's device (a single row may come without its batch axis).

    Raises:
        TypeError: not integers, or not an ordinary tensor.
        ValueError: not one or two axes, empty, longer than the context, or an id outside the embedding.
    """
    check_storage(tokens, "tokens")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens are {tokens.dtype}; they must be integers (a residual stream needs start_at_layer=)")
    if tokens.dim() == 1:
        tokens = tokens[None]
    if tokens.dim() != 2:
        raise ValueError(f"tokens have shape {list(tokens.shape)}; they must be [batch, pos]")
    if tokens.numel() == 0:
        raise ValueError(f"tokens have shape {list(tokens.shape)}: there is nothing to run on")
    check_length(tokens.shape[1], cfg)
    tokens = tokens.to(device=cfg.device, dtype=torch.long)
    low, high = (int(bound) for bound in tokens.aminmax())
    if low < 0 or high >= cfg.d_vocab:
        hint = " (-1 marks places that a causal run has not reached)" if low == -1 else ""
        culprit = low if low < 0 else high
        raise ValueError(f"token id {culprit} is not among the {cfg.d_vocab} tokens of {cfg.model_name!r}{hint}")
    return tokens


def check_storage(x: Tensor, what: str) -> None:
    """Raise a `TypeError` unless `x` is an ordinary tensor: dense, and with its values in memory."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: a {type(x).__name__} was given; it must be a tensor, such as torch.as_tensor(...)")
    if x.is_meta:
        raise TypeError(f"{what}: a tensor on the meta device has a shape and no values; create it on a real device")
    if x.layout != torch.strided:
        raise TypeError(f"{what}: the tensor's layout is {x.layout}; give a dense one, such as tensor.to_dense()")


def check_length(n_pos: int, cfg: DiffusionConfig) -> None:
    """Raise a `ValueError` unless `n_pos` places fit into the context."""
    if n_pos > cfg.n_ctx:
        raise ValueError(f"{n_pos} places do not fit into the context of {cfg.model_name!r}, n_ctx={cfg.n_ctx}")


def check_attention_mask(mask: Tensor, n_batch: int, n_pos: int, device: str | torch.device | None) -> Tensor | None:
    """`attention_mask` (1 or true at real tokens, 0 at padding) as Bool[batch pos], `None` when nothing is padding.

    Raises:
        TypeError: not an ordinary tensor.
        ValueError: another shape, values other than 0 and 1 (a mask to be added to scores, say), a row all padding.
    """
    check_storage(mask, "attention_mask")
    if mask.dim() == 1:
        mask = mask[None]
    if tuple(mask.shape) != (n_batch, n_pos):
        raise ValueError(f"attention_mask is {list(mask.shape)}; it must match the tokens, {[n_batch, n_pos]}")
    real = mask.to(device) == 1
    if not bool((real | (mask.to(device) == 0)).all()):
        strange = mask[(mask != 0) & (mask != 1)][0].item()
        raise ValueError(
            f"attention_mask holds {strange}; it is 1 (or true) at real tokens and 0 at padding. One that is added to "
            "scores, 0 at real tokens and very negative at padding, becomes it by (attention_mask == 0)"
        )
    if not bool(real.any(dim=1).all()):
        row = int((~real.any(dim=1)).nonzero()[0])
        raise ValueError(f"attention_mask has a row without a single real token: row {row} is all padding")
    return None if bool(real.all()) else real


def check_layers(start: int | None, stop: int | None, n_layers: int) -> tuple[int, int]:
    """Block range as `start <= stop`; negative numbers count from the end, as in TransformerLens."""
    bounds = []
    for name, layer, default in (("start_at_layer", start, 0), ("stop_at_layer", stop, n_layers)):
        resolved = default if layer is None else layer + n_layers if layer < 0 else layer
        if not 0 <= resolved <= n_layers:
            raise ValueError(f"{name}={layer} is outside the {n_layers} layers of this model")
        bounds.append(resolved)
    first, last = bounds
    if first > last:
        raise ValueError(f"start_at_layer={start} lies after stop_at_layer={stop}")
    return first, last
