"""`diffusion-lens one-layer` trains small networks with different positions, and measures why they answer backwards."""

from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_lens.cli import options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.report import Report, progress, save_figure
from diffusion_lens.cli.workers import WorkerChoice, failed_facts

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
    depths: Annotated[
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
            "resumes from it. To add seeds or kinds to a complete one, name another folder."
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help='Do only one part of the trainings, e.g. "0/4" for the first of four. --merge joins the parts.'
        ),
    ] = None,
    merge: options.Merge = None,
    workers: options.Workers = None,
    dask: options.Dask = None,
    slurm: options.Slurm = None,
    json: options.Json = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate the time from a few training steps, and do nothing else.")
    ] = False,
) -> None:
    """Train small masked diffusion models and AR baselines with different positions, and measure their signatures.

    The networks learn facts of three tokens. Only the positions differ; data, steps and initial weights are the same.
    The table shows recall as trained and in reverse, and the signatures of the reverse question, over the seeds. With
    --merge, give the options of the parts.

    Example: diffusion-lens one-layer --positions none --data one-way --depth 1 --seeds 1 --steps 40 --out one-layer
    """
    arguments = dict(locals())
    require("pictures")
    from diffusion_lens.analysis.resumable import pick_shard
    from diffusion_lens.cli.shards import require_parts, share_of_work
    from diffusion_lens.one_layer import OneLayerStudy, one_layer_study
    from diffusion_lens.one_layer.study import DEPTHS, POSITIONS, describe, seconds_per_training
    from diffusion_lens.one_layer.toy import DATA
    from diffusion_lens.records import require_same_run, require_same_settings
    from weight_conversion import as_json

    # 1. Check the settings, and the folder.
    spread = WorkerChoice(workers, dask, slurm, "cpu", merge)
    out = out or DEFAULT_FOLDER
    chosen: dict[str, Any] = {
        "positions": positions or list(POSITIONS),
        "data": data or list(DATA),
        "depths": depths or list(DEPTHS),
        "seeds": seeds,
        "steps": steps,
    }
    record = describe(**chosen)
    share_of_work(len(record["facts"]), shard, merge)
    require_parts(merge, ["trainings"])
    if not merge:
        require_same_settings(out / "trainings", record)
    report = Report("one-layer", {**arguments, **chosen}, out, json)

    # 2. For a dry run, print the cost.
    report.say(*spread.describe())
    if dry_run:
        own = [] if merge else pick_shard(list(record["facts"]), shard or "0/1")
        started = not merge and (out / "trainings" / "run.json").exists()
        done = set(OneLayerStudy.load(out / "trainings").ids if started else ()) & set(own)
        left = [record["facts"][cell_id]["depth"] for cell_id in own if cell_id not in done]
        of_depth = {n_layers: seconds_per_training(n_layers, steps) for n_layers in sorted(set(left))}
        seconds = sum(of_depth[n_layers] for n_layers in left)
        report.say(
            f"{len(own)} trainings of {steps} steps, {len(done)} of them done",
            f"time: about {max(1, round(seconds / 60))} min on one core of this machine",
        )
        results = {
            "trainings": len(own),
            "done": len(done),
            "updates": len(left) * steps,
            "seconds": round(seconds, 1),
        }
        Report(report.command, report.settings, None, report.as_json).finish(results)
        raise typer.Exit

    # 3. Train, or join the shards.
    if merge:
        study = OneLayerStudy.merge([folder / "trainings" for folder in merge])
        require_same_run(study.record, as_json(record), "the study to merge")
    else:
        with spread.open(out) as executor:
            study = one_layer_study(
                **chosen, out=out / "trainings", shard=shard or "0/1", progress=progress(), executor=executor
            )
        report.notes.extend(failed_facts(study))
    if shard is not None:
        report.part_done(shard, len(study.ids), out, "trainings")

    # 4. Show the table, and write the files.
    report.say(study.to_text())
    files: dict[str, Any] = {"study": study.save(out / "one_layer.safetensors")}
    for of_data in chosen["data"]:
        for n_layers in chosen["depths"]:
            name = f"{of_data}_{n_layers}_layer{'s' * (n_layers > 1)}"
            files[name] = save_figure(study.plot(of_data, n_layers)[0], out / f"{name}.png")
    shown = {"steps": study.steps, "table": study.rows(), "curves": study.curve_rows()}
    report.finish(shown, study.record, **files)
