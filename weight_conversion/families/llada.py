"""LLaDA-8B (Base, Instruct, 1.5) and iLLaDA-8B, dense: Llama's blocks under OLMo's names, bidirectional, read in place.

Two kinds of tensors are called ff_out: in a block it is the MLP's down-projection, at the top level the head. The
defaults of the class differ from the published config (rope_theta, lengths), so every number is read from config.json.
Sources: ML-GSAI/LLaDA; ZHZisZZ/dllm `dllm/pipelines/llada/models/modeling_llada.py`.
"""

from __future__ import annotations

from typing import Any

from weight_conversion.architecture import Architecture
from weight_conversion.families.family import Config, ConfigKeys, by_model_type, mask_token_id, rotary_base
from weight_conversion.key_map import Rule

KEYS = ConfigKeys(
    family="llada",
    counts={
        "d_model": "d_model",
        "max_sequence_length": "n_ctx",
        "mlp_hidden_size": "d_mlp",
        "n_heads": "n_heads",
        "n_layers": "n_layers",
        "vocab_size": "d_vocab",
    },
    optional={"embedding_size": "d_vocab", "n_kv_heads": "n_key_value_heads"},
    flags={"rope_full_precision": None, "weight_tying": "tied"},
    read=("mask_token_id", "model_type", "rms_norm_eps", "rope_theta"),
    fixed={
        "activation_type": ("silu",),
        "alibi": (False,),
        "attention_layer_norm": (False,),
        "bias_for_layer_norm": (False, None),
        "block_group_size": (1,),
        "block_type": ("llama",),
        "include_bias": (False,),
        "include_qkv_bias": (False,),
        "input_emb_norm": (False,),
        "layer_norm_type": ("rms",),
        "layer_norm_with_affine": (True,),
        "multi_query_attention": (None, False),
        "rope": (True,),
        "scale_logits": (False,),
    },
    ignored=(
        *("alibi_bias_max", "attention_layer_norm_with_affine", "flash_attention", "mlp_ratio", "precision"),
        *("init_cutoff_factor", "init_device", "init_fn", "init_std"),
    ),
)

_BLOCK = "model.transformer.blocks.{i}."
RULES = (
    Rule("model.transformer.wte.weight", ("embed.weight",)),
    Rule(_BLOCK + "attn_norm.weight", ("blocks.{i}.ln1.weight",)),
    Rule(_BLOCK + "q_proj.weight", ("blocks.{i}.attn.q.weight",)),
    Rule(_BLOCK + "k_proj.weight", ("blocks.{i}.attn.k.weight",)),
    Rule(_BLOCK + "v_proj.weight", ("blocks.{i}.attn.v.weight",)),
    Rule(_BLOCK + "attn_out.weight", ("blocks.{i}.attn.o.weight",)),
    Rule(_BLOCK + "ff_norm.weight", ("blocks.{i}.ln2.weight",)),
    Rule(_BLOCK + "ff_proj.weight", ("blocks.{i}.mlp.gate.weight",)),
    Rule(_BLOCK + "up_proj.weight", ("blocks.{i}.mlp.up.weight",)),
    Rule(_BLOCK + "ff_out.weight", ("blocks.{i}.mlp.down.weight",)),
    Rule("model.transformer.ln_f.weight", ("ln_final.weight",)),
    Rule("model.transformer.ff_out.weight", ("unembed.weight",)),
)


def read_llada(config: Config) -> Architecture:
    return Architecture(
        family="llada",
        **KEYS.fields(config),
        attention_dir="bidirectional",
        readout="in_place",
        mask_token_id=mask_token_id(config, "llada"),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        rotary_base=rotary_base(config),
        rotation="float32" if config.get("rope_full_precision") in (True, None) else "activation",
    )


def write_llada(a: Architecture) -> dict[str, Any]:
    return {
        "model_type": "llada",
        **KEYS.of(a),
        "mask_token_id": a.mask_token_id,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rotary_base,
        "rope_full_precision": a.rotation == "float32",
        **KEYS.written,
    }


FAMILIES = (
    by_model_type(
        KEYS,
        RULES,
        read_llada,
        write_llada,
        {"llada": "LLaDAModel(LM)?"},
        where=lambda config: not config.get("num_experts"),  # mixtures of experts have the same model type
        options=("mask_token_id",),
    ),
)
