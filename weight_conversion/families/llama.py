"""Hugging Face's Llama (TinyLlama, Llama-2 to 3.3), and bidirectional diffusion models of its layout.

The config of "a2d-llama" names such a model. That of DiffuLLaMA (Gong et al. 2024, arXiv 2410.17891) does not: it is a
causal model's, as is Open-dCoder's (`qwen.py`), and `mode="bidirectional"` reads it as the diffusion model, whose
logits are shifted by one as Llama's. With `"is_causal": false`, which is written for these, transformers 5 reads such a
config in both directions too. Stable-DiffCoder (Fan et al. 2026, arXiv 2601.15892) is Llama by blocks, read in place,
under Llama's model type: the name of its class tells. Source: its hub file `modeling_stable_diffcoder.py`.
Queries, keys, values and the output have biases if `attention_bias` is true, the MLP if `mlp_bias` is true. Rotary
tables have the precision of the activations. Source: transformers `models/llama/modeling_llama.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

# Our key of twins whose first token sees only itself; no class of transformers reads it.
CAUSAL_FIRST = "causal_first"
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
        for theirs, ours, parts in (("self_attn", "attn", ("q", "k", "v", "o")), ("mlp", "mlp", ("gate", "up", "down")))
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
    where: Callable[[Config], bool] | None = None,
    written: Mapping[str, Any] | None = None,
    **how: Any,
) -> Family:
    """A family of diffusion models of Llama's layout, from the keys of its config; `how` are arguments of
    `read_decoder`, `written` further keys of its exports."""

    def read(config: Config) -> Architecture:
        return read_decoder(keys, config, masked=True, **how)

    def write(a: Architecture) -> dict[str, Any]:
        return {"model_type": next(iter(classes)), **write_decoder(keys, a), **(written or {})}

    return by_model_type(keys, rules, read, write, classes, options=options, where=where)


def causal_family(
    keys: ConfigKeys, causal_class: str, diffusion_class: str, rules: tuple[Rule, ...] = RULES, **how: Any
) -> Family:
    """A family of causal decoders of Llama's layout, which may also be read in both directions, with their readout, and
    of the diffusion models made from them whose model type begins with "a2d-", with a readout in place."""
    family, keys = keys.family, replace(keys, flags={**keys.flags, CAUSAL_FIRST: None})
    classes = {family: causal_class, DIFFUSION + family: f"{diffusion_class}|{causal_class}"}
    more = {name: how.pop(name) for name in ("ignored", "where") if name in how}

    def read(config: Config) -> Architecture:
        if config["model_type"] != family:
            if "mode" in config:
                raise ValueError(
                    f"mode={config['mode']!r} does not apply to model_type={config['model_type']!r}, which is read in "
                    "one mode only: leave mode= out"
                )
            keys.check(config)  # without "is_causal", which is of a causal model's config only
            return read_decoder(keys, config, masked=True, **how)
        default = "ar" if config.get("is_causal", True) else "bidirectional"
        masked = mode_of(config, family, ("ar", "bidirectional"), default) == "bidirectional"
        return read_decoder(keys, config, masked=masked, readout="shifted", **how)

    def write(a: Architecture) -> dict[str, Any]:
        of_causal = {"mode": "bidirectional", "is_causal": False} if a.has_mask and a.readout == "shifted" else {}
        model_type = family if of_causal or not a.has_mask else DIFFUSION + family
        first = {CAUSAL_FIRST: True} if a.causal_first else {}
        return {"model_type": model_type, **write_decoder(keys, a), **of_causal, **first}

    known = replace(keys, read=(*keys.read, "mode", "is_causal"))
    options = ("block_size", "mode", "mask_token_id")
    return by_model_type(known, rules, read, write, classes, options=options, **more)


def read_decoder(
    keys: ConfigKeys,
    config: Config,
    *,
    masked: bool,
    by_blocks: bool = False,
    default_base: float | None = None,
    **fields: Any,
) -> Architecture:
    """The architecture from the keys that Llama's config shares with its descendants', and from further `fields`.

    By default queries, keys and values have biases where the output has one.

    Args:
        masked: Whether the model is a masked diffusion model.
        by_blocks: Whether the model was trained by blocks for certain, so that the config must give the block size.
    """
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
    if masked and config.get(CAUSAL_FIRST):
        if sees["attention_dir"] != "bidirectional":
            raise ValueError(
                f"the config says {CAUSAL_FIRST}, of a model that sees the whole canvas, and its block_size is "
                f"{config['block_size']!r}: leave block_size= out"
            )
        sees |= {CAUSAL_FIRST: True}
    sizes = read_sizes(keys, config, eps=1e-6, base=default_base)
    read = {"readout": "in_place" if masked else "shifted", "qkv_bias": sizes.get("o_bias", False), **sizes, **sees}
    mask = mask_token_id(config, keys.family) if masked else None
    return Architecture(family=keys.family, mask_token_id=mask, **{**read, **fields})


def write_decoder(keys: ConfigKeys, a: Architecture) -> dict[str, Any]:
    """The inverse of `read_decoder` but for the model type, with the keys of transformers 4, which 5 also reads."""
    # Models trained by blocks have the same model type; a block_size of null tells them apart.
    diffusion = {"mask_token_id": a.mask_token_id, "block_size": a.causal_block} if a.has_mask else {}
    return {**keys.written, **write_sizes(keys, a), **diffusion}


_BY_BLOCKS = "StableDiffcoderForCausalLM"


def _is_by_blocks(config: Config) -> bool:
    return _BY_BLOCKS in str([config.get("architectures"), config.get("auto_map")])


FAMILIES = (
    decoder_family(
        replace(KEYS, family="stable_diffcoder"),
        {"llama": _BY_BLOCKS},
        by_blocks=True,
        default_base=10000.0,
        where=_is_by_blocks,
        written={"architectures": [_BY_BLOCKS]},
    ),
    causal_family(
        KEYS,
        "Llama(Model|ForCausalLM)",
        r"A2DLlama\w*",
        where=lambda config: not _is_by_blocks(config),
        default_base=10000.0,  # Llama-2's config does not give rope_theta
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),  # rotary tables in old checkpoints (Llama-2)
    ),
)
