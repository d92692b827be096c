"""BD3LM (Arriola et al. 2025, arXiv 2503.09573): MDLM's network that sees finished blocks and its own.

A block as long as the context is the whole context, so that nothing is causal. The network reads a text as in
`sample_mode`; training reads the noisy and the clean text at once. The probability of noise is the time itself. Source:
kuleshov-group/bd3lms `models/hf/modeling_bd3lm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.conditioning import NoiseSchedule
from weight_conversion.families import dit, mdlm
from weight_conversion.families.family import Config, Family

MODEL_TYPE = "bd3lm"
KEYS = replace(
    mdlm.KEYS,
    family=MODEL_TYPE,
    counts=(*mdlm.COUNTS, "block_size"),
    read=(*mdlm.KEYS.read, "block_size"),
    fixed={"adaln": (True,), "causal": (False,)},
    ignored=("attn_backend", "cross_attn", "dropout", "sampling_eps_max", "sampling_eps_min", "var_min"),
)


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return config is not None and config.get("model_type") == MODEL_TYPE


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    assert config is not None
    KEYS.check(config)
    block = config["block_size"]
    by_blocks = {"attention_dir": "block_causal", "causal_block": block} if block < config["model_length"] else {}
    return mdlm.read_dit(
        config, MODEL_TYPE, mask_token_id=mdlm.last_token(config), schedule=NoiseSchedule("linear"), **by_blocks
    )


def write_config(architecture: Architecture) -> dict[str, Any]:
    return {
        **mdlm.write_dit(architecture, MODEL_TYPE),
        "block_size": architecture.causal_block or architecture.n_ctx,
        **{key: allowed[0] for key, allowed in KEYS.fixed.items()},
    }


FAMILY = Family(
    name=MODEL_TYPE,
    rules=dit.rules(mdlm.PREFIX),
    recognises=recognises,
    read_architecture=read_architecture,
    write_config=write_config,
    config_file="config.json",
    ignored=dit.ignored(mdlm.PREFIX),
    options=("block_size", "mask_token_id"),
    classes={MODEL_TYPE: "BD3LM"},
)
