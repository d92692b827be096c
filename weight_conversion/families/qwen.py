"""Hugging Face's Qwen2 and Qwen3 (dense), and the diffusion models made from them: a2d, Dream and SDAR.

Qwen2 (and Qwen2.5) has Llama's layout with biases on queries, keys and values; Qwen3 has a norm on each head's queries
and keys instead. Sources: transformers `models/qwen2/modeling_qwen2.py`, `models/qwen3/modeling_qwen3.py`.

- "a2d-qwen2" and "a2d-qwen3" are the same networks without the causal mask and without a shift (ZHZisZZ/dllm).
- Dream-7B and DiffuCoder are Qwen2 without its causal mask, with logits shifted by one: row i - 1 predicts the token at
  position i, as in the causal model from which Dream was trained. Sources: DreamLM/Dream and ZHZisZZ/dllm
  `dllm/pipelines/dream/models/modeling_dream.py`, `generation_utils.py`.
- SDAR is block diffusion made from Qwen3 (Cheng et al. 2025, arXiv 2510.06303): a position sees its block and the
  blocks before it, and predicts its own token. The published configs say neither the number of positions in a block nor
  the id of [MASK] (`kinds.py`). Source: JetAstra/SDAR `training/model/SDAR-4B-Chat/modeling_sdar.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from weight_conversion.architecture import Architecture
from weight_conversion.families.family import Config, by_model_type
from weight_conversion.families.llama import KEYS, RULES, read_decoder, write_decoder
from weight_conversion.key_map import Rule

# Sliding windows, if they were used, would begin at layer max_window_layers.
QWEN2_KEYS = replace(
    KEYS,
    family="qwen2",
    flags={"tie_word_embeddings": "tied"},
    fixed={**KEYS.fixed, "use_sliding_window": (False,), "use_mrope": (False,)},
    ignored=("max_window_layers", "sliding_window", "layer_types"),
)
QWEN3_KEYS = replace(QWEN2_KEYS, family="qwen3", flags={**QWEN2_KEYS.flags, "attention_bias": "o_bias"})
DREAM_KEYS = replace(QWEN2_KEYS, family="dream", read=tuple(key for key in QWEN2_KEYS.read if key != "block_size"))
SDAR_KEYS = replace(
    QWEN3_KEYS,
    family="sdar",
    ignored=(
        *(*QWEN3_KEYS.ignored, "attn_implementation", "block_causal_prompt", "debug", "ep_size"),
        *("fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep"),
    ),
)
QWEN3_RULES = (
    *RULES,
    Rule("model.layers.{i}.self_attn.q_norm.weight", ("blocks.{i}.attn.q_norm.weight",)),
    Rule("model.layers.{i}.self_attn.k_norm.weight", ("blocks.{i}.attn.k_norm.weight",)),
)


def read_qwen2(config: Config) -> Architecture:
    return read_decoder(QWEN2_KEYS, config, qkv_bias=True)


def read_dream(config: Config) -> Architecture:
    return replace(read_decoder(DREAM_KEYS, config, masked=True, qkv_bias=True), readout="shifted")


def read_qwen3(config: Config) -> Architecture:
    return read_decoder(QWEN3_KEYS, config, qkv_bias=bool(config.get("attention_bias")), qk_norm=True)


def read_sdar(config: Config) -> Architecture:
    biased = bool(config.get("attention_bias"))
    return read_decoder(SDAR_KEYS, config, masked=True, by_blocks=True, qkv_bias=biased, qk_norm=True)


write_qwen2, write_qwen3 = (partial(write_decoder, keys) for keys in (QWEN2_KEYS, QWEN3_KEYS))


def write_dream(a: Architecture) -> dict[str, Any]:
    return {**write_decoder(DREAM_KEYS, a), "model_type": "Dream"}


def write_sdar(a: Architecture) -> dict[str, Any]:
    return {**write_decoder(SDAR_KEYS, a), "model_type": "sdar"}


_OPTIONS = ("block_size", "mask_token_id")
_QWEN2 = {"qwen2": "Qwen2(Model|ForCausalLM)", "a2d-qwen2": r"A2DQwen2\w*|Qwen2(Model|ForCausalLM)"}
_QWEN3 = {"qwen3": "Qwen3(Model|ForCausalLM)", "a2d-qwen3": r"A2DQwen3\w*|Qwen3(Model|ForCausalLM)"}
_DREAM = {"Dream": "Dream(Base)?Model"}
_SDAR = {"sdar": "SDAR(Model|ForCausalLM)"}
FAMILIES = (
    by_model_type(DREAM_KEYS, RULES, read_dream, write_dream, _DREAM, options=("mask_token_id",)),
    by_model_type(QWEN2_KEYS, RULES, read_qwen2, write_qwen2, _QWEN2, options=_OPTIONS),
    by_model_type(QWEN3_KEYS, QWEN3_RULES, read_qwen3, write_qwen3, _QWEN3, options=_OPTIONS),
    by_model_type(SDAR_KEYS, QWEN3_RULES, read_sdar, write_sdar, _SDAR, options=_OPTIONS),
)
