"""DiffusionGemma: the text network, which writes canvas after canvas under uniform noise.

The authors' encoder (prompt and finished canvases, causal) and decoder (the open canvas, which sees everything) share
their weights. They are one network here, whose attention depends on where the open canvas begins. Its layers are local,
with a sliding window, or global, with heads of another width whose values are their keys. Each block has a dense MLP
beside its experts, norms before and after its parts, and a factor at its end, which encoder and decoder store each. The
vision tower is left out. Source: transformers `models/diffusion_gemma/modular_diffusion_gemma.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weight_conversion.architecture import MOST_LAYERS, Architecture, Experts, GlobalLayers, check_count
from weight_conversion.families.family import IGNORED_KEYS, Config, ConfigKeys, by_model_type
from weight_conversion.key_map import ByExpert, Rule

MODEL_TYPE = "diffusion_gemma"
LOCAL, GLOBAL = "sliding_attention", "full_attention"
LAYERS = "types_of_layers"
EXPERTS = {"num_experts": "n_experts", "top_k_experts": "n_chosen", "moe_intermediate_size": "d_expert"}
# Keys of the whole config that the text network needs; all others of it are about images.
_OUTSIDE = ("canvas_length", "image_token_id", "model_type", "tie_word_embeddings", "_name_or_path", IGNORED_KEYS)
KEYS = ConfigKeys(
    family="diffusion_gemma",
    counts={
        "canvas_length": "causal_block",
        "head_dim": "d_head",
        "hidden_size": "d_model",
        "intermediate_size": "d_mlp",
        "max_position_embeddings": "n_ctx",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "num_key_value_heads": "n_key_value_heads",
        "sliding_window": "window",
        "vocab_size": "d_vocab",
        **dict.fromkeys(EXPERTS),
    },
    flags={"tie_word_embeddings": "tied"},
    read=(
        *("model_type", "image_token_id", "rms_norm_eps", "final_logit_softcapping", "rope_parameters"),
        *("per_layer_config", "global_head_dim", "num_global_key_value_heads", LAYERS),
    ),
    fixed={
        "attention_bias": (False,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        # "vision" lets image tokens see each other, and there are none here; "all" makes the context bidirectional.
        "use_bidirectional_attention": (None, "vision"),
    },
    ignored=("attention_k_eq_v", "enable_moe_block"),  # which the authors' code does not read
)

_LAYER, _BLOCK = "model.decoder.layers.{i}.", "blocks.{i}."
_NORMS = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln1_post",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ln2_post",
    "pre_feedforward_layernorm_2": "mlp.experts_norm",
    "post_feedforward_layernorm_2": "mlp.experts_post",
    "post_feedforward_layernorm_1": "mlp.shared_post",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    **{f"self_attn.{part}_proj": f"attn.{part}" for part in "qkvo"},
    **{f"mlp.{part}_proj": f"mlp.shared.{part}" for part in ("gate", "up", "down")},
    "router.proj": "mlp.router",
}
RULES = (
    Rule("model.decoder.embed_tokens.weight", ("embed.weight",)),
    *(Rule(f"{_LAYER}{theirs}.weight", (f"{_BLOCK}{ours}.weight",)) for theirs, ours in _NORMS.items()),
    Rule(_LAYER + "router.scale", (_BLOCK + "mlp.router.scale",)),
    Rule(_LAYER + "router.per_expert_scale", (_BLOCK + "mlp.router.expert_scale",)),
    Rule(
        _LAYER + "experts.gate_up_proj",
        tuple(f"{_BLOCK}mlp.experts.{{e}}.{part}.weight" for part in ("gate", "up")),
        ByExpert(2),
    ),
    Rule(_LAYER + "experts.down_proj", (_BLOCK + "mlp.experts.{e}.down.weight",), ByExpert()),
    Rule(_LAYER + "layer_scalar", (_BLOCK + "scale_open",)),
    Rule("model.encoder.language_model.layers.{i}.layer_scalar", (_BLOCK + "scale_context",)),
    Rule("model.decoder.self_conditioning.pre_norm.weight", ("self_conditioning.norm.weight",)),
    *(
        Rule(f"model.decoder.self_conditioning.{part}_proj.weight", (f"self_conditioning.mlp.{part}.weight",))
        for part in ("gate", "up", "down")
    ),
    Rule("model.decoder.norm.weight", ("ln_final.weight",)),
    Rule("lm_head.weight", ("unembed.weight",)),
)


def values_of(config: Config) -> Config:
    """The keys of the text network, and those of the whole that it needs."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config is {text!r} in the diffusion_gemma config; it must describe the text network")
    values = {key: value for key, value in text.items() if key != "layer_types"}
    # Of these, `ConfigKeys` knows one type only.
    return {**values, **{key: config[key] for key in _OUTSIDE if key in config}, LAYERS: text.get("layer_types")}


