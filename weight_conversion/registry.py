"""The families, and which one a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Mapping

from weight_conversion.architecture import Shape
from weight_conversion.families import lit_gpt, native
from weight_conversion.families.family import Config, Family

FAMILIES: dict[str, Family] = {family.name: family for family in (native.FAMILY, lit_gpt.FAMILY)}


def recognise(config: Config | None, shapes: Mapping[str, Shape], source: str) -> Family:
    """The family of a checkpoint; a `ValueError` with its first tensors when none knows it."""
    for family in FAMILIES.values():
        if family.recognises(config, shapes):
            return family
    raise ValueError(
        f"{source} is of no known family ({', '.join(FAMILIES)}); its first tensors are {sorted(shapes)[:4]}. "
        "A folder written by save_pretrained needs its config.json beside the weights; any other format has to be "
        "converted to one of these first."
    )
