"""Hooks that fill a cache, as TransformerLens's do; `pos_slice` selects positions on the axis of each hook point."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.devices import warn_if_mps
from transformer_lens.utilities.slice import Slice
from transformer_lens.utilities.tensors import remove_batch_dim

from diffusion_lens.hook_names import ByHookPoint, mlp_out, shared_out
from diffusion_lens.model.hook_points import position_axis

# As in TransformerLens: an index (the axis stays), a slice or a tuple of its bounds, or several indices.
PosSlice: TypeAlias = Any
Hooks = list[tuple[str, Callable[..., None]]]


class AliasedCache(ActivationCache):
    """TransformerLens's cache, in which other names of a hook point (`hook_names.BLOCK_ALIASES`) reach it too."""

    def __init__(self, cache_dict: Mapping[str, Tensor], model: Any, has_batch_dim: bool = True) -> None:
        super().__init__(ByHookPoint(cache_dict), model, has_batch_dim)

    def __contains__(self, name: object) -> bool:
        return name in self.cache_dict

    def decompose_resid(self, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens; a layer's "mlp_out" includes the output of its shared expert, if it has one."""
        whole, model = dict(self.cache_dict), cast(Any, self.model)
        for layer in range(model.cfg.n_layers):
            if shared_out(layer) in model.hook_dict and mlp_out(layer) in whole:
                whole[mlp_out(layer)] = whole[mlp_out(layer)] + self.cache_dict[shared_out(layer)]
        summed = AliasedCache(whole, self.model, self.has_batch_dim)
        return ActivationCache.decompose_resid(summed, *args, **kwargs)

    def to(self, device: str | torch.device) -> "AliasedCache":
        """As in TransformerLens."""
        super().to(device)
        self.cache_dict = ByHookPoint(self.cache_dict)
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> "AliasedCache":
        """As in TransformerLens."""
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        return AliasedCache(sliced.cache_dict, sliced.model, sliced.has_batch_dim)


def caching_hooks(
    points: Mapping[str, HookPoint],
    cache: dict[str, Tensor],
    incl_bwd: bool,
    device: Any,
    without_batch: bool,
    pos_slice: Slice,
) -> tuple[Hooks, Hooks]:
    """Forward and backward hooks that store activations in `cache`; names of gradients end in "_grad"."""
    if device is not None:
        warn_if_mps(device)

    def store(activation: Tensor, hook: HookPoint, suffix: str) -> None:
        # Positions are selected first, because removing the batch axis would shift their axis.
        selected = select_positions(activation.detach().to(device), pos_slice, hook)
        cache[f"{hook.name}{suffix}"] = remove_batch_dim(selected) if without_batch else selected

    forward: Hooks = [(name, partial(store, suffix="")) for name in points]
    backward: Hooks = [(name, partial(store, suffix="_grad")) for name in points] if incl_bwd else []
    return forward, backward


def select_positions(x: Tensor, pos_slice: Slice, hook: HookPoint) -> Tensor:
    """Some positions of an activation at a hook point; for scores and patterns, query positions.

    An activation without positions is returned whole.
    """
    axis = position_axis(hook)
    if axis is None:
        return x
    if pos_slice.mode != "identity":
        count_positions(pos_slice, x.shape[axis], repr(hook.name))
    selected: Tensor = pos_slice.apply(x, dim=axis)
    return selected


def count_positions(pos_slice: Slice, n_pos: int, where: str) -> int:
    """Number of selected positions; an `IndexError` if one is out of range, or none is selected.

    Args:
        pos_slice: Selection.
        n_pos: Number of positions.
        where: Name of what has the positions, for the message.
    """
    try:
        count = int(pos_slice.indices(n_pos).size)
        if isinstance(pos_slice.slice, int) and not -n_pos <= pos_slice.slice < n_pos:
            raise IndexError
    except IndexError as error:
        raise IndexError(f"pos_slice={pos_slice.slice} reaches outside the {n_pos} positions of {where}") from error
    if not count:
        raise IndexError(f"pos_slice={pos_slice.slice} selects none of the {n_pos} positions of {where}")
    return count
