"""Files of tensors: read in pieces, written whole or not at all.

A file is mapped into memory and opened anew again and again, so that the pages already read are given back: peak memory
stays at the weights plus one piece. A `.pth` is read with `weights_only=True`: no code of a checkpoint is ever run.
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
from safetensors.torch import save_file
from torch import Tensor

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
        """Name and shape of every tensor, without reading one."""

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A tensor, or its rows `start` to `stop`. It may share memory with the file: copy what is to be kept."""


class SafetensorsFile(TensorSource):
    """One `.safetensors` file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def shapes(self) -> dict[str, Shape]:
        with self._open() as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        with self._open() as file:
            rows: Tensor = file.get_slice(name)[start:stop]
            return rows

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{self.path} is not a whole safetensors file ({self.path.stat().st_size:,} bytes on disk): {error}. "
                "It may have been cut off while it was copied: delete it and fetch it again."
            ) from error


class ShardedFiles(TensorSource):
    """A folder with `model.safetensors.index.json` and the shards that it names.

    The index alone says which tensors there are and where each stands: what else a shard holds, such as an old copy of
    another shard's tensor, is no part of the checkpoint.
    """

    def __init__(self, index: Path) -> None:
        self.path = index
        where = indexed_files(index)
        if absent := files_not_in(index.parent, sorted(set(where.values()))):
            raise FileNotFoundError(f"{index} names files that are not beside it: {absent}; fetch them too")
        files = {shard: SafetensorsFile(index.parent / shard) for shard in sorted(set(where.values()))}
        held = {shard: file.shapes() for shard, file in files.items()}
        if lost := [f"{name} in {shard}" for name, shard in where.items() if name not in held[shard]]:
            raise ValueError(
                f"{index} does not belong to the shards beside it: there is no {', no '.join(lost[:3])}"
                f"{f' ({len(lost)} in all)' if len(lost) > 3 else ''}. Fetch the index and its shards again"
            )
        self._where = {name: files[shard] for name, shard in where.items()}
        self._shapes = {name: held[shard][name] for name, shard in where.items()}

    def shapes(self) -> dict[str, Shape]:
        return dict(self._shapes)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self._where[name].read(name, start, stop)


def indexed_files(index: Path) -> dict[str, str]:
    """The tensors that an index names, and the file beside it that holds each.

    Raises:
        ValueError: no such mapping, or a file that is no safetensors file beside the index: an index says nothing about
            files elsewhere.
    """
    content = read_json(index)
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
        raise ValueError(f"{index} should hold 'weight_map', a mapping of tensor names to files; fetch it again")
    outside = {shard for shard in where.values() if not re.fullmatch(r"[^/\\\0]+\.safetensors", shard)}
    if outside:
        raise ValueError(
            f"{index} should name .safetensors files beside it; it names {sorted(outside)[:3]}. Fetch it again"
        )
    return where


def files_not_in(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of `names` under which `folder` holds no file, such as names of folders and names too long for any file."""
    # Path.is_file raises an OSError for a name that the file system refuses.
    return [name for name in names if not os.path.isfile(folder / name)]


class TorchFile(TensorSource):
    """A `.pth` / `.pt` / `.ckpt` / `.bin`: a mapping of tensors, at the top or under "model" or "state_dict".

    One in the format from before torch 1.6 cannot be mapped; it is in memory as long as it is open.
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
        except Exception as error:  # what a broken pickle raises depends on its bytes
            raise ValueError(
                f"{self.path} was not read: it is cut off, or it holds more than tensors and would have to run code of "
                f"its own to be read, which is refused ({_reason(error)}). Use the .safetensors file of the same "
                "model, or save the plain state_dict."
            ) from error
        for key in ("model", "state_dict"):
            if isinstance(content, dict) and isinstance(content.get(key), dict):
                content = content[key]
        if not isinstance(content, dict) or not content or not all(_is_named_tensor(*item) for item in content.items()):
            raise ValueError(
                f"{self.path} does not hold a mapping of names to tensors, at the top or under 'model' or "
                "'state_dict'; save the plain state_dict"
            )
        return content


def open_tensors(path: Path) -> TensorSource:
    """The tensors of a file, or of a folder that holds one checkpoint.

    In a folder `model.safetensors` comes before an index with its shards, as in transformers.
    """
    if path.is_dir():
        if (path / INDEX).exists() and not (path / WHOLE).exists():
            return ShardedFiles(path / INDEX)
        candidates = [path / WHOLE] if (path / WHOLE).exists() else sorted(path.glob("*.safetensors"))
        candidates = candidates or sorted(path.glob("*.pth"))
        if len(candidates) != 1:
            held = [file.name for file in candidates] or "none"
            raise FileNotFoundError(
                f"the folder {path} should hold one .safetensors or .pth checkpoint; it holds {held}. Pass the path of "
                "the file itself."
            )
        path = candidates[0]
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in CHECKPOINT_SUFFIXES:
        return TorchFile(path)
    raise ValueError(
        f"{path} is not a checkpoint by its name; pass a file that ends in {', '.join(CHECKPOINT_SUFFIXES)}, or a "
        "folder with one"
    )


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write under a temporary name, then rename: a reader never sees half a file."""
    with renamed_when_whole(path) as temporary:
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            save_file(contiguous, temporary, metadata=dict(metadata) if metadata else None)
        except SafetensorError as error:
            raise OSError(str(error)) from error  # a full disk is no other error here than elsewhere


def safetensors_size(shapes: Mapping[str, Shape], dtype: str = "F32") -> int:
    """Bytes of a safetensors file with these tensors and no metadata: 8 for the length, the header, the data.

    The header is compact JSON in name order, padded with spaces to a multiple of 8.
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
    # torch wraps the one telling phrase into advice to switch the protection off.
    text = str(error) or type(error).__name__
    found = re.search(r"Unsupported (global: GLOBAL \S+|operand \d+)", text)
    return found[0] if found else text.splitlines()[0]


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
