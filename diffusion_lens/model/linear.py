"""Products of activations with weights that may be on another device (`model/placement.py`).

A weight in the CPU's memory or in a file is copied to the activation's device for one product. A weight on another GPU
stays there: the activation goes to it, and the product comes back. Nothing is copied where both are on one device.

The copy is not kept for the backward pass, which would have all layers on the GPU at once: autograd keeps the weight
itself, and copies it again.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

Layout = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset of a view


class Linear(nn.Linear):
    """`torch.nn.Linear` for an activation on any device."""

    def forward(self, x: Float[Tensor, "*rest _"]) -> Float[Tensor, "*rest _"]:
        """x Wᵀ + b, on the device of `x`."""
        return linear(x, self.weight, self.bias)


def linear(x: Float[Tensor, "*rest _"], weight: Tensor, bias: Tensor | None = None) -> Float[Tensor, "*rest _"]:
    """x Wᵀ + b, on the device of `x`."""
    if not _is_elsewhere(weight, x):
        return F.linear(x, weight, bias)
    if weight.device.type != "cpu":
        there = x.to(weight.device)
        return F.linear(there, weight, None if bias is None else beside(bias, there)).to(x.device)
    return _with_copy(x, weight, None if bias is None else beside(bias, x))


def beside(weight: Tensor, x: Tensor) -> Tensor:
    """A weight on the device of an activation: the weight itself, or a copy."""
    return weight.to(x.device, copy=True) if _is_elsewhere(weight, x) else weight


def rows_of(weight: Float[Tensor, "_ d"], indices: Int[Tensor, "*rest"]) -> Float[Tensor, "*rest d"]:
    """Rows of a table of vectors, on the device of the indices; the table is not copied."""
    return F.embedding(indices.to(weight.device), weight).to(indices.device)


def _is_elsewhere(weight: Tensor, x: Tensor) -> bool:
    return weight.device != x.device


def _with_copy(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product with a copy of the weight, which the backward pass makes again."""
    copy = weight.to(x.device, copy=True)
    version = weight._version

    def pack(saved: Tensor) -> Tensor | Layout:
        if saved.untyped_storage().data_ptr() != copy_address:
            return saved
        return saved.shape, saved.stride(), int(saved.storage_offset())

    def unpack(packed: Tensor | Layout) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if weight._version != version:
            raise RuntimeError("a weight has been changed between the forward pass and the backward pass that reads it")
        return weight.detach().to(x_device, copy=True).as_strided(*packed)

    copy_address, x_device = copy.untyped_storage().data_ptr(), x.device
    with saved_tensors_hooks(pack, unpack):
        return F.linear(x, copy, bias)
