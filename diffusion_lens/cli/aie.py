"""`diffusion-lens aie` averages the traces of many facts, on one canvas each or step by step."""

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.load_model import ModelChoice, default_folder
from diffusion_lens.cli.report import Report, progress, save_figure
from diffusion_lens.cli.workers import WorkerChoice, failed_facts

if TYPE_CHECKING:
    from diffusion_lens.analysis import AverageEffect, AverageTrajectoryEffect


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
    first_tokens: Annotated[
        int | None,
        typer.Option(
            help="Score only this many first tokens of the answer. Default: 1, as in ROME; with --by-step all.",
            callback=ranges.at_least(1),
        ),
    ] = None,
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
            help="Number of steps of the denoising run for --known recalled and --by-step. Default: that of the "
            "sampler, 32.",
            callback=ranges.at_least(1),
        ),
    ] = None,
    by_step: Annotated[
        bool,
        typer.Option(
            "--by-step",
            help="Trace each fact at the steps of its denoising run that write the answer, and average step by step, "
            "counted from the one that reveals the last token.",
        ),
    ] = False,
    canvas: options.Canvas = None,
    seed: options.Seed = 1,
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
    """Average causal traces over many facts by token role, with confidence intervals.

    The average excludes facts that the model does not know (see --known) and facts that cannot be laid out as a query.
    OUT/facts contains one file per fact, so an interrupted run resumes, and --shard can split the work.

    Example: diffusion-lens aie site-mdm --data site-attributes --length 16 --limit 3 --out aie
    """
    arguments = dict(locals())
    spread = WorkerChoice(workers, dask, slurm, device, merge)
    chosen = ModelChoice(model, config, tokenizer, spread.device, dtype, mode, block_size, mask_token_id)
    require("pictures")
    from diffusion_lens.analysis import AverageEffect, AverageTrajectoryEffect, LoopSettings
    from diffusion_lens.analysis.average_effects.known import Known, default_rule
    from diffusion_lens.analysis.average_effects.study import average_facts
    from diffusion_lens.analysis.average_effects.trace_settings import TraceSettings, corruption_of_facts
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.analysis.causal_tracing.restoration import Restoration
    from diffusion_lens.analysis.causal_tracing.trajectory_trace import check_canvas
    from diffusion_lens.analysis.usable_facts import say_set_aside
    from diffusion_lens.cli.shards import describe_facts, require_model, require_parts, share_of_work
    from diffusion_lens.cost import average_effect
    from diffusion_lens.data.sources import default_source, open_source
    from diffusion_lens.records import require_same_settings, shown_model

    # 1. Read the facts, and check the settings before the model is loaded.
    out = out or default_folder("aie", [chosen.label])
    source = open_source(data or default_source(model), outline_only=dry_run)
    facts = source.pick(trained, asked, limit)
    length = chosen.length(length, source.length)
    check_canvas(canvas or "forced")
    if canvas is not None and not by_step:
        raise ValueError("--canvas is a setting of --by-step; without it, each fact is traced on one canvas")
    if not by_step and first_tokens is None:
        first_tokens = 1
    rule = ("recalled" if by_step else default_rule(first_tokens)) if known is None else known
    corruption, measures_noise = corruption_of_facts("gaussian", noise, samples, seed)
    settings = TraceSettings(
        layout=CanvasLayout(length, first_tokens=first_tokens),
        restoration=Restoration.of(kind, window),
        corruption=corruption,
        measures_noise=measures_noise,
        known=Known.of({"one-canvas": "one_canvas"}.get(rule, rule)),
        loop=None if steps is None else LoopSettings(steps=steps),
        canvas=(canvas or "forced") if by_step else None,
    )
    result_type: Any = AverageTrajectoryEffect if by_step else AverageEffect

    # 2. Refuse a folder that holds another study; for a dry run, print the cost.
    n_facts = share_of_work(len(facts), shard, merge)
    require_parts(merge, ["facts"])
    if not merge:
        described = {**settings.describe(chosen.known_shape()), "dtype": dtype}
        if dry_run and (outline := chosen.without_weights()) is not None:
            described |= describe_facts(outline, facts, partial(settings.query, outline))
        require_same_settings(out / "facts", described)
    effective = {"data": source.name, "facts": len(facts), "length": length, "first_tokens": first_tokens}
    report = Report("aie", {**arguments, **effective}, out, json)
    report.say(*spread.describe())
    if dry_run:
        queries = cost.queries_of(chosen, facts, length, first_tokens, settings.query)
        work = average_effect(cost.config_of(chosen), queries, settings) * (n_facts / len(facts))
        cost.show(report, [(chosen, work)], flops)

    # 3. Trace the facts, or join the shards.
    if merge:
        average: Any = result_type.merge([folder / "facts" for folder in merge])
        require_model(chosen, average.record)
    else:
        with spread.open(out) as executor:
            loaded, part = chosen.load(on=spread.layout), shard or "0/1"
            average = average_facts(result_type, loaded, facts, settings, out / "facts", part, progress(), executor)
        report.notes.extend(failed_facts(average))
    if shard is not None:
        report.part_done(shard, len(average.ids) + len(average.unknown), out)

    # 4. Show the average effects, and write the files.
    report.say(f"{shown_model(average.record)}, the average over {average.rule}")
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
        lows, highs = average.ate_interval()
        if by_step:
            for index, (offset, n_facts) in enumerate(zip(average.offsets, average.n_facts, strict=True)):
                when = f"{-offset} step{'s' * (offset < -1)} before it" if offset else "last token revealed"
                total = _with_interval(average.ate[index].item(), lows[index].item(), highs[index].item())
                report.say(f"{when}, n = {n_facts}: average total effect {total}", *_by_role(average, index))
            results |= {"offsets": average.offsets, "n_facts": average.n_facts, "ate": average.ate.tolist()}
        else:
            report.say(f"average total effect {_with_interval(average.ate, lows, highs)}", *_by_role(average, ...))
            results["ate"] = average.ate
        by_role = average.aie.unbind(dim=-2)
        results["aie"] = {role: effects.tolist() for role, effects in zip(average.roles, by_role, strict=True)}
        files["picture"] = save_figure(average.plot(), out / "average.png")
    report.finish(results, average.record, **files)


def _by_role(average: "AverageEffect | AverageTrajectoryEffect", step: Any) -> Iterator[str]:
    """The average indirect effects at one step, with a line for each role that occurs."""
    for role, effects in zip(average.roles, average.aie[step].tolist(), strict=True):
        if not any(map(math.isnan, effects)):
            yield f"  {role:15} {' '.join(f'{effect:6.3f}' for effect in effects)}"


def _with_interval(effect: float, low: float, high: float) -> str:
    return f"{effect:.3f} ({'one fact: no interval' if math.isnan(low) else f'{low:.3f} to {high:.3f}'})"
