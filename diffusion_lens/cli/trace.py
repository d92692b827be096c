"""`diffusion-lens trace` traces one fact, and `aie` averages the traces of many facts."""

import math
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.load_model import ModelChoice, default_folder, subject_start
from diffusion_lens.cli.report import Report, progress, save_figure


@app.command()
def trace(
    model: options.Model,
    prompt: options.Prompt,
    subject: options.Subject,
    answer: options.Answer,
    kind: options.Kind = "resid",
    window: options.Window = 10,
    noise: options.Noise = None,
    samples: options.Samples = 10,
    corruption: Annotated[
        str, typer.Option(help="Corruption of the subject: gaussian, uniform, replace or mask.")
    ] = "gaussian",
    length: options.LengthOfOne = None,
    first_tokens: options.FirstTokens = None,
    occurrence: options.Occurrence = None,
    seed: options.Seed = 1,
    config: options.Config = None,
    tokenizer: options.Tokenizer = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    out: options.Out = None,
    json: options.Json = False,
    dry_run: options.DryRun = False,
    flops: options.Flops = None,
) -> None:
    """Trace one fact: corrupt the subject, restore one state at a time, and measure the probability of the answer.

    Example: diffusion-lens trace site-mdm --prompt "Plerrick Baupling plays" --subject "Plerrick Baupling"
    --answer " bassoon" --length 16 --out trace
    """
    arguments = dict(locals())
    chosen = ModelChoice(model, config, tokenizer, device, dtype)
    from diffusion_lens.analysis import Corruption, Restoration, Selection, noise_scale, trace_query
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.analysis.causal_tracing.corruption import CORRUPTIONS
    from diffusion_lens.facts import Fact

    # 1. Check the settings before the model is loaded.
    available = [name for name in CORRUPTIONS if name != "swap"]  # "swap" needs another subject, which no option gives.
    without_mask = [name for name in available if name != "mask"]
    if corruption not in available:
        raise ValueError(f"corruption={corruption!r} is unknown here; it must be one of {', '.join(available)}")
    corrupting, restoration = Corruption(corruption, noise or 0.0, samples, seed), Restoration(kind, window)
    shape = chosen.known_shape()
    if corruption == "mask" and shape is not None and not shape.has_mask:
        raise ValueError(
            f"corruption='mask' replaces the subject by [MASK], which {model!r} does not have; use "
            f"{', '.join(without_mask)}"
        )
    fact = Fact(prompt, subject, answer, subject_start=subject_start(prompt, subject, occurrence))
    _ = fact.subject_span
    length = chosen.length(length)
    layout = CanvasLayout(length, first_tokens=first_tokens)
    report = Report("trace", {**arguments, "length": length}, out, json)
    if out is not None:
        require("pictures")

    # 2. For a dry run, print the cost.
    if dry_run:
        n_positions = length or len(f"{prompt}{answer}".split()) * 2
        if (outline := chosen.without_weights()) is not None:
            n_positions = len(layout.query(outline, fact).tokens)
        cost.show(report, [(chosen, _grid(chosen, n_positions, samples, 1))], flops)

    # 3. Lay out the query, measure the noise if none was given, and trace.
    loaded = chosen.load()
    query = layout.query(loaded, fact)
    if noise is None and corruption != "mask":
        corrupting = replace(corrupting, noise=noise_scale(loaded, [query]))
    result = trace_query(loaded, query, restoration, corrupting, Selection(), progress=progress())

    # 4. Show the strongest states, and write the files.
    report.say(f"p(answer) {result.clean:.3f}, with the subject corrupted {result.corrupted:.3f}")
    strongest = result.indirect_effect.flatten().argsort(descending=True)[:5].tolist()
    n_columns = result.scores.shape[1]
    for cell in strongest:
        row, column = divmod(cell, n_columns)
        position, layer = result.positions[row], result.layers[column]
        word, effect = result.str_tokens[position].strip(), result.indirect_effect[row, column]
        report.say(f"  {kind} at position {position} ({word}), layer {layer}: restores {effect:+.3f}")
    files: dict[str, Any] = {}
    if out is not None:
        files = {
            "trace": result.save(out / "trace.safetensors"),
            "picture": save_figure(result.plot(), out / "trace.png"),
        }
    results: dict[str, Any] = {
        "clean": result.clean,
        "corrupted": result.corrupted,
        "indirect_effect": result.indirect_effect.tolist(),
    }
    report.finish(results, result.record, **files)


