"""SEDD (Lou et al. 2023, arXiv 2310.16834) with the absorbing or the uniform graph, and its nested config.

The head gives logarithms of scores. With the absorbing graph there is one token more than the config counts, [MASK],
and `scale_by_sigma` is on; with the uniform graph there is none, and it is off. The published samplers subtract the
scale from the output; here the output is that of the head's matrix. Source: louaaron/Score-Entropy-Discrete-Diffusion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.conditioning import NoiseSchedule, TimeConditioning
from weight_conversion.families import dit
from weight_conversion.families.family import Config, Family
from weight_conversion.families.nested_config import NestedKeys

GRAPHS = ("absorb", "uniform")
KEYS = NestedKeys(
    family="sedd",
    counts=("tokens", "model.hidden_size", "model.cond_dim", "model.length", "model.n_blocks", "model.n_heads"),
    read=("model.name", "graph.type", "noise.type", "noise.sigma_min", "noise.sigma_max", "model.scale_by_sigma"),
    fixed={"model.type": ("ddit",)},
    ignored=("model.dropout", "graph.file", "graph.report_all"),
)
_SCHEDULES = {"loglinear": "log_linear", "geometric": "geometric"}


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return isinstance((config or {}).get("graph"), Mapping) and isinstance((config or {}).get("model"), Mapping)


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    assert config is not None
    values = KEYS.read_values(config)
    graph, scaled = values.get("graph.type"), values.get("model.scale_by_sigma")
    if graph not in GRAPHS:
        raise ValueError(f"graph.type is {graph!r} in the sedd config; it must be one of {', '.join(GRAPHS)}")
    absorbing = graph == "absorb"
    if scaled is not absorbing:
        raise ValueError(
            f"scale_by_sigma is {scaled!r} in the sedd config; with the graph {graph!r} it must be {absorbing}"
        )
    n_tokens = values["tokens"] + absorbing
    return dit.architecture(
        family="sedd",
        name=str(values.get("model.name") or "sedd"),
        width=values["model.hidden_size"],
        n_heads=values["model.n_heads"],
        n_layers=values["model.n_blocks"],
        d_vocab=n_tokens,
        n_ctx=values["model.length"],
        mask_token_id=n_tokens - 1 if absorbing else None,
        time=TimeConditioning(values["model.cond_dim"], told=True),
        schedule=_schedule(values),
        head="log_scores",
    )


def _schedule(values: Mapping[str, Any]) -> NoiseSchedule:
    kind = values.get("noise.type")
    if kind not in _SCHEDULES:
        raise ValueError(f"noise.type is {kind!r} in the sedd config; it must be one of {', '.join(_SCHEDULES)}")
    if kind == "loglinear":
        return NoiseSchedule("log_linear")
    if missing := [key for key in ("noise.sigma_min", "noise.sigma_max") if key not in values]:
        raise ValueError(f"the sedd config lacks {missing}, the ends of its geometric schedule; add them")
    return NoiseSchedule("geometric", sigma_min=values["noise.sigma_min"], sigma_max=values["noise.sigma_max"])


def write_config(architecture: Architecture) -> dict[str, Any]:
    a = architecture
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
            "name": a.name,
            "type": "ddit",
            "hidden_size": a.d_model,
            "cond_dim": a.time.d_cond if a.time is not None else 1,
            "length": a.n_ctx,
            "n_blocks": a.n_layers,
            "n_heads": a.n_heads,
            "scale_by_sigma": a.has_mask,
        },
    }


FAMILY = Family(
    name="sedd",
    rules=dit.rules(),
    recognises=recognises,
    read_architecture=read_architecture,
    write_config=write_config,
    config_file="config.json",
    ignored=dit.ignored(),
)
