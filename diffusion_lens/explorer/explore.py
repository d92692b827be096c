"""`explore`: the explorer of a model, as a widget in a notebook or as a file."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusion_lens.denoising.samplers import fitting_samplers
from diffusion_lens.explorer.session import Session
from diffusion_lens.explorer.spec import Spec
from diffusion_lens.facts import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.pages.page import html_path, write_page
from diffusion_lens.settings import Whole, whole_numbers

Models = HookedDiffusionTransformer | Sequence[HookedDiffusionTransformer]
LARGEST_PAGE = 16 * 2**20
NEW_TOKENS = 16  # of a canvas whose length nothing decides


def explore(
    model: Models,
    prompt: str | Fact | Spec,
    path: str | Path | None = None,
    *,
    attention: Iterable[Whole] = (),
    max_bytes: int = LARGEST_PAGE,
    **settings: Any,
) -> Any:
    """Explore a run of a prompt: canvases, likeliest tokens, logit lens, attention and causal traces by step.

    Without a path, in a notebook, this is a widget that computes what is looked at, and new runs: with other settings,
    with a token forced or masked again, or with heads, MLPs and states changed. With a path it is an HTML file that
    contains the numbers and needs neither a network nor the model.

    Args:
        model: A model, or several to compare, such as `load_pair("site-mdm")`.
        prompt: Text; a `Fact`, whose subject and answer are then traced; or a `Spec`.
        path: File to write, ending in .html.
        attention: Layers whose patterns a file contains, at every step. A widget computes any.
        max_bytes: Largest size of a file; a larger one is refused.
        settings: Settings of the run as in `denoise`: length, steps (16 by default), sampler, cfg_scale, temperature,
            seed.

    Returns:
        The widget, or the path.

    Raises:
        ValueError: A setting that does not fit the model, or a page that is too large.
        TypeError: An unknown setting.
    """
    if path is not None:
        html_path(path)
    session = Session([model] if isinstance(model, HookedDiffusionTransformer) else list(model))
    runs = [session.run(spec) for spec in first_specs(session, prompt, **settings)]
    if path is None:
        from diffusion_lens.explorer.widget import widget

        return widget(session)
    page = session.page([run["id"] for run in runs], whole_numbers("attention", attention))
    return write_page(page, path, max_bytes)


def first_specs(session: Session, prompt: str | Fact | Spec, **settings: Any) -> list[Spec]:
    """The run of a prompt on each model of a session.

    Args:
        settings: Settings of `Spec`.
    """
    if isinstance(prompt, Spec):
        return [replace(prompt, **settings)]
    unknown = set(settings) - {"length", "steps", "sampler", "cfg_scale", "temperature", "seed"}
    if unknown:
        raise TypeError(f"explore() got an unexpected keyword argument {min(unknown)!r}")
    fact = prompt if isinstance(prompt, Fact) else None
    fits_one = any(settings.get("sampler") in fitting_samplers(model.cfg) for model in session.models)
    specs = []
    for index, model in enumerate(session.models):
        given: dict[str, Any] = {"model": index, "prompt": prompt if fact is None else fact.prompt, **settings}
        if given.get("length") is None and model.cfg.trained_length is None:
            given["length"] = model.to_tokens(given["prompt"]).shape[1] + NEW_TOKENS
        # Models side by side may be of different kinds: where a setting does not fit, a model takes its own.
        if len(session.models) > 1:
            if fits_one and settings["sampler"] not in fitting_samplers(model.cfg):
                given["sampler"] = None
            if not model.cfg.has_mask:
                given["cfg_scale"] = 0.0
        if fact is not None:
            query = fact.to_query(model)
            given |= {"answer": fact.answer, "subject": list(query.subject)}
        specs.append(Spec.of(given))
    return specs
