"""`diffusion-lens explore` shows the runs of a model in a browser."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_lens.cli import options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.load_model import ModelChoice, model_label, name_and_mode, reading

if TYPE_CHECKING:
    from diffusion_lens.facts import Fact

PAIR = "pair"


@app.command()
def explore(
    model: options.Model,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help='Second model to show beside the first. "pair" is the AR baseline of a published pair, and of a '
            "checkpoint that is both, its causal mode; NAME@MODE is any mode of a checkpoint.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue. Default: the first fact of a bundled model's training.")
    ] = None,
    subject: Annotated[str | None, typer.Option(help="Subject of the fact, a part of the prompt, for traces.")] = None,
    answer: Annotated[
        str | None, typer.Option(help="Answer with its leading space, which the lens ranks and traces follow.")
    ] = None,
    length: options.LengthOfOne = None,
    steps: options.Steps = 16,
    sampler: options.Sampler = None,
    cfg_scale: options.CfgScale = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    attention: Annotated[
        list[int] | None,
        typer.Option(
            help="With --out: layer whose attention patterns the file contains. Repeat the option for several.",
            callback=ranges.at_least(0),
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write one .html file that needs no network and no model, and serve nothing.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than 127.0.0.1 let other machines in, given the token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0 takes a free one.", callback=ranges.port())] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the default browser.")] = True,
    config: options.Config = None,
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = None,
    block_size: options.BlockSize = None,
    mask_token_id: options.MaskTokenId = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
) -> None:
    """Explore runs in a browser: canvases, lens, attention and traces by step, and interventions by clicking.

    Serves the page on this machine, at an address with a random token, until Ctrl-C.

    Example: diffusion-lens explore site-mdm --against pair
    """
    from diffusion_lens.denoising import DenoiseSettings
    from diffusion_lens.facts import Fact

    # 1. Check the settings before the models are loaded.
    DenoiseSettings(steps, sampler, cfg_scale or 0.0, temperature, seed)
    if out is None:
        require("live pages", "servers")
        if attention:
            raise ValueError(
                "attention= selects what a file contains, so it needs out=; the live page computes any layer"
            )
    elif out.suffix != ".html":
        raise ValueError(f"out={out}: the explorer writes an HTML file; name one that ends in .html")
    if (subject is None) != (answer is None) and subject is not None:
        raise ValueError("subject= is traced together with answer=; give both")
    if prompt is None and (subject or answer):
        raise ValueError("subject= and answer= belong to a prompt; give prompt= too")
    model, mode = name_and_mode(model, mode)
    names, second_mode = [model], None
    if against is not None:
        second, second_mode = name_and_mode(against)
        names.append(_second(model, second, config, reading(mode, block_size, mask_token_id)))
    if shared := len(set(names)) < len(names) and (against == PAIR or second_mode is not None):
        mode = mode or "bidirectional"
        second_mode = second_mode or "ar"
    asked: Fact | str
    asked, of_data = _first_fact(model) if prompt is None else (prompt, None)
    if prompt is not None and subject is not None and answer is not None:
        asked = Fact(prompt, subject, answer)
    # Beside another mode, the causal one takes neither option.
    sizes = (None, None) if shared and mode == "ar" else (block_size, mask_token_id)
    choices = [ModelChoice(names[0], config, tokenizer, device, dtype, mode, *sizes)]
    if shared:
        sizes = (None, None) if second_mode == "ar" else (block_size, mask_token_id)
        choices.append(replace(choices[0], mode=second_mode, block_size=sizes[0], mask_token_id=sizes[1]))
    else:
        choices += [ModelChoice(name, None, tokenizer, device, dtype, second_mode) for name in names[1:]]
    lengths = [choice.length(length, of_data) for choice in choices]
    length = min((known for known in lengths if known is not None), default=None)

    # 2. Load the models, and compute the first run on each.
    from diffusion_lens.explorer import Session
    from diffusion_lens.explorer.explore import LARGEST_PAGE, first_specs

    loaded = [choices[0].load()]
    loaded += [choice.load(weights_of=loaded[0] if shared else None) for choice in choices[1:]]
    session = Session(loaded)
    settings = {"length": length, "steps": steps, "sampler": sampler, "cfg_scale": cfg_scale or 0.0}
    specs = first_specs(session, asked, **settings, temperature=temperature, seed=seed)
    if answer is not None and subject is None:
        specs = [replace(spec, answer=answer) for spec in specs]
    runs = [session.run(spec)["id"] for spec in specs]

    # 3. Write the file, or serve.
    if out is not None:
        from diffusion_lens.pages import write_page

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


def _second(model: str, against: str, config: Path | None, options: Mapping[str, Any]) -> str:
    """The name of the second model; that of the first, if it is both models of a pair.

    Raises:
        ValueError: The first model is in no published pair.
    """
    if against != PAIR:
        return against
    from diffusion_lens.loading import shape_of
    from diffusion_lens.pairs import PAIRS
    from weight_conversion.registry import FAMILIES

    if Path(model).expanduser().exists() and "mode" in FAMILIES[shape_of(model, config, options).family].options:
        return model
    pair = PAIRS.get(model.lower())
    if pair is None:
        raise ValueError(f"{model!r} is the diffusion model of no published pair; name the second model with against=")
    return pair.causal


def _first_fact(model: str) -> "tuple[Fact, int | None]":
    """The first fact of a bundled model's training, and the canvas of its data set.

    Raises:
        ValueError: The model is not bundled.
    """
    from diffusion_lens.catalogue import BUNDLED
    from diffusion_lens.data.sources import default_source, open_source

    if model.lower() not in BUNDLED:
        raise ValueError(f"{model_label(model)!r} is not bundled, so there is no default prompt: give prompt=")
    source = open_source(default_source(model.lower()))
    return source.pick(trained="p2d", asked="p2d")[0], source.length
