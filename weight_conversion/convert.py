"""A checkpoint in, plain data out; and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.families import native
from weight_conversion.families.family import Config, Family
from weight_conversion.files import (
    TensorSource,
    open_tensors,
    read_json,
    safetensors_size,
    write_json,
    write_safetensors,
)
from weight_conversion.key_map import KeyMap
from weight_conversion.registry import FAMILIES, recognise


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint: its facts at once, its tensors when asked."""

    architecture: Architecture
    source: TensorSource
    key_map: KeyMap

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in our layout, whole. It may share memory with the file: copy what is to be kept."""
        self._check_repeated()
        return self.key_map.to_ours(self.source.read, most_bytes=sys.maxsize)

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """The same in pieces: a large tensor comes as several, consecutive rows of it, under the same name.

        Who copies each piece to its place before asking for the next never holds more than a few megabytes of the file.
        """
        self._check_repeated()
        return self.key_map.to_ours(self.source.read)

    def _check_repeated(self) -> None:
        self.key_map.check_repeated(self.source.shapes(), self.source.read, str(self.source.path))


def open_checkpoint(path: str | Path, config: str | Path | Config | None = None) -> Checkpoint:
    """Recognise and check a checkpoint.

    Args:
        path: a `.safetensors` or `.pth` file, or a folder with one checkpoint.
        config: the family's config as a path or a mapping. Without it the file that the family keeps beside its
            checkpoint is taken, and without that the architecture is recognised from the tensors' shapes.

    Raises:
        FileNotFoundError: no checkpoint there.
        ValueError: cut off, of no known family, or with missing, unknown or wrongly shaped tensors (named).
    """
    path = Path(path)
    source = open_tensors(path)
    shapes = source.shapes()
    settings, read_from = _given(config) if config is not None else _beside(source.path.parent, shapes)
    family = recognise(settings, shapes, str(path))
    try:
        architecture = family.read_architecture(settings, shapes)
        key_map = KeyMap(family.rules, architecture, family.ignored)
        key_map.check(shapes, str(path))
    except ValueError as error:
        raise ValueError(f"{error} [config: {read_from}]") from error
    return Checkpoint(architecture, source, key_map)


def export(
    tensors: Mapping[str, Tensor], architecture: Architecture, path: str | Path, family: str | None = None
) -> Path:
    """Write `tensors` (our layout) in a family's own format: the inverse of `open_checkpoint`.

    Args:
        path: the `.safetensors` file to write; the family's config goes beside it.
        family: by default the one the architecture came from.

    Raises:
        ValueError: a tensor is missing or misshapen, or the family's config has no words for this architecture.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ValueError(f"{target} should end in .safetensors")
    name = family or architecture.family
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; known are {', '.join(FAMILIES)}")
    key_map = KeyMap(FAMILIES[name].rules, architecture)
    config = _config_of(architecture, FAMILIES[name], key_map)
    write_safetensors(dict(key_map.to_theirs(tensors)), target)
    write_json(config, target.parent / FAMILIES[name].config_file)
    return target


def export_size(architecture: Architecture) -> int:
    """Bytes of the float32 safetensors file that the architecture's own family keeps, to the byte."""
    return safetensors_size(KeyMap(FAMILIES[architecture.family].rules, architecture).their_shapes)


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


def _given(config: str | Path | Config) -> tuple[Config, str]:
    """A config passed by the caller, and how to call it in an error."""
    if isinstance(config, Mapping):
        return config, "the mapping that was passed"
    path = Path(config).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no config file at {path}; pass the path of the checkpoint's JSON config")
    settings = read_json(path)
    if not isinstance(settings, Mapping):
        raise ValueError(f"{path} is not a config: it should hold one JSON object")
    return settings, str(path)


def _beside(folder: Path, shapes: Mapping[str, Shape]) -> tuple[Config | None, str]:
    """The config that the checkpoint's own family keeps beside it, if there is one."""
    for family in FAMILIES.values():
        path = folder / family.config_file
        if path.exists():
            settings, read_from = _given(path)
            if family.recognises(settings, shapes):
                return settings, read_from
    return None, "none was passed or found, so the tensors' shapes were compared with the published sizes"
