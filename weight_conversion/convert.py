"""A checkpoint in, plain data out; and back."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.families import native
from weight_conversion.families.family import Config, Family
from weight_conversion.families.unsupported import warn_if_silent
from weight_conversion.files import (
    CHECKPOINT_SUFFIXES,
    INDEX,
    WHOLE,
    TensorSource,
    indexed_files,
    open_tensors,
    safetensors_size,
    write_safetensors,
)
from weight_conversion.json_files import read_json_object, write_json
from weight_conversion.key_map import PIECE_BYTES, KeyMap, all_finite
from weight_conversion.registry import FAMILIES, recognise
from weight_conversion.whole_files import renamed_when_whole


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint: its facts at once, its tensors when asked."""

    architecture: Architecture
    source: TensorSource
    key_map: KeyMap

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in our layout, whole. It may share memory with the file: copy what is to be kept."""
        return self._stream(sys.maxsize)

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """The same in pieces: a large tensor comes as several, consecutive rows of it, under the same name.

        Who copies each piece to its place before asking for the next never holds more than a few megabytes of the file.
        """
        return self._stream(PIECE_BYTES)

    def _stream(self, most_bytes: int) -> Iterator[tuple[str, Tensor]]:
        self.key_map.check_repeated(self.source.shapes(), self.source.read, str(self.source.path))
        not_finite: dict[str, None] = {}

        def read(name: str, start: int, stop: int) -> Tensor:
            rows = self.source.read(name, start, stop)
            if not all_finite(rows):
                not_finite[name] = None
            return rows

        yield from self.key_map.to_ours(read, most_bytes)
        if not_finite:
            shown = ", ".join([*not_finite][:4])
            more = f" and {len(not_finite) - 4} more" if len(not_finite) > 4 else ""
            warnings.warn(
                f"{self.source.path} holds weights that are NaN or infinite, in {shown}{more}: what the model computes "
                "with them is not a number either. The training may have diverged, or the file is damaged: fetch it "
                "again, or take an earlier checkpoint",
                stacklevel=2,
            )


def open_checkpoint(path: str | Path, config: str | Path | Config | None = None) -> Checkpoint:
    """Recognise and check a checkpoint.

    Args:
        path: a `.safetensors` or `.pth` file, or a folder with one checkpoint.
        config: the family's config as a path or a mapping. Without it the file that the family keeps beside its
            checkpoint is taken, and without that the architecture is recognised from the tensors' shapes.

    Raises:
        FileNotFoundError: no checkpoint there.
        ValueError: cut off, of no known family, or with missing, unknown or wrongly shaped tensors (named).

    Warns:
        UserWarning: nothing tells whether a model made from a causal one was trained by blocks.
    """
    path = Path(path)
    source = open_tensors(path)
    shapes = source.shapes()
    settings, read_from = _given(config) if config is not None else _beside(source.path.parent, shapes)
    config_path = str(Path(config).expanduser()) if isinstance(config, str | Path) else None
    beside = None if config is None else _described_by_others(source.path.parent)
    family = recognise(settings, shapes, str(path), config_path, beside)
    warn_if_silent(settings or {}, str(path), config_path)
    try:
        architecture = family.read_architecture(settings, shapes)
        # The table is written out for each layer, so the number of layers is held against the file first.
        if architecture.n_layers > len(shapes):
            raise ValueError(
                f"{path} holds {len(shapes)} tensors, too few for the {architecture.n_layers} layers of its config. "
                "Pass the config that belongs to this checkpoint"
            )
        key_map = KeyMap(family.rules, architecture, family.ignored)
        key_map.check(shapes, str(path))
    except ValueError as error:
        raise ValueError(f"{error} [config: {read_from}]") from error
    return Checkpoint(architecture, source, key_map)


def export(
    tensors: Mapping[str, Tensor], architecture: Architecture, path: str | Path, family: str | None = None
) -> Path:
    """Write `tensors` (our layout) in a family's own format: the inverse of `open_checkpoint`.

    A folder that holds other weights keeps them readable: their config stays as it is if it says the same, and the
    export is refused if it does not.

    Args:
        path: the `.safetensors` file to write; the family's config goes beside it.
        family: by default the one the architecture came from.

    Raises:
        ValueError: a tensor is missing or misshapen, the family's config has no words for this architecture, or the
            folder holds other weights that would be hidden, lose a shard or get a config that is not theirs. Nothing is
            written then.
    """
    target = Path(path)
    layout, key_map, config = _plan(architecture, target, family)
    theirs = dict(key_map.to_theirs(tensors))
    beside = target.parent / layout.config_file
    if _other_weights(target) and beside.exists():
        write_safetensors(theirs, target)
        return target
    # The config waits under its temporary name until the weights stand: the two change together.
    with renamed_when_whole(beside) as config_part:
        write_json(config, config_part)
        write_safetensors(theirs, target)
    return target


def check_export(architecture: Architecture, path: str | Path, family: str | None = None) -> None:
    """Raise the `ValueError` that `export` would, as far as it needs no tensors to tell."""
    _plan(architecture, Path(path), family)


def export_size(architecture: Architecture) -> int:
    """Bytes of the float32 safetensors file that the architecture's own family keeps, to the byte."""
    return safetensors_size(KeyMap(FAMILIES[architecture.family].rules, architecture).their_shapes)


