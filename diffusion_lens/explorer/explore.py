"""`explore`: the explorer of a model, as a widget in a notebook or as a file."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusion_lens.explorer.prompts import first_specs
from diffusion_lens.explorer.session import Session
from diffusion_lens.explorer.spec import Spec
from diffusion_lens.explorer.widget import widget
from diffusion_lens.facts.fact import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.pages.page import LARGEST_PAGE, html_path, write_page
from diffusion_lens.settings import Whole, whole_numbers

Models = HookedDiffusionTransformer | Sequence[HookedDiffusionTransformer]


def explore(
    model: Models,
    prompt: str | Fact | Spec | Sequence[Fact],
    path: str | Path | None = None,
    *,
    results: Any = (),
    attention: Iterable[Whole] = (),
    state: Mapping[str, Any] | None = None,
    max_bytes: int = LARGEST_PAGE,
    **settings: Any,
) -> Any:
    """Explore a run of a prompt: canvases, likeliest tokens, logit lens, attention and causal traces by step.

    Without a path, in a notebook, this is a widget that computes what is looked at, and new runs: with other settings,
    with a token forced or masked again, or with heads, MLPs and states changed. With a path it is an HTML file that
    contains the numbers and needs neither a network nor the model.

    Args:
        model: A model, or several to compare, such as `load_pair("site-mdm")`.
        prompt: Text; a `Fact`, whose subject and answer are then traced; a `Spec`; or several facts, of which the first
            is shown and all are in a table. A file contains the canvas of each.
        path: File to write, ending in .html.
        results: Saved results of a study of these facts, a `Recall` or an `AverageEffect` or several, which fill in the
            table.
        attention: Layers whose patterns a file contains, at every step. A widget computes any.
        state: What a file shows at first, as the front end writes it.
        max_bytes: Largest size of a file; a larger one is refused.
        settings: Settings of the runs as in `denoise`: length, steps (one for each position to write by default, 16 at
            most), sampler, cfg_scale, temperature, seed.

    Returns:
        The widget, or the path.

    Raises:
        ValueError: A setting that does not fit the model, results of other facts, or a page that is too large.
        TypeError: An unknown setting.
    """
    if path is not None:
        html_path(path)
    models = [model] if isinstance(model, HookedDiffusionTransformer) else list(model)
    facts = [] if isinstance(prompt, str | Fact | Spec) else list(prompt)
    if not isinstance(prompt, str | Fact | Spec):
        if not facts:
            raise ValueError("there is no fact to explore: the list is empty")
        prompt = facts[0]
    given = results if isinstance(results, list | tuple) else [results]
    session = Session(models, facts=facts, results=given, settings=settings)
    runs = [session.run(spec) for spec in first_specs(models, prompt, **settings)]
    if path is None:
        return widget(session)
    compute_facts(session)
    page = session.page([run["id"] for run in runs], whole_numbers("attention", attention), state)
    return write_page(page, path, max_bytes)


def compute_facts(session: Session) -> None:
    """Compute the run of every fact of a session's table on every model; the table says why there is none."""
    for index in range(len(session.table.facts)):
        for model in range(len(session.models)):
            try:
                session.fact({"id": index, "model": model})
            except ValueError as error:
                session.table.fail(index, model, error)
