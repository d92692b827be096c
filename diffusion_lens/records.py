"""Saved results, with a record of the model and the settings that produced them.

Each result is one safetensors file with its tensors and a JSON record in the metadata. Nothing is pickled.
"""

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from diffusion_lens.config import DiffusionConfig, name_with_mode
from diffusion_lens.identity import identity_of, require_identified
from diffusion_lens.identity import weights_sha256 as weights_sha256
from weight_conversion import as_json, from_json, read_json, restore_numbers, to_json, write_safetensors

D = TypeVar("D")  # a dataclass
RECORD = "diffusion_lens"
PART = "diffusion_lens.part"
NOT_COMPARED = ("device", "versions", "failed")
NETWORK = ("model", "dtype", "weights_sha256", "hooks", "modules", "tokenizer_sha256")

installed_version = cache(version)  # which reads and parses a file
_START_AGAIN = "Delete the files in this folder and start again, or name another folder"
_SHOWN_PARTS = 3
_TOKENIZERS: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
_PART: ContextVar[str | None] = ContextVar("_PART", default=None)


def provenance(model: nn.Module, cfg: DiffusionConfig) -> dict[str, Any]:
    """Entries of every record besides the settings: model, weights, tokenizer, hooks, modules, dtype, device, versions.

    Weights, hooks and modules are those at the beginning of the computation (`identity.begins_run`).
    """
    identity, clock = identity_of(model), getattr(model, "clock", None)
    return {
        "model": cfg.model_name,
        **({} if cfg.mode is None else {"mode": cfg.mode}),
        "architecture": cfg.architecture.to_dict(),
        "weights_sha256": identity.weights_sha256,
        "tokenizer_sha256": tokenizer_sha256(getattr(model, "tokenizer", None), cfg.default_prepend_bos),
        "hooks": identity.hooks,
        "modules": identity.modules,
        "dtype": str(cfg.dtype).removeprefix("torch."),
        "device": str(cfg.device),
        # The time that the network was told in `model.at_time(t)`, without which the numbers cannot be had again.
        **({} if (time := getattr(clock, "time", None)) is None else {"time": time}),
        # The open blocks of `model.at_block(start)`.
        **({} if (origins := getattr(clock, "origins", None)) is None else {"blocks_from": origins.tolist()}),
        "versions": {
            "diffusion-lens": installed_version("diffusion-lens"),
            "transformer-lens": installed_version("transformer-lens"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def shown_model(record: Mapping[str, Any]) -> str:
    """The name of the model of a record, with its mode, `name@mode`, where one checkpoint is several models."""
    return name_with_mode(str(record["model"]), record.get("mode"))


def network_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a record that identify its network, for the record of a result that builds on this one."""
    mode = {"mode": record["mode"]} if "mode" in record else {}
    return {**{name: record.get(name) for name in NETWORK}, **mode}


def tokenizer_sha256(tokenizer: Any, prepend_bos: bool) -> str | None:
    """SHA-256 of a complete fast tokenizer (normaliser and added tokens included) and of `prepend_bos`."""
    if tokenizer is None:
        return None
    # Serialising a large vocabulary takes a tenth of a second, so the hash is cached until tokens are added.
    cached = _TOKENIZERS.get(tokenizer)
    if cached is None or cached[0] != len(tokenizer):
        text = tokenizer.backend_tokenizer.to_str()
        cached = _TOKENIZERS[tokenizer] = (len(tokenizer), hashlib.sha256(text.encode()).hexdigest())
    return hashlib.sha256(f"{cached[1]} {prepend_bos}".encode()).hexdigest()


def save_result(path: str | Path, kind: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
    """Write a result in one atomic file; `load_result` is the inverse."""
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ValueError(f"results are safetensors files; {target} should end in .safetensors")
    part = _PART.get()
    described = {"kind": kind, **record, **({} if part is None else {PART: part})}
    write_safetensors(tensors, target, {RECORD: to_json(described)})
    return target


@contextmanager
def part_of_run(mark: str) -> Iterator[None]:
    """Write `mark` into every result that is saved inside. `mark_of` reads it, to match a part with its study."""
    token = _PART.set(mark)
    try:
        yield
    finally:
        _PART.reset(token)


def mark_of(path: str | Path) -> str | None:
    """The mark that `part_of_run` wrote into a result; `None` if it was saved without one."""
    with _opened(path, "result") as file:
        in_metadata: str | None = (file.metadata() or {}).get(PART)  # as earlier versions wrote it
        return in_metadata or _record_of(file).get(PART)


def kind_of(path: str | Path) -> str:
    """Kind of a saved result, the name that its class has given it.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a saved result.
    """
    with _opened(path, "result") as file:
        kind = _record_of(file).get("kind")
    if not isinstance(kind, str):
        raise ValueError(f"{path} is not a saved result of diffusion_lens")
    return kind


def load_result(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and record of a saved result; a `ValueError` if the file is incomplete or of another kind."""
    tensors, record = open_result(path, kind)
    return {name: tensor.clone() for name, tensor in tensors.items()}, record


def save_fields(path: str | Path, kind: str, result: Any) -> Path:
    """Write a dataclass in one atomic file: its tensors as tensors, all other fields in the record."""
    return save_result(path, kind, *split_fields(result))


def load_fields(path: str | Path, kind: str, result_type: type[D]) -> D:
    """The dataclass that `save_fields` wrote. Fields that only earlier versions had are ignored."""
    tensors, record = load_result(path, kind)
    return as_dataclass(result_type, {**tensors, **record})


def split_fields(result: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The fields of a dataclass that are tensors, and the others; `as_dataclass` is the inverse."""
    tensors = {name: value.contiguous() for name, value in vars(result).items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in vars(result).items() if name not in tensors}


def as_dataclass(result_type: type[D], saved: Mapping[str, Any]) -> D:
    """An instance with the saved values. JSON stores tuples as lists; this function restores the tuples."""
    annotations = {field.name: field.type for field in fields(cast(Any, result_type))}
    given = {name: value for name, value in saved.items() if name in annotations}
    tuples = {name: tuple(value) for name, value in given.items() if get_origin(annotations[name]) is tuple}
    return result_type(**{**given, **tuples})


def open_result(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Like `load_result`, but the tensors are memory-mapped: they stay on disk until they are used."""
    with _opened(path, kind) as file:
        record = _record_of(file)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if record.pop("kind", None) != kind:
        raise ValueError(f"{path} is not a saved {kind}")
    record.pop(PART, None)
    return tensors, record


@contextmanager
def _opened(path: str | Path, kind: str) -> Iterator[Any]:
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(f"there is no saved {kind} at {source}")
    if source.is_dir():
        raise ValueError(f"{source} is a folder; name the file of the saved {kind} in it")
    try:
        with safe_open(source, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{source} is not a complete safetensors file: {error}. It was truncated or changed: delete it and save "
            "the result again, or name another file or folder"
        ) from error


def _record_of(file: Any) -> dict[str, Any]:
    record: dict[str, Any] = from_json((file.metadata() or {}).get(RECORD, "{}"))
    return record


def read_run(path: Path) -> dict[str, Any]:
    """The description of a study or a training run, from the `run.json` of its folder.

    Raises:
        ValueError: The file contains no such description.
    """
    try:
        run = restore_numbers(read_json(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} does not describe a study or a training run: {error}. {_START_AGAIN}") from error
    if not isinstance(run, dict):
        raise ValueError(
            f"{path} does not describe a study or a training run: it contains {str(run)[:40]} and not a mapping. "
            f"{_START_AGAIN}"
        )
    return run


def require_same_run(saved: Mapping[str, Any], current: Mapping[str, Any], where: str) -> None:
    """Raise a `ValueError` with the differences, unless two records describe the same study or training run.

    Entries in `NOT_COMPARED` may differ.

    Args:
        saved: Record of the results that exist already.
        current: Record of this call.
        where: Where `saved` comes from, for the message.
    """
    saved, current = {"hooks": {}, **saved}, {"hooks": {}, **current}
    require_identified(saved, where)
    # Records of earlier versions have no entry for modules, so modules are compared only if both records have one.
    if "modules" not in saved or "modules" not in current:
        saved, current = (
            {key: value for key, value in record.items() if key != "modules"} for record in (saved, current)
        )
    compared = [name for name in {**saved, **current} if name not in NOT_COMPARED]
    if different := "; ".join(differences(saved, current, compared)):
        raise ValueError(
            f"{where} was made with other settings, data, weights or hooks ({different}). Continue with the same ones, "
            "or name another folder"
        )


def require_same_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Like `require_same_run`, but before the model is loaded: compares only `settings` with what the folder records.

    A folder without `run.json` passes.
    """
    record = folder / "run.json"
    if record.exists():
        saved = read_run(record)
        require_same_run(saved, {**saved, **as_json(settings)}, str(folder))


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], compared: Iterable[str]) -> list[str]:
    """One text for each of the `compared` entries that differs; values of `saved` are "there", of `current` "here"."""
    return [
        _difference(name, saved.get(name), current.get(name))
        for name in compared
        if saved.get(name) != current.get(name)
    ]


def _difference(name: str, saved: Any, current: Any) -> str:
    """Text on one entry that differs. For a long mapping, such as facts by id, it names the first keys only."""
    if not isinstance(saved, dict) or not isinstance(current, dict):
        return f"{name}: {saved!r} there, {current!r} here"
    keys = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
    if name == "hooks":
        changes = [f"{key} {_hooks(saved.get(key))} there, {_hooks(current.get(key))} here" for key in keys[:3]]
        return f"hooks: {'; '.join(changes)}{'; ...' if len(keys) > 3 else ''}"
    if all(not isinstance(mapping.get(key), dict) for key in keys for mapping in (saved, current)):
        return "; ".join(f"{name}.{key}: {saved.get(key)!r} there, {current.get(key)!r} here" for key in keys)
    return f"{name}: {len(keys)} differ ({', '.join(map(repr, keys[:3]))}{', ...' if len(keys) > 3 else ''})"


def _hooks(attached: Any) -> str:
    return f"[{', '.join(attached)}]" if attached else "none"


def one_line(result: Any) -> str:
    """A result in one line, for `__repr__`: its class, model, numbers, and tensors by axis and size."""
    record = getattr(result, "record", {})  # The results of one fact have no record.
    shown = [shown_model(record)] if record.get("model") else []
    for field in fields(result):
        value = getattr(result, field.name)
        if isinstance(value, Tensor):
            axes = getattr(field.type, "dim_str", "").replace("*", "").split()
            named = len(axes) == value.dim()
            sizes = [f"{axis} {size}" for axis, size in zip(axes, value.shape, strict=True)] if named else value.shape
            shown.append(f"{field.name} [{', '.join(map(str, sizes))}]")
        elif isinstance(value, float):
            shown.append(f"{field.name} {value:.3g}")
    more = ["..."] if len(shown) > _SHOWN_PARTS else []
    return f"{type(result).__name__}({', '.join(shown[:_SHOWN_PARTS] + more)})"
