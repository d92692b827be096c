"""MDLM (Sahoo et al. 2024, arXiv 2406.07524) in the form of Hugging Face, and the keys that its relatives share.

[MASK] is the last token unless the config says another, as with a tokenizer that has none of its own. Without
`time_conditioning`, as published, the noise level that the network reads is always 0. Source: kuleshov-group/mdlm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.conditioning import NoiseSchedule, TimeConditioning
from weight_conversion.families import dit
from weight_conversion.families.family import Config, Family
from weight_conversion.families.hf_config import ConfigKeys

MODEL_TYPE = "mdlm"
PREFIX = "backbone."
COUNTS = ("cond_dim", "hidden_dim", "model_length", "n_blocks", "n_heads", "vocab_size")
KEYS = ConfigKeys(
    family=MODEL_TYPE,
    counts=COUNTS,
    flags=("time_conditioning",),
    read=("mask_token_id", "model_type"),
    ignored=("dropout",),
)


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return config is not None and config.get("model_type") == MODEL_TYPE


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    assert config is not None
    KEYS.check(config)
    return read_dit(config, MODEL_TYPE, mask_token_id=last_token(config), schedule=NoiseSchedule("log_linear"))


def read_dit(config: Config, family: str, **more: Any) -> Architecture:
    """The architecture from the keys that these configs share; `more` are further fields."""
    return dit.architecture(
        family=family,
        name=str(config.get("_name_or_path") or family),
        width=config["hidden_dim"],
        n_heads=config["n_heads"],
        n_layers=config["n_blocks"],
        d_vocab=config["vocab_size"],
        n_ctx=config["model_length"],
        time=TimeConditioning(config["cond_dim"], told=bool(config.get("time_conditioning", False))),
        **more,
    )


def last_token(config: Config) -> int:
    """The id of [MASK]: the one in the config, else that of the last token."""
    mask = config.get("mask_token_id")
    last: int = config["vocab_size"] - 1 if mask is None else mask
    return last


def write_dit(architecture: Architecture, model_type: str) -> dict[str, Any]:
    """The inverse of `read_dit` and `last_token`."""
    a = architecture
    mask = {} if a.mask_token_id in (None, a.d_vocab - 1) else {"mask_token_id": a.mask_token_id}
    return {
        "model_type": model_type,
        "_name_or_path": a.name,
        "hidden_dim": a.d_model,
        "n_blocks": a.n_layers,
        "n_heads": a.n_heads,
        "vocab_size": a.d_vocab,
        "model_length": a.n_ctx,
        "cond_dim": a.time.d_cond if a.time is not None else 1,
        "time_conditioning": a.is_told_time,
        **mask,
    }


def write_config(architecture: Architecture) -> dict[str, Any]:
    return write_dit(architecture, MODEL_TYPE)


FAMILY = Family(
    name=MODEL_TYPE,
    rules=dit.rules(PREFIX),
    recognises=recognises,
    read_architecture=read_architecture,
    write_config=write_config,
    config_file="config.json",
    ignored=dit.ignored(PREFIX),
    options=("mask_token_id",),
    classes={MODEL_TYPE: "MDLM"},
)
