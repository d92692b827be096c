"""`diffusion-lens recall`: the table of recall by number of denoising steps."""

from typing import Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import EXTRAS, require
from diffusion_lens.cli.load_model import ModelChoice, default_folder
from diffusion_lens.cli.report import Report, progress, save_figure


@app.command()
def recall(
    model: options.Model,
    out: options.OutNeeded = None,
    data: options.Data = None,
    trained: options.Trained = None,
    asked: options.Asked = None,
    limit: options.Limit = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(
            "--steps",
            help="Denoising steps, by default several; repeat the option for others.",
            callback=ranges.at_least(1),
        ),
    ] = None,
    length: options.Length = None,
    cfg_scale: options.CfgScale = None,
    sampler: options.Sampler = None,
    temperature: options.Temperature = 0.0,
    score: Annotated[
        str, typer.Option(help="The score of the table: contained (SMDM's), exact, character_bleu or word_bleu.")
    ] = "contained",
    seed: options.Seed = 1234,
    shard: options.Shard = None,
    merge: options.Merge = None,
    config: options.Config = None,
    tokenizer: options.Tokenizer = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    json: options.Json = False,
    dry_run: options.DryRun = False,
    flops: options.Flops = None,
) -> None:
    """Ask held-out questions in both directions, at several numbers of denoising steps, beside the published numbers.

    Both namings stand in the table: Berglund's files name the direction of training, SMDM's columns that of the
    question. A file a question is kept in OUT/replies, so a run that is stopped goes on.

    Example: diffusion-lens recall tiny-mdm --limit 20 --out recall
    """
    given = dict(locals())
    chosen = ModelChoice(model, config, tokenizer, device, dtype)
    require("pictures", *({score} & set(EXTRAS)))
    from diffusion_lens.cli.shards import asked_facts, require_model, require_parts, share_of_work
    from diffusion_lens.data.sources import default_source, open_source
    from diffusion_lens.denoising.samplers import LeftToRight, describe_sampler, resolve_sampler
    from diffusion_lens.evaluation import Recall, recall_by_steps
    from diffusion_lens.evaluation.naming import cell_name
    from diffusion_lens.evaluation.recall_by_steps import prompt_length, step_columns
    from diffusion_lens.evaluation.scores import check_score
    from diffusion_lens.records import require_same_settings

    check_score(score)
    out = out or default_folder("recall", [model])
    source = open_source(data or default_source(model), outline_only=dry_run)
    facts = source.pick(trained, asked, limit)
    settings: dict[str, Any] = {
        "length": chosen.length(length, source.length) or 52,
        "cfg_scale": source.cfg_scale if cfg_scale is None else cfg_scale,
        "sampler": sampler,
        "temperature": temperature,
        "seed": seed,
    }
    columns = step_columns(steps or source.steps)
    compared = {**settings, "dtype": dtype}
    del compared["sampler"], compared["cfg_scale"]
    shape = chosen.known_shape()
    if shape is not None:
        writes = resolve_sampler(sampler, shape)
        compared |= {
            "steps": [None] if isinstance(writes, LeftToRight) else columns,
            "cfg_scale": settings["cfg_scale"] if shape.has_mask else 0.0,
            "sampler": describe_sampler(writes),
        }
    mine = share_of_work(len(facts), shard, merge)
    require_parts(merge, ["replies"])
    if not merge:
        replies, length = out / "replies", settings["length"]
        if dry_run and (blank := chosen.without_weights()) is not None:
            compared |= asked_facts(blank, facts, lambda fact: prompt_length(blank, fact, length), replies)
        require_same_settings(replies, compared)
    told = {**given, "data": source.name, "facts": len(facts), "steps": columns, **settings}
    report = Report("recall", told, out, json)
    if dry_run:
        work = cost.denoising(chosen, columns, settings["length"], settings["cfg_scale"], mine, rows=32)
        cost.show(report, chosen, work, flops)

    if merge:
        found = Recall.merge([folder / "replies" for folder in merge])
        require_model(chosen, found.record)
    else:
        found = recall_by_steps(
            chosen.load(),
            facts,
            columns,
            **settings,
            folder=out / "replies",
            shard=shard or "0/1",
            progress=progress(),
        )
    if shard is not None:
        report.part_done(shard, len(found.facts), out)
    report.say(found.to_text(score))
    files: dict[str, Any] = {
        "recall": found.save(out / "recall.safetensors"),
        "picture": save_figure(found.plot(score), out / "recall.png"),
    }
    table = {
        cell_name(*cell): {str(step): share._asdict() for step, share in row.items()}
        for cell, row in found.table(score).items()
    }
    report.finish(table, found.record, **files)
