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
    SIZES,
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
    counts={**SIZES, "intermediate_size": "d_mlp"},
    optional={"head_dim": "d_head", "num_key_value_heads": "n_key_value_heads"},
    flags={"attention_bias": "o_bias", "mlp_bias": "mlp_bias", "tie_word_embeddings": "tied"},
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
    # Llama-2's config does not give rope_theta.
    architecture = read_decoder(KEYS, config, masked=masked, default_base=10000.0)
    return replace(architecture, qkv_bias=architecture.o_bias, readout="shifted" if causal else "in_place")


def read_decoder(
    keys: ConfigKeys,
    config: Config,
    *,
    masked: bool | None = None,
    by_blocks: bool = False,
    default_base: float | None = None,
    **flags: Any,
) -> Architecture:
    """The architecture from the keys that Llama's config shares with its descendants', and from further fields.

    Args:
        masked: Whether the model is a masked diffusion model; by default, if its model type begins with "a2d-".
        by_blocks: Whether the model was trained by blocks for certain, so that the config must give the block size.
    """
    if masked is None:
        masked = str(config["model_type"]).startswith(DIFFUSION)
    causal, diffusion = f"model_type={config['model_type']!r}", f"model_type='{DIFFUSION}{keys.family}'"
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
        family=keys.family,
        readout="in_place" if masked else "shifted",
        mask_token_id=mask_token_id(config, keys.family) if masked else None,
        **sees,
        **read_sizes(keys, config, eps=1e-6, base=default_base),
        **flags,
    )


def write_llama(architecture: Architecture) -> dict[str, Any]:
    a = architecture
    written = write_decoder(KEYS, a)
    if a.has_mask and a.readout == "shifted":
        written |= {"model_type": "llama", "mode": "bidirectional"}
    return written


def write_decoder(keys: ConfigKeys, a: Architecture) -> dict[str, Any]:
    """The inverse of `read_decoder`, with the keys of transformers 4, which transformers 5 also reads."""
    # Models trained by blocks have the same model type; a block_size of null tells them apart.
    diffusion = {"mask_token_id": a.mask_token_id, "block_size": a.causal_block} if a.has_mask else {}
    model_type = f"{DIFFUSION if a.has_mask else ''}{keys.family}"
    return {"model_type": model_type, **write_sizes(keys, a), "hidden_act": "silu", **diffusion}


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
