"""Hugging Face's Llama (TinyLlama, Llama-2 to 3.3), and bidirectional diffusion models of its layout.

The config of "a2d-llama" names such a model. That of DiffuLLaMA (Gong et al. 2024, arXiv 2410.17891) does not: it is a
causal model's, and `mode="bidirectional"` reads it as the diffusion model, whose logits are shifted by one as Llama's.
Queries, keys, values and the output have biases if `attention_bias` is true, the MLP if `mlp_bias` is true. Rotary
tables have the precision of the activations. Source: transformers `models/llama/modeling_llama.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.families.block_sizes import block_size
from weight_conversion.families.family import Config, Family
from weight_conversion.families.hf_config import (
    DIFFUSION,
    ROPE,
    ConfigKeys,
    mask_token_id,
    mode_of,
    rotary_base,
    rotary_scaling,
    write_rotary,
)
from weight_conversion.key_map import Rule

MODEL_TYPES = ("llama", "a2d-llama")

KEYS = ConfigKeys(
    family="llama",
    counts=(
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    ),
    optional=("head_dim", "num_key_value_heads"),
    flags=("attention_bias", "mlp_bias", "tie_word_embeddings"),
    read=("block_size", "mask_token_id", "model_type", "rms_norm_eps", *ROPE),
    fixed={"hidden_act": ("silu",)},
)
# Of a causal model's config only.
_WITH_MODE = replace(KEYS, read=(*KEYS.read, "mode"))

RULES = (
    Rule("model.embed_tokens.weight", ("embed.weight",)),
    Rule("model.layers.{i}.input_layernorm.weight", ("blocks.{i}.ln1.weight",)),
    Rule("model.layers.{i}.self_attn.q_proj.weight", ("blocks.{i}.attn.q.weight",)),
    Rule("model.layers.{i}.self_attn.q_proj.bias", ("blocks.{i}.attn.q.bias",)),
    Rule("model.layers.{i}.self_attn.k_proj.weight", ("blocks.{i}.attn.k.weight",)),
    Rule("model.layers.{i}.self_attn.k_proj.bias", ("blocks.{i}.attn.k.bias",)),
    Rule("model.layers.{i}.self_attn.v_proj.weight", ("blocks.{i}.attn.v.weight",)),
    Rule("model.layers.{i}.self_attn.v_proj.bias", ("blocks.{i}.attn.v.bias",)),
    Rule("model.layers.{i}.self_attn.o_proj.weight", ("blocks.{i}.attn.o.weight",)),
    Rule("model.layers.{i}.self_attn.o_proj.bias", ("blocks.{i}.attn.o.bias",)),
    Rule("model.layers.{i}.post_attention_layernorm.weight", ("blocks.{i}.ln2.weight",)),
    Rule("model.layers.{i}.mlp.gate_proj.weight", ("blocks.{i}.mlp.gate.weight",)),
    Rule("model.layers.{i}.mlp.gate_proj.bias", ("blocks.{i}.mlp.gate.bias",)),
    Rule("model.layers.{i}.mlp.up_proj.weight", ("blocks.{i}.mlp.up.weight",)),
    Rule("model.layers.{i}.mlp.up_proj.bias", ("blocks.{i}.mlp.up.bias",)),
    Rule("model.layers.{i}.mlp.down_proj.weight", ("blocks.{i}.mlp.down.weight",)),
    Rule("model.layers.{i}.mlp.down_proj.bias", ("blocks.{i}.mlp.down.bias",)),
    Rule("model.norm.weight", ("ln_final.weight",)),
    Rule("lm_head.weight", ("unembed.weight",)),
)


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return config is not None and config.get("model_type") in MODEL_TYPES


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    assert config is not None
    causal = config.get("model_type") == "llama"
    (_WITH_MODE if causal else KEYS).check(config)
    masked = not causal or mode_of(config, "llama", ("ar", "bidirectional"), "ar") == "bidirectional"
    biased = bool(config.get("attention_bias", False))
    # Llama-2's config does not give rope_theta.
    architecture = read_decoder(
        config,
        "llama",
        masked=masked,
        default_base=10000.0,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )
    return replace(architecture, readout="shifted") if causal else architecture


def read_decoder(
    config: Config,
    family: str,
    *,
    masked: bool | None = None,
    by_blocks: bool = False,
    default_base: float | None = None,
    **flags: Any,
) -> Architecture:
    """The architecture from the keys that Llama's config shares with its descendants'.

    Args:
        masked: Whether the model is a masked diffusion model; by default, if its model type begins with "a2d-".
        by_blocks: Whether the model was trained by blocks for certain, so that the config must give the block size.
        default_base: Base of the rotary frequencies where the config does not give it.
        flags: Further fields of the architecture.
    """
    if masked is None:
        masked = str(config["model_type"]).startswith(DIFFUSION)
    if not masked and config.get("mask_token_id") is not None:
        raise ValueError(
            f"the config names a causal model, model_type={config['model_type']!r}, and the mask_token_id "
            f"{config['mask_token_id']!r} of a diffusion model: pass it as a mapping with "
            f"model_type='{DIFFUSION}{family}' (bidirectional, no shift), or without the id"
        )
    if not masked and config.get("block_size") is not None:
        raise ValueError(
            f"the config names a causal model, model_type={config['model_type']!r}, and the block_size "
            f"{config['block_size']!r} of a diffusion model: pass it as a mapping with "
            f"model_type='{DIFFUSION}{family}', or without the block_size"
        )
    sees = block_size(config, required=by_blocks) if masked else {"attention_dir": "causal"}
    n_heads, width = config["num_attention_heads"], config["hidden_size"]
    return Architecture(
        family=family,
        name=str(config.get("_name_or_path") or config["model_type"]),
        n_layers=config["num_hidden_layers"],
        d_model=width,
        n_heads=n_heads,
        n_key_value_heads=config.get("num_key_value_heads") or n_heads,
        d_head=config.get("head_dim") or width // n_heads,
        d_mlp=config["intermediate_size"],
        d_vocab=config["vocab_size"],
        d_vocab_out=config["vocab_size"],
        n_ctx=config["max_position_embeddings"],
        readout="in_place" if masked else "shifted",
        mask_token_id=mask_token_id(config, family) if masked else None,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rotary_base=rotary_base(config, default_base),
        rotary_scaling=rotary_scaling(config),
        rotation="activation",
        tied=bool(config.get("tie_word_embeddings", False)),
        **sees,
        **flags,
    )


def write_config(architecture: Architecture) -> dict[str, Any]:
    a = architecture
    written = {**write_decoder(a, "llama"), "attention_bias": a.o_bias, "mlp_bias": a.mlp_bias}
    if a.has_mask and a.readout == "shifted":
        written |= {"model_type": MODEL_TYPES[0], "mode": "bidirectional"}
    return written


def write_decoder(architecture: Architecture, model_type: str) -> dict[str, Any]:
    """The inverse of `read_decoder`, with the keys of transformers 4, which transformers 5 also reads."""
    a = architecture
    masked = a.has_mask
    return {
        "model_type": f"{DIFFUSION if masked else ''}{model_type}",
        "_name_or_path": a.name,
        "hidden_size": a.d_model,
        "intermediate_size": a.d_mlp,
        "num_hidden_layers": a.n_layers,
        "num_attention_heads": a.n_heads,
        "num_key_value_heads": a.n_key_value_heads,
        "head_dim": a.d_head,
        "vocab_size": a.d_vocab,
        "max_position_embeddings": a.n_ctx,
        "rms_norm_eps": a.norm_eps,
        **write_rotary(a),
        "tie_word_embeddings": a.tied,
        "hidden_act": "silu",
        # Models trained by blocks have the same model type; a block_size of null tells them apart.
        **({"mask_token_id": a.mask_token_id, "block_size": a.causal_block} if masked else {}),
    }


FAMILY = Family(
    name="llama",
    rules=RULES,
    recognises=recognises,
    read_architecture=read_architecture,
    write_config=write_config,
    config_file="config.json",
    options=("block_size", "mode", "mask_token_id"),
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),  # rotary tables in old checkpoints (Llama-2)
    classes={"llama": "Llama(Model|ForCausalLM)", "a2d-llama": r"A2DLlama\w*|Llama(Model|ForCausalLM)"},
)
