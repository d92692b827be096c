"""What a family has to say; `registry.py` lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.key_map import Rule

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint.

    `recognises(config, shapes)` says whether a checkpoint is of this family; `read_architecture(config, shapes)` reads
    it (config `None`: from the tensors alone); `write_config` is the inverse, for export. `ignored` are patterns of
    tensors that carry nothing, `config_file` is the name under which the family keeps its config. `classes` are the
    model types of the family, each with a pattern of the class names that its configs list under `architectures`.
    """

    name: str
    rules: tuple[Rule, ...]
    recognises: Callable[[Config | None, Mapping[str, Shape]], bool]
    read_architecture: Callable[[Config | None, Mapping[str, Shape]], Architecture]
    write_config: Callable[[Architecture], dict[str, Any]]
    config_file: str
    ignored: tuple[str, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)


def require_count(key: str, count: object, family: str) -> None:
    """Raise a `ValueError` unless a number of a config is a whole one, at least 1: no float, no text, no true."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{key}={count!r} in the {family} config must be a whole number, at least 1")
