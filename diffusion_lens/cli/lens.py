"""`diffusion-lens lens` reads what each layer predicts, on one canvas or at the steps of a denoising run."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.lens_output import results_of, save, tables
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.loop import canvas_of, denoised, run_settings, steps_read, unnamed_subject
from diffusion_lens.cli.report import Report, progress

if TYPE_CHECKING:
    from torch import Tensor

    from diffusion_lens.denoising.canvas import Canvas
    from diffusion_lens.facts import Query


@app.command()
def lens(
    model: options.Model,
    prompt: options.Prompt,
    answer: Annotated[
        str | None,
        typer.Option(
            help='Answer to follow through the layers, with its leading space, e.g. " bassoon". Default: with --steps '
            "the tokens that the run writes."
        ),
    ] = None,
    steps: options.LoopSteps = None,
    at_step: Annotated[
        list[int] | None,
        typer.Option(
            "--at-step",
            help="Step to read, counted from 0. Repeat the option for several. Default: all.",
            callback=ranges.at_least(0),
        ),
    ] = None,
    sampler: options.Sampler = None,
    cfg_scale: options.CfgScale = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(
            "--layer",
            help="State to read: l is the one that enters block l, and the number of blocks is the last one. Repeat "
            "the option for several. Default: all.",
        ),
    ] = None,
    position: Annotated[
        list[int] | None,
        typer.Option(
            "--position",
            help="Position of the predicted token. Repeat the option for several. Default: those of the answer, or all "
            "that are to be written; on one text of a causal model the next one.",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Number of positions of the canvas, including the prompt. Default: the training length; if that is "
            "unknown, the length of prompt and answer, or 52 without --answer.",
            callback=ranges.at_least(1),
        ),
    ] = None,
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
    """Show what the model would predict if it ended after each layer (the logit lens), by position or by step.

    Without --steps, the table has the likeliest token by layer and position. With --steps, it has the same by layer and
    step if one position is read, and otherwise the first state from which on the token at each position is likeliest.

    Example: diffusion-lens lens site-mdm --prompt "Plerrick Baupling plays" --answer " bassoon" --length 16 --out lens
    """
    arguments = dict(locals())
    chosen = ModelChoice(model, config, tokenizer, device, dtype, mode, block_size, mask_token_id)
    from diffusion_lens.analysis import logit_lens
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.analysis.selection import unique_indices
    from diffusion_lens.cost import denoising, forward
    from diffusion_lens.data.sources import STUDY_LENGTH
    from diffusion_lens.settings import pick_indices

    # 1. Check the settings before the model is loaded.
    loop = run_settings(chosen, steps, at_step, sampler=sampler, cfg_scale=cfg_scale, seed=seed)
    unique_indices("position", position)
    shape = chosen.known_shape()
    one_text = loop is None and answer is None and shape is not None and shape.grows
    if one_text and length is not None:
        raise ValueError(
            f"--length {length}: without --steps {model!r}, which is causal, reads the prompt alone; leave out --length"
        )
    length = None if one_text else chosen.length(length) or (STUDY_LENGTH if answer is None else None)
    if shape is not None:
        pick_indices("layer", layer, shape.n_layers + 1)
    fact = unnamed_subject(prompt, answer or "")
    layout = CanvasLayout(length)
    report = Report("lens", {**arguments, "length": length}, out, json)
    if out is not None:
        require("pictures")

    # 2. For a dry run, print the cost.
    if dry_run:
        n_positions, n_given, n_answer = length or cost.guessed_tokens(prompt), cost.guessed_tokens(prompt), 1
        if answer is not None:
            laid_out = cost.query_of(chosen, layout, fact)
            n_positions, n_answer = len(laid_out.tokens), len(laid_out.answer_tokens)
            n_given = laid_out.answer_positions[0]
        elif not one_text and (outline := chosen.without_weights()) is not None:
            blank = canvas_of(outline, prompt, length)
            n_positions, n_given = blank.tokens.shape[1], int(blank.given.sum())
        work = forward(cost.config_of(chosen), 1, n_positions)
        if steps is not None and loop is not None:
            n_canvases = steps_read(chosen, steps, at_step, n_positions, n_answer)
            n_positions = max(n_positions, n_given + 1)
            work = work * n_canvases + denoising(cost.config_of(chosen), n_positions, n_given, loop)
        cost.show(report, [(chosen, work)], flops)

    # 3. Lay out the canvas or denoise it, and read it.
    loaded = chosen.load()
    query = None if answer is None else layout.query(loaded, fact)
    trajectory = None
    one_text = loop is None and query is None and loaded.cfg.grows
    canvas = None if one_text else canvas_of(loaded, query or prompt, length)
    if loop is not None and canvas is not None:
        trajectory = denoised(loaded, canvas, loop)
    positions = _default_positions(query, canvas) if position is None else position
    inputs: Any = trajectory or query or (prompt if canvas is None else canvas.tokens)
    targets = None if trajectory is None or query is None else _targets(trajectory.tokens, query, positions)
    result = logit_lens(
        loaded, inputs, layers=layer, positions=positions, steps=at_step, targets=targets, progress=progress()
    )

    # 4. Show the table, and write the files.
    if trajectory is not None:
        report.say(f"the run writes: {trajectory.text[0]}")
    report.say(*tables(result))
    files = {} if out is None else save(result, trajectory, out)
    report.finish(results_of(result), result.record, **files)


def _default_positions(query: "Query | None", canvas: "Canvas | None") -> list[int]:
    """The positions of the answer, or those to be written; the next one after a text of a causal model."""
    if query is not None:
        return list(query.answer_positions)
    return [-1] if canvas is None else canvas.blanks(canvas.tokens)[0].nonzero().flatten().tolist()


def _targets(written: "Tensor", query: "Query", positions: list[int]) -> "Tensor":
    """The token to follow at each position: the answer's, elsewhere the one that the run has written.

    Args:
        written: Int[1 pos], the canvas at the end.

    Raises:
        ValueError: A position outside the canvas.
    """
    from diffusion_lens.settings import pick_indices

    tokens = written.clone()
    tokens[0, list(query.answer_positions)] = tokens.new_tensor(query.answer_tokens)
    return tokens[:, pick_indices("position", positions, tokens.shape[1])]
