"""Dream-7B and DiffuCoder: Qwen2's network without its causal mask, with logits shifted by one.

Row i - 1 of the logits predicts the token at position i, as in the causal model from which Dream was trained. Sources:
DreamLM/Dream and ZHZisZZ/dllm `dllm/pipelines/dream/models/modeling_dream.py`, `generation_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.families import llama, qwen2
from weight_conversion.families.family import Config, Family

MODEL_TYPE = "Dream"

KEYS = replace(qwen2.KEYS, family="dream", read=tuple(key for key in qwen2.KEYS.read if key != "block_size"))


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return config is not None and config.get("model_type") == MODEL_TYPE


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    assert config is not None
    KEYS.check(config)
    return replace(llama.read_decoder(config, "dream", masked=True, qkv_bias=True), readout="shifted")


def write_config(architecture: Architecture) -> dict[str, Any]:
    return {**llama.write_decoder(architecture, "dream"), "model_type": MODEL_TYPE}


FAMILY = Family(
    name="dream",
    rules=llama.RULES,
    recognises=recognises,
    read_architecture=read_architecture,
    write_config=write_config,
    config_file="config.json",
    options=("mask_token_id",),
    classes={MODEL_TYPE: "Dream(Base)?Model"},
)
