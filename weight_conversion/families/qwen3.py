"""Hugging Face's Qwen3 (dense), and the diffusion models made from it by removing the causal mask ("a2d-qwen3").

Llama's layout, with a norm on each head's queries and keys. Source: transformers `models/qwen3/modeling_qwen3.py`; for
the diffusion models ZHZisZZ/dllm (`model_type` "a2d-qwen3", bidirectional, no shift).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.families import llama, qwen2
from weight_conversion.families.family import Config, Family
from weight_conversion.key_map import Rule

MODEL_TYPES = ("qwen3", "a2d-qwen3")

KEYS = replace(qwen2.KEYS, family="qwen3", flags=(*qwen2.KEYS.flags, "attention_bias"))

RULES = (
    *llama.RULES,
    Rule("model.layers.{i}.self_attn.q_norm.weight", ("blocks.{i}.attn.q_norm.weight",)),
    Rule("model.layers.{i}.self_attn.k_norm.weight", ("blocks.{i}.attn.k_norm.weight",)),
)


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return config is not None and config.get("model_type") in MODEL_TYPES


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    assert config is not None
    KEYS.check(config)
    biased = bool(config.get("attention_bias", False))
    return llama.read_decoder(config, "qwen3", qkv_bias=biased, o_bias=biased, qk_norm=True)


def write_config(architecture: Architecture) -> dict[str, Any]:
    return {**llama.write_decoder(architecture, "qwen3"), "attention_bias": architecture.o_bias}


FAMILY = Family(
    name="qwen3",
    rules=RULES,
    recognises=recognises,
    read_architecture=read_architecture,
    write_config=write_config,
    config_file="config.json",
    options=("block_size", "mask_token_id"),
    classes={"qwen3": "Qwen3(Model|ForCausalLM)", "a2d-qwen3": r"A2DQwen3\w*|Qwen3(Model|ForCausalLM)"},
)
