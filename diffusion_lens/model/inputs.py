"""Checks of the inputs of a forward pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from diffusion_lens.config import DiffusionConfig


def check_tokens(tokens: Tensor, cfg: DiffusionConfig) -> Tensor:
    """Token ids as Int64[batch pos] on the model's device. A single sequence may be given without a batch axis.

    Raises:
        TypeError: The tokens are not integers, or not an ordinary tensor.
        ValueError: The tensor has not one or two axes, is empty, is longer than the context, or has an id without a row
            in the embedding.
    """
    check_storage(tokens, "tokens")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens are {tokens.dtype}; they must be integers (a residual stream needs start_at_layer=)")
    if tokens.dim() == 1:
        tokens = tokens[None]
    if tokens.dim() != 2:
        raise ValueError(f"tokens have shape {list(tokens.shape)}; they must be [batch, pos]")
    if tokens.numel() == 0:
        raise ValueError(f"tokens have shape {list(tokens.shape)}: the model needs at least one token")
    check_length(tokens.shape[1], cfg)
    tokens = tokens.to(device=cfg.device, dtype=torch.long)
    smallest, largest = (int(id_) for id_ in tokens.aminmax())
    if smallest < 0 or largest >= cfg.d_vocab:
        hint = " (-1 marks positions that a causal model has not reached)" if smallest == -1 else ""
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"token id {wrong} is not among the {cfg.d_vocab} tokens of {cfg.model_name!r}{hint}")
    return tokens


def check_clean(clean: Tensor, noisy: Tensor, cfg: DiffusionConfig) -> Tensor:
    """The clean text of noisy tokens; a `ValueError` if their shapes differ or the model does not attend by blocks."""
    if cfg.causal_block is None:
        raise ValueError(
            f"clean= is what the blocks of a model that attends by blocks see of earlier blocks, and "
            f"{cfg.model_name!r} has no blocks: leave it out"
        )
    clean = check_tokens(clean, cfg)
    if clean.shape != noisy.shape:
        raise ValueError(f"clean is {list(clean.shape)}; it must have the shape of the tokens, {list(noisy.shape)}")
    return clean


def check_storage(x: Tensor, what: str) -> None:
    """Raise a `TypeError` unless `x` is a dense tensor with values in memory."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: a {type(x).__name__} was given; it must be a tensor, such as torch.as_tensor(...)")
    if x.is_meta:
        raise TypeError(f"{what}: a tensor on the meta device has no values; create it on a real device")
    if x.layout != torch.strided:
        raise TypeError(f"{what}: the tensor's layout is {x.layout}; give a dense one, such as tensor.to_dense()")


def check_length(n_pos: int, cfg: DiffusionConfig) -> None:
    """Raise a `ValueError` unless `n_pos` positions fit into the context."""
    if n_pos > cfg.n_ctx:
        raise ValueError(f"{n_pos} positions do not fit into the context of {cfg.model_name!r}, n_ctx={cfg.n_ctx}")


def check_attention_mask(mask: Tensor, n_batch: int, n_pos: int, device: str | torch.device | None) -> Tensor | None:
    """`attention_mask` (1 or true at real tokens, 0 at padding) as Bool[batch pos]; `None` if nothing is padding.

    Raises:
        TypeError: The mask is not an ordinary tensor.
        ValueError: The mask has another shape, has values other than 0 and 1 (such as one that is added to scores), or
            has a row of padding only.
    """
    check_storage(mask, "attention_mask")
    if mask.dim() == 1:
        mask = mask[None]
    if tuple(mask.shape) != (n_batch, n_pos):
        raise ValueError(f"attention_mask is {list(mask.shape)}; it must match the tokens, {[n_batch, n_pos]}")
    real = mask.to(device) == 1
    if not bool((real | (mask.to(device) == 0)).all()):
        wrong = mask[(mask != 0) & (mask != 1)][0].item()
        raise ValueError(
            f"attention_mask contains {wrong}; it must be 1 (or true) at real tokens and 0 at padding. Convert a mask "
            "that is added to scores, 0 at real tokens and very negative at padding, with (attention_mask == 0)"
        )
    if not bool(real.any(dim=1).all()):
        row = int((~real.any(dim=1)).nonzero()[0])
        raise ValueError(f"attention_mask has a row without a single real token: row {row} is all padding")
    return None if bool(real.all()) else real


def check_layers(start: int | None, stop: int | None, n_layers: int) -> tuple[int, int]:
    """First block and end of the block range; negative numbers count from the end, as in TransformerLens."""
    bounds = []
    for name, layer, default in (("start_at_layer", start, 0), ("stop_at_layer", stop, n_layers)):
        resolved = default if layer is None else layer + n_layers if layer < 0 else layer
        if not 0 <= resolved <= n_layers:
            raise ValueError(f"{name}={layer} is outside the {n_layers} layers of this model")
        bounds.append(resolved)
    first, last = bounds
    if first > last:
        raise ValueError(f"start_at_layer={start} is after stop_at_layer={stop}")
    return first, last


def check_past(n_cached: Sequence[int], n_pos: int, real: Tensor | None, cfg: DiffusionConfig, in_loop: bool) -> int:
    """Number of earlier positions in the cache, which must be the same in every layer that runs.

    Args:
        n_cached: Number of positions cached in each of these layers.
        n_pos: Number of new positions.
        real: Bool[batch pos], false at padding; `None` without padding.
        cfg: Config of the model.
        in_loop: Whether the denoising loop says which block is open.
    """
    lengths = set(n_cached)
    if not lengths:
        return 0
    size = cfg.final_together
    if size is None:
        raise ValueError(
            f"past_kv_cache needs a model whose earlier positions never see later ones, causal or by blocks, and "
            f"{cfg.model_name!r} is bidirectional: its earlier positions change with every new token"
        )
    if cfg.counts_from_prompt and not in_loop:
        raise ValueError(
            f"past_kv_cache: {cfg.model_name!r} computes an open block again when it is finished, so only the "
            "denoising loop, which knows the open block, can keep keys and values"
        )
    if real is not None:
        raise ValueError("past_kv_cache cannot be used with padding; pass sequences of one length")
    if len(lengths) > 1:
        raise ValueError(
            f"past_kv_cache has {sorted(lengths)} positions in different layers; run the same ones in every layer"
        )
    if max(lengths) % size:
        raise ValueError(
            f"past_kv_cache has {max(lengths)} positions, and positions of one block of {size} see each other, "
            f"whichever came first: cache whole blocks, {max(lengths) // size * size} positions "
            "(past_kv_cache.keep), and pass the rest again"
        )
    check_length(n_pos + max(lengths), cfg)
    return max(lengths)
