"""The places of a model's weights, and how the residual stream goes from one to the next."""

from abc import ABC
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_lens.config import DTYPES, DiffusionConfig, as_device, as_dtype
from diffusion_lens.model.attention import AttentionContext
from diffusion_lens.model.kv_cache import LayerKeyValues
from diffusion_lens.model.logit_rows import LogitRows
from diffusion_lens.model.placement import Placement
from diffusion_lens.model.shared_weights import sharing
from diffusion_lens.shapes import Resid


class Placed(nn.Module, ABC):
    """Moves a model whose weights are on one device, and runs one whose weights are on several (`placement`)."""

    cfg: DiffusionConfig
    blocks: Any
    unembed: Any
    # The places that a map gave; `None` for a model on one device.
    placement: Placement | None = None
    _block_devices: tuple[torch.device, ...] | None = None

    @property
    def main_device(self) -> torch.device:
        """The device of tokens, logits and residual streams that are passed and returned."""
        return torch.device(self.cfg.device or "cpu")

    def _place(self, placement: Placement) -> None:
        """Note where the weights are."""
        self.cfg.device = str(placement.main)
        if placement.is_one_device:
            return
        self.placement = placement
        firsts = [next(block.named_parameters())[0] for block in self.blocks]
        devices = tuple(placement.runs_on(f"blocks.{i}.{name}") for i, name in enumerate(firsts))
        if set(devices) != {placement.main}:
            self._block_devices = devices

    def _for_block(
        self,
        layer: int,
        resid: Resid,
        context: AttentionContext,
        past: LayerKeyValues | None,
        rows: LogitRows | None,
    ) -> tuple[Resid, AttentionContext, LayerKeyValues | None, LogitRows | None]:
        """What a block reads, on the device on which it runs."""
        if self._block_devices is None:
            return resid, context, past, rows
        device = self._block_devices[layer]
        return resid.to(device), context.on(device), past, None if rows is None else rows.on(device)

    def _returned(self, resid: Resid) -> Resid:
        """A residual stream on the main device."""
        return resid if self._block_devices is None else resid.to(self.main_device)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch; dtypes and devices may be names, as in `model.to("bfloat16")` and `model.to("cuda:1")`.

        Raises:
            ValueError: The model was loaded with a `device_map` that has several places.
        """
        for key, value in [*enumerate(args), *kwargs.items()]:
            if key == "dtype" or isinstance(value, torch.dtype) or str(value).removeprefix("torch.") in DTYPES:
                kwargs["dtype"] = as_dtype(value)
            elif key == "device" or isinstance(value, str | torch.device):
                kwargs["device"] = as_device(value)
        others = [value for value in args if not isinstance(value, str | torch.dtype | torch.device)]
        return super().to(*others, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # torch calls this for .to, .cuda, .half and the like, so the config is updated with the weights here.
        if self.placement is not None:
            raise ValueError(
                "the weights of this model have several places, which its device_map gave, so that it cannot be moved "
                "or converted: load it again with another device_map=, device= or dtype="
            )
        super()._apply(fn, recurse)
        for model in (self, *sharing(self)):
            model.cfg.device, model.cfg.dtype = str(self.unembed.weight.device), self.unembed.weight.dtype
        return self
