"""Files that we write: the safetensors library reads them, and their tensors begin at multiples of 64 bytes."""

import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES, load_file, save_file

from weight_conversion import files as tensor_files
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


# What the safetensors library writes itself.
@pytest.mark.parametrize(
    "dtype", sorted(set(_TYPES.values()), key=str), ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def test_every_dtype_of_the_format_is_written_as_the_library_writes_it(tmp_path, dtype):
    tensor = torch.arange(64 * 16 // dtype.itemsize).remainder(2).to(dtype)
    write_safetensors({"a": tensor}, tmp_path / "ours.safetensors")
    save_file({"a": tensor}, tmp_path / "theirs.safetensors")
    ours, theirs = (load_file(tmp_path / f"{name}.safetensors")["a"] for name in ("ours", "theirs"))
    assert ours.dtype == theirs.dtype == dtype
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_a_dtype_that_is_not_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'a': torch.complex128"):
        write_safetensors({"a": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_numbers_whose_sign_is_only_noted_are_written_with_it(tmp_path):
    number = torch.tensor([1 + 2j])
    tensors = {"conjugate": number.conj(), "part": number.conj().imag}
    write_safetensors(tensors, tmp_path / "a.safetensors")
    loaded = load_file(tmp_path / "a.safetensors")
    assert (loaded["conjugate"].item(), loaded["part"].item()) == (1 - 2j, -2)


@pytest.mark.parametrize(
    ("n_tensors", "metadata", "says"),
    [(2, {"facts": "x" * 900}, "shorten the metadata"), (20, {"a": "b"}, r"20 tensors .* write fewer tensors")],
)
def test_a_header_that_no_reader_would_accept_is_refused(tmp_path, monkeypatch, n_tensors, metadata, says):
    tensors = {f"weights.{i}": torch.zeros(4) for i in range(n_tensors)}
    path = tmp_path / "a.safetensors"
    write_safetensors(tensors, path, metadata)
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    monkeypatch.setattr(tensor_files, "LONGEST_HEADER", length)
    write_safetensors(tensors, path, metadata)
    monkeypatch.setattr(tensor_files, "LONGEST_HEADER", length - 1)
    with pytest.raises(ValueError, match=says):
        write_safetensors({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata)
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (before, [path])


def test_the_longest_header_is_that_of_the_library(tmp_path):
    path = tmp_path / "a.safetensors"
    for length in (tensor_files.LONGEST_HEADER, tensor_files.LONGEST_HEADER + 1):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(SafetensorError) as refused:
            load_file(path)
        assert ("header too large" in str(refused.value).lower()) == (length > tensor_files.LONGEST_HEADER)
