"""The settings of the denoising loop."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from diffusion_lens.denoising.sampler import Sampler, Seed, plain_seed
from diffusion_lens.denoising.samplers import SAMPLERS, describe_sampler, fitting_samplers, named_sampler, sampler_from
from diffusion_lens.settings import Real, Whole, at_least, not_negative
from weight_conversion import Variant


@dataclass(frozen=True, init=False)
class DenoiseSettings:
    """Settings of the denoising loop, checked once, when they are made.

    The fields are the arguments of `HookedDiffusionTransformer.denoise`. Without `steps` the sampler says how many, and
    without `sampler` it is the model's default.
    """

    steps: int | None
    sampler: Sampler | None
    cfg_scale: float
    temperature: float
    seed: int | tuple[int, ...] | torch.Generator

    def __init__(
        self,
        steps: Whole | None = None,
        sampler: str | Sampler | None = None,
        cfg_scale: Real = 0.0,
        temperature: Real = 0.0,
        seed: Seed = 0,
    ) -> None:
        """Check the settings; a sampler may be named, and numbers of NumPy and torch become plain Python numbers.

        Raises:
            ValueError: A number is out of range, or the sampler is unknown.
            TypeError: A setting has the wrong type, such as a number of steps with a decimal point.
        """
        vars(self).update(
            sampler=sampler if sampler is None or isinstance(sampler, Sampler) else named_sampler(sampler),
            steps=None if steps is None else at_least(1, "steps", steps, "only a step reveals positions"),
            cfg_scale=not_negative("cfg_scale", cfg_scale, "no guidance"),
            temperature=not_negative("temperature", temperature, "the likeliest token"),
            seed=plain_seed(seed),
        )

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
            ValueError: The sampler does not fit this variant, or guidance is requested of a model without [MASK].
        """
        if self.cfg_scale and not variant.has_mask:
            raise ValueError(
                f"cfg_scale={self.cfg_scale} masks the prompt, and {model_name!r} has no [MASK]; use cfg_scale=0"
            )
        return replace(self, sampler=resolve_sampler(self.sampler, variant, self.steps))

    def fitted_to(self, variant: Variant) -> "DenoiseSettings":
        """These settings, with `cfg_scale=0` on a model without [MASK]; lets one study cover both variants."""
        return self if variant.has_mask else replace(self, cfg_scale=0.0)

    def describe(self) -> dict[str, Any]:
        """The settings for a record. A generator is recorded as `None`, because its state is not saved."""
        seed = None if isinstance(self.seed, torch.Generator) else self.seed
        return {
            "sampler": None if self.sampler is None else describe_sampler(self.sampler),
            "steps": self.steps,
            "cfg_scale": self.cfg_scale,
            "temperature": self.temperature,
            "seed": list(seed) if isinstance(seed, tuple) else seed,
        }


def resolve_sampler(sampler: Sampler | None, variant: Variant, steps: int | None = None) -> Sampler:
    """The sampler, or the default of a kind of model, settled; a `ValueError` if it does not fit that kind of model."""
    if sampler is None:
        name = {"absorbing": "confidence", "uniform": "uniform_posterior", None: "left_to_right"}[variant.noise]
        if variant.opens_blocks and variant.has_mask:
            name = "block_posterior" if variant.time_conditioning else "block_confidence"
        sampler = SAMPLERS[name]
    if problem := sampler.misfit(variant):
        raise ValueError(
            f"the sampler {sampler.name!r} {problem}. Samplers that fit: {', '.join(fitting_samplers(variant))}"
        )
    return sampler.settled(variant) if steps is None else sampler
