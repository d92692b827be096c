"""`diffusion-lens explore` shows the runs of a model in a browser."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffusion_lens.cli.load_model import LoadingOptions, model_label, name_and_mode
from diffusion_lens.cli.options import LENGTH, FactsOptions, Model, command, each_from_0
from diffusion_lens.cli.report import require
from diffusion_lens.settings import at_least, setting
from diffusion_lens.settings.shared import DenoiseFields

if TYPE_CHECKING:
    from diffusion_lens.cli.load_model import ModelChoice
    from diffusion_lens.data.fact_files import FactSource
    from diffusion_lens.facts.fact import Fact

PAIR = "pair"
FACTS_BY_DEFAULT = 10  # of a bundled model's training, for each pair of directions


def port_number(name: str, value: int) -> int:
    """`value`; a `ValueError` unless it is a port."""
    if not 0 <= value < 2**16:
        raise ValueError(f"{name}={value}; a port is a whole number from 0 to {2**16 - 1}")
    return value


@command(
    data="Facts for the table beside the canvas: site, site-attributes, toy, reversal-curse, known-1000, parent-child, "
    "poems, or a path as in other commands. Default: the facts of a bundled model's training, otherwise none.",
    limit="Largest number of facts per pair of directions (trained, queried), evenly spread. Default: all of --data, "
    f"and {FACTS_BY_DEFAULT} of a bundled model's training.",
)
def explore(
    model: Model,
    run: DenoiseFields,
    chosen_facts: FactsOptions,
    loading: LoadingOptions,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help='Second model to show beside the first. "pair" is the AR baseline of a published pair, and of a '
            "checkpoint that is both, its causal mode; NAME@MODE is any mode of a checkpoint.",
        ),
    ] = None,
    prompt: str | None = setting(
        None,
        "Text to continue. Default: the first fact of the table that is asked in reverse, or forward of an AR model "
        "alone.",
    ),
    subject: str | None = setting(None, "Subject of the fact, a part of the prompt, for traces."),
    answer: str | None = setting(None, "Answer with its leading space, which the lens ranks and traces follow."),
    length: int | None = LENGTH,
    steps: int | None = setting(
        None, "Number of denoising steps. Default: one for each position to write, 16 at most.", partial(at_least, 1)
    ),
    attention: list[int] | None = setting(
        None,
        "With --out: layer whose attention patterns the file contains. Repeat the option for several.",
        each_from_0,
    ),
    out: Path | None = setting(None, "Write one new .html file that needs no network and no model, and serve nothing."),
    host: str = setting(
        "127.0.0.1", "Address to listen on. Others than 127.0.0.1 let other machines in, given the token."
    ),
    port: int = setting(0, "Port to listen on. 0 takes a free one.", port_number),
    browser: Annotated[bool, typer.Option(help="Open the page in the default browser.")] = True,
) -> None:
    """Explore runs in a browser: canvases, lens, attention and traces by step, and interventions by clicking.

    Serves the page on this machine, at an address with a random token, until Ctrl-C.

    Example: diffusion-lens explore site-mdm --against pair
    """
    from diffusion_lens.denoising import DenoiseSettings
    from diffusion_lens.facts.fact import Fact

    # 1. Check the settings before the models are loaded.
    DenoiseSettings(**vars(run))
    if out is None:
        require("live pages", "servers")
        if attention:
            raise ValueError(
                "attention= selects what a file contains, so it needs out=; the live page computes any layer"
            )
    elif out.suffix != ".html":
        raise ValueError(f"out={out}: the explorer writes an HTML file; name one that ends in .html")
    elif out.exists():
        raise ValueError(f"out={out} already exists; name a new file")
    if (subject is None) != (answer is None) and subject is not None:
        raise ValueError("subject= is traced together with answer=; give both")
    if prompt is None and (subject or answer):
        raise ValueError("subject= and answer= belong to a prompt; give prompt= too")
    model, mode = name_and_mode(model, loading.mode)
    names, second_mode = [model], None
    if against is not None:
        second, second_mode = name_and_mode(against)
        names.append(_second(model, second, replace(loading, mode=mode)))
    if shared := len(set(names)) < len(names) and (against == PAIR or second_mode is not None):
        mode = mode or "bidirectional"
        second_mode = second_mode or "ar"
    choices = [loading.of(model, mode, beside=shared)]
    if shared:
        choices.append(loading.of(model, second_mode, beside=True))
    else:
        others = replace(loading, config=None, block_size=None, mask_token_id=None, ignore_config_keys=None)
        choices += [others.of(name, second_mode) for name in names[1:]]
    source = _facts_of(model, chosen_facts)
    limit = chosen_facts.limit or (None if chosen_facts.data else FACTS_BY_DEFAULT)
    facts = source.pick(chosen_facts.trained, chosen_facts.asked, limit) if source else []
    asked: Fact | str
    if prompt is None:
        if not facts:
            raise ValueError(
                f"{model_label(model)!r} is not bundled, so there is no default prompt: give prompt= or data="
            )
        asked = _first_fact(facts, choices)
    else:
        asked = prompt if subject is None or answer is None else Fact(prompt, subject, answer)
    of_data = source.length if source and (prompt is None or asked in facts) else None
    lengths = [choice.length(length, of_data) for choice in choices]
    length = min((known for known in lengths if known is not None), default=None)

    # 2. Load the models, and compute the first run on each.
    from diffusion_lens.explorer import Session
    from diffusion_lens.explorer.prompts import first_specs
    from diffusion_lens.explorer.widget import compute_facts
    from diffusion_lens.pages.page import LARGEST_PAGE

    loaded = [choices[0].load()]
    loaded += [choice.load(weights_of=loaded[0] if shared else None) for choice in choices[1:]]
    settings = {**vars(run), "length": length}
    session = Session(loaded, facts=facts, settings=settings)
    specs = first_specs(loaded, asked, **settings)
    if answer is not None and subject is None:
        specs = [replace(spec, answer=answer) for spec in specs]
    runs = [session.run(spec)["id"] for spec in specs]

    # 3. Write the file, or serve.
    if out is not None:
        from diffusion_lens.pages import write_page

        compute_facts(session)
        write_page(session.page(runs, attention or ()), out, LARGEST_PAGE)
        typer.echo(f"Wrote {out} ({out.stat().st_size:,} bytes).")
        return
    from diffusion_lens.explorer.server import Server

    server = Server(session, host, port)

    def started() -> None:
        typer.echo(f"Explore {session.title} at\n{server.url}\nCtrl-C ends it.")
        if browser:
            import webbrowser

            webbrowser.open(server.url)

    server.serve(started)


def _second(model: str, against: str, loading: LoadingOptions) -> str:
    """The name of the second model; that of the first, if it is both models of a pair."""
    if against != PAIR:
        return against
    from diffusion_lens.loading import shape_of
    from diffusion_lens.loading.pairs import PAIRS
    from weight_conversion.registry import FAMILIES

    if Path(model).expanduser().exists() and FAMILIES[shape_of(model, loading.config, loading.options).family].modes:
        return model
    pair = PAIRS.get(model.lower())
    if pair is None:
        raise ValueError(f"{model!r} is the diffusion model of no published pair; name the second model with against=")
    return pair.causal


def _facts_of(model: str, chosen: FactsOptions) -> "FactSource | None":
    """The data set of the table; `None` where none is given and the model is not bundled."""
    from diffusion_lens.loading.catalogue import BUNDLED

    if chosen.data is None and model.lower() not in BUNDLED:
        return None
    source: FactSource = chosen.source(model.lower(), outline_only=False)
    return source


def _first_fact(facts: "Sequence[Fact]", choices: "Sequence[ModelChoice]") -> "Fact":
    """The first fact that is queried in reverse for a name, which a diffusion model may know and its AR baseline does
    not; for an AR model alone the first that is queried as it is trained."""
    shape = choices[0].known_shape()
    alone = len(choices) == 1 and shape is not None and shape.is_autoregressive
    wanted = ("p2d", "p2d") if alone else ("p2d", "d2p")
    return next((fact for fact in facts if (fact.trained, fact.asked) == wanted), facts[0])
