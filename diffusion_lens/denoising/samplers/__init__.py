"""The samplers, by name and as objects. A preset carries the name of the code that it reproduces."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from difflib import get_close_matches
from typing import Any

from diffusion_lens.denoising.sampler import Proposal, Sampler
from diffusion_lens.denoising.samplers.by_block import BlockConfidence, BlockPosterior, EntropyBound, FirstHitting
from diffusion_lens.denoising.samplers.masked import (
    Ancestral,
    Blocks,
    Confidence,
    ConfidenceThreshold,
    LeftToRight,
    ReMDM,
)
from diffusion_lens.denoising.samplers.presets import (
    bd3lm,
    diffullama,
    diffusion_gemma,
    dream,
    duo,
    fast_dllm_v2,
    llada,
    llada2,
    mdlm,
    nemotron,
    radd,
    rnd1,
    sdar,
    sedd,
    smdm,
    threshold,
    udlm,
)
from diffusion_lens.denoising.samplers.transitions import Posterior, Score, UniformPosterior
from weight_conversion import NoiseSchedule, Variant

SAMPLERS: dict[str, Sampler] = {
    sampler.name: sampler
    for sampler in (
        Confidence(),
        Ancestral(),
        LeftToRight(),
        ReMDM(),
        Blocks(),
        ConfidenceThreshold(),
        BlockConfidence(),
        BlockPosterior(),
        FirstHitting(),
        Posterior(),
        UniformPosterior(),
        Score(),
        EntropyBound(),
    )
}
PRESETS: dict[str, Callable[[], Sampler]] = {
    preset.__name__: preset
    for preset in (
        *(
            smdm,
            llada,
            threshold,
            llada2,
            dream,
            diffullama,
            rnd1,
            nemotron,
            sdar,
            fast_dllm_v2,
            mdlm,
            bd3lm,
            sedd,
            udlm,
            duo,
            radd,
        ),
        diffusion_gemma,
    )
}

_LATER = {BlockConfidence: ("sub_block",), Confidence: ("rounding",), UniformPosterior: ("removes_rest", "greedy_tail")}


def describe_sampler(sampler: Sampler) -> dict[str, Any]:
    """The name and settings of a sampler, as plain data."""
    settings: dict[str, Any] = asdict(sampler) if is_dataclass(sampler) else {}
    # Records of earlier versions lack these settings.
    for later in ("first", "crosses"):
        if "proposal" in settings and settings["proposal"][later] == getattr(Proposal, later):
            del settings["proposal"][later]
    for later in _LATER.get(type(sampler), ()):
        if settings[later] == getattr(type(sampler), later):
            del settings[later]
    return {"name": sampler.name, **settings}


def sampler_from(description: Mapping[str, Any]) -> Sampler:
    """The inverse of `describe_sampler`; a sampler that is not in `SAMPLERS` is a `ValueError`."""
    settings = dict(description)
    name = settings.pop("name")
    if name not in SAMPLERS:
        raise ValueError(f"the run used a sampler {name!r} that is not one of {', '.join(SAMPLERS)}: pass sampler=")
    if "proposal" in settings:
        scored_on = settings["proposal"]["scored_on"].replace("drawn", "sampled")  # the name in older records
        settings["proposal"] = Proposal(**{**settings["proposal"], "scored_on": scored_on})
    if settings.get("schedule") is not None:
        settings["schedule"] = NoiseSchedule(**settings["schedule"])
    return type(SAMPLERS[name])(**settings)


def named_sampler(sampler: str | Sampler) -> Sampler:
    """The sampler of a name or of a preset's name; an object is returned as it is.

    Raises:
        ValueError: An unknown name; the nearest one is given.
        TypeError: What is neither a name nor a `Sampler`, such as its class.
    """
    if isinstance(sampler, str):
        known = [*SAMPLERS, *PRESETS]
        if sampler not in known:
            near = get_close_matches(sampler, known, n=1, cutoff=0.0)
            raise ValueError(f"unknown sampler {sampler!r}; known are {', '.join(known)} (nearest: {near[0]})")
        sampler = PRESETS[sampler]() if sampler in PRESETS else SAMPLERS[sampler]
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"sampler={sampler!r} is neither a name nor a Sampler object; write Confidence(), with brackets"
        )
    return sampler


def fitting_samplers(variant: Variant) -> list[str]:
    """The names of the samplers and presets that can write the text of a kind of model."""
    known = {**SAMPLERS, **{name: preset() for name, preset in PRESETS.items()}}
    return [name for name, sampler in known.items() if not sampler.misfit(variant)]


__all__ = [
    "PRESETS",
    "SAMPLERS",
    "Ancestral",
    "BlockConfidence",
    "BlockPosterior",
    "Blocks",
    "Confidence",
    "ConfidenceThreshold",
    "EntropyBound",
    "FirstHitting",
    "LeftToRight",
    "Posterior",
    "Proposal",
    "ReMDM",
    "Sampler",
    "Score",
    "UniformPosterior",
    "bd3lm",
    "diffullama",
    "diffusion_gemma",
    "dream",
    "duo",
    "fast_dllm_v2",
    "fitting_samplers",
    "llada",
    "llada2",
    "mdlm",
    "named_sampler",
    "nemotron",
    "radd",
    "rnd1",
    "sdar",
    "sedd",
    "smdm",
    "threshold",
    "udlm",
]
