"""RADD (Ou et al. 2024, arXiv 2406.03736): the diffusion transformer without any time, and with biases in its norms.

[MASK] is one token more than the config counts. Source: ML-GSAI/RADD.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.conditioning import NoiseSchedule
from weight_conversion.families import dit
from weight_conversion.families.family import Config, Family
from weight_conversion.families.nested_config import NestedKeys

MODEL_TYPE = "ddit_wot"
KEYS = NestedKeys(
    family="radd",
    counts=("tokens", "model.hidden_size", "model.length", "model.n_blocks", "model.n_heads"),
    read=("model.name", "model.type"),
    fixed={"noise.type": ("loglinear",)},
    ignored=(
        *("model.cond_dim", "model.dropout", "model.dtype", "model.scale_by_sigma", "model.use_checkpoint"),
        *("graph.file", "graph.report_all", "graph.type", "noise.sigma_max", "noise.sigma_min"),
    ),
)


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    model = (config or {}).get("model")
    return isinstance(model, Mapping) and model.get("type") == MODEL_TYPE


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    assert config is not None
    values = KEYS.read_values(config)
    return dit.architecture(
        family="radd",
        name=str(values.get("model.name") or "radd"),
        width=values["model.hidden_size"],
        n_heads=values["model.n_heads"],
        n_layers=values["model.n_blocks"],
        d_vocab=values["tokens"] + 1,
        n_ctx=values["model.length"],
        mask_token_id=values["tokens"],
        norm_bias=True,
        schedule=NoiseSchedule("log_linear"),
    )


def write_config(architecture: Architecture) -> dict[str, Any]:
    a = architecture
    return {
        "tokens": a.d_vocab - 1,
        "noise": {"type": "loglinear"},
        "model": {
            "name": a.name,
            "type": MODEL_TYPE,
            "hidden_size": a.d_model,
            "length": a.n_ctx,
            "n_blocks": a.n_layers,
            "n_heads": a.n_heads,
        },
    }


FAMILY = Family(
    name="radd",
    rules=dit.rules(),
    recognises=recognises,
    read_architecture=read_architecture,
    write_config=write_config,
    config_file="config.json",
    ignored=dit.ignored(),
)
