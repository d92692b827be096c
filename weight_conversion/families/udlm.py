"""UDLM (Schiff et al. 2024, arXiv 2412.10193): MDLM's network under uniform noise, which needs no [MASK].

Classifier-free guidance by a class label is not supported. Source: kuleshov-group/discrete-diffusion-guidance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.conditioning import NoiseSchedule
from weight_conversion.families import dit, mdlm
from weight_conversion.families.family import Config, Family

MODEL_TYPE = "udlm"
KEYS = replace(mdlm.KEYS, family=MODEL_TYPE, read=("model_type",), fixed={"cfg": (False,), "cfg_num_classes": (-1,)})


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return config is not None and config.get("model_type") == MODEL_TYPE


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    assert config is not None
    KEYS.check(config)
    # The class's own default, unlike that of its relatives.
    timed = {"time_conditioning": True, **config}
    return mdlm.read_dit(timed, MODEL_TYPE, mask_token_id=None, schedule=NoiseSchedule("log_linear"))


def write_config(architecture: Architecture) -> dict[str, Any]:
    return {
        **mdlm.write_dit(architecture, MODEL_TYPE),
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
    classes={MODEL_TYPE: "UDLM"},
)
