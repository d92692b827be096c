"""LLaDA-MoE-7B-A1B: a mixture of experts in Llama's layout, bidirectional, read in place.

Its published config has the model type of the dense LLaDA, so the number of experts tells the two apart. The router's
scores are a softmax over all experts; those of the chosen experts weigh their outputs and are not divided by their sum.
The bias of the experts is a part of the scores. The code ignores the keys of other routers that its config has.
Source: ZHZisZZ/dllm `dllm/pipelines/llada/models/modeling_lladamoe.py`.
"""

from __future__ import annotations

from typing import Any

from weight_conversion.architecture import MOST_LAYERS, Architecture, Experts, check_count
from weight_conversion.families.family import (
    ROPE,
    SIZES,
    Config,
    ConfigKeys,
    by_model_type,
    mask_token_id,
    read_sizes,
    rotary_dim,
    write_sizes,
)
from weight_conversion.families.qwen import QWEN3_RULES
from weight_conversion.key_map import Rule

EXPERTS = {"num_experts": "n_experts", "num_experts_per_tok": "n_chosen", "expert_intermediate_size": "d_expert"}
KEYS = ConfigKeys(
    family="llada_moe",
    counts={**SIZES, "dense_intermediate_size": "d_mlp", **dict.fromkeys(EXPERTS)},
    optional={"num_key_value_heads": "n_key_value_heads", "shared_expert_intermediate_size": None},
    flags={"moe_router_enable_expert_bias": None, "qk_layernorm": "qk_norm", "tie_word_embeddings": "tied"},
    read=(
        *("clip_qkv", "mask_token_id", "model_type", "moe_layer_freq", "rms_norm_eps"),
        *ROPE,
    ),
    fixed={"attention_bias": (False, None), "hidden_act": ("silu",)},
    ignored=(
        *("moe_router_score_function", "norm_topk_prob", "output_router_logits", "routed_scaling_factor"),
        *("router_num_group", "router_topk_group"),
    ),
)

_LAYER = "model.layers.{i}."
RULES = (
    *QWEN3_RULES,
    Rule(_LAYER + "mlp.gate.weight", ("blocks.{i}.mlp.router.weight",)),
    Rule(_LAYER + "mlp.expert_bias", ("blocks.{i}.mlp.router.bias",)),
    *(
        Rule(f"{_LAYER}{theirs}.{part}_proj.weight", (f"blocks.{{i}}.mlp.{ours}.{part}.weight",))
        for theirs, ours in (("mlp.experts.{e}", "experts.{e}"), ("shared_expert", "shared"))
        for part in ("gate", "up", "down")
    ),
)


def read_llada_moe(config: Config) -> Architecture:
    has_bias = bool(config.get("moe_router_enable_expert_bias", False))
    sizes = {
        **read_sizes(KEYS, config, eps=1e-5, turns_a_part=True),
        "name": str(config.get("_name_or_path") or "llada_moe"),
    }
    return Architecture(
        family="llada_moe",
        **sizes,
        attention_dir="bidirectional",
        readout="in_place",
        mask_token_id=mask_token_id(config, "llada_moe"),
        rotary_dim=rotary_dim(config, sizes["d_head"]),
        qkv_clip=config.get("clip_qkv"),
        experts=Experts(
            **{field: config[key] for key, field in EXPERTS.items()},
            layers=_layers_with_experts(config),
            d_shared=config.get("shared_expert_intermediate_size"),
            router_bias=has_bias,
            bias_weighs=has_bias,
        ),
    )


def _layers_with_experts(config: Config) -> tuple[bool, ...]:
    """For each layer, whether it has experts: 1 or 0 in `moe_layer_freq`, or one number for all layers."""
    given, n_layers = config.get("moe_layer_freq", 1), config["num_hidden_layers"]
    check_count("num_hidden_layers", n_layers, MOST_LAYERS)
    by_layer = list(given) if isinstance(given, list | tuple) else [given] * n_layers
    if len(by_layer) != n_layers or any(each not in (0, 1) for each in by_layer):
        raise ValueError(f"moe_layer_freq={given!r} must give 0 or 1 for each of the {n_layers} layers")
    return tuple(map(bool, by_layer))


def write_llada_moe(a: Architecture) -> dict[str, Any]:
    if (experts := a.experts) is None:
        raise ValueError("the llada_moe format describes mixtures of experts, and this model has none")
    return {
        "model_type": "llada",
        "architectures": ["LLaDAMoEModelLM"],
        **write_sizes(KEYS, a),
        **{key: getattr(experts, field) for key, field in EXPERTS.items()},
        "shared_expert_intermediate_size": experts.d_shared,
        "moe_layer_freq": list(map(int, experts.layers)),
        "moe_router_enable_expert_bias": experts.router_bias,
        "moe_router_score_function": "softmax",
        "mask_token_id": a.mask_token_id,
        "partial_rotary_factor": 1 if a.rotary_dim is None else a.rotary_dim / a.d_head,
        "clip_qkv": a.qkv_clip,
        **KEYS.written,
    }


FAMILIES = (
    by_model_type(
        KEYS,
        RULES,
        read_llada_moe,
        write_llada_moe,
        dict.fromkeys(("llada", "lladamoe"), "LLaDAMoEModel(LM)?"),
        where=lambda config: bool(config.get("num_experts")),
        options=("mask_token_id",),
    ),
)