@app.command()
def aie(
    model: options.Model,
    out: options.OutNeeded = None,
    data: options.Data = None,
    trained: options.Trained = None,
    asked: options.Asked = None,
    limit: options.Limit = None,
    kind: options.Kind = "resid",
    window: options.Window = 10,
    noise: options.Noise = None,
    samples: options.Samples = 10,
    length: options.Length = None,
    first_tokens: options.FirstTokens = 1,
    known: Annotated[
        str | None,
        typer.Option(
            help="Facts to average: recalled (a denoising run writes the answer), one-canvas (the answer is the most "
            "likely one on the traced canvas), or all. Default: one-canvas with --first-tokens 1, otherwise recalled."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Number of steps of the denoising run for --known recalled. Default: one per masked position.",
            callback=ranges.at_least(1),
        ),
    ] = None,
    seed: options.Seed = 1,
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
    """Average causal traces over many facts by token role, with confidence intervals.

    The average excludes facts that the model does not know (see --known) and facts that cannot be laid out as a query.
    OUT/facts contains one file per fact, so an interrupted run resumes, and --shard can split the work.

    Example: diffusion-lens aie site-mdm --data site-attributes --length 16 --limit 3 --out aie
    """
    arguments = dict(locals())
    chosen = ModelChoice(model, config, tokenizer, device, dtype)
    require("pictures")
    from diffusion_lens.analysis import AverageEffect, LoopSettings
    from diffusion_lens.analysis.average_effects.known import Known, default_rule
    from diffusion_lens.analysis.average_effects.study import average_facts
    from diffusion_lens.analysis.average_effects.trace_settings import TraceSettings, corruption_of_facts
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.analysis.causal_tracing.restoration import Restoration
    from diffusion_lens.analysis.usable_facts import say_set_aside
    from diffusion_lens.cli.shards import describe_facts, require_model, require_parts, share_of_work
    from diffusion_lens.data.sources import default_source, open_source
    from diffusion_lens.records import require_same_settings

    # 1. Read the facts, and check the settings before the model is loaded.
    out = out or default_folder("aie", [model])
    source = open_source(data or default_source(model), outline_only=dry_run)
    facts = source.pick(trained, asked, limit)
    length = chosen.length(length, source.length)
    corruption, measures_noise = corruption_of_facts("gaussian", noise, samples, seed)
    settings = TraceSettings(
        layout=CanvasLayout(length, first_tokens=first_tokens),
        restoration=Restoration.of(kind, window),
        corruption=corruption,
        measures_noise=measures_noise,
        known=Known.of(default_rule(first_tokens) if known is None else {"one-canvas": "one_canvas"}.get(known, known)),
        loop=None if steps is None else LoopSettings(steps=steps),
    )

    # 2. Refuse a folder that holds another study; for a dry run, print the cost.
    n_facts = share_of_work(len(facts), shard, merge)
    require_parts(merge, ["facts"])
    if not merge:
        described = {**settings.describe(chosen.known_shape()), "dtype": dtype}
        if dry_run and (outline := chosen.without_weights()) is not None:
            described |= describe_facts(outline, facts, partial(settings.query, outline))
        require_same_settings(out / "facts", described)
    report = Report("aie", {**arguments, "data": source.name, "facts": len(facts), "length": length}, out, json)
    if dry_run:
        cost.show(report, [(chosen, _grid(chosen, length or 32, samples, n_facts))], flops)

    # 3. Trace the facts, or join the shards.
    if merge:
        average = AverageEffect.merge([folder / "facts" for folder in merge])
        require_model(chosen, average.record)
    else:
        average = average_facts(
            AverageEffect, chosen.load(), facts, settings, out / "facts", shard or "0/1", progress()
        )
    if shard is not None:
        report.part_done(shard, len(average.ids) + len(average.unknown), out)

    # 4. Show the average effects, and write the files.
    report.say(f"{average.record['model']}, the average over {average.rule}")
    if average.set_aside:
        report.say(say_set_aside(average.set_aside))
    files: dict[str, Any] = {"average": average.save(out / "average.safetensors")}
    results: dict[str, Any] = {
        "known": len(average.ids),
        "unknown": len(average.unknown),
        "rule": average.rule,
        "set_aside": average.set_aside,
    }
    if average.ids:
        low, high = average.ate_interval()
        interval = "one fact: no interval" if math.isnan(low) else f"{low:.3f} to {high:.3f}"
        report.say(f"average total effect {average.ate:.3f} ({interval})")
        for role, effects in zip(average.roles, average.aie.tolist(), strict=True):
            if not any(map(math.isnan, effects)):
                report.say(f"  {role:15} {' '.join(f'{effect:6.3f}' for effect in effects)}")
        results |= {"ate": average.ate, "aie": dict(zip(average.roles, average.aie.tolist(), strict=True))}
        files["picture"] = save_figure(average.plot(), out / "average.png")
    report.finish(results, average.record, **files)


def _grid(model: ModelChoice, n_positions: int, samples: int, facts: int) -> cost.Cost:
    """Cost of a full grid. A state restored after block l of L runs the L - l blocks above it for each noise sample."""
    layers = model.shape().n_layers
    return cost.Cost(facts * (1 + samples * (1 + n_positions * (layers - 1) / 2)), n_positions, 1 + samples)
