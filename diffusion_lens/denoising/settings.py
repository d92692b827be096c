"""The settings of the denoising loop."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from diffusion_lens.denoising.sampler import Sampler, Seed, plain_seed
from diffusion_lens.denoising.samplers import SAMPLERS, describe_sampler, fitting_samplers, named_sampler, sampler_from
from diffusion_lens.settings import INHERITED
from diffusion_lens.settings.shared import DenoiseFields
from weight_conversion import Variant


@dataclass(frozen=True)
class DenoiseSettings(DenoiseFields):
    """Settings of the denoising loop, checked once, when they are made.

    A sampler that is given by its name is kept as an object. Without `steps` the sampler says how many, and without
    `sampler` it is the model's default.
    """

    sampler: str | Sampler | None = INHERITED
    seed: Seed = INHERITED

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.sampler
        made = given if given is None or isinstance(given, Sampler) else named_sampler(given)
        vars(self).update(sampler=made, seed=plain_seed(self.seed))

    @classmethod
    def recorded(
        cls, record: Mapping[str, Any], sampler: str | Sampler | None = None, seeds: Seed | None = None
    ) -> "DenoiseSettings":
        """The settings in a trajectory's record, with another sampler or other seeds if these are given."""
        return cls(
            steps=record["steps"],
            sampler=sampler or sampler_from(record["sampler"]),
            cfg_scale=record["cfg_scale"],
            temperature=record["temperature"],
            seed=record["seeds"] if seeds is None else seeds,
        )

    def on(self, variant: Variant, model_name: str) -> "DenoiseSettings":
        """These settings for one model, with its default sampler if none was chosen.

        Raises:
            ValueError: The sampler does not fit this variant, or guidance is requested of a model without [MASK] or
                with an approximate cache.
        """
        if self.cfg_scale and not variant.has_mask:
            raise ValueError(
                f"cfg_scale={self.cfg_scale} masks the prompt, and {model_name!r} has no [MASK]; use cfg_scale=0"
            )
        sampler = resolve_sampler(self.sampler, variant, self.steps)
        if self.temperature and sampler.hands_on:
            raise ValueError(
                f"temperature={self.temperature}: the sampler {sampler.name!r} has temperatures of its own, t_max and "
                "t_min; leave it out"
            )
        if self.cfg_scale and sampler.approximate_cache:
            raise ValueError(
                f"cfg_scale={self.cfg_scale} takes two passes of a step, and approximate_cache="
                f"{sampler.approximate_cache!r} keeps the keys and values of one: use cfg_scale=0, or no cache"
            )
        return replace(self, sampler=sampler)

    def fitted_to(self, variant: Variant) -> "DenoiseSettings":
        """These settings, with `cfg_scale=0` on a model without [MASK]; lets one study cover both variants."""
        return self if variant.has_mask else replace(self, cfg_scale=0.0)

    def describe(self) -> dict[str, Any]:
        """The settings for a record. A generator is recorded as `None`, because its state is not saved."""
        unsaved = {"seed": None} if isinstance(self.seed, torch.Generator) else {}
        sampler = describe_sampler(self.sampler) if isinstance(self.sampler, Sampler) else None
        return {**super().describe(), "sampler": sampler, **unsaved}


def resolve_sampler(sampler: str | Sampler | None, variant: Variant, steps: int | None = None) -> Sampler:
    """The sampler, or the default of a kind of model, settled; a `ValueError` if it does not fit that kind of model."""
    if sampler is None:
        name = {"absorbing": "confidence", "uniform": "uniform_posterior", None: "left_to_right"}[variant.noise]
        if variant.opens_blocks and variant.has_mask:
            name = "block_posterior" if variant.time_conditioning else "block_confidence"
        elif variant.opens_blocks and variant.uniform_noise:
            name = "entropy_bound"
        sampler = SAMPLERS[name]
    elif isinstance(sampler, str):
        sampler = named_sampler(sampler)
    if problem := sampler.misfit(variant):
        raise ValueError(
            f"the sampler {sampler.name!r} {problem}. Samplers that fit: {', '.join(fitting_samplers(variant))}"
        )
    sampler = sampler.adapted(variant)
    return sampler.settled(variant) if steps is None else sampler
