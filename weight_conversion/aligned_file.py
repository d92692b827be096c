"""Safetensors files whose tensors begin at multiples of 64 bytes, as torch's own tensors on the CPU do.

Matrix products with weights of another alignment may differ in their last bits, so only an aligned tensor can be used
as it is mapped from the file. The format allows spaces after the header, but no gap between tensors. Tensors whose
size is a multiple of 64 bytes therefore come first; of the others, which are biases and norms of odd widths, only the
first is sure to be aligned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_aligned(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; equal tensors and metadata give equal bytes.

    Raises:
        ValueError: A tensor has a dtype that is none of the usual floats, integers and booleans.
    """
    if unknown := {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype not in _NAMES}:
        raise ValueError(f"tensors of these dtypes are not written: {unknown}; convert them to one of {list(_NAMES)}")
    names = sorted(tensors, key=lambda name: _rank(name, tensors[name]))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in names:
        tensor, start = tensors[name], offset
        offset += tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, offset]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            file.write(bytes_of(tensors[name].detach().cpu()).numpy().data)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, row by row."""
    flat = tensor.contiguous()
    # A view would keep the strides of a tensor with one element, which are arbitrary.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _rank(name: str, tensor: Tensor) -> tuple[bool, int, int, str]:
    """What orders the tensors: multiples of 64 bytes, then wide items, and sizes that are multiples of large powers."""
    return tensor.nbytes % ALIGNMENT != 0, -tensor.itemsize, -(tensor.nbytes & -tensor.nbytes), name