def read_diffusion_gemma(values: Config) -> Architecture:
    check_count("num_hidden_layers", values["num_hidden_layers"], MOST_LAYERS)
    is_global = _is_global(values[LAYERS], values["num_hidden_layers"])
    rotary = values.get("rope_parameters") or {}
    return Architecture(
        family="diffusion_gemma",
        **KEYS.fields(values),
        attention_dir="block_causal",
        block_context="causal",
        readout="in_place",
        mask_token_id=None,
        norm_eps=values.get("rms_norm_eps", 1e-6),
        rotary_base=_rotary(rotary, LOCAL, "default", 10_000.0)["rope_theta"],
        rotation="activation",
        qk_norm=True,
        v_norm=True,
        attn_scale=1.0,
        act_fn="gelu_new",
        use_normalization_before_and_after=True,
        layer_scalars=True,
        scaled_embedding=True,
        output_logits_soft_cap=values.get("final_logit_softcapping", 30.0),
        self_conditioning=True,
        unread_tokens=tuple(id_ for id_ in (values.get("image_token_id"),) if id_ is not None),
        global_layers=_global_layers(values, is_global, rotary),
        experts=Experts(
            **{field: values[key] for key, field in EXPERTS.items()},
            layers=(True,) * len(is_global),
            d_shared=values["intermediate_size"],
            normalised=True,
            scales=True,
            own_norms=True,
        ),
    )


def _is_global(layer_types: object, n_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it is global; by default every sixth and the last."""
    if layer_types is None:
        return tuple(layer % 6 == 5 or layer == n_layers - 1 for layer in range(n_layers))
    if not isinstance(layer_types, list) or len(layer_types) != n_layers or {*layer_types} - {LOCAL, GLOBAL}:
        raise ValueError(f"layer_types={layer_types!r} must name {LOCAL} or {GLOBAL} for each of {n_layers} layers")
    return (*(layer == GLOBAL for layer in layer_types[:-1]), True)  # as the authors' code reads the last one


def _global_layers(values: Config, is_global: tuple[bool, ...], rotary: Mapping[str, Any]) -> GlobalLayers:
    usual = {"head_dim": values["head_dim"], "num_key_value_heads": values["num_key_value_heads"]}
    of_layers = values.get("per_layer_config")
    if of_layers is None:  # the keys of Gemma 4
        heads = values.get("num_global_key_value_heads") or usual["num_key_value_heads"]
        own = {"head_dim": values.get("global_head_dim", 512), "num_key_value_heads": heads}
    else:
        # A layer or a number that is not named is as usual.
        named = {str(layer): {**usual, **numbers} for layer, numbers in of_layers.items()}
        each = [named.pop(str(layer), usual) for layer, is_one in enumerate(is_global) if is_one]
        own = each[0]
        if named or any(other != own for other in each) or own.keys() != usual.keys():
            raise ValueError(
                f"per_layer_config={of_layers!r} must give the same {sorted(usual)} for each of the global layers, and "
                "nothing else"
            )
    turned = _rotary(rotary, GLOBAL, "proportional", 1_000_000.0)
    return GlobalLayers(
        is_global,
        own["head_dim"],
        own["num_key_value_heads"],
        turned["rope_theta"],
        turned.get("partial_rotary_factor", 1.0),
        keys_as_values=True,
    )


def _rotary(rotary: Mapping[str, Any], layer_type: str, rope_type: str, base: float) -> Mapping[str, Any]:
    """The settings of the rotary frequencies of one type of layers."""
    default = {"rope_type": rope_type, "rope_theta": base}
    if rope_type == "proportional":
        default["partial_rotary_factor"] = 0.25
    settings: Mapping[str, Any] = rotary.get(layer_type, default)
    if settings.get("rope_type", rope_type) != rope_type or settings.keys() - default.keys():
        raise ValueError(
            f"rope_parameters of {layer_type} are {settings!r}; supported is the type {rope_type!r} with {[*default]}"
        )
    return settings


def write_diffusion_gemma(a: Architecture) -> dict[str, Any]:
    own, experts = a.global_layers, a.experts
    if own is None or experts is None or not experts.own_norms:
        raise ValueError("the diffusion_gemma format describes models with its experts and global layers only")
    heads = {"head_dim": own.d_head, "num_key_value_heads": own.n_key_value_heads}
    turned = {"rope_theta": own.rotary_base, "partial_rotary_factor": own.rotary_share}
    text = {key: value for key, value in KEYS.of(a).items() if key not in _OUTSIDE}
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "canvas_length": a.causal_block,
        "image_token_id": next(iter(a.unread_tokens), None),
        "tie_word_embeddings": a.tied,
        "_name_or_path": a.name,
        "text_config": {
            "model_type": f"{MODEL_TYPE}_text",
            **text,
            **{key: getattr(experts, field) for key, field in EXPERTS.items()},
            "layer_types": [GLOBAL if is_global else LOCAL for is_global in own.layers],
            "per_layer_config": {str(layer): heads for layer, is_global in enumerate(own.layers) if is_global},
            "rms_norm_eps": a.norm_eps,
            "rope_parameters": {
                LOCAL: {"rope_type": "default", "rope_theta": a.rotary_base},
                GLOBAL: {"rope_type": "proportional", **turned},
            },
            "final_logit_softcapping": a.output_logits_soft_cap,
            **KEYS.written,
        },
    }


FAMILIES = (
    by_model_type(
        KEYS,
        RULES,
        read_diffusion_gemma,
        write_diffusion_gemma,
        {MODEL_TYPE: r"DiffusionGemma\w*"},
        values_of=values_of,
        ignored=("model.encoder.vision_tower.*", "model.encoder.embed_vision.*", "model.encoder.language_model.*"),
    ),
)
