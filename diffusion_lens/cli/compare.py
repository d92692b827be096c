"""`diffusion-lens compare`: keys and values of many facts, asked both ways."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.load_model import ModelChoice, default_folder
from diffusion_lens.cli.report import Report, progress, save_figure


@app.command()
def compare(
    models: options.Models,
    out: options.OutNeeded = None,
    data: options.Data = None,
    trained: options.Trained = None,
    limit: options.Limit = None,
    layers: options.Layers = None,
    vectors: Annotated[str, typer.Option(help="keys, values or outputs.")] = "keys",
    against: Annotated[
        str | None, typer.Option(help="Those of the other direction, by default as --vectors: keys, values or outputs.")
    ] = None,
    statistic: Annotated[
        str,
        typer.Option(
            help="Shown and drawn: cka or procrustes; of vectors of one kind also cosine, centred_cosine, retrieval or "
            "subspace."
        ),
    ] = "cka",
    draws: Annotated[
        int, typer.Option(help="Random pairings that say what chance gives.", callback=ranges.at_least(1))
    ] = 1000,
    length: options.Length = None,
    first_tokens: options.FirstTokens = 1,
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
    """Are facts encoded alike forwards and backwards? Keys and values both ways, paired person by person.

    A file a fact is kept in OUT/MODEL, so a run that is stopped goes on, and several may share the work with --shard.

    Example: diffusion-lens compare tiny-mdm tiny-ar --layer 0 --limit 20 --draws 99 --out compare
    """
    given = dict(locals())
    require("pictures")
    from diffusion_lens.analysis import KeyValueStudy
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.analysis.representations.forward_reverse import fewest_facts
    from diffusion_lens.analysis.representations.similarity import statistics
    from diffusion_lens.analysis.rome.study import KeyValueSettings, study_keys_and_values
    from diffusion_lens.analysis.rome.study_result import DIRECTIONS, check_vectors
    from diffusion_lens.analysis.usable_facts import say_set_aside
    from diffusion_lens.cli.shards import describe_facts, require_model, require_parts, share_of_work
    from diffusion_lens.data.sources import default_source, open_source
    from diffusion_lens.records import require_same_settings

    chosen = [ModelChoice(model, config, tokenizer, device, dtype) for model in models]
    out = out or default_folder("compare", models)
    for name in (vectors, against or vectors):
        check_vectors(name)
    # What the comparison would refuse, before the long search for what it compares.
    known = statistics(rank=2, one_space=(against or vectors) == vectors)
    if statistic not in known:
        raise ValueError(f"statistic {statistic!r} is not computed of {vectors}; it is one of {', '.join(known)}")
    for model in chosen:
        cost.check_layers(model, layers or [])
    names = [model.label for model in chosen]
    if len(set(names)) < len(names):
        raise ValueError(f"{' '.join(models)}: each model has a folder of its name in OUT, so no two may share one")
    source = open_source(data or default_source(models[0]), outline_only=dry_run)
    facts = source.pick(trained, limit=limit)
    lengths = [model.length(length, source.length) for model in chosen]
    forward, reverse = ({fact.person for fact in facts if fact.asked == asked} for asked in DIRECTIONS)
    if len(forward & reverse) < fewest_facts():
        raise ValueError(
            f"{len(forward & reverse)} persons are asked both ways, too few to compare: take at least {fewest_facts()}"
        )
    n_facts = share_of_work(len(facts), shard, merge)
    report = Report("compare", {**given, "data": source.name, "facts": len(facts), "lengths": lengths}, out, json)
    require_parts(merge, names)
    settings = [
        KeyValueSettings(layers or None, layout=CanvasLayout(places, first_tokens=first_tokens)) for places in lengths
    ]
    for model, own in [] if merge else zip(chosen, settings, strict=True):
        described = {**own.describe(model.known_shape()), "dtype": dtype}
        if dry_run and (blank := model.without_weights()) is not None:
            described |= describe_facts(blank, facts, partial(own.request, blank))
        require_same_settings(out / model.label, described)
    if dry_run:
        cost.show(report, chosen[0], _searches(chosen, n_facts, layers, max(each or 32 for each in lengths)), flops)

    axes: Any = None
    done = 0
    results, record = {}, {}
    files: dict[str, Path] = {}
    for model, own in zip(chosen, settings, strict=True):
        name = model.label
        if merge:
            study = KeyValueStudy.merge([folder / name for folder in merge])
            require_model(model, study.record)
        else:
            study = study_keys_and_values(model.load(), facts, own, out / name, shard or "0/1", progress())
        if shard is not None:
            done += len(study.ids)
            continue
        found = study.compare(vectors, against, draws=draws, progress=progress())
        if study.record["set_aside"]:
            report.say(f"{name}: {say_set_aside(study.record['set_aside'])}")
        files[name] = found.save(out / f"{name}_{vectors}.safetensors")
        report.say(f"{name}: {vectors}, {len(next(iter(found.at.values())).ids)} persons asked both ways")
        for layer, row in found.table(statistic).items():
            report.say(
                f"  layer {layer}: {statistic} {row['value']:.3f} ({row['low']:.3f} to {row['high']:.3f}), "
                f"by chance {row['chance_low']:.3f} to {row['chance_high']:.3f}, p {row['p']:.3f}"
            )
        results[name] = found.table(statistic)
        axes = found.plot(statistic, ax=axes, label=name, title=f"{vectors} of a person, both directions")
        record = study.record
    if shard is not None:
        report.part_done(shard, done, out)
    files["picture"] = save_figure(axes, out / f"{vectors}_{statistic}.png")
    report.finish(results, record, **files)


def _searches(models: list[ModelChoice], facts: int, layers: list[int] | None, places: int) -> cost.Cost:
    """A search of 20 iterations a fact and layer, each through the blocks above it, with its essence beside it."""
    depth = models[0].shape().n_layers
    blocks = [layer % depth for layer in layers] if layers else range(depth - 1)
    work = len(models) * facts * 2 * sum(1 + 20 * (depth - 1 - layer) / depth for layer in blocks)
    return cost.Cost(work, places, 64, backward=work)