def _plan(architecture: Architecture, target: Path, family: str | None) -> tuple[Family, KeyMap, dict[str, Any]]:
    """The format of an export, its names of the tensors, and its config."""
    if target.suffix != ".safetensors":
        raise ValueError(f"{target} should end in .safetensors")
    name = family or architecture.family
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; known are {', '.join(FAMILIES)}")
    key_map = KeyMap(FAMILIES[name].rules, architecture)
    config = _config_of(architecture, FAMILIES[name], key_map)
    beside = target.parent / FAMILIES[name].config_file
    others = _other_weights(target)
    if INDEX in others:
        _check_beside_shards(target)
    if others and beside.exists() and not _says_the_same(beside, architecture, FAMILIES[name], key_map):
        raise ValueError(
            f"{target.parent} holds other weights ({', '.join(others[:3])}), whose {beside.name} the export "
            "would replace by another: name another folder. Nothing was written"
        )
    return FAMILIES[name], key_map, config


def _config_of(architecture: Architecture, family: Family, key_map: KeyMap) -> dict[str, Any]:
    """The family's config for an architecture; read back, it must say the same."""
    config = family.write_config(architecture)
    meant, said = asdict(architecture), asdict(family.read_architecture(config, key_map.their_shapes))
    lost = [
        f"{key}={meant[key]!r} (would become {said[key]!r})"
        for key in meant
        if key != "family" and meant[key] != said[key]
    ]
    if lost:
        raise ValueError(f"the {family.name} format cannot say {', '.join(lost)}: pass family='{native.FORMAT}'")
    return config


def _other_weights(target: Path) -> list[str]:
    """The files of weights beside `target`."""
    folder = target.parent
    names = sorted(file.name for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
    return [name for name in names if name != target.name and (name == INDEX or name.endswith(CHECKPOINT_SUFFIXES))]


def _check_beside_shards(target: Path) -> None:
    """Raise a `ValueError` if a file at `target` would hide the shards of its folder, or be taken for one of them."""
    if target.name == WHOLE:
        harm = f"which {WHOLE} beside it would hide"
    elif target.name in indexed_files(target.parent / INDEX).values():
        harm = f"of which {target.name} is a part"
    else:
        return
    raise ValueError(
        f"{target.parent} holds a checkpoint in shards ({INDEX}), {harm}: name another folder. Nothing was written"
    )


def _says_the_same(path: Path, architecture: Architecture, family: Family, key_map: KeyMap) -> bool:
    """Whether the config at `path` describes this architecture, under whatever name."""
    try:
        said = family.read_architecture(read_json_object(path), key_map.their_shapes)
    except ValueError:
        return False
    return replace(said, name=architecture.name, family=architecture.family) == architecture


def require_config(path: Path) -> None:
    """Raise a `FileNotFoundError` where a config was promised and no file is."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no config file at {path}; pass the path of the checkpoint's JSON config")


def _given(config: str | Path | Config) -> tuple[Config, str]:
    """A config passed by the caller, and how to call it in an error."""
    if isinstance(config, Mapping):
        return config, "the mapping that was passed"
    path = Path(config).expanduser()
    require_config(path)
    return read_json_object(path), str(path)


def _described_by_others(folder: Path) -> Config | None:
    """The config.json of a folder whose checkpoint is given another config; `None` if it cannot be read."""
    try:
        return read_json_object(folder / "config.json")
    except (OSError, ValueError):
        return None


def _beside(folder: Path, shapes: Mapping[str, Shape]) -> tuple[Config | None, str]:
    """The config that the checkpoint's own family keeps beside it, if there is one; else another kind's.

    A config that no family takes says what the checkpoint is, where its tensors do not.
    """
    foreign: tuple[Config, str] | None = None
    for family in FAMILIES.values():
        path = folder / family.config_file
        if path.exists():
            settings, read_from = _given(path)
            if family.recognises(settings, shapes):
                return settings, read_from
            foreign = (settings, read_from) if "model_type" in settings else foreign
    if foreign and not any(family.recognises(None, shapes) for family in FAMILIES.values()):
        return foreign
    return None, "none was passed or found, so the tensors' shapes were compared with the published sizes"
