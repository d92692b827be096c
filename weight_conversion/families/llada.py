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
    counts=("d_model", "max_sequence_length", "mlp_hidden_size", "n_heads", "n_layers", "vocab_size"),
    optional=("embedding_size", "n_kv_heads"),
    flags=("rope_full_precision", "weight_tying"),
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
        *("embedding_dropout", "init_cutoff_factor", "init_device", "init_fn", "init_std", "residual_dropout"),
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
    rows = config.get("embedding_size") or config["vocab_size"]
    return Architecture(
        family="llada",
        name=str(config.get("_name_or_path") or "llada"),
        n_layers=config["n_layers"],
        d_model=config["d_model"],
        n_heads=config["n_heads"],
        n_key_value_heads=config.get("n_kv_heads") or config["n_heads"],
        d_head=config["d_model"] // config["n_heads"],
        d_mlp=config["mlp_hidden_size"],
        d_vocab=rows,
        d_vocab_out=rows,
        n_ctx=config["max_sequence_length"],
        attention_dir="bidirectional",
        readout="in_place",
        mask_token_id=mask_token_id(config, "llada"),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        rotary_base=rotary_base(config),
        rotation="float32" if config.get("rope_full_precision") in (True, None) else "activation",
        tied=bool(config.get("weight_tying", False)),
    )


def write_llada(a: Architecture) -> dict[str, Any]:
    return {
        "model_type": "llada",
        "_name_or_path": a.name,
        "d_model": a.d_model,
        "n_layers": a.n_layers,
        "n_heads": a.n_heads,
        "n_kv_heads": a.n_key_value_heads,
        "mlp_hidden_size": a.d_mlp,
        "vocab_size": a.d_vocab,
        "embedding_size": a.d_vocab,
        "max_sequence_length": a.n_ctx,
        "mask_token_id": a.mask_token_id,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rotary_base,
        "rope_full_precision": a.rotation == "float32",
        "weight_tying": a.tied,
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
