"""Chunks: the binary pieces of an explorer page, one for each step of a view.

    uint32 n, little endian; n bytes of UTF-8 JSON, the header; zeros up to a multiple of 8; then the arrays, one after
    the other, each followed by zeros up to a multiple of 8

The header lists the arrays, {"arrays": [{"name", "dtype": "u1" | "u2" | "i4" | "f4", "shape", "scale"}, ...], ...}.
With a scale, a value is the stored integer times the scale, and the largest integer stands for NaN. Probabilities are
stored as u2 with the scale 1/65534, which is exact to 0.8e-5.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 8
_DTYPES: dict[str, Any] = {"u1": np.uint8, "u2": np.uint16, "i4": np.int32, "f4": np.float32}
_ABSENT = {"u1": 2**8 - 1, "u2": 2**16 - 1}  # stored for NaN


@dataclass(frozen=True, eq=False)
class Stored:
    """An array as a chunk stores it.

    Attributes:
        dtype: "u1", "u2", "i4" or "f4".
        values: The stored numbers.
        scale: Factor by which stored integers are multiplied; `None` for values that are stored as they are.
    """

    dtype: str
    values: NDArray[Any]
    scale: float | None = None

    @classmethod
    def integers(cls, x: Any) -> "Stored":
        """Integers, such as positions and ranks, in 32 bits."""
        return cls("i4", _as_array(x).astype(np.int32))

    @classmethod
    def numbers(cls, x: Any) -> "Stored":
        """Numbers in float32; NaN stays NaN."""
        return cls("f4", _as_array(x).astype(np.float32))

    @classmethod
    def shares(cls, x: Any, dtype: str = "u2") -> "Stored":
        """Numbers between 0 and 1, or NaN, as integers of 8 ("u1") or 16 bits ("u2") with a scale.

        Raises:
            ValueError: A number is outside 0 to 1.
        """
        given = _as_array(x).astype(np.float64)
        absent = _ABSENT[dtype]
        known = given[~np.isnan(given)]
        if known.size and (known.min() < 0 or known.max() > 1 + 1e-4):
            raise ValueError(f"shares are between 0 and 1, and these are between {known.min():g} and {known.max():g}")
        stored = np.where(np.isnan(given), absent, np.rint(np.nan_to_num(given.clip(max=1)) * (absent - 1)))
        return cls(dtype, stored.astype(_DTYPES[dtype]), 1 / (absent - 1))


def pack(arrays: Mapping[str, Stored], **extra: Any) -> bytes:
    """The bytes of a chunk.

    Args:
        extra: Further entries of the header.
    """
    described = []
    for name, stored in arrays.items():
        entry: dict[str, Any] = {"name": name, "dtype": stored.dtype, "shape": list(stored.values.shape)}
        described.append(entry if stored.scale is None else {**entry, "scale": stored.scale})
    header = json.dumps({"arrays": described, **extra}, allow_nan=False, ensure_ascii=False).encode()
    parts = [_padded(len(header).to_bytes(4, "little") + header)]
    for stored in arrays.values():
        parts.append(_padded(np.ascontiguousarray(stored.values, dtype=_DTYPES[stored.dtype]).tobytes()))
    return b"".join(parts)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNED)


def _as_array(x: Any) -> NDArray[Any]:
    return x.detach().float().cpu().numpy() if isinstance(x, Tensor) and x.is_floating_point() else np.asarray(x)
