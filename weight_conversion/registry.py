"""The table of families, which are those of every module in `families`, and `recognise`, which finds a checkpoint's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from weight_conversion import families
from weight_conversion.architecture import Shape
from weight_conversion.families.family import IGNORED_KEYS, Config, Family
from weight_conversion.families.kinds import refuse_unsupported

_IN_FOLDER = [import_module(f"{families.__name__}.{each.name}") for each in iter_modules(families.__path__)]
MODULES = tuple(module for module in _IN_FOLDER if hasattr(module, "FAMILIES"))
_FAMILIES: dict[str, Family] = {family.name: family for module in MODULES for family in module.FAMILIES}
FAMILIES = dict(sorted(_FAMILIES.items()))
NAMES = ", ".join(FAMILIES)


def recognise(
    config: Config | None,
    shapes: Mapping[str, Shape],
    source: str,
    config_path: str | None = None,
    beside: Config | None = None,
) -> Family:
    """The family of a checkpoint; the arguments are those of `refuse_unsupported`.

    Raises:
        ValueError: The checkpoint is of an unsupported kind, even if a family seems to fit; no family recognises it; or
            its config names a class of another model type.
    """
    refuse_unsupported(config, shapes, source, config_path, beside)
    for family in FAMILIES.values():
        if family.recognises(config, shapes):
            _check_classes(config or {}, source)
            return family
    if settings := [f"{key}={config[key]!r}" for key in ("model_type", "architectures") if config and config.get(key)]:
        raise ValueError(
            f"{source} is of no known family: its config says {' and '.join(settings)}, and known are {NAMES}. To "
            "add another, see 'Add a family of checkpoints' in the documentation"
        )
    raise ValueError(
        f"{source} is of no known family ({NAMES}); its first tensors are {sorted(shapes)[:4]}. "
        "Most formats need their config.json beside the weights; any other has to be converted to one of these first."
    )


def mode_read(family: str, attention_dir: str) -> str | None:
    """The mode in which a model of this family was read; `None` where each checkpoint is one model."""
    return FAMILIES[family].modes.get(attention_dir) if family in FAMILIES else None


def warn_of_class(config: Config, family: Family, source: str) -> None:
    """Warn if a config names a class of no family."""
    model_type = config.get("model_type")
    unknown = [name for name in _classes_of(config) if model_type in family.classes and not _owners(name)]
    if unknown and "architectures" not in config.get(IGNORED_KEYS, ()):
        warnings.warn(
            f"{source} is read as model_type={model_type!r}, and its config names an unknown class, {unknown[0]!r}, "
            "whose code is not run. If that class computes something else, such as attention in both directions, the "
            f"numbers will be wrong. If not, pass {IGNORED_KEYS}=['architectures'] to end this warning",
            stacklevel=4,
        )


def _classes_of(config: Config) -> list[str]:
    """The names of the classes in a config."""
    classes = config.get("architectures")
    return [str(name) for name in (classes if isinstance(classes, list) else [classes]) if name]


def _owners(name: str) -> list[tuple[str, str]]:
    """The families with a class of this name, each with the model type."""
    return [
        (family.name, owner)
        for family in FAMILIES.values()
        for owner, pattern in family.classes.items()
        if re.fullmatch(pattern, name)
    ]


def _check_classes(config: Config, source: str) -> None:
    """Raise a `ValueError` if a config names a class that belongs to another model type than its own."""
    model_type = config.get("model_type")
    for name in _classes_of(config):
        owners = _owners(name)
        if owners and model_type not in [owner for _, owner in owners]:
            family_name, owner = owners[0]
            raise ValueError(
                f"{source} contradicts itself: its config says model_type={model_type!r}, and architectures="
                f"{config['architectures']!r}, where {name} is a class of model_type={owner!r} (the family "
                f"{family_name}). Models of the two compute different things: correct the one that is wrong in its "
                "config.json, or pass config="
            )
