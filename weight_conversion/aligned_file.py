"""Safetensors files whose tensors begin at multiples of 64 bytes, as torch's own tensors on the CPU do.

Matrix products with weights of another alignment may differ in their last bits, so only an aligned tensor can be used
as it is mapped from the file. The format allows spaces after the header, but no gap between tensors. Tensors whose
size is a multiple of 64 bytes therefore come first; of the others, which are biases and norms of odd widths, only the
first is sure to be aligned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes
LONGEST_HEADER = 100_000_000  # bytes; the safetensors library refuses a longer one
# The dtypes of the format, except those that torch has only since 2.7.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_aligned(
    tensors: Mapping[str, Tensor], file: IO[bytes], metadata: Mapping[str, str] | None = None, emptied: bool = False
) -> None:
    """Write a safetensors file; equal tensors and metadata give equal bytes.

    Args:
        tensors: By name.
        file: Open file; written from its current position, which should be its beginning.
        metadata: Strings for the header.
        emptied: Whether each tensor, which must then have one name only, is emptied once it is written.

    Raises:
        ValueError: A tensor has a dtype that the format does not have, or the header would be longer than
            `LONGEST_HEADER`. Nothing is written then.
    """
    if unknown := {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype not in _NAMES}:
        raise ValueError(f"tensors of these dtypes are not written: {unknown}; convert them to one of {list(_NAMES)}")
    names = sorted(tensors, key=lambda name: _rank(name, tensors[name]))
    header = _header(tensors, names, metadata or {})
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for name in names:
        file.write(bytes_of(tensors[name].detach().cpu()).numpy().data)
        if emptied:
            tensors[name].data = tensors[name].new_empty(0)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, row by row."""
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    # A view would keep the strides of a tensor with one element, which are arbitrary.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _header(tensors: Mapping[str, Tensor], names: list[str], metadata: Mapping[str, str]) -> bytes:
    """The header of a file with the tensors in the order of `names`, padded with spaces."""
    entries: dict[str, Any] = {}
    offset = 0
    for name in names:
        tensor, start = tensors[name], offset
        offset += tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, offset]}
    described = _json({"__metadata__": dict(sorted(metadata.items())), **entries} if metadata else entries)
    described += b" " * (-(8 + len(described)) % ALIGNMENT)
    if len(described) > LONGEST_HEADER:
        of_tensors = len(_json(entries))
        advice = (
            "write fewer tensors, joined or in several files"
            if 2 * of_tensors > len(described)
            else "shorten the metadata, by storing long lists as tensors or in files of their own"
        )
        raise ValueError(
            f"the header of this safetensors file would have {len(described):,} bytes, {of_tensors:,} of them for "
            f"{len(names):,} tensors and the others for metadata, and no reader accepts more than {LONGEST_HEADER:,}: "
            f"{advice}. Nothing was written"
        )
    return described


def _json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def _rank(name: str, tensor: Tensor) -> tuple[bool, int, int, str]:
    """What orders the tensors: multiples of 64 bytes, then wide items, and sizes that are multiples of large powers."""
    return tensor.nbytes % ALIGNMENT != 0, -tensor.itemsize, -(tensor.nbytes & -tensor.nbytes), name
