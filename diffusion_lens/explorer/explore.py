"""`explore`: the explorer of a model, as a widget in a notebook or as a file.

The widget requires the extra `explore`. The module in the browser asks with {id, ask: "chunk", run, name} or
{id, ask: "run", spec}. The answer is {id, ok} with the chunk as a buffer or the entry as `run`, or
{id, ok: false, error}, with unknown: true where there is no such run or chunk.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusion_lens.denoising.samplers import fitting_samplers
from diffusion_lens.explorer.session import Session
from diffusion_lens.explorer.spec import RUN_SETTINGS, Spec
from diffusion_lens.facts.fact import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.pages.modules import explorer_files
from diffusion_lens.pages.page import html_path, write_page
from diffusion_lens.settings import Whole, check_keywords, whole_numbers

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
        return widget(session)
    page = session.page([run["id"] for run in runs], whole_numbers("attention", attention))
    return write_page(page, path, max_bytes)


def first_specs(session: Session, prompt: str | Fact | Spec, **settings: Any) -> list[Spec]:
    """The run of a prompt on each model of a session, with settings of `Spec`."""
    if isinstance(prompt, Spec):
        return [replace(prompt, **settings)]
    check_keywords("explore", settings, RUN_SETTINGS)
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


def widget(session: Session) -> Any:
    """The widget of a session, an `anywidget.AnyWidget`; Jupyter shows it where it is the last value of a cell."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise ImportError("the widget needs anywidget: pip install 'diffusion-lens[explore]'") from error
    module, style = explorer_files()

    class Explorer(anywidget.AnyWidget):
        """The explorer of a session."""

        _esm = module
        _css = style
        manifest = traitlets.Dict().tag(sync=True)
        live = traitlets.Bool(True).tag(sync=True)

        def __init__(self) -> None:
            super().__init__(manifest=session.manifest)
            self.session = session
            self.on_msg(lambda _, message, buffers: answer(session, message, self.send))

        def __repr__(self) -> str:
            return f"Explorer({session.title})"

    return Explorer()


def answer(session: Session, message: Any, send: Callable[[dict[str, Any], list[bytes]], None]) -> None:
    """Answer one message of the browser; `send` takes the answer and its buffers."""
    asked: Mapping[str, Any] = message if isinstance(message, Mapping) else {}
    try:
        if asked.get("ask") == "chunk":
            chunk = session.chunk(str(asked.get("run")), str(asked.get("name")))
            send({"id": asked.get("id"), "ok": True}, [chunk])
        elif asked.get("ask") == "run":
            send({"id": asked.get("id"), "ok": True, "run": session.run(asked.get("spec") or {})}, [])
        else:
            raise ValueError(f"ask={asked.get('ask')!r}; it must be 'chunk' or 'run'")
    except Exception as error:  # The page shows its text; without an answer it would wait.
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        unknown = {"unknown": True} if isinstance(error, KeyError) else {}
        send({"id": asked.get("id"), "ok": False, "error": text, **unknown}, [])
