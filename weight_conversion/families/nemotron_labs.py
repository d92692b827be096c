"""Nemotron-Labs-Diffusion: one set of weights, read as a causal model, by blocks, or over the whole canvas.

A Llama whose rotary frequencies are scaled by YaRN and whose queries are scaled by their position. The attention
pattern and the row that predicts a token are no part of the weights: `mode` chooses "ar" (causal, shifted), "block"
(the open block sees all of itself, in place) or "bidirectional" (in place). In mode "block" finished tokens are
causal; with "causal_context": false in the config, named after the argument of the authors' `generate`, the prompt is
one block, and finished blocks see all of themselves. Source: the hub model's `modeling_nemotron_labs_diffusion.py`;
transformers `models/ministral3/modeling_ministral3.py` for the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture, Context, QueryScale, scaling_data
from weight_conversion.families import llama
from weight_conversion.families.family import ROPE, Config, by_model_type, mode_of

MODEL_TYPE = "nemotron_labs_diffusion"
# The value of dlm_paradigm under which the authors' code computes each mode.
PARADIGMS = {"bidirectional": "bidirectional", "block": "block_diff", "ar": "autoregressive"}
MODES = {"bidirectional": "bidirectional", "block_causal": "block", "causal": "ar"}
QUERY_SCALE = "llama_4_scaling_beta"
CAUSAL_CONTEXT = "causal_context"

KEYS = replace(
    llama.KEYS,
    family="nemotron_labs",
    read=(*llama.KEYS.read, "dlm_paradigm", "mode"),
    flags={"attention_bias": None, "mlp_bias": None, "tie_word_embeddings": "tied", CAUSAL_CONTEXT: None},
    fixed={**llama.KEYS.fixed, "attention_bias": (False, None), "mlp_bias": (False, None), "sliding_window": (None,)},
    # Of the training, and of code that computes the same in another way.
    ignored=("ar_loss_weight", "dlm_loss_weight", "dp_varying_mask_ratio"),
)

RULES = tuple(
    replace(rule, theirs=rule.theirs.replace("model.", "encoder.", 1).replace("lm_head.", "diffusion_head."))
    for rule in llama.RULES
)


def read_nemotron_labs(config: Config) -> Architecture:
    paradigm = config.get("dlm_paradigm")
    default = next((mode for mode, name in PARADIGMS.items() if name == paradigm), paradigm)
    mode = mode_of(config, "nemotron_labs", tuple(PARADIGMS), default)
    decoder, query_scale = _without_query_scale(config)
    # The config gives block_size and mask_token_id whatever the mode.
    unused = {"bidirectional": ("block_size",), "block": (), "ar": ("block_size", "mask_token_id")}[mode]
    decoder |= dict.fromkeys(unused)
    context: Context = "blocks"
    if by_blocks := mode == "block":
        context = "prompt" if config.get(CAUSAL_CONTEXT) is False else "causal"
    architecture = llama.read_decoder(KEYS, decoder, masked=mode != "ar", by_blocks=by_blocks)
    return replace(architecture, query_scale=query_scale, block_context=context)


def _without_query_scale(config: Config) -> tuple[dict[str, Any], QueryScale | None]:
    """The config without the scaling of queries, which stands among the rotary numbers, and that scaling."""
    rotary = config.get("rope_parameters")
    if not isinstance(rotary, Mapping) or QUERY_SCALE not in rotary:
        return dict(config), None
    length = "original_max_position_embeddings"
    if length not in rotary:
        raise ValueError(f"rope_parameters has {QUERY_SCALE} and lacks {length}, from which on queries are scaled")
    others = {key: value for key, value in rotary.items() if key != QUERY_SCALE}
    if others.get("rope_type", "default") == "default":
        others.pop(length)
    return {**config, "rope_parameters": others}, QueryScale(rotary[QUERY_SCALE], rotary[length])


def write_nemotron_labs(architecture: Architecture) -> dict[str, Any]:
    a = architecture
    written = llama.write_decoder(KEYS, a)
    rotary: dict[str, Any] = {"rope_type": "default"} if a.rotary_scaling is None else scaling_data(a.rotary_scaling)
    if a.query_scale is not None:
        rotary[QUERY_SCALE] = a.query_scale.beta
        rotary["original_max_position_embeddings"] = a.query_scale.original_max_position_embeddings
    for key in ROPE:
        written.pop(key, None)
    return {
        "model_type": MODEL_TYPE,
        **written,
        "rope_parameters": {**rotary, "rope_theta": a.rotary_base},
        "dlm_paradigm": PARADIGMS[MODES[a.attention_dir]],
        "block_size": a.causal_block,
        "mask_token_id": a.mask_token_id,
        **({CAUSAL_CONTEXT: False} if a.block_context == "prompt" else {}),
    }


FAMILIES = (
    by_model_type(
        KEYS,
        RULES,
        read_nemotron_labs,
        write_nemotron_labs,
        {MODEL_TYPE: r"NemotronLabsDiffusion\w*"},
        options=("mode", "block_size", "mask_token_id"),
        modes=MODES,
    ),
)
