"""The samplers, by name and as objects. A preset carries the name of the code that it reproduces."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from difflib import get_close_matches
from typing import Any

from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.samplers.ancestral import Ancestral
from diffusion_lens.denoising.samplers.block_confidence import BlockConfidence
from diffusion_lens.denoising.samplers.block_posterior import BlockPosterior, FirstHitting
from diffusion_lens.denoising.samplers.blocks import Blocks
from diffusion_lens.denoising.samplers.confidence import Confidence
from diffusion_lens.denoising.samplers.left_to_right import LeftToRight
from diffusion_lens.denoising.samplers.posterior import Posterior, UniformPosterior
from diffusion_lens.denoising.samplers.presets import diffullama, dream, llada, llada2, nemotron, sdar, smdm
from diffusion_lens.denoising.samplers.remdm import ReMDM
from diffusion_lens.denoising.samplers.score import Score
from diffusion_lens.denoising.samplers.transition_presets import bd3lm, mdlm, radd, sedd, udlm
from weight_conversion import NoiseSchedule, Variant

SAMPLERS: dict[str, Sampler] = {
    sampler.name: sampler
    for sampler in (
        Confidence(),
        Ancestral(),
        LeftToRight(),
        ReMDM(),
        Blocks(),
        BlockConfidence(),
        BlockPosterior(),
        FirstHitting(),
        Posterior(),
        UniformPosterior(),
        Score(),
    )
}
PRESETS: dict[str, Callable[[], Sampler]] = {
    preset.__name__: preset
    for preset in (smdm, llada, llada2, dream, diffullama, nemotron, sdar, mdlm, bd3lm, sedd, udlm, radd)
}


def describe_sampler(sampler: Sampler) -> dict[str, Any]:
    """The name and settings of a sampler, as plain data."""
    settings: dict[str, Any] = asdict(sampler) if is_dataclass(sampler) else {}
    # Records of earlier versions lack these settings.
    for later in ("first", "crosses"):
        if "proposal" in settings and settings["proposal"][later] == getattr(Proposal, later):
            del settings["proposal"][later]
    return {"name": sampler.name, **settings}


def sampler_from(description: Mapping[str, Any]) -> Sampler:
    """The inverse of `describe_sampler`; a sampler that is not in `SAMPLERS` is a `ValueError`."""
    settings = dict(description)
    name = settings.pop("name")
    if name not in SAMPLERS:
        raise ValueError(f"the run used a sampler {name!r} that is not one of {', '.join(SAMPLERS)}: pass sampler=")
    if "proposal" in settings:
        proposal = settings["proposal"]
        scored_on = (
            "sampled" if proposal["scored_on"] == "drawn" else proposal["scored_on"]
        )  # the name in older records
        settings["proposal"] = Proposal(**{**proposal, "scored_on": scored_on})
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


def resolve_sampler(sampler: str | Sampler | None, variant: Variant, steps: int | None = None) -> Sampler:
    """The sampler of a name, or the default of a kind of model, settled for a number of steps.

    Raises:
        ValueError: An unknown name, or a sampler that this kind of model cannot follow.
        TypeError: As for `named_sampler`.
    """
    if sampler is None:
        defaults = {"absorbing": "confidence", "uniform": "uniform_posterior", None: "left_to_right"}
        sampler = defaults[variant.noise]
        if variant.has_mask and variant.opens_blocks:
            sampler = "block_posterior" if variant.is_told_time else "block_confidence"
    sampler = named_sampler(sampler)
    if problem := _undoes_other_noise(sampler, variant):
        fitting = [name for name in fitting_samplers(variant) if name in SAMPLERS]
        raise ValueError(f"the sampler {sampler.name!r} {problem}; use {', '.join(map(repr, fitting))}")
    if problem := sampler.misfit(variant) or _gives_one_time(sampler, variant):
        raise ValueError(f"the sampler {sampler.name!r} {problem}")
    return sampler.settled(steps, variant)


def fitting_samplers(variant: Variant) -> list[str]:
    """The names of the samplers and presets that can write the text of a kind of model."""
    known = {**SAMPLERS, **{name: preset() for name, preset in PRESETS.items()}}
    return [
        name
        for name, sampler in known.items()
        if not _undoes_other_noise(sampler, variant)
        if not sampler.misfit(variant)
        if not _gives_one_time(sampler, variant)
    ]


def _gives_one_time(sampler: Sampler, variant: Variant) -> str | None:
    """Why a sampler whose rows share a time cannot write blocks of a network that is told it; `None` if it can."""
    if not variant.is_told_time or not variant.opens_blocks or sampler.has_times_of_rows:
        return None
    return (
        "gives a step one time, that of the run, and this model is told the time and writes block after block: each "
        "row is at its own time in its own block. Use 'block_posterior' or 'first_hitting'"
    )


def _undoes_other_noise(sampler: Sampler, variant: Variant) -> str | None:
    """Why a sampler does not fit a model's noise; `None` if it does."""
    return None if variant.noise is None or variant.noise in sampler.noises else _MISFIT[variant.noise]


# Why a sampler does not fit a model's noise.
_MISFIT = {
    "absorbing": "draws every position again in every step, and under the noise of this model, [MASK], a token that is "
    "written stays",
    "uniform": "reveals masked positions, and the noise of this model is uniform: every position has a token, and may "
    "change in every step",
}


__all__ = [
    "PRESETS",
    "SAMPLERS",
    "Ancestral",
    "BlockConfidence",
    "BlockPosterior",
    "Blocks",
    "Confidence",
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
    "dream",
    "fitting_samplers",
    "llada",
    "llada2",
    "mdlm",
    "named_sampler",
    "nemotron",
    "radd",
    "resolve_sampler",
    "sdar",
    "sedd",
    "smdm",
    "udlm",
]
