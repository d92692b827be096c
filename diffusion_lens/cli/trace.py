"""`diffusion-lens trace` traces one fact, on one canvas or at the steps of a denoising run."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.load_model import ModelChoice, subject_start
from diffusion_lens.cli.loop import canvas_of, check_masked, denoised, run_settings
from diffusion_lens.cli.report import Report, progress
from diffusion_lens.cli.trace_output import one_canvas, steps_of_a_run


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
    steps: options.LoopSteps = None,
    at_step: Annotated[
        list[int] | None,
        typer.Option(
            "--at-step",
            help="Step to trace, counted from 0. Repeat the option for several. Default: from the step that reveals "
            "the first token of the answer to the one that reveals the last.",
            callback=ranges.at_least(0),
        ),
    ] = None,
    canvas: options.Canvas = None,
    sampler: options.Sampler = None,
    cfg_scale: options.CfgScale = None,
    length: options.LengthOfOne = None,
    first_tokens: options.FirstTokens = None,
    occurrence: options.Occurrence = None,
    seed: options.Seed = 1,
    config: options.Config = None,
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = None,
    block_size: options.BlockSize = None,
    mask_token_id: options.MaskTokenId = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    out: options.Out = None,
    json: options.Json = False,
    dry_run: options.DryRun = False,
    flops: options.Flops = None,
) -> None:
    """Trace one fact: corrupt the subject, restore one state at a time, and measure the probability of the answer.

    With --steps, the fact is traced at the steps at which a denoising run writes the answer: tokens that the run has
    revealed are context, and p(answer) is that of the tokens still masked. OUT then has an explorer page.

    Example: diffusion-lens trace site-mdm --prompt "Plerrick Baupling plays" --subject "Plerrick Baupling"
    --answer " bassoon" --length 16 --out trace
    """
    arguments = dict(locals())
    chosen = ModelChoice(model, config, tokenizer, device, dtype, mode, block_size, mask_token_id)
    from diffusion_lens.analysis import Corruption, Restoration, Selection, noise_scale, trace_query, trace_steps
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.analysis.causal_tracing.corruption import CORRUPTIONS
    from diffusion_lens.analysis.causal_tracing.trajectory_trace import check_canvas
    from diffusion_lens.analysis.traced_trajectory import TracedTrajectory
    from diffusion_lens.cost import trace as price_trace
    from diffusion_lens.cost import trajectory_trace
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
    check_canvas(canvas or "forced")
    loop = run_settings(chosen, steps, at_step, sampler=sampler, cfg_scale=cfg_scale, seed=seed, canvas=canvas)
    fact = Fact(prompt, subject, answer, subject_start=subject_start(prompt, subject, occurrence))
    _ = fact.subject_span
    length = chosen.length(length)
    layout = CanvasLayout(length, first_tokens=first_tokens)
    report = Report("trace", {**arguments, "length": length}, out, json)
    if out is not None:
        require("pictures")

    # 2. For a dry run, print the cost.
    if dry_run:
        cfg, expected = cost.config_of(chosen), cost.query_of(chosen, layout, fact)
        if loop is None:
            work = price_trace(cfg, expected, restoration, corrupting)
        else:
            n_canvases = len(at_step) if at_step else None
            work = trajectory_trace(
                cfg, expected, loop, restoration, corrupting, canvas=canvas or "forced", canvases=n_canvases
            )
        cost.show(report, [(chosen, work)], flops)

    # 3. Lay out the query, measure the noise if none was given, and trace.
    loaded = chosen.load()
    query = layout.query(loaded, fact)
    if noise is None and corruption != "mask":
        corrupting = replace(corrupting, noise=noise_scale(loaded, [query]))
    result: Any
    if loop is None:
        result = trace_query(loaded, query, restoration, corrupting, Selection(), progress=progress())
        results, files = one_canvas(report, result, out)
    else:
        run_of_fact = TracedTrajectory.of(loaded, query, denoised(loaded, canvas_of(loaded, query), loop))
        check_masked(at_step, run_of_fact.last_step)
        result = trace_steps(run_of_fact, at_step, canvas or "forced", restoration, corrupting, progress=progress())
        results, files = steps_of_a_run(report, result, run_of_fact.trajectory, out)
    report.finish(results, result.record, **files)
