"""The linear maps, embeddings and norms, of which every block consists.

A weight may be on another device than the activation (`model/build.py`). One in the CPU's memory or in a file is
copied to the activation's device for one product. A weight on another GPU stays there: the activation goes to it, and
the product comes back. Nothing is copied where both are on one device. The copy is not kept for the backward pass,
which would have all layers on the GPU at once: autograd keeps the weight itself, and copies it again.

The norms are RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) and LayerNorm (Ba et al. 2016, arXiv 1607.06450),
both computed at least in float32, as in TransformerLens. In a network with time conditioning, the time shifts and
scales what they give (`Modulation`, see `model/time.py`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from diffusion_lens.model.hook_points import StepHookPoint
from diffusion_lens.model.shapes import Resid, Tokens

Layout = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset of a view
WIDE = (torch.float32, torch.float64)


class Linear(nn.Linear):
    """`torch.nn.Linear` for an activation on any device."""

    def forward(self, x: Float[Tensor, "*rest _"]) -> Float[Tensor, "*rest _"]:
        """x Wᵀ + b, on the device of `x`."""
        weight, bias = self.weight, self.bias
        return F.linear(x, weight, bias) if weight.device == x.device else linear(x, weight, bias)


def linear(x: Float[Tensor, "*rest _"], weight: Tensor, bias: Tensor | None = None) -> Float[Tensor, "*rest _"]:
    """x Wᵀ + b, on the device of `x`."""
    if weight.device == x.device:
        return F.linear(x, weight, bias)
    if weight.device.type != "cpu":
        there = x.to(weight.device)
        return F.linear(there, weight, None if bias is None else beside(bias, there)).to(x.device)
    return linear_with_copy(x, weight, None if bias is None else beside(bias, x))


def beside(weight: Tensor, x: Tensor) -> Tensor:
    """A weight on the device of an activation: the weight itself, or a copy."""
    return weight if weight.device == x.device else weight.to(x.device, copy=True)


def rows_of(weight: Float[Tensor, "_ d"], indices: Int[Tensor, "*rest"]) -> Float[Tensor, "*rest d"]:
    """Rows of a table of vectors, on the device of the indices; the table is not copied."""
    return F.embedding(indices.to(weight.device), weight).to(indices.device)


def bias_of(linear: nn.Linear) -> Tensor:
    """The bias of a projection; zeros if it has none."""
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


class Embed(nn.Module):
    """Tokens to vectors: one row per token, including [MASK]; `scaled`, times the square root of `d_model`."""

    # Only where it is not 1 is it an attribute: records describe objects by their attributes.
    scale: float = 1.0

    def __init__(self, d_vocab: int, d_model: int, scaled: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_vocab, d_model, device="meta"))
        if scaled:
            self.scale = d_model**0.5

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        return self.weight

    def forward(self, tokens: Tokens) -> Resid:
        rows = rows_of(self.weight, tokens)
        return rows if self.scale == 1 else self.scaled(rows)

    def scaled(self, rows: Float[Tensor, "*rest d_model"]) -> Float[Tensor, "*rest d_model"]:
        """Rows of the table, or mixtures of them, as the network reads them; the factor has the weights' precision."""
        return rows * torch.tensor(self.scale, dtype=rows.dtype, device=rows.device)


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

    soft_cap: float | None = None  # c: logits are c tanh(x / c)

    def __init__(self, d_model: int, d_vocab_out: int, bias: bool = False, soft_cap: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_vocab_out, d_model, device="meta"))
        if soft_cap is not None:
            self.soft_cap = soft_cap
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(d_vocab_out, device="meta")) if bias else None)

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab_out"]:
        return self.weight.T

    @property
    def b_U(self) -> Float[Tensor, "d_vocab_out"]:
        return self.weight.new_zeros(self.weight.shape[0]) if self.bias is None else self.bias

    def forward(self, resid: Float[Tensor, "*rest d_model"]) -> Float[Tensor, "*rest d_vocab_out"]:
        logits = linear(resid, self.weight, self.bias)
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


@dataclass(frozen=True)
class Modulation:
    """How the time changes what one part of the network reads and writes."""

    shift: Float[Tensor, "batch d_model"]  # added to the output of its norm
    scale: Float[Tensor, "batch d_model"]  # 1 + scale multiplies this output
    gate: Float[Tensor, "batch d_model"] | None = None  # multiplies the part's output; the last norm has none


