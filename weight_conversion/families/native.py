"""The family of our own layout, which `HookedDiffusionTransformer.save_pretrained` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.families.family import Config, Family
from weight_conversion.key_map import Rule

FORMAT = "diffusion_lens"


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return config is not None and config.get("format") == FORMAT and any(name in shapes for name in _NAMES)


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    if config is None or not isinstance(config.get("architecture"), Mapping):
        raise ValueError(f"a {FORMAT} folder needs its config.json with 'architecture', a mapping; save it again")
    return Architecture.from_dict(config["architecture"])


def write_config(architecture: Architecture) -> dict[str, Any]:
    return {"format": FORMAT, "architecture": architecture.to_dict()}


_NAMES = (
    "embed.weight",
    "pos_embed.weight",
    *(
        f"{part}.{kind}"
        for part in (
            *(f"blocks.{{i}}.{norm}" for norm in ("ln1", "ln2", "modulation", "mlp.router")),
            *(f"blocks.{{i}}.attn.{matrix}" for matrix in ("q", "k", "v", "o")),
            *(
                f"blocks.{{i}}.{mlp}.{matrix}"
                for mlp in ("mlp", "mlp.experts.{e}", "mlp.shared")
                for matrix in ("gate", "up", "down")
            ),
            *("ln_final", "unembed", "time_embed.hidden", "time_embed.out", "final_modulation"),
        )
        for kind in ("weight", "bias")
    ),
    "blocks.{i}.attn.q_norm.weight",
    "blocks.{i}.attn.k_norm.weight",
)
FAMILIES = (
    Family(
        FORMAT,
        tuple(Rule(name, (name,)) for name in _NAMES),
        recognises,
        read_architecture,
        write_config,
        config_file="config.json",
    ),
)
