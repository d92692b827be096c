"""Folds the adaptive LayerNorms of a network without time conditioning into its other weights, and undoes it.

Such a network reads the noise level 0 whatever its canvas, so that shift, scale and gate of every part are constants:

    norm weight w · (1 + scale), norm bias shift, and the rows of the output matrix (and its bias) times the gate.

The folded network computes the same up to rounding, and its matrices are those that it applies. The maps from which the
constants come are kept, so that `unfolded` gives the tensors that were folded, to the last digit or the one beside it.
If the folded weights have changed since, what no constant can express is added to the biases of the maps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from weight_conversion.architecture import Architecture
from weight_conversion.key_map import N_FREQUENCIES

_ROWS = 64


@dataclass(frozen=True)
class _Constant:
    """The constants of one part of the network, float64.

    Attributes:
        outputs: Names of the tensors whose rows the gate multiplies; empty after the last norm.
        source: Name of the bias of the map, with the index of the shift's first entry; scale and gate follow.
    """

    norm: str
    outputs: tuple[str, ...]
    source: tuple[str, int]
    shift: Tensor
    scale: Tensor
    gate: Tensor | None = None


def is_constant(architecture: Architecture) -> bool:
    """Whether there are constants that are not folded yet."""
    return architecture.time is not None and not architecture.time.conditioned and not architecture.time.folded


def folded_architecture(architecture: Architecture) -> Architecture:
    """The same after `fold`."""
    assert architecture.time is not None
    return replace(architecture, time=replace(architecture.time, folded=True))


def unfolded_architecture(architecture: Architecture) -> Architecture:
    """The same before `fold`; any other architecture as it is."""
    if architecture.time is None or not architecture.time.folded:
        return architecture
    return replace(architecture, time=replace(architecture.time, folded=False))


@torch.no_grad()
def fold(tensors: Mapping[str, Tensor], architecture: Architecture) -> None:
    """Fold the constants in place. The biases of the norms must be there, and 0."""
    for constant in _constants(tensors, architecture):
        _multiply_rows(tensors[f"{constant.norm}.weight"], 1 + constant.scale)
        tensors[f"{constant.norm}.bias"].copy_(constant.shift)
        for name in constant.outputs:
            assert constant.gate is not None
            _multiply_rows(tensors[name], constant.gate)


@torch.no_grad()
def unfolded(tensors: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """The tensors before `fold`, which stay as they are; those of any other architecture as they are."""
    result = dict(tensors)
    if architecture.time is None or not architecture.time.folded:
        return result
    for constant in _constants(tensors, architecture):
        name, start = constant.source
        width = len(constant.shift)
        result[name] = result[name].clone()
        shift, scale, gate = (result[name][start + i * width :][:width] for i in range(3))
        # Where nothing has changed the shift of the norm, the map gives it already.
        present = result.pop(f"{constant.norm}.bias")
        changed = present != constant.shift.to(present.dtype)
        shift += torch.where(changed, present.double() - constant.shift, 0.0).to(shift.dtype)
        scale += _divide(result, (f"{constant.norm}.weight",), 1 + constant.scale).to(scale.dtype)
        if constant.gate is not None:
            gate += _divide(result, constant.outputs, constant.gate).to(gate.dtype)
    return result


def _divide(tensors: dict[str, Tensor], names: Sequence[str], factor: Tensor) -> Tensor:
    """Divide the rows of tensors by a factor; True where it is 0 and a row is not, so that it has to be 1 instead."""
    used = torch.stack([tensors[name].reshape(len(factor), -1).ne(0).any(dim=1) for name in names]).any(dim=0)
    lost = (factor == 0) & used
    divisor = torch.where(factor == 0, 1.0, factor)
    for name in names:
        tensors[name] = (tensors[name].double() / _by_row(divisor, tensors[name])).to(tensors[name].dtype)
    return lost


def _constants(tensors: Mapping[str, Tensor], architecture: Architecture) -> Iterator[_Constant]:
    """The constants of every part, from the maps and the noise level 0."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"].double(), tensors[f"{name}.bias"].double())

    half = N_FREQUENCIES // 2
    waves = torch.cat([torch.ones(half), torch.zeros(half)]).double().to(tensors["embed.weight"].device)
    condition = F.silu(linear("time_embed.out", F.silu(linear("time_embed.hidden", waves))))
    width, biased = architecture.d_model, {True: ("weight", "bias"), False: ("weight",)}
    for i in range(architecture.n_layers):
        block = f"blocks.{i}"
        six = linear(f"{block}.modulation", condition).split(width)
        for j, (norm, output, has_bias) in enumerate(
            (("ln1", "attn.o", architecture.o_bias), ("ln2", "mlp.down", architecture.mlp_bias))
        ):
            names = tuple(f"{block}.{output}.{part}" for part in biased[has_bias])
            source = (f"{block}.modulation.bias", 3 * j * width)
            yield _Constant(f"{block}.{norm}", names, source, *six[3 * j : 3 * j + 3])
    yield _Constant("ln_final", (), ("final_modulation.bias", 0), *linear("final_modulation", condition).split(width))


def _multiply_rows(tensor: Tensor, factor: Tensor) -> None:
    """Multiply rows in place, in double precision, a few at a time so that little memory is taken."""
    for rows, factors in zip(tensor.split(_ROWS), factor.split(_ROWS), strict=True):
        rows.copy_(rows.double() * _by_row(factors, rows))


def _by_row(factor: Tensor, tensor: Tensor) -> Tensor:
    return factor.view(-1, *[1] * (tensor.dim() - 1))
