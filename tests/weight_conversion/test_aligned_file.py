"""Files that we write: the safetensors library reads them, and their tensors begin at multiples of 64 bytes."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from weight_conversion import write_safetensors

ALIGNED = {
    "b.weight": torch.randn(3, 16),
    "a.weight": torch.randn(32, 5).to(torch.bfloat16),
    "ids": torch.arange(8),
    "flags": torch.arange(64) % 3 == 0,
    "empty": torch.zeros(0, 4),
}
# Behind these no other tensor is sure to be aligned.
OTHERS = {
    "bias": torch.randn(5),
    "half": torch.randn(7).half(),
    "number": torch.tensor(2.5, dtype=torch.float64),
    "one_of_a_row": torch.randn(4)[::2][:1],
}


def begins(path):
    """Where each tensor begins in a file, in bytes."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


@pytest.mark.parametrize("metadata", [None, {"b": "Grüße", "a": "1"}])
def test_the_library_reads_what_is_written_aligned(tmp_path, metadata):
    tensors = {**OTHERS, **ALIGNED, "turned": torch.randn(4, 16).T}
    path = tmp_path / "a.safetensors"
    write_safetensors(tensors, path, metadata)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert all(loaded[name].dtype == tensors[name].dtype for name in tensors)
    with safe_open(path, framework="pt") as file:
        assert (file.metadata() or None) == metadata
    starts = begins(path)
    assert {name for name, start in starts.items() if start % 64 == 0} >= {*ALIGNED, "turned", "number"}
    assert all(start % tensors[name].itemsize == 0 for name, start in starts.items())
    again = tmp_path / "b.safetensors"
    write_safetensors(dict(reversed(loaded.items())), again, dict(reversed(metadata.items())) if metadata else None)
    assert again.read_bytes() == path.read_bytes()


def test_a_dtype_that_is_not_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'a': torch.complex64"):
        write_safetensors({"a": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []
