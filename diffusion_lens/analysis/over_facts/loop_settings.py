"""How the denoising loop writes the answers of many facts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from diffusion_lens.analysis.engine.trajectory import loop_prompt
from diffusion_lens.analysis.over_facts.folder import fact_seed
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import prepare
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.samplers import LeftToRight
from diffusion_lens.denoising.settings import DenoiseSettings, resolve_sampler
from diffusion_lens.facts.fact import Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import INHERITED, at_least, setting, whole_number
from diffusion_lens.settings.shared import DenoiseFields
from weight_conversion import Variant


@dataclass(frozen=True)
class LoopSettings(DenoiseFields):
    """How the loop writes answers. On a causal model guidance is left out."""

    sampler: str | Sampler | None = INHERITED
    seed: int = setting(1, "Seed of the study; each fact has its own seed, made of this one and its id.", whole_number)
    batch_size: int = setting(
        32,
        "Largest number of facts in one batch. Only facts whose prompts are equally long share one, as do their "
        "canvases. A sampler by which the runs of a batch depend on one another gets one fact at a time: one that "
        "ranks a batch as one pool, or gives the network the time of the last change to any of its rows.",
        partial(at_least, 1),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self).update(vars(self.denoise))

    @cached_property
    def denoise(self) -> DenoiseSettings:
        """The settings of the loop alone."""
        return DenoiseSettings(self.steps, self.sampler, self.cfg_scale, self.temperature, self.seed)

    def for_facts(self, fact_ids: Sequence[str], variant: Variant) -> DenoiseSettings:
        """The settings of a batch of these facts on a model of this variant, with a seed for each fact."""
        seeds = tuple(fact_seed(self.seed, fact_id) for fact_id in fact_ids)
        return replace(self.denoise.fitted_to(variant), seed=seeds)

    def writes_in_order(self, variant: Variant) -> bool:
        """Whether answers are written from left to right, one step per token."""
        return isinstance(resolve_sampler(self.denoise.sampler, variant), LeftToRight)

    def facts_together(self, variant: Variant) -> int:
        """The largest number of facts in one batch on a model of this variant."""
        return 1 if resolve_sampler(self.denoise.sampler, variant).couples_rows(variant) else self.batch_size

    def describe_on(self, variant: Variant) -> dict[str, Any]:
        """The settings for a record."""
        fitted = self.denoise.fitted_to(variant)
        described = replace(fitted, sampler=resolve_sampler(fitted.sampler, variant, self.steps)).describe()
        steps = {"steps": None} if self.writes_in_order(variant) else {}
        return {**described, **steps, "batch_size": self.batch_size}

    def check(self, model: DiffusionTransformer, query: Query) -> None:
        """Raise a `ValueError` unless the loop can write on this canvas."""
        prompt, length = loop_prompt(model, query)
        prepare(model, lay_out(model, prompt[None], length), self.denoise.fitted_to(model.cfg))
