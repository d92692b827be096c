"""Files of tensors: read one tensor at a time, written whole or not at all.

Safetensors files are opened anew for each tensor, so that the pages of a tensor already read are given back: peak
memory stays at the weights plus one tensor. A `.pth` is read with `weights_only=True`: no code of a checkpoint is ever
run.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weight_conversion.architecture import Shape

INDEX = "model.safetensors.index.json"


class TensorSource(ABC):
    """Named tensors on disk."""

    path: Path

    @abstractmethod
    def shapes(self) -> dict[str, Shape]:
        """Name and shape of every tensor, without reading one."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor. It may share memory with the file: copy what is to be kept."""


class SafetensorsFile(TensorSource):
    """One `.safetensors` file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def shapes(self) -> dict[str, Shape]:
        with self._open() as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def read(self, name: str) -> Tensor:
        with self._open() as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{self.path} is not a whole safetensors file ({self.path.stat().st_size:,} bytes on disk): {error}. "
                "It may have been cut off while it was copied: delete it and fetch it again."
            ) from error


class ShardedFiles(TensorSource):
    """A folder with `model.safetensors.index.json` and the shards that it names."""

    def __init__(self, index: Path) -> None:
        self.path = index
        self._where: dict[str, str] = read_json(index)["weight_map"]
        if absent := sorted({shard for shard in self._where.values() if not (index.parent / shard).exists()}):
            raise FileNotFoundError(f"{index} names shards that are not beside it: {absent}")

    def shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for shard in sorted(set(self._where.values())):
            shapes.update(SafetensorsFile(self.path.parent / shard).shapes())
        return shapes

    def read(self, name: str) -> Tensor:
        return SafetensorsFile(self.path.parent / self._where[name]).read(name)


class TorchFile(TensorSource):
    """A `.pth` / `.pt` / `.ckpt` / `.bin`: a mapping of tensors, at the top or under "model" or "state_dict"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(
                f"{path} was not read: it is cut off, or it holds more than tensors and would have to run code of its "
                f"own to be read, which is refused ({str(error).splitlines()[0]}). Use the .safetensors file of the "
                "same model, or save the plain state_dict."
            ) from error
        for key in ("model", "state_dict"):
            if isinstance(content, dict) and isinstance(content.get(key), dict):
                content = content[key]
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise ValueError(f"{path} does not hold a mapping of names to tensors, at the top or under 'model'")
        self._tensors: dict[str, Tensor] = content

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def open_tensors(path: Path) -> TensorSource:
    """The tensors of a file, or of a folder that holds one checkpoint."""
    if path.is_dir():
        if (path / INDEX).exists():
            return ShardedFiles(path / INDEX)
        candidates = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.pth"))
        if len(candidates) != 1:
            held = [file.name for file in candidates] or "none"
            raise FileNotFoundError(f"{path} should hold one .safetensors or .pth checkpoint; it holds {held}")
        path = candidates[0]
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in (".pth", ".pt", ".ckpt", ".bin"):
        return TorchFile(path)
    raise ValueError(f"{path} is neither .safetensors nor .pth; a checkpoint is one of these or a folder with one")


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write under a temporary name, then rename: a reader never sees half a file."""
    with _renamed_when_whole(path) as temporary:
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary, metadata=dict(metadata) if metadata else None)


def write_json(data: Any, path: Path) -> None:
    """Write under a temporary name, then rename."""
    with _renamed_when_whole(path) as temporary:
        temporary.write_text(json.dumps(data, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Parse a JSON file; a syntax error becomes a `ValueError` that names the file."""
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def sha256_of_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


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


@contextmanager
def _renamed_when_whole(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    try:
        yield Path(name)
        # mkstemp makes files private; a result should be as readable as any other new file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
