"""The family of our own layout, which `HookedDiffusionTransformer.save_pretrained` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.families.family import Config, Family
from weight_conversion.key_map import OUR_NAMES

FORMAT = "diffusion_lens"


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return (
        config is not None
        and config.get("format") == FORMAT
        and bool({"embed.weight", "ln_final.weight"} & set(shapes))
    )


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    if config is None or not isinstance(config.get("architecture"), Mapping):
        raise ValueError(f"a {FORMAT} folder needs its config.json with 'architecture', a mapping; save it again")
    return Architecture.from_dict(config["architecture"])


def write_config(architecture: Architecture) -> dict[str, Any]:
    return {"format": FORMAT, "architecture": architecture.to_dict()}


FAMILIES = (Family(FORMAT, OUR_NAMES, recognises, read_architecture, write_config, config_file="config.json"),)
