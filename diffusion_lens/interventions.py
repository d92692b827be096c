"""Hook factories: each returns a plain `fn(activation, hook)` for any model with TransformerLens hooks.

None writes into the tensor it is handed; each returns a new one.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

Hook = Callable[..., Any]


def add_noise(noise: Float[Tensor, "batch place d_model"], places: slice) -> Hook:
    """Add `noise` to the activation at `places`; row r of the batch gets draw r."""

    def hook_fn(activation: Tensor, hook: HookPoint) -> Tensor:
        noisy = activation.clone()
        noisy[:, places] += noise.to(device=activation.device, dtype=activation.dtype)
        return noisy

    return hook_fn


def restore(value: Float[Tensor, "pos d_model"], places: Int[Tensor, "batch"]) -> Hook:
    """Put back one place of each row: row r gets `value[places[r]]` at `places[r]`."""

    def hook_fn(activation: Tensor, hook: HookPoint) -> Tensor:
        restored = activation.clone()
        where = places.to(activation.device)
        rows = torch.arange(activation.shape[0], device=activation.device)
        restored[rows, where] = value.to(device=activation.device, dtype=activation.dtype)[where]
        return restored

    return hook_fn
