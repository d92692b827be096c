"""Files of tensors, read in pieces and written atomically.

A file is mapped into memory and reopened while it is read, which releases the pages already read: peak memory stays at
the weights plus one piece. A `.pth` is read with `weights_only=True`, so no code of a checkpoint is ever run.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weight_conversion.aligned_file import write_aligned
from weight_conversion.architecture import Shape
from weight_conversion.json_files import read_json
from weight_conversion.whole_files import renamed_when_whole

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
CHECKPOINT_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin")
REOPEN_BYTES = 1 << 24


class TensorSource(ABC):
    """Named tensors on disk."""

    path: Path

    @abstractmethod
    def shapes(self) -> dict[str, Shape]:
        """Name and shape of every tensor, without reading any."""

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A tensor, or its rows `start` to `stop`. It may share memory with the file: copy it to keep it."""


class SafetensorsFile(TensorSource):
    """One `.safetensors` file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def shapes(self) -> dict[str, Shape]:
        with self._open() as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        with self._open() as file:
            part = file.get_slice(name)
            n_rows = part.get_shape()[0] if part.get_shape() else 1
            # Only a whole tensor stays mapped from the file; rows are copied.
            whole = start == 0 and (stop is None or stop >= n_rows)
            rows: Tensor = file.get_tensor(name) if whole else part[start:stop]
            return rows

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{self.path} is not a complete safetensors file ({self.path.stat().st_size:,} bytes on disk): {error}"
                ". It may have been truncated while it was copied: delete it and fetch it again."
            ) from error


class ShardedFiles(TensorSource):
    """A folder with `model.safetensors.index.json` and the shards that it names.

    Only the index decides which tensors there are and in which shard each is. Other tensors of a shard, such as an old
    copy of a tensor of another shard, are not part of the checkpoint.
    """

    def __init__(self, index: Path) -> None:
        self.path = index
        shard_of = indexed_files(index)
        shards = sorted(set(shard_of.values()))
        if absent := files_not_in(index.parent, shards):
            raise FileNotFoundError(f"{index} names files that are not beside it: {absent}; fetch them too")
        files = {shard: SafetensorsFile(index.parent / shard) for shard in shards}
        shapes = {shard: file.shapes() for shard, file in files.items()}
        if missing := [f"{name} in {shard}" for name, shard in shard_of.items() if name not in shapes[shard]]:
            raise ValueError(
                f"{index} does not belong to the shards beside it: there is no {', no '.join(missing[:3])}"
                f"{f' ({len(missing)} in all)' if len(missing) > 3 else ''}. Fetch the index and its shards again"
            )
        self._files = {name: files[shard] for name, shard in shard_of.items()}
        self._shapes = {name: shapes[shard][name] for name, shard in shard_of.items()}

    def shapes(self) -> dict[str, Shape]:
        return dict(self._shapes)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self._files[name].read(name, start, stop)


def indexed_files(index: Path) -> dict[str, str]:
    """The tensors that an index names, with the name of the file that contains each.

    Raises:
        ValueError: The index contains no such mapping, or names files other than .safetensors files beside it.
    """
    content = read_json(index)
    shard_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(name, str) for name in shard_of.values()):
        raise ValueError(f"{index} should contain 'weight_map', a mapping of tensor names to files; fetch it again")
    outside = {shard for shard in shard_of.values() if not re.fullmatch(r"[^/\\\0]+\.safetensors", shard)}
    if outside:
        raise ValueError(
            f"{index} should name .safetensors files beside it; it names {sorted(outside)[:3]}. Fetch it again"
        )
    return shard_of


def files_not_in(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of `names` that are not files in `folder`; a folder of that name does not count as a file."""
    # Unlike Path.is_file, os.path.isfile raises no OSError for a name that is too long for the file system.
    return [name for name in names if not os.path.isfile(folder / name)]


class TorchFile(TensorSource):
    """A `.pth`, `.pt`, `.ckpt` or `.bin` file: a mapping of tensors, at the top level or under "model" or "state_dict".

    A file in the format used before torch 1.6 cannot be memory-mapped; it stays in memory while it is open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped = _is_zip(path)
        self._tensors = self._load()
        self._n_read = 0

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        if self._mapped and self._n_read > REOPEN_BYTES:
            self._tensors, self._n_read = self._load(), 0
        rows = self._tensors[name][start:stop]
        self._n_read += rows.nbytes
        return rows

    def _load(self) -> dict[str, Tensor]:
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True, mmap=self._mapped)
        except Exception as error:  # a broken pickle may raise any exception
            raise ValueError(
                f"{self.path} was not read: it is truncated, or it contains more than tensors and would have to run "
                f"code of its own to be read, which is refused ({_reason(error)}). Use the .safetensors file of the "
                "same model, or save the plain state_dict."
            ) from error
        for key in ("model", "state_dict"):
            if isinstance(content, dict) and isinstance(content.get(key), dict):
                content = content[key]
        if not isinstance(content, dict) or not content or not all(_is_named_tensor(*item) for item in content.items()):
            raise ValueError(
                f"{self.path} does not contain a mapping of names to tensors, at the top level or under 'model' or "
                "'state_dict'; save the plain state_dict"
            )
        return content


def open_tensors(path: Path) -> TensorSource:
    """The tensors of a file, or of a folder that contains one checkpoint.

    In a folder, `model.safetensors` takes precedence over an index with its shards, as in transformers.
    """
    if path.is_dir():
        if (path / INDEX).exists() and not (path / WHOLE).exists():
            return ShardedFiles(path / INDEX)
        candidates = [path / WHOLE] if (path / WHOLE).exists() else sorted(path.glob("*.safetensors"))
        candidates = candidates or sorted(path.glob("*.pth"))
        if len(candidates) != 1:
            names = [file.name for file in candidates] or "none"
            raise FileNotFoundError(
                f"the folder {path} should contain one .safetensors or .pth checkpoint; it contains {names}. Pass the "
                "path of the file itself."
            )
        path = candidates[0]
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in CHECKPOINT_SUFFIXES:
        return TorchFile(path)
    raise ValueError(
        f"{path} is not named like a checkpoint; pass a file that ends in {', '.join(CHECKPOINT_SUFFIXES)}, or a "
        "folder with one"
    )


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors under a temporary name, then rename the file: a reader never sees a partial file.

    Raises:
        ValueError: A dtype is not in the format, or the metadata or the tensors are too many for its header.
    """
    with renamed_when_whole(path) as temporary, temporary.open("wb") as file:
        write_aligned(tensors, file, metadata)


def safetensors_size(shapes: Mapping[str, Shape], dtype: str = "F32") -> int:
    """Size in bytes of the file that the safetensors library writes of these tensors, without metadata.

    It is 8 for the length of the header, the header, which is compact JSON in order of names, padded with spaces to a
    multiple of 8, and the data. The header of `write_safetensors` has another order and other padding.
    """
    width = {"F32": 4, "BF16": 2, "F16": 2}[dtype]
    header: dict[str, Any] = {}
    offset = 0
    for name in sorted(shapes):
        end = offset + width * torch.Size(shapes[name]).numel()
        header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + length + -length % 8 + offset


def _is_named_tensor(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor)


def _reason(error: Exception) -> str:
    # torch surrounds the reason with advice to switch the protection off, which is left out here.
    text = str(error) or type(error).__name__
    reason = re.search(r"Unsupported (global: GLOBAL \S+|operand \d+)", text)
    return reason[0] if reason else text.splitlines()[0]


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
