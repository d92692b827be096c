"""Hugging Face's Qwen2 and Qwen3 (dense), and the diffusion models made from them: a2d, Dream and SDAR.

Qwen2 (and Qwen2.5) has Llama's layout with biases on queries, keys and values; Qwen3 has a norm on each head's queries
and keys instead. Sources: transformers `models/qwen2/modeling_qwen2.py`, `models/qwen3/modeling_qwen3.py`.

- "a2d-qwen2" and "a2d-qwen3" are the same networks without the causal mask and without a shift (ZHZisZZ/dllm).
- Dream-7B and DiffuCoder are Qwen2 without its causal mask, with logits shifted by one: row i - 1 predicts the token at
  position i, as in the causal model from which Dream was trained. Sources: DreamLM/Dream and ZHZisZZ/dllm
  `dllm/pipelines/dream/models/modeling_dream.py`, `generation_utils.py`.
- Open-dCoder is Qwen2.5-Coder without its causal mask, read in the row before, under a causal model's config:
  `mode="bidirectional"` reads it. Source: pengzhangzhi/Open-dLLM `veomni/models/transformers/qwen2/modeling_qwen2.py`.
- Fast-dLLM v2 is block diffusion made from Qwen2.5 (Wu et al. 2025, arXiv 2509.26328): a position sees its block and
  the blocks before it, and logits stay shifted, so that a finished block predicts the first token of the next. The id
  of [MASK] is not in the config. Source: the hub model's `modeling.py`.
- SDAR is block diffusion made from Qwen3 (Cheng et al. 2025, arXiv 2510.06303): a position sees its block and the
  blocks before it, and predicts its own token. The published configs say neither the number of positions in a block nor
  the id of [MASK], and I-DLM and RCD have the same model type (`kinds.py`). Source: JetAstra/SDAR
  `training/model/SDAR-4B-Chat/modeling_sdar.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture
from weight_conversion.families.family import Config, by_model_type
from weight_conversion.families.llama import KEYS, RULES, causal_family, decoder_family, read_decoder, write_decoder
from weight_conversion.key_map import Rule

# Sliding windows, if they were used, would begin at layer max_window_layers.
QWEN2_KEYS = replace(
    KEYS,
    family="qwen2",
    flags={"tie_word_embeddings": "tied"},
    fixed={**KEYS.fixed, "use_mrope": (False,)},
    ignored=("max_window_layers", "sliding_window", "layer_types"),
)
QWEN3_KEYS = replace(QWEN2_KEYS, family="qwen3", flags={**QWEN2_KEYS.flags, "attention_bias": "o_bias"})
DREAM_KEYS = replace(QWEN2_KEYS, family="dream", read=tuple(key for key in QWEN2_KEYS.read if key != "block_size"))
SDAR_KEYS = replace(
    QWEN3_KEYS,
    family="sdar",
    fixed={**QWEN3_KEYS.fixed, "mode": ("block",)},  # other networks have its model type (`kinds.py`)
    ignored=(
        *(*QWEN3_KEYS.ignored, "block_causal_prompt", "debug", "ep_size"),
        *("fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep"),
    ),
)
FAST_DLLM_KEYS = replace(
    QWEN2_KEYS,
    family="fast_dllm",
    counts={**QWEN2_KEYS.counts, "bd_size": None},
    read=tuple(key for key in QWEN2_KEYS.read if key != "block_size"),
)
QWEN3_RULES = (
    *RULES,
    Rule("model.layers.{i}.self_attn.q_norm.weight", ("blocks.{i}.attn.q_norm.weight",)),
    Rule("model.layers.{i}.self_attn.k_norm.weight", ("blocks.{i}.attn.k_norm.weight",)),
)


def read_fast_dllm(config: Config) -> Architecture:
    by_blocks = {**config, "block_size": config["bd_size"]}
    return read_decoder(FAST_DLLM_KEYS, by_blocks, masked=True, by_blocks=True, readout="shifted", qkv_bias=True)


def write_fast_dllm(a: Architecture) -> dict[str, Any]:
    written = write_decoder(FAST_DLLM_KEYS, a)
    return {"model_type": "Fast_dLLM_Qwen", "bd_size": written.pop("block_size"), **written}


FAMILIES = (
    by_model_type(
        FAST_DLLM_KEYS,
        RULES,
        read_fast_dllm,
        write_fast_dllm,
        {"Fast_dLLM_Qwen": r"Fast_dLLM_Qwen\w+"},
        options=("mask_token_id",),
    ),
    decoder_family(
        DREAM_KEYS, {"Dream": "Dream(Base)?Model"}, readout="shifted", qkv_bias=True, options=("mask_token_id",)
    ),
    causal_family(QWEN2_KEYS, "Qwen2(Model|ForCausalLM)", r"A2DQwen2\w*", qkv_bias=True),
    causal_family(QWEN3_KEYS, "Qwen3(Model|ForCausalLM)", r"A2DQwen3\w*", QWEN3_RULES, qk_norm=True),
    decoder_family(
        SDAR_KEYS,
        {"sdar": "SDAR(Model|ForCausalLM)"},
        QWEN3_RULES,
        by_blocks=True,
        qk_norm=True,
        options=("mode", "block_size", "mask_token_id"),
    ),
)
