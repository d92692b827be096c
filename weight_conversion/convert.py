"""A checkpoint in, plain data out; and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from weight_conversion.architecture import Architecture
from weight_conversion.families.family import Config
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
    """A checked checkpoint: its facts at once, its tensors when asked, one at a time."""

    architecture: Architecture
    source: TensorSource
    key_map: KeyMap

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in our layout. It may share memory with the file: copy what is to be kept."""
        return self.key_map.to_ours(self.source.read)


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
    settings = _read_config(path, config)
    family = recognise(settings, shapes, str(path))
    architecture = family.read_architecture(settings, shapes)
    key_map = KeyMap(family.rules, architecture, family.ignored)
    key_map.check(shapes, str(path))
    return Checkpoint(architecture, source, key_map)


def export(
    tensors: Mapping[str, Tensor], architecture: Architecture, path: str | Path, family: str | None = None
) -> Path:
    """Write `tensors` (our layout) in a family's own format: the inverse of `open_checkpoint`.

    Args:
        path: the `.safetensors` file to write; the family's config goes beside it.
        family: by default the one the architecture came from.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ValueError(f"{target} should end in .safetensors")
    name = family or architecture.family
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; known are {', '.join(FAMILIES)}")
    key_map = KeyMap(FAMILIES[name].rules, architecture)
    write_safetensors(dict(key_map.to_theirs(tensors)), target)
    write_json(FAMILIES[name].write_config(architecture), target.parent / FAMILIES[name].config_file)
    return target


def export_size(architecture: Architecture) -> int:
    """Bytes of the float32 safetensors file that the architecture's own family keeps, to the byte."""
    return safetensors_size(KeyMap(FAMILIES[architecture.family].rules, architecture).their_shapes)


def _read_config(path: Path, config: str | Path | Config | None) -> Config | None:
    if isinstance(config, Mapping):
        return config
    if config is not None:
        settings: Config = read_json(Path(config))
        return settings
    folder = path if path.is_dir() else path.parent
    for family in FAMILIES.values():
        if (folder / family.config_file).exists():
            beside: Config = read_json(folder / family.config_file)
            return beside
    return None
