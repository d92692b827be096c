"""The diffusion transformers (DiT) of the literature: MDLM, UDLM, DUO, BD3LM, RADD and SEDD share one table of tensors.

Bidirectional blocks (block-causal in BD3LM) with LayerNorms, a fused projection of queries, keys and values, rotary
positions, a plain GELU MLP with biases, and a head with a bias. All but RADD have adaptive LayerNorms that read the
noise level; where the config switches that off, the level is always 0.

- MDLM (Sahoo et al. 2024, arXiv 2406.07524): [MASK] is the last token unless the config says another, as with a
  tokenizer that has none of its own. Source: kuleshov-group/mdlm `models/dit.py`.
- UDLM (Schiff et al. 2024, arXiv 2412.10193): uniform noise, which needs no [MASK]. Classifier-free guidance by a class
  label is not supported. Source: kuleshov-group/discrete-diffusion-guidance.
- DUO (Sahoo et al. 2025, arXiv 2506.10892) is the same under another name, always with time conditioning; its uniform
  noise is the argmax of Gaussian noise in training only. Source: s-sahoo/duo `models/dit.py`, `trainer_base.py`.
- BD3LM (Arriola et al. 2025, arXiv 2503.09573): sees finished blocks and its own. A block as long as the context is the
  whole context, so that nothing is causal. The network reads a text as in `sample_mode`; training reads the noisy and
  the clean text at once. The probability of noise is the time itself. Source: kuleshov-group/bd3lms
  `models/hf/modeling_bd3lm.py`.
- RADD (Ou et al. 2024, arXiv 2406.03736): no time, and biases in the norms. [MASK] is one token more than the config
  counts. Source: ML-GSAI/RADD `model/transformer.py`.
- SEDD (Lou et al. 2023, arXiv 2310.16834): the head gives logarithms of scores. With the absorbing graph there is one
  token more than the config counts, [MASK], and `scale_by_sigma` is on; with the uniform graph there is none, and it is
  off. The published samplers subtract the scale from the output; here the output is that of the head's matrix. Source:
  louaaron/Score-Entropy-Discrete-Diffusion `model/transformer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture, NoiseSchedule, TimeConditioning
from weight_conversion.families.family import Config, ConfigKeys, by_model_type, of_config
from weight_conversion.key_map import Rule, Stacked

_BLOCK = "blocks.{i}."
_QKV = tuple(f"{_BLOCK}attn.{part}.weight" for part in ("q", "k", "v"))
_TABLE = (
    Rule("vocab_embed.embedding", ("embed.weight",)),
    *(
        Rule(f"{theirs}.{kind}", (f"{ours}.{kind}",))
        for theirs, ours in (
            ("sigma_map.mlp.0", "time_embed.hidden"),
            ("sigma_map.mlp.2", "time_embed.out"),
            (_BLOCK + "norm1", _BLOCK + "ln1"),
            (_BLOCK + "norm2", _BLOCK + "ln2"),
            (_BLOCK + "mlp.0", _BLOCK + "mlp.up"),
            (_BLOCK + "mlp.2", _BLOCK + "mlp.down"),
            (_BLOCK + "adaLN_modulation", _BLOCK + "modulation"),
            ("output_layer.norm_final", "ln_final"),
            ("output_layer.linear", "unembed"),
            ("output_layer.adaLN_modulation", "final_modulation"),
        )
        for kind in ("weight", "bias")
    ),
    Rule(_BLOCK + "attn_qkv.weight", _QKV, Stacked()),
    Rule(_BLOCK + "attn_out.weight", (_BLOCK + "attn.o.weight",)),
)
# Rotary frequencies, and the range of noise on which a block-diffusion model was last trained, which are not needed.
_BUFFERS = ("rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max")
_PREFIX = "backbone."  # of every name in the checkpoints for Hugging Face but those of the wrapping class's buffers
_WRAPPED: dict[str, Any] = {
    "rules": tuple(Rule(_PREFIX + rule.theirs, rule.ours, rule.layout) for rule in _TABLE),
    "ignored": (*(_PREFIX + buffer for buffer in _BUFFERS), *_BUFFERS),
}

MDLM_KEYS = ConfigKeys(
    family="mdlm",
    counts={
        "hidden_dim": "d_model",
        "n_blocks": "n_layers",
        "n_heads": "n_heads",
        "vocab_size": "d_vocab",
        "model_length": "n_ctx",
        "cond_dim": None,
    },
    flags={"time_conditioning": None},
    read=("mask_token_id", "model_type"),
)
UDLM_KEYS = replace(MDLM_KEYS, family="udlm", read=("model_type",), fixed={"cfg": (False,), "cfg_num_classes": (-1,)})
DUO_KEYS = replace(
    MDLM_KEYS, family="duo", flags={}, read=("model_type",), fixed={"causal": (False,)}, ignored=("var_min",)
)
BD3LM_KEYS = replace(
    MDLM_KEYS,
    family="bd3lm",
    counts={**MDLM_KEYS.counts, "block_size": None},
    fixed={"adaln": (True,), "causal": (False,)},
    ignored=("attn_backend", "cross_attn", "sampling_eps_max", "sampling_eps_min", "var_min"),
)
RADD_KEYS = ConfigKeys(
    family="radd",
    counts={
        "tokens": None,
        "model.hidden_size": "d_model",
        "model.length": "n_ctx",
        "model.n_blocks": "n_layers",
        "model.n_heads": "n_heads",
    },
    read=("model.name", "model.type"),
    name="model.name",
    fixed={"noise.type": ("loglinear",)},
    ignored=(
        *("model.cond_dim", "model.dtype", "model.scale_by_sigma", "model.use_checkpoint"),
        *("graph.file", "graph.report_all", "graph.type", "noise.sigma_max", "noise.sigma_min"),
    ),
)
SEDD_KEYS = ConfigKeys(
    family="sedd",
    counts={**RADD_KEYS.counts, "model.cond_dim": None},
    read=("model.name", "graph.type", "noise.type", "noise.sigma_min", "noise.sigma_max", "model.scale_by_sigma"),
    fixed={"model.type": ("ddit",)},
    ignored=("graph.file", "graph.report_all"),
    name="model.name",
)
_RADD_TYPE = "ddit_wot"
_GRAPHS = ("absorb", "uniform")
_SCHEDULES = {"loglinear": "log_linear", "geometric": "geometric"}


def read_mdlm(config: Config) -> Architecture:
    return _read_wrapped(MDLM_KEYS, config, mask_token_id=_last_token(config))


def read_udlm(config: Config) -> Architecture:
    timed = {"time_conditioning": True, **config}  # the class's own default, unlike that of its relatives
    return _read_wrapped(UDLM_KEYS, timed, mask_token_id=None)


def read_duo(config: Config) -> Architecture:
    return _read_wrapped(DUO_KEYS, {"time_conditioning": True, **config}, mask_token_id=None)


def read_bd3lm(config: Config) -> Architecture:
    block = config["block_size"]
    by_blocks = {"attention_dir": "block_causal", "causal_block": block} if block < config["model_length"] else {}
    architecture = _read_wrapped(BD3LM_KEYS, config, mask_token_id=_last_token(config), **by_blocks)
    return replace(architecture, schedule=NoiseSchedule("linear"))


def write_mdlm(a: Architecture) -> dict[str, Any]:
    """The inverse of `read_mdlm`, and the keys that its relatives share."""
    return {
        "model_type": "mdlm",
        **MDLM_KEYS.of(a),
        "cond_dim": a.time.d_cond if a.time is not None else 1,
        "time_conditioning": a.time_conditioning,
        **({} if a.mask_token_id in (None, a.d_vocab - 1) else {"mask_token_id": a.mask_token_id}),
    }


def write_udlm(a: Architecture) -> dict[str, Any]:
    return {**write_mdlm(a), "model_type": "udlm", **UDLM_KEYS.written}


def write_duo(a: Architecture) -> dict[str, Any]:
    written = {key: value for key, value in write_mdlm(a).items() if key != "time_conditioning"}
    return {**written, "model_type": "duo", **DUO_KEYS.written}


def write_bd3lm(a: Architecture) -> dict[str, Any]:
    return {**write_mdlm(a), "model_type": "bd3lm", "block_size": a.causal_block or a.n_ctx, **BD3LM_KEYS.written}


def read_radd(values: Config) -> Architecture:
    mask, schedule = values["tokens"], NoiseSchedule("log_linear")
    return _architecture(RADD_KEYS, values, d_vocab=mask + 1, mask_token_id=mask, norm_bias=True, schedule=schedule)


def write_radd(a: Architecture) -> dict[str, Any]:
    return {"tokens": a.d_vocab - 1, "noise": {"type": "loglinear"}, "model": {**_section(a), "type": _RADD_TYPE}}


def read_sedd(values: Config) -> Architecture:
    graph, scaled = values.get("graph.type"), values.get("model.scale_by_sigma")
    if graph not in _GRAPHS:
        raise ValueError(f"graph.type is {graph!r} in the sedd config; it must be one of {', '.join(_GRAPHS)}")
    absorbing = graph == "absorb"
    if scaled is not absorbing:
        raise ValueError(
            f"scale_by_sigma is {scaled!r} in the sedd config; with the graph {graph!r} it must be {absorbing}"
        )
    kind = values.get("noise.type")
    if kind not in _SCHEDULES:
        raise ValueError(f"noise.type is {kind!r} in the sedd config; it must be one of {', '.join(_SCHEDULES)}")
    schedule = NoiseSchedule("log_linear")
    if kind == "geometric":
        if missing := [key for key in ("noise.sigma_min", "noise.sigma_max") if key not in values]:
            raise ValueError(f"the sedd config lacks {missing}, the ends of its geometric schedule; add them")
        ends = {end: values[f"noise.{end}"] for end in ("sigma_min", "sigma_max")}
        schedule = NoiseSchedule("geometric", **ends)
    n_tokens = values["tokens"] + absorbing
    return _architecture(
        SEDD_KEYS,
        values,
        d_vocab=n_tokens,
        mask_token_id=n_tokens - 1 if absorbing else None,
        time=TimeConditioning(values["model.cond_dim"], conditioned=True),
        schedule=schedule,
        head="log_scores",
    )


def write_sedd(a: Architecture) -> dict[str, Any]:
    schedule = a.schedule or NoiseSchedule("log_linear")
    kinds = {ours: theirs for theirs, ours in _SCHEDULES.items()}
    return {
        "tokens": a.d_vocab - a.has_mask,
        "graph": {"type": "absorb" if a.has_mask else "uniform"},
        "noise": {
            "type": kinds.get(schedule.kind, schedule.kind),
            "sigma_min": schedule.sigma_min,
            "sigma_max": schedule.sigma_max,
        },
        "model": {
            **_section(a),
            "type": "ddit",
            "cond_dim": a.time.d_cond if a.time is not None else 1,
            "scale_by_sigma": a.has_mask,
        },
    }


def _is_radd(config: Config) -> bool:
    model = config.get("model")
    return isinstance(model, Mapping) and model.get("type") == _RADD_TYPE


def _is_sedd(config: Config) -> bool:
    return isinstance(config.get("graph"), Mapping) and isinstance(config.get("model"), Mapping)


def _read_wrapped(keys: ConfigKeys, config: Config, **more: Any) -> Architecture:
    """The architecture from the keys that the configs of Hugging Face share; `more` are further fields."""
    time = TimeConditioning(config["cond_dim"], conditioned=bool(config.get("time_conditioning", False)))
    return _architecture(keys, config, time=time, schedule=NoiseSchedule("log_linear"), **more)


def _section(a: Architecture) -> dict[str, Any]:
    """The sizes in the section "model" of RADD and SEDD."""
    return {key.removeprefix("model."): value for key, value in RADD_KEYS.of(a).items()}


def _last_token(config: Config) -> int:
    mask = config.get("mask_token_id")
    last: int = config["vocab_size"] - 1 if mask is None else mask
    return last


def _architecture(keys: ConfigKeys, config: Config, **more: Any) -> Architecture:
    sizes = {**keys.fields(config), **more}
    if sizes["d_model"] % sizes["n_heads"]:
        raise ValueError(f"a stream of width {sizes['d_model']} cannot be divided among {sizes['n_heads']} heads")
    # [MASK] has a column, which takes no part in the softmax.
    head = "logits" if sizes.get("mask_token_id") is None else "subs"
    common: dict[str, Any] = {"attention_dir": "bidirectional", "head": head, **sizes, "d_vocab_out": sizes["d_vocab"]}
    return Architecture(
        **common,
        family=keys.family,
        d_mlp=4 * sizes["d_model"],
        readout="in_place",
        mlp_bias=True,
        norm="layer",
        mlp="plain",
        act_fn="gelu_new",
        unembed_bias=True,
    )


FAMILIES = (
    by_model_type(
        MDLM_KEYS, read=read_mdlm, write=write_mdlm, classes={"mdlm": "MDLM"}, options=("mask_token_id",), **_WRAPPED
    ),
    by_model_type(UDLM_KEYS, read=read_udlm, write=write_udlm, classes={"udlm": "UDLM"}, **_WRAPPED),
    by_model_type(DUO_KEYS, read=read_duo, write=write_duo, classes={"duo": "DUO", "DUO": "DUO"}, **_WRAPPED),
    by_model_type(
        BD3LM_KEYS,
        read=read_bd3lm,
        write=write_bd3lm,
        classes={"bd3lm": "BD3LM"},
        options=("block_size", "mask_token_id"),
        **_WRAPPED,
    ),
    of_config(RADD_KEYS, _TABLE, _is_radd, read_radd, write_radd, ignored=_BUFFERS),
    of_config(SEDD_KEYS, _TABLE, _is_sedd, read_sedd, write_sedd, ignored=_BUFFERS),
)
