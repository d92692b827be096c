"""Hugging Face's Qwen2 (and Qwen2.5), and the diffusion models made from it by removing the causal mask ("a2d-qwen2").

Llama's layout with biases on queries, keys and values. Source: transformers `models/qwen2/modeling_qwen2.py`; for the
diffusion models ZHZisZZ/dllm (`model_type` "a2d-qwen2", bidirectional, no shift).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.families import llama
from weight_conversion.families.family import Config, Family

MODEL_TYPES = ("qwen2", "a2d-qwen2")

# Sliding windows, if they were used, would begin at layer max_window_layers.
KEYS = replace(
    llama.KEYS,
    family="qwen2",
    flags=("tie_word_embeddings",),
    fixed={**llama.KEYS.fixed, "use_sliding_window": (False,), "use_mrope": (False,)},
    ignored=("max_window_layers", "sliding_window", "layer_types"),
)


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return config is not None and config.get("model_type") in MODEL_TYPES


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    assert config is not None
    KEYS.check(config)
    return llama.read_decoder(config, "qwen2", qkv_bias=True)


def write_config(architecture: Architecture) -> dict[str, Any]:
    return llama.write_decoder(architecture, "qwen2")


FAMILY = Family(
    name="qwen2",
    rules=llama.RULES,
    recognises=recognises,
    read_architecture=read_architecture,
    write_config=write_config,
    config_file="config.json",
    options=("block_size", "mask_token_id"),
    classes={"qwen2": "Qwen2(Model|ForCausalLM)", "a2d-qwen2": r"A2DQwen2\w*|Qwen2(Model|ForCausalLM)"},
)
