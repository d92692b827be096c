"""`diffusion-lens recall` measures recall by number of denoising steps."""

from typing import Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import EXTRAS, require
from diffusion_lens.cli.load_model import ModelChoice, default_folder
from diffusion_lens.cli.report import Report, progress, save_figure
from diffusion_lens.cli.workers import WorkerChoice, failed_facts


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
            help="Number of denoising steps. Repeat the option for several. Default: those of the data set.",
            callback=ranges.at_least(1),
        ),
    ] = None,
    length: options.Length = None,
    cfg_scale: options.CfgScale = None,
    sampler: options.Sampler = None,
    temperature: options.Temperature = 0.0,
    score: Annotated[
        str, typer.Option(help="Score of the table: contained (SMDM's), exact, character_bleu or word_bleu.")
    ] = "contained",
    seed: options.Seed = 1234,
    workers: options.Workers = None,
    dask: options.Dask = None,
    slurm: options.Slurm = None,
    shard: options.Shard = None,
    merge: options.Merge = None,
    config: options.Config = None,
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = None,
    block_size: options.BlockSize = None,
    mask_token_id: options.MaskTokenId = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    json: options.Json = False,
    dry_run: options.DryRun = False,
    flops: options.Flops = None,
) -> None:
    """Measure recall in both directions at several numbers of denoising steps, next to the published numbers.

    The table shows both names of a cell: Berglund's files name the direction of training, SMDM's columns the direction
    of the question. OUT/replies contains one file per question, so an interrupted run resumes.

    Example: diffusion-lens recall site-mdm --length 16 --limit 5 --out recall
    """
    arguments = dict(locals())
    spread = WorkerChoice(workers, dask, slurm, device, merge)
    chosen = ModelChoice(model, config, tokenizer, spread.device, dtype, mode, block_size, mask_token_id)
    require("pictures", *({score} & set(EXTRAS)))
    from diffusion_lens.analysis import LoopSettings
    from diffusion_lens.cli.shards import describe_facts, require_model, require_parts, share_of_work
    from diffusion_lens.cost import recall as price_recall
    from diffusion_lens.data.sources import STUDY_LENGTH, default_source, open_source
    from diffusion_lens.evaluation import Recall
    from diffusion_lens.evaluation.naming import cell_name
    from diffusion_lens.evaluation.recall_by_steps import (
        RecallSettings,
        prompt_length,
        recall_facts,
    )
    from diffusion_lens.evaluation.scores import check_score
    from diffusion_lens.records import require_same_settings

    # 1. Read the facts, and check the settings before the model is loaded.
    check_score(score)
    out = out or default_folder("recall", [chosen.label])
    source = open_source(data or default_source(model), outline_only=dry_run)
    facts = source.pick(trained, asked, limit)
    length = chosen.length(length, source.length) or STUDY_LENGTH
    cfg_scale = source.cfg_scale if cfg_scale is None else cfg_scale
    loop = LoopSettings(sampler=sampler, cfg_scale=cfg_scale, temperature=temperature, seed=seed)
    settings = RecallSettings(steps or source.steps, length, loop)
    described = {**settings.describe(chosen.known_shape()), "dtype": dtype}

    # 2. Refuse a folder that holds another study; for a dry run, print the cost.
    n_facts = share_of_work(len(facts), shard, merge)
    require_parts(merge, ["replies"])
    if not merge:
        if dry_run and (outline := chosen.without_weights()) is not None:
            described |= describe_facts(outline, facts, lambda fact: prompt_length(outline, fact, length))
        require_same_settings(out / "replies", described)
    effective = {
        "data": source.name,
        "facts": len(facts),
        "steps": list(settings.steps),
        "length": length,
        "cfg_scale": cfg_scale,
    }
    report = Report("recall", {**arguments, **effective}, out, json)
    report.say(*spread.describe())
    if dry_run:
        # A guessed prompt leaves at least one position for the answer.
        given = [min(n_given, length - 1) for n_given in cost.prompts_of(chosen, facts)]
        work = price_recall(cost.config_of(chosen), given, settings) * (n_facts / len(facts))
        cost.show(report, [(chosen, work)], flops)

    # 3. Let the model answer the facts, or join the shards.
    if merge:
        result = Recall.merge([folder / "replies" for folder in merge])
        require_model(chosen, result.record)
    else:
        with spread.open(out) as executor:
            loaded, part = chosen.load(on=spread.layout), shard or "0/1"
            result = recall_facts(loaded, facts, settings, out / "replies", part, progress(), executor)
        report.notes.extend(failed_facts(result))
    if shard is not None:
        report.part_done(shard, len(result.facts), out)

    # 4. Show the table, and write the files.
    report.say(result.to_text(score))
    files: dict[str, Any] = {
        "recall": result.save(out / "recall.safetensors"),
        "picture": save_figure(result.plot(score), out / "recall.png"),
    }
    table = {
        cell_name(*cell): {str(step): share._asdict() for step, share in row.items()}
        for cell, row in result.table(score).items()
    }
    report.finish(table, result.record, **files)
