"""Results on disk, and what they remember of how they came about.

One safetensors file a result: its tensors, and a JSON record in the metadata. Nothing is pickled.
"""

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.identity import identity_of, require_identified
from diffusion_lens.identity import weights_sha256 as weights_sha256
from weight_conversion import as_json, from_json, read_json, restore_numbers, to_json, write_safetensors

D = TypeVar("D")  # a dataclass
RECORD = "diffusion_lens"
PART = "diffusion_lens.part"
NOT_COMPARED = ("device", "versions")
NETWORK = ("model", "dtype", "weights_sha256", "hooks", "modules", "tokenizer_sha256")

_START_ANEW = "Delete the folder's files and start the run anew, or name another folder"
_TOKENIZERS: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
_PART: ContextVar[str | None] = ContextVar("_PART", default=None)


def provenance(model: nn.Module, cfg: DiffusionConfig) -> dict[str, Any]:
    """Model, its weights, tokenizer, hooks and modules, dtype, device, versions: what results record beside settings.

    Weights, hooks and modules are those at the beginning of the run (`identity.begins_run`).
    """
    found = identity_of(model)
    return {
        "model": cfg.model_name,
        "architecture": cfg.architecture.to_dict(),
        "weights_sha256": found.weights_sha256,
        "tokenizer_sha256": tokenizer_sha256(getattr(model, "tokenizer", None), cfg.default_prepend_bos),
        "hooks": found.hooks,
        "modules": found.modules,
        "dtype": str(cfg.dtype).removeprefix("torch."),
        "device": str(cfg.device),
        "versions": {
            "diffusion-lens": version("diffusion-lens"),
            "transformer-lens": version("transformer-lens"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def network_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a record, which network it is of: for the record of a result that stands on another one."""
    return {name: record.get(name) for name in NETWORK}


def tokenizer_sha256(tokenizer: Any, prepend_bos: bool) -> str | None:
    """SHA-256 of a fast tokenizer, its normaliser, added tokens and all, and of whether texts begin with BOS."""
    if tokenizer is None:
        return None
    # Of a large vocabulary the text takes a tenth of a second, so it is taken again only if tokens were added.
    held = _TOKENIZERS.get(tokenizer)
    if held is None or held[0] != len(tokenizer):
        text = tokenizer.backend_tokenizer.to_str()
        held = _TOKENIZERS[tokenizer] = (len(tokenizer), hashlib.sha256(text.encode()).hexdigest())
    return hashlib.sha256(f"{held[1]} {prepend_bos}".encode()).hexdigest()


def save_result(path: str | Path, kind: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
    """Write a result in one atomic file; `load_result` is the inverse."""
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ValueError(f"results are safetensors files; {target} should end in .safetensors")
    part = _PART.get()
    metadata = {RECORD: to_json({"kind": kind, **record})} | ({} if part is None else {PART: part})
    write_safetensors(tensors, target, metadata)
    return target


@contextmanager
def part_of_run(mark: str) -> Iterator[None]:
    """Results saved inside carry `mark`, by which `mark_of` tells the parts of one run from those of another."""
    token = _PART.set(mark)
    try:
        yield
    finally:
        _PART.reset(token)


def mark_of(path: str | Path) -> str | None:
    """The mark under which a result was saved, if it was."""
    with _opened(path, "result") as file:
        mark: str | None = (file.metadata() or {}).get(PART)
    return mark


def kind_of(path: str | Path) -> str:
    """What a saved result is, as the class that saved it names it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no saved result.
    """
    with _opened(path, "result") as file:
        kind = _record_of(file).get("kind")
    if not isinstance(kind, str):
        raise ValueError(f"{path} does not hold a saved result")
    return kind


def load_result(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and record of a saved result; a `ValueError` when the file is cut off or of another kind."""
    tensors, record = open_result(path, kind)
    return {name: tensor.clone() for name, tensor in tensors.items()}, record


def save_fields(path: str | Path, kind: str, result: Any) -> Path:
    """Write a dataclass in one atomic file: its tensors as tensors, all else in the record."""
    return save_result(path, kind, *split_fields(result))


def load_fields(path: str | Path, kind: str, result_type: type[D]) -> D:
    """The dataclass that `save_fields` wrote. Fields of earlier versions that this one no longer has are left out."""
    tensors, record = load_result(path, kind)
    return as_dataclass(result_type, {**tensors, **record})


def split_fields(result: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The fields of a dataclass that are tensors, and the others; `as_dataclass` is the inverse."""
    tensors = {name: value.contiguous() for name, value in vars(result).items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in vars(result).items() if name not in tensors}


def as_dataclass(result_type: type[D], saved: Mapping[str, Any]) -> D:
    """An instance with the saved values; JSON keeps tuples as lists, and here they become tuples again."""
    annotations = {field.name: field.type for field in fields(cast(Any, result_type))}
    given = {name: value for name, value in saved.items() if name in annotations}
    tuples = {name: tuple(value) for name, value in given.items() if get_origin(annotations[name]) is tuple}
    return result_type(**{**given, **tuples})


def open_result(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As `load_result`, but the tensors stay on disk until they are used (memory-mapped)."""
    with _opened(path, kind) as file:
        record = _record_of(file)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if record.pop("kind", None) != kind:
        raise ValueError(f"{path} does not hold a saved {kind}")
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
            f"{source} is not a whole safetensors file: {error}. It was cut off or changed: delete it and save the "
            "result again, or name another file or folder"
        ) from error


def _record_of(file: Any) -> dict[str, Any]:
    record: dict[str, Any] = from_json((file.metadata() or {}).get(RECORD, "{}"))
    return record


def read_run(path: Path) -> dict[str, Any]:
    """What a folder's run is, from its `run.json`.

    Raises:
        ValueError: not the description of a run.
    """
    try:
        run = restore_numbers(read_json(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} does not describe a run: {error}. {_START_ANEW}") from error
    if not isinstance(run, dict):
        raise ValueError(f"{path} does not describe a run: it holds {str(run)[:40]}, no mapping. {_START_ANEW}")
    return run


def require_same_run(made: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> None:
    """Raise a `ValueError` that says how two runs differ, unless they are one; `NOT_COMPARED` may differ."""
    made, asked = {"hooks": {}, **made}, {"hooks": {}, **asked}
    require_identified(made, where)
    if "modules" not in made or "modules" not in asked:  # a record of before it held them
        made, asked = ({key: held for key, held in each.items() if key != "modules"} for each in (made, asked))
    compared = [name for name in {**made, **asked} if name not in NOT_COMPARED]
    if different := "; ".join(differences(made, asked, compared)):
        raise ValueError(
            f"{where} holds another run ({different}). The parts of one run share settings, data, weights and hooks: "
            "go on with it as it was begun, or name another folder"
        )


def require_same_settings(folder: Path, asked: Mapping[str, Any]) -> None:
    """`require_same_run` before the model is there: of the run that a folder holds, if any, the settings in `asked`."""
    record = folder / "run.json"
    if record.exists():
        made = read_run(record)
        require_same_run(made, {**made, **as_json(asked)}, str(folder))


def differences(made: Mapping[str, Any], asked: Mapping[str, Any], compared: Iterable[str]) -> list[str]:
    """How two records differ in the settings named, a text for each that does; `made` is "there", `asked` is "here"."""
    return [
        _difference(name, made.get(name), asked.get(name)) for name in compared if made.get(name) != asked.get(name)
    ]


def _difference(name: str, made: Any, asked: Any) -> str:
    """One setting in which two runs differ; of long records, such as facts by id, the first names."""
    if not isinstance(made, dict) or not isinstance(asked, dict):
        return f"{name}: {made!r} there, {asked!r} here"
    keys = [key for key in {**made, **asked} if made.get(key) != asked.get(key)]
    if name == "hooks":
        told = [f"{key} {_hooks(made.get(key))} there, {_hooks(asked.get(key))} here" for key in keys[:3]]
        return f"hooks: {'; '.join(told)}{'; ...' if len(keys) > 3 else ''}"
    if all(not isinstance(each.get(key), dict) for key in keys for each in (made, asked)):
        return "; ".join(f"{name}.{key}: {made.get(key)!r} there, {asked.get(key)!r} here" for key in keys)
    return f"{name}: {len(keys)} differ ({', '.join(map(repr, keys[:3]))}{', ...' if len(keys) > 3 else ''})"


def _hooks(attached: Any) -> str:
    return f"[{', '.join(attached)}]" if attached else "none"
