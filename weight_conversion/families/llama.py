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

from weight_conversion.architecture import Architecture
from weight_conversion.families.family import (
    DIFFUSION,
    ROPE,
    SIZES,
    Config,
    ConfigKeys,
    Family,
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


def decoder_family(
    keys: ConfigKeys,
    classes: Mapping[str, str],
    rules: tuple[Rule, ...] = RULES,
    *,
    options: tuple[str, ...] = ("block_size", "mask_token_id"),
    **how: Any,
) -> Family:
    """A family of decoders of Llama's layout, from the keys of its config; `how` are arguments of `read_decoder`.

    The first model type in `classes` is written for a causal model, the last for a masked diffusion model.
    """

    def read(config: Config) -> Architecture:
        return read_decoder(keys, config, **how)

    def write(a: Architecture) -> dict[str, Any]:
        mode = {"mode": keys.written["mode"]} if "mode" in keys.fixed else {}
        return {"model_type": list(classes)[-1 if a.has_mask else 0], **write_decoder(keys, a), **mode}

    return by_model_type(keys, rules, read, write, classes, options=options)


def read_llama(config: Config) -> Architecture:
    causal = config.get("model_type") == "llama"
    if not causal:
        KEYS.check(config)  # without "mode", which is of a causal model's config only
    masked = not causal or mode_of(config, "llama", ("ar", "bidirectional"), "ar") == "bidirectional"
    # Llama-2's config does not give rope_theta.
    shift = "shifted" if causal else "in_place"
    return read_decoder(KEYS, config, masked=masked, default_base=10000.0, readout=shift)


def read_decoder(
    keys: ConfigKeys,
    config: Config,
    *,
    masked: bool | None = None,
    by_blocks: bool = False,
    default_base: float | None = None,
    **fields: Any,
) -> Architecture:
    """The architecture from the keys that Llama's config shares with its descendants', and from further `fields`.

    By default queries, keys and values have biases where the output has one.

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
    sizes = read_sizes(keys, config, eps=1e-6, base=default_base)
    read = {"readout": "in_place" if masked else "shifted", "qkv_bias": sizes.get("o_bias", False), **sizes, **sees}
    mask = mask_token_id(config, keys.family) if masked else None
    return Architecture(family=keys.family, mask_token_id=mask, **{**read, **fields})


def write_llama(architecture: Architecture) -> dict[str, Any]:
    a = architecture
    of_causal = {"mode": "bidirectional"} if a.has_mask and a.readout == "shifted" else {}
    model_type = "llama" if of_causal or not a.has_mask else f"{DIFFUSION}llama"
    return {"model_type": model_type, **write_decoder(KEYS, a), **of_causal}


def write_decoder(keys: ConfigKeys, a: Architecture) -> dict[str, Any]:
    """The inverse of `read_decoder` but for the model type, with the keys of transformers 4, which 5 also reads."""
    # Models trained by blocks have the same model type; a block_size of null tells them apart.
    diffusion = {"mask_token_id": a.mask_token_id, "block_size": a.causal_block} if a.has_mask else {}
    return {**write_sizes(keys, a), "hidden_act": "silu", **diffusion}


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
