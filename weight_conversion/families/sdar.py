"""SDAR: block diffusion made from Qwen3 (Cheng et al. 2025, arXiv 2510.06303).

Tensors and network are those of Qwen3; a position sees its block and the blocks before it, and predicts its own token.
The published configs say neither the number of positions in a block nor the id of [MASK] (`block_sizes.py`). Source:
JetAstra/SDAR `training/model/SDAR-4B-Chat/modeling_sdar.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.families import llama, qwen3
from weight_conversion.families.family import Config, Family

MODEL_TYPE = "sdar"

KEYS = replace(
    qwen3.KEYS,
    family=MODEL_TYPE,
    ignored=(
        *qwen3.KEYS.ignored,
        "attn_implementation",
        "block_causal_prompt",
        "debug",
        "ep_size",
        "fuse_cross_entropy",
        "micro_forward",
        "skip_checkpoint",
        "use_deepep",
    ),
)


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return config is not None and config.get("model_type") == MODEL_TYPE


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    assert config is not None
    KEYS.check(config)
    biased = bool(config.get("attention_bias", False))
    return llama.read_decoder(
        config, MODEL_TYPE, masked=True, by_blocks=True, qkv_bias=biased, o_bias=biased, qk_norm=True
    )


def write_config(architecture: Architecture) -> dict[str, Any]:
    return {**qwen3.write_config(architecture), "model_type": MODEL_TYPE}


FAMILY = Family(
    name=MODEL_TYPE,
    rules=qwen3.RULES,
    recognises=recognises,
    read_architecture=read_architecture,
    write_config=write_config,
    config_file="config.json",
    options=("block_size", "mask_token_id"),
    classes={MODEL_TYPE: "SDAR(Model|ForCausalLM)"},
)
