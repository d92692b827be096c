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
    "blocks.{i}.ln1.weight",
    "blocks.{i}.ln1.bias",
    "blocks.{i}.attn.q.weight",
    "blocks.{i}.attn.q.bias",
    "blocks.{i}.attn.k.weight",
    "blocks.{i}.attn.k.bias",
    "blocks.{i}.attn.v.weight",
    "blocks.{i}.attn.v.bias",
    "blocks.{i}.attn.q_norm.weight",
    "blocks.{i}.attn.k_norm.weight",
    "blocks.{i}.attn.o.weight",
    "blocks.{i}.attn.o.bias",
    "blocks.{i}.ln2.weight",
    "blocks.{i}.ln2.bias",
    "blocks.{i}.modulation.weight",
    "blocks.{i}.modulation.bias",
    "blocks.{i}.mlp.router.weight",
    "blocks.{i}.mlp.router.bias",
    *(
        f"blocks.{{i}}.{mlp}.{part}.{kind}"
        for mlp in ("mlp", "mlp.experts.{e}", "mlp.shared")
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    ),
    "ln_final.weight",
    "ln_final.bias",
    "unembed.weight",
    "unembed.bias",
    "pos_embed.weight",
    "time_embed.hidden.weight",
    "time_embed.hidden.bias",
    "time_embed.out.weight",
    "time_embed.out.bias",
    "final_modulation.weight",
    "final_modulation.bias",
)

FAMILY = Family(
    name=FORMAT,
    rules=tuple(Rule(name, (name,)) for name in _NAMES),
    recognises=recognises,
    read_architecture=read_architecture,
    write_config=write_config,
    config_file="config.json",
)
