"""Files of tensors, read in pieces, and strict JSON; both are written whole or not at all.

A file is mapped into memory and reopened while it is read, which releases the pages already read: peak memory stays at
the weights plus one piece. A `.pth` is read with `weights_only=True`, so no code of a checkpoint is ever run.

In a written file tensors begin at multiples of 64 bytes, as torch's own tensors on the CPU do. Matrix products with
weights of another alignment may differ in their last bits, so only an aligned tensor can be used as it is mapped from
the file. The format allows spaces after the header, but no gap between tensors. Tensors whose size is a multiple of 64
bytes therefore come first; of the others, which are biases and norms of odd widths, only the first is sure to be
aligned.

Strict JSON has no NaN and infinity, which most readers refuse. A number that is not finite is written as null, and
listed at the top level of the document under `not_finite` with its value: `{"p": null, "not_finite": {"/p": "NaN"}}`.
The keys are JSON pointers (RFC 6901). `from_json` restores the numbers.

Repeated keys, half surrogate pairs and values nested too deep are refused in reading: Python's reader would accept each
of them with a meaning that the file's author did not intend.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weight_conversion.architecture import Shape

NOT_FINITE = "not_finite"
BLANKS = " \t\n\r"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def to_json(data: Any, indent: int | None = None) -> str:
    """A document as strict JSON.

    Args:
        data: Mappings, lists, tuples, strings, numbers (numpy's too) and None.

    Raises:
        TypeError: The data contains something else, such as a tensor; the message says where.
        ValueError: A text contains half of a surrogate pair.
    """
    not_finite: dict[str, str] = {}
    document = _plain(data, "", not_finite)
    if not_finite:
        if not isinstance(document, dict) or NOT_FINITE in document:
            raise ValueError(
                f"numbers that are not finite ({', '.join(not_finite)}) need a mapping without {NOT_FINITE!r} around "
                "them"
            )
        document[NOT_FINITE] = not_finite
    text = json.dumps(document, indent=indent, allow_nan=False)
    if _SURROGATE.search(text):
        try:
            json.dumps(document, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{error.object[max(error.start - 20, 0) : error.end + 20]!r} contains half of a surrogate pair, which "
                "no reader of JSON takes; write the whole character"
            ) from None
    return text


def from_json(text: str | bytes) -> Any:
    """The data that `to_json` wrote, with the numbers that are not finite restored."""
    return restore_numbers(json.loads(text))


def restore_numbers(data: Any) -> Any:
    """Restore, in place, the numbers that are not finite of a parsed document; returns the document.

    Raises:
        ValueError: The list of these numbers does not fit the document.
    """
    not_finite = data.pop(NOT_FINITE, None) if isinstance(data, dict) else None
    try:
        for pointer, number in (not_finite or {}).items():
            *path, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
            container = data
            for part in path:
                container = container[_key(container, part)]
            container[_key(container, last)] = float(number)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its list of numbers that are not finite does not fit: {not_finite!r:.60}") from error
    return data


def as_json(data: Any) -> Any:
    """`data` after a round trip through JSON: lists for tuples, strings for keys, plain numbers for numpy's."""
    return from_json(to_json(data))


class JsonError(ValueError):
    """Text that is not valid under the strict rules of this module.

    Attributes:
        reason: Description of the error, which follows the name of the text: "is not valid JSON: ...".
        offset: Index of the character at which the reader stopped or the value begins.
    """

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"the text {reason}")
        self.reason, self.offset = reason, offset


