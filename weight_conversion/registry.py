"""The families, and which one a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Mapping

from weight_conversion.architecture import Shape
from weight_conversion.families import dream, lit_gpt, llada, llama, native, qwen2, qwen3
from weight_conversion.families.family import Config, Family
from weight_conversion.families.unsupported import refuse_unsupported

FAMILIES: dict[str, Family] = {
    room.FAMILY.name: room.FAMILY for room in (native, lit_gpt, llada, dream, llama, qwen2, qwen3)
}


def recognise(config: Config | None, shapes: Mapping[str, Shape], source: str) -> Family:
    """The family of a checkpoint.

    Raises:
        ValueError: it is of a kind that is not supported, though a family may seem to fit (says which), or no family
            knows it (says what was seen of it).
    """
    refuse_unsupported(config, shapes, source)
    for family in FAMILIES.values():
        if family.recognises(config, shapes):
            return family
    if config is not None and "model_type" in config:
        raise ValueError(
            f"{source} is of no known family: its config says model_type={config['model_type']!r}"
            f"{f' and architectures={classes!r}' if (classes := config.get('architectures')) else ''}, and known are "
            f"{', '.join(FAMILIES)}"
        )
    raise ValueError(
        f"{source} is of no known family ({', '.join(FAMILIES)}); its first tensors are {sorted(shapes)[:4]}. "
        "Most formats need their config.json beside the weights; any other has to be converted to one of these first."
    )
