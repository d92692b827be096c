"""`diffusion-lens compare` compares the keys and values of many facts in both directions."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.load_model import ModelChoice, default_folder, different_labels, name_and_mode
from diffusion_lens.cli.report import Report, progress, save_figure
from diffusion_lens.cli.workers import WorkerChoice, failed_facts


@app.command()
def compare(
    models: options.Models,
    out: options.OutNeeded = None,
    data: options.Data = None,
    trained: options.Trained = None,
    limit: options.Limit = None,
    layers: options.Layers = None,
    vectors: Annotated[str, typer.Option(help="Vectors to compare: keys, values or outputs.")] = "keys",
    against: Annotated[
        str | None, typer.Option(help="Vectors of the other direction: keys, values or outputs. Default: --vectors.")
    ] = None,
    statistic: Annotated[
        str,
        typer.Option(
            help="Statistic to print and draw: cka or procrustes; for vectors of one kind also cosine, centred_cosine, "
            "retrieval or subspace."
        ),
    ] = "cka",
    resamples: Annotated[
        int, typer.Option(help="Number of random pairings and of random subsets of facts.", callback=ranges.at_least(1))
    ] = 1000,
    length: options.Length = None,
    first_tokens: options.FirstTokens = 1,
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
    """Compare keys and values of both directions, paired by person. Are facts encoded symmetrically?

    OUT/MODEL contains one file per fact, so an interrupted run resumes, and --shard can split the work.

    Example: diffusion-lens compare site-mdm site-ar --length 16 --layer 0 --limit 7 --statistic cka --resamples 19
    --out compare
    """
    arguments = dict(locals())
    require("pictures")
    from diffusion_lens.analysis import KeyValueStudy
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.analysis.representations.forward_reverse import fewest_facts
    from diffusion_lens.analysis.representations.similarity import statistics
    from diffusion_lens.analysis.rome.study import KeyValueSettings, study_keys_and_values
    from diffusion_lens.analysis.rome.study_result import DIRECTIONS, check_vectors
    from diffusion_lens.analysis.usable_facts import say_set_aside
    from diffusion_lens.cli.shards import describe_facts, require_model, require_parts, share_of_work
    from diffusion_lens.cost import keys_and_values
    from diffusion_lens.data.sources import default_source, open_source
    from diffusion_lens.records import require_same_settings

    # 1. Check the options that need neither data nor a model; the vectors take long to compute.
    spread = WorkerChoice(workers, dask, slurm, device, merge)
    chosen = []
    for name, own_mode in map(name_and_mode, models):
        # Beside another mode, the causal one takes neither option.
        given = (None, None) if own_mode == "ar" and len(models) > 1 else (block_size, mask_token_id)
        chosen.append(ModelChoice(name, config, tokenizer, spread.device, dtype, own_mode or mode, *given))
    names = different_labels(chosen)
    out = out or default_folder("compare", names)
    for name in (vectors, against or vectors):
        check_vectors(name)
    available = statistics(rank=2, one_space=(against or vectors) == vectors)
    if statistic not in available:
        raise ValueError(
            f"statistic {statistic!r} is not computed of {vectors}; it must be one of {', '.join(available)}"
        )
    for model in chosen:
        cost.check_layers(model, layers or [])

    # 2. Read the facts, and lay out the study of each model.
    source = open_source(data or default_source(models[0]), outline_only=dry_run)
    facts = source.pick(trained, limit=limit)
    lengths = [model.length(length, source.length) for model in chosen]
    forward, reverse = ({fact.person for fact in facts if fact.asked == asked} for asked in DIRECTIONS)
    if len(forward & reverse) < fewest_facts():
        raise ValueError(
            f"{len(forward & reverse)} people are queried in both directions, too few to compare: use at least "
            f"{fewest_facts()}"
        )
    n_facts = share_of_work(len(facts), shard, merge)
    report = Report("compare", {**arguments, "data": source.name, "facts": len(facts), "lengths": lengths}, out, json)
    require_parts(merge, names)
    settings = [
        KeyValueSettings(layers or None, layout=CanvasLayout(length, first_tokens=first_tokens)) for length in lengths
    ]

    # 3. Refuse a folder that holds another study; for a dry run, print the cost.
    for model, own in [] if merge else zip(chosen, settings, strict=True):
        described = {**own.describe(model.known_shape()), "dtype": dtype}
        if dry_run and (outline := model.without_weights()) is not None:
            described |= describe_facts(outline, facts, partial(own.request, outline))
        require_same_settings(out / model.label, described)
    report.say(*spread.describe())
    if dry_run:
        work = []
        for model, own in zip(chosen, settings, strict=True):
            queries = cost.queries_of(model, facts, own.layout.length, first_tokens, own.layout.query)
            requests = [[query] for query in queries]
            price = keys_and_values(cost.config_of(model), requests, layers or None, own.search)
            work.append(price * (n_facts / len(facts)))
        cost.show(report, list(zip(chosen, work, strict=True)), flops)

    # 4. Compute the vectors of each model, or join their shards, and compare both directions.
    axes: Any = None
    n_done = 0
    results, record = {}, {}
    files: dict[str, Path] = {}
    with spread.open(out) as executor:
        for model, own in zip(chosen, settings, strict=True):
            name = model.label
            if merge:
                study = KeyValueStudy.merge([folder / name for folder in merge])
                require_model(model, study.record)
            else:
                loaded, part = model.load(on=spread.layout), shard or "0/1"
                study = study_keys_and_values(loaded, facts, own, out / name, part, progress(), executor)
                report.notes.extend(failed_facts(study))
            if shard is not None:
                n_done += len(study.ids)
                continue
            comparisons = study.compare(vectors, against, resamples=resamples, progress=progress())
            if study.record["set_aside"]:
                report.say(f"{name}: {say_set_aside(study.record['set_aside'])}")
            files[name] = comparisons.save(out / f"{name}_{vectors}.safetensors")
            n_people = len(next(iter(comparisons.at.values())).ids)
            report.say(f"{name}: {vectors}, {n_people} people queried in both directions")
            for layer, row in comparisons.table(statistic).items():
                report.say(
                    f"  layer {layer}: {statistic} {row['value']:.3f} ({row['low']:.3f} to {row['high']:.3f}), "
                    f"by chance {row['chance_low']:.3f} to {row['chance_high']:.3f}, p {row['p']:.3f}"
                )
            results[name] = comparisons.table(statistic)
            axes = comparisons.plot(statistic, ax=axes, label=name, title=f"{vectors} of a person, both directions")
            record = study.record

    # 5. Write the figure and the record.
    if shard is not None:
        report.part_done(shard, n_done, out)
    files["picture"] = save_figure(axes, out / f"{vectors}_{statistic}.png")
    report.finish(results, record, **files)