def parse_json(text: str) -> Any:
    """The JSON value of a text that contains exactly one.

    Raises:
        JsonError: The text is not such a value.
    """
    if text.startswith("\ufeff"):
        raise JsonError("is not valid JSON: it begins with a BOM; save it as UTF-8 without one", 0)
    start = len(text) - len(text.lstrip(BLANKS))
    try:
        content = _DECODER.decode(text)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except _RepeatedKey as error:
        reason = f"gives the key {error.args[0]!r} twice in one object; keep the correct one"
        raise JsonError(reason, start) from None
    except RecursionError:
        reason = "is not valid JSON for any file read here: its values are nested too deep; fetch it again"
        raise JsonError(reason, start) from None
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        reason = f"contains {half!r}, half of a surrogate pair; write the whole character, or remove it"
        raise JsonError(reason, start) from None
    except json.JSONDecodeError as error:
        what = "text follows the end of the value" if error.msg == "Extra data" else error.msg
        raise JsonError(f"is not valid JSON: {what}", error.pos) from None
    except ValueError as error:  # a number of thousands of digits
        raise JsonError(f"is not valid JSON: {error}", start) from None
    return content


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        ValueError: The file is not UTF-8, or `parse_json` refuses its text; the message names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    try:
        return parse_json(text)
    except JsonError as error:
        raise ValueError(f"{path} {error.reason} (line {text.count(chr(10), 0, error.offset) + 1})") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that contains one object; any other value raises a `ValueError` that names the file."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} should contain one JSON object, {{...}}; it contains {content!r:.60}. Fetch it again")
    return content


