"""Hooks that fill a cache, as TransformerLens's do, with each hook point saying where its places are."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.devices import warn_if_mps
from transformer_lens.utilities.slice import Slice
from transformer_lens.utilities.tensors import remove_batch_dim

from diffusion_lens.model.hook_points import position_axis

# What TransformerLens takes: an index (its axis stays), a slice or a tuple of its ends, or indices.
PosSlice: TypeAlias = Any
Hooks = list[tuple[str, Callable[..., None]]]


def caching_hooks(
    points: Mapping[str, HookPoint],
    cache: dict[str, Tensor],
    incl_bwd: bool,
    device: Any,
    without_batch: bool,
    pos_slice: Slice,
) -> tuple[Hooks, Hooks]:
    """Forward and backward hooks that put what passes into `cache`; gradients under the name with "_grad"."""
    if device is not None:
        warn_if_mps(device)

    def keep(activation: Tensor, hook: HookPoint, suffix: str) -> None:
        # Sliced before the batch axis goes, which would move the places'.
        kept = take_places(activation.detach().to(device), pos_slice, hook)
        cache[f"{hook.name}{suffix}"] = remove_batch_dim(kept) if without_batch else kept

    forward: Hooks = [(name, partial(keep, suffix="")) for name in points]
    backward: Hooks = [(name, partial(keep, suffix="_grad")) for name in points] if incl_bwd else []
    return forward, backward


def take_places(x: Tensor, pos_slice: Slice, hook: HookPoint) -> Tensor:
    """Some places of what passes a hook point; of scores and patterns, the queries."""
    axis = position_axis(hook)
    if pos_slice.mode != "identity":
        count_places(pos_slice, x.shape[axis], repr(hook.name))
    taken: Tensor = pos_slice.apply(x, dim=axis)
    return taken


def count_places(pos_slice: Slice, n_pos: int, where: str) -> int:
    """How many of the places of `where` are picked; an `IndexError` for one outside, or for none at all."""
    try:
        count = int(pos_slice.indices(n_pos).size)
        if isinstance(pos_slice.slice, int) and not -n_pos <= pos_slice.slice < n_pos:
            raise IndexError
    except IndexError as error:
        raise IndexError(f"pos_slice={pos_slice.slice} reaches outside the {n_pos} places of {where}") from error
    if not count:
        raise IndexError(f"pos_slice={pos_slice.slice} picks none of the {n_pos} places of {where}")
    return count
