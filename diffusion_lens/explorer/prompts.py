"""The runs with which an explorer begins: a prompt or a fact on each of its models."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diffusion_lens.denoising.samplers import fitting_samplers
from diffusion_lens.explorer.spec import RUN_SETTINGS, Spec
from diffusion_lens.facts.fact import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.settings import check_keywords

NEW_TOKENS = 16  # of a canvas whose length nothing decides
MOST_DEFAULT_STEPS = 16


def first_specs(models: Sequence[HookedDiffusionTransformer], prompt: str | Fact | Spec, **settings: Any) -> list[Spec]:
    """The run of a prompt on each model with the settings of `spec_on`; a `Spec` is one run, with these settings."""
    if isinstance(prompt, Spec):
        return [replace(prompt, **settings)]
    return [spec_on(models, index, prompt, settings) for index in range(len(models))]


def greedy_spec(
    models: Sequence[HookedDiffusionTransformer], index: int, prompt: str, settings: Mapping[str, Any]
) -> Spec:
    """The greedy run of any prompt on one of several models, on a canvas of the length in `settings`, or of the
    training, if the prompt leaves room there."""
    model = models[index]
    n_given, length = len(model.encode(prompt)), settings.get("length") or model.cfg.trained_length
    fits = length is not None and n_given < length
    return spec_on(models, index, prompt, {"length": length if fits else n_given + NEW_TOKENS})


def spec_on(
    models: Sequence[HookedDiffusionTransformer], index: int, prompt: str | Fact, settings: Mapping[str, Any]
) -> Spec:
    """The run of a prompt or fact on one of several models.

    A canvas is by default as long as those of the training. By default a run has a step for each position to write, 16
    at most: more steps than positions would be steps that write nothing.

    Args:
        settings: Settings of `denoise`: length, steps, sampler, cfg_scale, temperature, seed. Models side by side may
            be of different kinds: where a sampler or guidance does not fit one of them, it takes its own.

    Raises:
        TypeError: An unknown setting.
        ValueError: A setting that does not fit, or a fact that the model cannot be queried for.
    """
    check_keywords("explore", settings, RUN_SETTINGS)
    model, fact = models[index], prompt if isinstance(prompt, Fact) else None
    given: dict[str, Any] = {
        "model": index,
        "prompt": prompt.prompt if isinstance(prompt, Fact) else prompt,
        **settings,
    }
    n_given = len(model.encode(given["prompt"]))
    if given.get("length") is None and model.cfg.trained_length is None:
        given["length"] = n_given + NEW_TOKENS
    if given.get("steps") is None:
        # Blocks that are opened one after another share the steps.
        by_block = model.cfg.opens_blocks and not model.cfg.is_autoregressive
        n_open = (given.get("length") or model.cfg.trained_length or 0) - n_given
        given["steps"] = MOST_DEFAULT_STEPS if by_block else min(MOST_DEFAULT_STEPS, max(1, n_open))
    if len(models) > 1:
        fits_one = any(settings.get("sampler") in fitting_samplers(each.cfg) for each in models)
        if fits_one and settings["sampler"] not in fitting_samplers(model.cfg):
            given["sampler"] = None
        if not model.cfg.has_mask:
            given["cfg_scale"] = 0.0
    if fact is not None:
        given["answer"] = fact.answer
        if fact.subject:
            given["subject"] = list(fact.to_query(model).subject)
    return Spec.of(given)
