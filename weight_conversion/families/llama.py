"""Hugging Face's Llama (TinyLlama, Llama-2 to 3.3), and bidirectional diffusion models of its layout.

The config of "a2d-llama" names such a model. That of DiffuLLaMA (Gong et al. 2024, arXiv 2410.17891) does not: it is a
causal model's, and `mode="bidirectional"` reads it as the diffusion model, whose logits are shifted by one as Llama's.
Queries, keys, values and the output have biases if `attention_bias` is true, the MLP if `mlp_bias` is true. Rotary
tables have the precision of the activations. Source: transformers `models/llama/modeling_llama.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture
from weight_conversion.families.family import (
    DIFFUSION,
    ROPE,
    Config,
    ConfigKeys,
    by_model_type,
    mask_token_id,
    mode_of,
    read_sizes,
    write_sizes,
)
from weight_conversion.families.kinds import block_size
from weight_conversion.key_map import Rule

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

_LAYER, _BLOCK = "model.layers.{i}.", "blocks.{i}."
RULES = (
    Rule("model.embed_tokens.weight", ("embed.weight",)),
    Rule(_LAYER + "input_layernorm.weight", (_BLOCK + "ln1.weight",)),
    Rule(_LAYER + "post_attention_layernorm.weight", (_BLOCK + "ln2.weight",)),
    *(
        Rule(f"{_LAYER}{theirs}.{part}_proj.{kind}", (f"{_BLOCK}{ours}.{part}.{kind}",))
        for theirs, ours, parts in (
            ("self_attn", "attn", ("q", "k", "v", "o")),
            ("mlp", "mlp", ("gate", "up", "down")),
        )
        for part in parts
        for kind in ("weight", "bias")
    ),
    Rule("model.norm.weight", ("ln_final.weight",)),
    Rule("lm_head.weight", ("unembed.weight",)),
)


def read_llama(config: Config) -> Architecture:
    causal = config.get("model_type") == "llama"
    if not causal:
        KEYS.check(config)  # without "mode", which is of a causal model's config only
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
    causal, diffusion = f"model_type={config['model_type']!r}", f"model_type='{DIFFUSION}{family}'"
    if not masked and config.get("mask_token_id") is not None:
        raise ValueError(
            f"the config names a causal model, {causal}, and the mask_token_id {config['mask_token_id']!r} of a "
            f"diffusion model: pass it as a mapping with {diffusion} (bidirectional, no shift), or without the id"
        )
    if not masked and config.get("block_size") is not None:
        raise ValueError(
            f"the config names a causal model, {causal}, and the block_size {config['block_size']!r} of a diffusion "
            f"model: pass it as a mapping with {diffusion}, or without the block_size"
        )
    sees = block_size(config, required=by_blocks) if masked else {"attention_dir": "causal"}
    return Architecture(
        family=family,
        d_mlp=config["intermediate_size"],
        readout="in_place" if masked else "shifted",
        mask_token_id=mask_token_id(config, family) if masked else None,
        **read_sizes(config, eps=1e-6, base=default_base),
        **sees,
        **flags,
    )


def write_llama(architecture: Architecture) -> dict[str, Any]:
    a = architecture
    written = {**write_decoder(a, "llama"), "attention_bias": a.o_bias, "mlp_bias": a.mlp_bias}
    if a.has_mask and a.readout == "shifted":
        written |= {"model_type": "llama", "mode": "bidirectional"}
    return written


def write_decoder(architecture: Architecture, model_type: str) -> dict[str, Any]:
    """The inverse of `read_decoder`, with the keys of transformers 4, which transformers 5 also reads."""
    a = architecture
    masked = a.has_mask
    return {
        "model_type": f"{DIFFUSION if masked else ''}{model_type}",
        **write_sizes(a),
        "intermediate_size": a.d_mlp,
        "head_dim": a.d_head,
        "hidden_act": "silu",
        # Models trained by blocks have the same model type; a block_size of null tells them apart.
        **({"mask_token_id": a.mask_token_id, "block_size": a.causal_block} if masked else {}),
    }


FAMILIES = (
    by_model_type(
        replace(KEYS, read=(*KEYS.read, "mode")),
        RULES,
        read_llama,
        write_llama,
        {"llama": "Llama(Model|ForCausalLM)", "a2d-llama": r"A2DLlama\w*|Llama(Model|ForCausalLM)"},
        options=("block_size", "mode", "mask_token_id"),
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),  # rotary tables in old checkpoints (Llama-2)
    ),
)
