"""`diffusion-lens denoise` generates text and shows the canvas by step."""

from typing import Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.report import Report, progress, save_figure


@app.command()
def denoise(
    model: options.Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    length: Annotated[
        int | None,
        typer.Option(
            help="Number of positions of the canvas, including the prompt. Default: the training length, or 52 if it "
            "is unknown.",
            callback=ranges.at_least(1),
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Number of masked positions after the prompt, instead of --length.", callback=ranges.at_least(1)
        ),
    ] = None,
    steps: options.Steps = 32,
    sampler: options.Sampler = None,
    cfg_scale: options.CfgScale = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
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
    """Generate text by denoising a canvas, and show the canvas after each step that changed it.

    Example: diffusion-lens denoise site-mdm "Plerrick Baupling is the" --max-new-tokens 5 --steps 8 --out run
    """
    arguments = dict(locals())
    from diffusion_lens.cost import denoising
    from diffusion_lens.data.sources import STUDY_LENGTH
    from diffusion_lens.denoising import DenoiseSettings, lay_out
    from diffusion_lens.denoising import denoise as run_denoising
    from diffusion_lens.denoising.prepare import prepare

    # 1. Check the settings before the model is loaded.
    chosen = ModelChoice(model, config, tokenizer, device, dtype, mode, block_size, mask_token_id)
    if length is not None and max_new_tokens is not None:
        raise ValueError(
            "give length= (all positions) or max_new_tokens= (masked positions after the prompt), not both"
        )
    if max_new_tokens is None:
        length = chosen.length(length) or STUDY_LENGTH
    else:
        chosen.check_length(max_new_tokens)
    settings = DenoiseSettings(steps, sampler, cfg_scale or 0.0, temperature, seed)
    shape = chosen.known_shape()
    if shape is not None:
        settings.on(shape, model)
    report = Report("denoise", {**arguments, "length": length, "cfg_scale": settings.cfg_scale}, out, json)
    if out is not None:
        require("pictures")

    # 2. For a dry run, print the cost.
    if dry_run:
        n_given = cost.guessed_tokens(prompt)
        n_positions = length or n_given + (max_new_tokens or 0)
        if shape is not None:
            n_positions = min(n_positions, shape.n_ctx)
        if (outline := chosen.without_weights()) is not None:
            run = prepare(outline, lay_out(outline, prompt, length, max_new_tokens), settings)
            n_given, n_positions = int(run.canvas.given[0].sum()), run.tokens.shape[1]
        work = denoising(cost.config_of(chosen), n_positions, min(n_given, n_positions - 1), settings)
        cost.show(report, [(chosen, work)], flops)

    # 3. Run the loop, and show each canvas that differs from the one before.
    loaded = chosen.load()
    trajectory = run_denoising(loaded, lay_out(loaded, prompt, length, max_new_tokens), settings, progress=progress())
    canvases = trajectory.str_canvases()
    n_given = int(trajectory.given[0].sum())
    for step, canvas in enumerate(canvases):
        if step == 0 or canvas != canvases[step - 1]:
            words = ["·" if word in ("[MASK]", "") else word for word in canvas[n_given:]]
            report.say(f"{'start' if step == 0 else step - 1:>5}  {' '.join(words)}")
    report.say(trajectory.text[0])

    # 4. Write the files.
    files: dict[str, Any] = {}
    if out is not None:
        files = {
            "trajectory": trajectory.save(out / "trajectory.safetensors"),
            "picture": save_figure(trajectory.plot(), out / "denoising.png"),
        }
    results: dict[str, Any] = {"text": trajectory.text[0], "revealed_at": trajectory.revealed_at[0].tolist()}
    report.finish(results, trajectory.record, **files)
