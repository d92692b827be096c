"""`diffusion-lens one-layer` trains small networks with different positions, and measures why they answer backwards."""

from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_lens.cli import options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.report import Report, progress, save_figure

DEFAULT_FOLDER = Path("one-layer")


@app.command()
def one_layer(
    positions: Annotated[
        list[str] | None,
        typer.Option(
            "--positions",
            help="Kind of positions: rotary, standard (learned), none or alibi (symmetric linear biases). Repeat the "
            "option for several. Default: all four.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="Sentences: one-way tells 64 facts as A is B, both-ways also as B is A, mixed the second for half of "
            "them. Repeat the option for several. Default: all three.",
        ),
    ] = None,
    depth: Annotated[
        list[int] | None,
        typer.Option(
            "--depth",
            help="Number of layers. Repeat the option for several. Default: 1, 2 and 4.",
            callback=ranges.at_least(1),
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Number of seeds, each a training of its own.", callback=ranges.at_least(1))
    ] = 3,
    steps: Annotated[int, typer.Option(help="Number of training steps.", callback=ranges.at_least(1))] = 600,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for trainings, results, figures and command.json. Default: one-layer. An interrupted run "
            "resumes from it."
        ),
    ] = None,
    json: options.Json = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate the time from a few training steps, and do nothing else.")
    ] = False,
) -> None:
    """Train small masked diffusion models and AR baselines with different positions, and measure their signatures.

    The networks learn facts of three tokens. Only the positions differ; data, steps and initial weights are the same.
    The table shows recall as trained and in reverse, and the signatures of the reverse question, over the seeds. All
    defaults together take about a quarter of an hour on one core.

    Example: diffusion-lens one-layer --positions none --data one-way --depth 1 --seeds 1 --steps 40 --out one-layer
    """
    arguments = dict(locals())
    require("pictures")
    from diffusion_lens.one_layer import OneLayerStudy, one_layer_study
    from diffusion_lens.one_layer.study import DEPTHS, POSITIONS, describe, seconds_per_step
    from diffusion_lens.one_layer.toy import DATA
    from diffusion_lens.records import require_same_settings

    # 1. Check the settings, and the folder.
    out = out or DEFAULT_FOLDER
    chosen: dict[str, Any] = {
        "positions": positions or list(POSITIONS),
        "data": data or list(DATA),
        "depths": depth or list(DEPTHS),
        "seeds": seeds,
        "steps": steps,
    }
    record = describe(**chosen)
    require_same_settings(out / "trainings", record)
    settings = {**arguments, **{"depth" if name == "depths" else name: value for name, value in chosen.items()}}
    report = Report("one-layer", settings, out, json)

    # 2. For a dry run, print the cost.
    if dry_run:
        cells = list(record["facts"].values())
        n_done = len(OneLayerStudy.load(out / "trainings").ids) if (out / "trainings" / "run.json").exists() else 0
        of_depth = {n_layers: seconds_per_step(n_layers) for n_layers in chosen["depths"]}
        seconds = steps * sum(of_depth[cell["depth"]] for cell in cells) * (1 - n_done / len(cells))
        report.say(
            f"{len(cells)} trainings of {steps} steps, {n_done} of them done",
            f"time: about {max(1, round(seconds / 60))} min on one core of this machine",
        )
        results = {"trainings": len(cells), "done": n_done, "updates": len(cells) * steps, "seconds": round(seconds, 1)}
        Report(report.command, report.settings, None, report.as_json).finish(results)
        raise typer.Exit

    # 3. Train, show the table, and write the files.
    study = one_layer_study(**chosen, out=out / "trainings", progress=progress())
    report.say(study.to_text())
    files: dict[str, Any] = {"study": study.save(out / "one_layer.safetensors")}
    for of_data in chosen["data"]:
        for n_layers in chosen["depths"]:
            name = f"{of_data}_{n_layers}_layer{'s' * (n_layers > 1)}"
            files[name] = save_figure(study.plot(of_data, n_layers)[0], out / f"{name}.png")
    report.finish({"steps": study.steps, "table": study.rows()}, study.record, **files)