def _plain(value: Any, pointer: str, not_finite: dict[str, str]) -> Any:
    """`value` in plain Python types; numbers that are not finite are noted in `not_finite` by their pointer."""
    if isinstance(value, str | bool | None):
        return value
    if isinstance(value, Mapping):
        items = {_name(key): item for key, item in value.items()}
        return {name: _plain(item, f"{pointer}/{_escaped(name)}", not_finite) for name, item in items.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{pointer}/{i}", not_finite) for i, item in enumerate(value)]
    if not isinstance(value, Real) and getattr(value, "ndim", None) == 0:
        return _plain(value.item(), pointer, not_finite)  # numpy's booleans, arrays and tensors of one number
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        not_finite[pointer] = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
        return None
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(
        f"{pointer or 'the document'} is a {type(value).__name__}{shape}, which JSON cannot represent; give a plain "
        "number, string, list or mapping (for a tensor, .tolist())"
    )


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return str(int(key)) if isinstance(key, Integral) else str(key)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _key(container: Any, part: str) -> Any:
    return int(part) if isinstance(container, list) else part


class _RepeatedKey(Exception):
    """An object of JSON gives a key twice."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise _RepeatedKey(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return content


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)


INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
CHECKPOINT_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin")
REOPEN_BYTES = 1 << 24
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
_WIDTHS = {name: dtype.itemsize for dtype, name in _NAMES.items()}


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
    """The tensors that an index names, with the name of the file that contains each."""
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

    An older file than those of torch 1.6 cannot be memory-mapped; it stays in memory while it is open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._mapped = file.read(4) == b"PK\x03\x04"  # the format since torch 1.6
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
        tensors: dict[str, Tensor] = content if isinstance(content, dict) else {}
        named = all(isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items())
        if not named or not tensors:
            raise ValueError(
                f"{self.path} does not contain a mapping of names to tensors, at the top level or under 'model' or "
                "'state_dict'; save the plain state_dict"
            )
        return tensors


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
            others = [file for file in sorted(path.iterdir()) if file.suffix in CHECKPOINT_SUFFIXES]
            names = [file.name for file in candidates or others]
            raise FileNotFoundError(
                f"the folder {path} should contain one .safetensors or .pth checkpoint; it contains "
                + (
                    f"{names}. Pass the path of the file itself, or for shards add their index {INDEX}"
                    if names
                    else "none. Pass the path of one"
                )
            )
        path = candidates[0]
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if not path.is_file():  # to open a pipe would wait for a writer
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise ValueError(f"{path} is {what}, and a checkpoint is read from a file: name the file, or put it there")
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in CHECKPOINT_SUFFIXES:
        return TorchFile(path)
    raise ValueError(
        f"{path} is not named like a checkpoint; pass a file that ends in {', '.join(CHECKPOINT_SUFFIXES)}, or a "
        "folder with one"
    )


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """`write_aligned` under a temporary name, then rename the file: a reader never sees a partial file."""
    with renamed_when_whole(path) as temporary, temporary.open("wb") as file:
        write_aligned(tensors, file, metadata)


def safetensors_size(shapes: Mapping[str, Shape], dtype: str = "F32") -> int:
    """Size in bytes of the file that the safetensors library writes of these tensors, without metadata.

    Its header is compact JSON in order of names, padded to a multiple of 8 bytes; that of `write_safetensors` differs.
    """
    entries = _entries((name, dtype, shapes[name]) for name in sorted(shapes))
    length = len(_json(entries))
    return 8 + length + -length % 8 + max((entry["data_offsets"][1] for entry in entries.values()), default=0)


def write_json(data: Any, path: Path) -> None:
    """Write strict JSON (`to_json`) under a temporary name, then rename the file."""
    with renamed_when_whole(path) as temporary:
        temporary.write_text(to_json(data, indent=2) + "\n", encoding="utf-8")


@contextmanager
def renamed_when_whole(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` to write to; it is renamed to `path` unless an exception is raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        # The system subtracts the umask, so that the file is as readable as any other new file. The process itself can
        # only read its umask by changing it, which would open the files that other threads make meanwhile.
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield part
        os.replace(part, path)
    except OSError as error:
        if type(error) is not OSError or error.filename not in (None, part, str(part)):
            raise
        # The error of a full disk names no file or the temporary one, so the message here names the target.
        named = OSError(f"{path} was not written: {error.strerror or error}")
        named.errno = error.errno
        raise named from error
    finally:
        if os.path.lexists(part):  # false, without an error, for a name that is too long
            part.unlink(missing_ok=True)


def sha256_of_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_aligned(tensors: Mapping[str, Tensor], file: IO[bytes], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file from the current position; equal tensors and metadata give equal bytes.

    Raises:
        ValueError: A dtype is not in the format, or the header would be too long. Nothing is written then.
    """
    if unknown := {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype not in _NAMES}:
        raise ValueError(f"tensors of these dtypes are not written: {unknown}; convert them to one of {list(_NAMES)}")
    names = sorted(tensors, key=lambda name: _rank(name, tensors[name]))
    header = _header(tensors, names, metadata or {})
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for name in names:
        file.write(bytes_of(tensors[name].detach().cpu()).numpy().data)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, row by row."""
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    # A view would keep the strides of a tensor with one element, which are arbitrary.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _header(tensors: Mapping[str, Tensor], names: list[str], metadata: Mapping[str, str]) -> bytes:
    entries = _entries((name, _NAMES[tensors[name].dtype], tensors[name].shape) for name in names)
    described = _json({"__metadata__": dict(sorted(metadata.items())), **entries} if metadata else entries)
    described += b" " * (-(8 + len(described)) % ALIGNMENT)
    if len(described) > LONGEST_HEADER:
        raise ValueError(
            f"the header of this safetensors file would have {len(described):,} bytes, {len(_json(entries)):,} of them "
            f"for {len(names):,} tensors and the others for metadata, and no reader accepts more than "
            f"{LONGEST_HEADER:,}: write fewer tensors, joined or in several files, or shorten the metadata, by storing "
            "long lists as tensors or in files of their own. Nothing was written"
        )
    return described


def _entries(tensors: Iterable[tuple[str, str, Shape]]) -> dict[str, Any]:
    """The header's entries of tensors with these dtypes and shapes that follow one another."""
    entries: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in tensors:
        start, offset = offset, offset + _WIDTHS[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [start, offset]}
    return entries


def _json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def _rank(name: str, tensor: Tensor) -> tuple[bool, int, int, str]:
    """What orders the tensors: multiples of 64 bytes, then wide items, and sizes that are multiples of large powers."""
    return tensor.nbytes % ALIGNMENT != 0, -tensor.itemsize, -(tensor.nbytes & -tensor.nbytes), name


def _reason(error: Exception) -> str:
    # torch surrounds the reason with advice to switch the protection off, which is left out here.
    text = str(error) or type(error).__name__
    reason = re.search(r"Unsupported (global: GLOBAL \S+|operand \d+)", text)
    return reason[0] if reason else text.splitlines()[0]
