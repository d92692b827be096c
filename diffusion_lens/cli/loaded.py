"""Models as a command names them."""

import torch

from diffusion_lens.cli.cost import bytes_per_weight
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer


def load(model: str, device: str | None, dtype: str) -> HookedDiffusionTransformer:
    """A model on its device.

    Raises:
        ValueError: an unknown name, device or dtype.
    """
    bytes_per_weight(dtype)
    try:
        where = None if device is None else torch.device(device)
        if where is not None:
            torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} is not here: {str(error).splitlines()[0]}") from error
    return HookedDiffusionTransformer.from_pretrained(model, device=where, dtype=getattr(torch, dtype))
