"""LLaDA2.0 and LLaDA2.1: a mixture of experts that writes block after block, read in place.

Queries, keys and values are one projection, the first dimensions of each head are rotated, and the first layers have a
dense MLP. The experts' scores are a sigmoid of logits in float32. A bias is added to them for the choice alone, which
takes the best groups of experts first; the weights of the chosen are divided by their sum and scaled. The shared
experts are one MLP of their joint width. The published configs give neither the number of positions in a block nor the
id of [MASK]. Source: inclusionAI/dFactory `models/llada2_moe/modeling_llada2_moe.py`.
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
from weight_conversion.families.kinds import block_size
from weight_conversion.key_map import Rule, Stacked

MODEL_TYPE = "llada2_moe"
EXPERTS = {
    "num_experts": "n_experts",
    "num_experts_per_tok": "n_chosen",
    "moe_intermediate_size": "d_expert",
    "n_group": "n_groups",
    "topk_group": "n_chosen_groups",
}
KEYS = ConfigKeys(
    family="llada2",
    counts={
        **SIZES,
        "num_key_value_heads": "n_key_value_heads",
        "intermediate_size": "d_mlp",
        **dict.fromkeys(EXPERTS),
    },
    optional={"head_dim": "d_head"},
    flags={"tie_word_embeddings": "tied"},
    read=(
        *("block_size", "mask_token_id", "model_type", "rms_norm_eps", "rotary_dim"),
        *("first_k_dense_replace", "num_shared_experts", "routed_scaling_factor"),
        *ROPE,
    ),
    fixed={
        "delete_token_id": (None,),
        "hidden_act": ("silu",),
        "moe_router_enable_expert_bias": (True,),
        "norm_head": (False,),
        "norm_softmax": (False,),
        "norm_topk_prob": (True,),
        "router_dtype": ("fp32",),
        "score_function": ("sigmoid",),
        "split_token_id": (None,),
        "use_bias": (False,),
        "use_qk_norm": (True,),
        "use_qkv_bias": (False,),
        "use_rmsnorm": (True,),
        "using_split_qkv_in_self_attention": (False,),
    },
    ignored=("max_window_layers", "output_router_logits", "sliding_window"),
)

_LAYER, _BLOCK = "model.layers.{i}.", "blocks.{i}."
RULES = (
    Rule("model.word_embeddings.weight", ("embed.weight",)),
    Rule(_LAYER + "input_layernorm.weight", (_BLOCK + "ln1.weight",)),
    Rule(
        _LAYER + "attention.query_key_value.weight",
        tuple(f"{_BLOCK}attn.{part}.weight" for part in ("q", "k", "v")),
        Stacked(),
    ),
    Rule(_LAYER + "attention.query_layernorm.weight", (_BLOCK + "attn.q_norm.weight",)),
    Rule(_LAYER + "attention.key_layernorm.weight", (_BLOCK + "attn.k_norm.weight",)),
    Rule(_LAYER + "attention.dense.weight", (_BLOCK + "attn.o.weight",)),
    Rule(_LAYER + "post_attention_layernorm.weight", (_BLOCK + "ln2.weight",)),
    Rule(_LAYER + "mlp.gate.weight", (_BLOCK + "mlp.router.weight",)),
    Rule(_LAYER + "mlp.gate.expert_bias", (_BLOCK + "mlp.router.bias",)),
    *(
        Rule(f"{_LAYER}mlp{theirs}.{part}_proj.weight", (f"{_BLOCK}mlp{ours}.{part}.weight",))
        for theirs, ours in (("", ""), (".experts.{e}", ".experts.{e}"), (".shared_experts", ".shared"))
        for part in ("gate", "up", "down")
    ),
    Rule("model.norm.weight", ("ln_final.weight",)),
    Rule("lm_head.weight", ("unembed.weight",)),
)


def read_llada2(config: Config) -> Architecture:
    sizes = read_sizes(KEYS, config, eps=1e-5, turns_a_part=True)
    n_layers = config["num_hidden_layers"]
    check_count("num_hidden_layers", n_layers, MOST_LAYERS)
    d_head = sizes["d_head"]
    n_dense = _number(config, "first_k_dense_replace")
    d_shared = config["moe_intermediate_size"] * _number(config, "num_shared_experts")
    turned = rotary_dim(config, d_head, default=0.5)
    if config.get("rotary_dim", turned or d_head) != (turned or d_head):
        raise ValueError(
            f"rotary_dim={config['rotary_dim']!r} in the llada2 config contradicts its partial_rotary_factor, by which "
            f"{turned or d_head} dimensions of a head are rotated: remove the one that is wrong"
        )
    return Architecture(
        family="llada2",
        **sizes,
        readout="in_place",
        mask_token_id=mask_token_id(config, "llada2"),
        rotary_dim=turned,
        qk_norm=True,
        experts=Experts(
            **{field: config[key] for key, field in EXPERTS.items()},
            layers=tuple(layer >= n_dense for layer in range(n_layers)),
            d_shared=d_shared or None,
            router="sigmoid",
            router_dtype="float32",
            router_bias=True,
            # The authors' code leaves the weight of a single expert as it is.
            normalised=config["num_experts_per_tok"] > 1,
            scale=config.get("routed_scaling_factor", 2.5),
        ),
        **block_size(config, required=True),
    )


def _number(config: Config, key: str) -> int:
    """A whole number that may be 0, which an absent or null key means too."""
    number = config.get(key) or 0
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{key}={config[key]!r} in the llada2 config must be a whole number, at least 0")
    return number


def write_llada2(a: Architecture) -> dict[str, Any]:
    if (experts := a.experts) is None:
        raise ValueError("the llada2 format describes mixtures of experts, and this model has none")
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["LLaDA2MoeModelLM"],
        **write_sizes(KEYS, a),
        "mask_token_id": a.mask_token_id,
        "block_size": a.causal_block,
        "partial_rotary_factor": 1 if a.rotary_dim is None else a.rotary_dim / a.d_head,
        **{key: getattr(experts, field) for key, field in EXPERTS.items()},
        "num_shared_experts": (experts.d_shared or 0) // experts.d_expert,
        "first_k_dense_replace": experts.layers.index(True),
        "routed_scaling_factor": experts.scale,
        **KEYS.written,
    }


FAMILIES = (
    by_model_type(
        KEYS,
        RULES,
        read_llada2,
        write_llada2,
        {MODEL_TYPE: "LLaDA2Moe(Model|ModelLM)"},
        options=("block_size", "mask_token_id"),
    ),
)