def gated(output: Float[Tensor, "batch *rest d_model"], modulation: Modulation | None) -> Tensor:
    """The output of a part of the network as it is added to the residual stream."""
    if modulation is None or modulation.gate is None:
        return output
    return output * _along(modulation.gate, output)


def normed(norm: nn.Module, x: Tensor, modulation: Modulation | None) -> Tensor:
    """The output of a norm, or of a module in its place, which without a modulation takes the stream alone."""
    out: Tensor = norm(x) if modulation is None else norm(x, modulation)
    return out


class Norm(nn.Module):
    """x / scale · w. `hook_scale` [... 1] is at the scale, and `hook_normalized` before the product with w.

    The activations are [batch pos ...] for norms of the residual stream, [batch pos head ...] for norms of heads.
    """

    is_centred = False  # whether the mean is subtracted first

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device="meta"))
        self.hook_scale = StepHookPoint()
        self.hook_normalized = StepHookPoint()

    @property
    def w(self) -> Tensor:
        """TransformerLens's name of the weight."""
        return self.weight

    def forward(
        self, x: Float[Tensor, "*rest d"], modulation: Modulation | None = None, *, hooked: bool = True
    ) -> Float[Tensor, "*rest d"]:
        """Normalise the stream. A norm that the time modulates needs the `modulation`; others take none."""
        wide = x if x.dtype in WIDE else x.float()
        if self.is_centred:
            wide = wide - wide.mean(-1, keepdim=True)
        scale = (wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        if hooked:
            scale = self.hook_scale(scale)
        normalized = wide / scale
        if normalized.dtype != x.dtype:
            normalized = normalized.to(x.dtype)
        if hooked:
            normalized = self.hook_normalized(normalized)
        weight = self.weight
        weighted = normalized * (weight if weight.device == x.device else beside(weight, x))
        return self._shifted(weighted, modulation) if self.is_centred else weighted

    def without_hooks(
        self, x: Float[Tensor, "*rest d"], modulation: Modulation | None = None
    ) -> Float[Tensor, "*rest d"]:
        """The same function, without its hook points."""
        return self.forward(x, modulation, hooked=False)

    def _shifted(self, weighted: Float[Tensor, "*rest d"], modulation: Modulation | None) -> Float[Tensor, "*rest d"]:
        """The output of a norm that may have a bias or be modulated."""
        return weighted


class RMSNorm(Norm):
    """x / scale · w, with the scale sqrt(mean(x²) + eps)."""


def rms_normalized(x: Float[Tensor, "*rest d"], eps: float) -> Float[Tensor, "*rest d"]:
    """x / sqrt(mean(x²) + eps), an RMSNorm without weights."""
    wide = x if x.dtype in WIDE else x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).pow(-0.5)).to(x.dtype)


class LayerNorm(Norm):
    """(x - mean) / scale · w + b, with the scale sqrt(variance + eps), then modulated by the time (`Modulation`)."""

    is_centred = True

    def __init__(self, width: int, eps: float, bias: bool = False, modulated: bool = False) -> None:
        super().__init__(width, eps)
        self.modulated = modulated
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(width, device="meta")) if bias else None)

    @property
    def b(self) -> Tensor:
        """TransformerLens's name of the bias; zeros if there is none."""
        return torch.zeros_like(self.weight) if self.bias is None else self.bias

    def _shifted(self, weighted: Float[Tensor, "*rest d"], modulation: Modulation | None) -> Float[Tensor, "*rest d"]:
        if self.bias is not None:
            weighted = weighted + beside(self.bias, weighted)
        if self.modulated != (modulation is not None):
            raise ValueError(
                "the time shifts and scales the output of this norm, so it needs a modulation: "
                "model.ln_final(resid, model.time.of_final_norm(...))"
                if self.modulated
                else "the time does not modulate this norm: leave the modulation out"
            )
        if modulation is None:
            return weighted
        return weighted * (1 + _along(modulation.scale, weighted)) + _along(modulation.shift, weighted)


def _along(vector: Float[Tensor, "batch d_model"], x: Tensor) -> Tensor:
    """The vector of each row of the batch, with axes of size 1 for all others of `x`."""
    return vector.view(len(vector), *[1] * (x.dim() - 2), -1)


def linear_with_copy(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
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
