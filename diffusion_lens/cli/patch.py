"""`diffusion-lens patch` patches activations of a clean prompt into a corrupted one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.loop import canvas_of, check_masked, denoised, run_settings, unnamed_subject
from diffusion_lens.cli.patch_output import results_of, save, say
from diffusion_lens.cli.report import Report, progress

if TYPE_CHECKING:
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.analysis.patching.patch_settings import PatchSettings
    from diffusion_lens.cost import Cost
    from diffusion_lens.denoising.denoise_settings import DenoiseSettings
    from diffusion_lens.facts import Query
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer


@app.command()
def patch(
    model: options.Model,
    prompt: Annotated[str, typer.Option(help='Clean prompt, e.g. "Plerrick Baupling plays".')],
    corrupted: Annotated[
        str,
        typer.Option(
            help="Corrupted prompt, which has as many tokens. Its activations are replaced by those of --prompt."
        ),
    ],
    answer: Annotated[str, typer.Option(help='Answer to the clean prompt with its leading space, e.g. " bassoon".')],
    rival: Annotated[
        str | None,
        typer.Option(
            help="Answer to the corrupted prompt. With it, the metric is the logit of the answer's first token less "
            "that of the rival's; without it, the probability of the whole answer."
        ),
    ] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            "--site",
            help="Activation to patch: resid_pre, resid_mid, resid_post, attn_out, mlp_out, or by head q, k, v, z, "
            "pattern. Repeat the option for several. Default: resid_pre.",
        ),
    ] = None,
    steps: options.LoopSteps = None,
    at_step: Annotated[
        list[int] | None,
        typer.Option(
            "--at-step",
            help="Step at which to patch, counted from 0. Repeat the option for several. Default: all up to the one "
            "that reveals the first token of the answer in the corrupted run.",
            callback=ranges.at_least(0),
        ),
    ] = None,
    sampler: options.Sampler = None,
    cfg_scale: options.CfgScale = None,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", help="Layer to patch. Repeat the option for several. Default: all.")
    ] = None,
    position: Annotated[
        list[int] | None,
        typer.Option("--position", help="Position to patch. Repeat the option for several. Default: each one."),
    ] = None,
    head: Annotated[
        list[int] | None,
        typer.Option("--head", help="Head to patch. Repeat the option for several. Default: each one."),
    ] = None,
    together: Annotated[
        bool,
        typer.Option("--together", help="Patch the positions together, as one cell for each layer (and head)."),
    ] = False,
    method: Annotated[
        str, typer.Option(help="exact, or attribution: an estimate by gradients, with its largest cells checked.")
    ] = "exact",
    length: options.LengthOfOne = None,
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
    """Patch activations of a clean prompt into the run of a corrupted one, cell by cell, and measure the answer.

    With --steps, both prompts are denoised, and the canvas of a step of the one is patched into that of the other.

    Example: diffusion-lens patch site-mdm --prompt "Plerrick Baupling plays" --corrupted "Mondall Rorrick plays"
    --answer " bassoon" --length 16 --out patch
    """
    arguments = dict(locals())
    chosen = ModelChoice(model, config, tokenizer, device, dtype, mode, block_size, mask_token_id)
    from diffusion_lens.analysis import patch_grid
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.analysis.patching.patch_settings import PatchSettings
    from diffusion_lens.analysis.patching.sites import resolve_sites
    from diffusion_lens.analysis.selection import unique_indices
    from diffusion_lens.analysis.traced_trajectory import TracedTrajectory
    from diffusion_lens.config import DiffusionConfig

    # 1. Check the settings before the model is loaded.
    loop = run_settings(chosen, steps, at_step, sampler=sampler, cfg_scale=cfg_scale, seed=seed)
    sites = resolve_sites(site or ["resid_pre"])
    selected: Any = list(unique_indices("position", position) or ()) or None
    cells: Any = ([selected] if selected else "all") if together else selected
    heads: Any = head
    settings = PatchSettings(sites, cells, layer or [], heads, method, check=8)
    cost.check_layers(chosen, layer or [])
    if (shape := chosen.known_shape()) is not None:
        cfg = DiffusionConfig.from_architecture(shape, device="cpu", dtype=dtype)
        _ = [one.pick_heads(heads, cfg) for one in sites]
    length = chosen.length(length)
    prompts = _Prompts(prompt, corrupted, answer, rival, CanvasLayout(length))
    report = Report("patch", {**arguments, "site": [one.name for one in sites], "length": length}, out, json)
    if out is not None:
        require("pictures")

    # 2. For a dry run, print the cost.
    if dry_run:
        work = _cost(chosen, prompts, settings, loop, at_step)
        cost.show(report, [(chosen, work)], flops)

    # 3. Lay out both prompts or denoise them, and patch.
    loaded = chosen.load()
    clean, other, rival_token = prompts.on(loaded)
    metric, row = _metric(loaded, other, rival_token)
    inputs: Any = (clean, other)
    if loop is not None:
        inputs = [denoised(loaded, canvas_of(loaded, query), loop) for query in (clean, other)]
        reading = TracedTrajectory.of(loaded, other, inputs[1])
        check_masked(at_step, reading.revealed_at[0] if rival else reading.last_step)
        first = reading.trajectory.first_step
        at_step = at_step or list(range(first, reading.answered_from + 1))
    grids = patch_grid(
        loaded,
        inputs[0],
        inputs[1],
        metric,
        [one.name for one in sites],
        None if loop is None else at_step,
        positions=cells,
        layers=layer,
        heads=heads,
        logits_at=row,
        method=method,
        progress=progress(),
    )

    # 4. Show the strongest cells, and write the files.
    say(report, grids, "logit difference" if rival else "p(answer)")
    files = {} if out is None else save(grids, out)
    report.finish(results_of(grids), next(iter(grids.values())).record, **files)


@dataclass(frozen=True)
class _Prompts:
    """The two prompts and the answers.

    Raises:
        ValueError: An empty prompt.
    """

    clean: str
    corrupted: str
    answer: str
    rival: str | None
    layout: "CanvasLayout"

    def __post_init__(self) -> None:
        for prompt in (self.clean, self.corrupted):
            unnamed_subject(prompt, self.answer)

    def on(self, model: "HookedDiffusionTransformer") -> "tuple[Query, Query, int | None]":
        """Both prompts on the canvas, with the clean one's answer, and the first token of the rival.

        Raises:
            ValueError: A prompt that cannot be laid out, prompts of different lengths, or a rival that begins with the
                token with which the answer begins.
        """
        clean, corrupted = (
            self.layout.query(model, unnamed_subject(prompt, self.answer)) for prompt in (self.clean, self.corrupted)
        )
        ends = [query.answer_positions[0] for query in (clean, corrupted)]
        if ends[0] != ends[1]:
            raise ValueError(
                f"the prompt has {ends[0]} tokens and the corrupted one {ends[1]}: states are patched between equal "
                "positions, so give prompts with the same number of tokens"
            )
        if self.rival is None:
            return clean, corrupted, None
        token = unnamed_subject(self.corrupted, self.rival).tokenize(model)[1][0]
        if token == clean.answer_tokens[0]:
            raise ValueError(f"the answer {self.answer!r} and the rival {self.rival!r} begin with the same token")
        return clean, corrupted, token


def _metric(model: "HookedDiffusionTransformer", query: "Query", rival_token: int | None) -> tuple[Any, Any]:
    """The metric of a corrupted run, and the row of the logits that it reads; `None` where the metric has its own."""
    from diffusion_lens.analysis import answer_probability
    from diffusion_lens.analysis.answer import Answer

    if rival_token is None:
        return answer_probability(model, query), None
    token = query.answer_tokens[0]

    def logit_difference(logits: Any) -> Any:
        return (logits[:, 0, token] - logits[:, 0, rival_token]).mean()

    return logit_difference, Answer.of(model, query).rows[:1]


def _cost(
    model: ModelChoice,
    prompts: _Prompts,
    settings: "PatchSettings",
    loop: "DenoiseSettings | None",
    at_step: Sequence[int] | None,
) -> "Cost":
    """Cost of the grid of two prompts, or of those of two runs."""
    import torch

    from diffusion_lens.cost import denoising, patch_grid
    from diffusion_lens.cost.grids import expected_canvases
    from diffusion_lens.readout import READOUTS
    from diffusion_lens.settings import pick_indices

    # 1. Lay out the prompts; without a tokenizer, two of one length that differ everywhere.
    cfg, outline = cost.config_of(model), model.without_weights()
    if outline is not None:
        clean, other, _ = prompts.on(outline)
    else:
        clean = cost.query_of(model, prompts.layout, unnamed_subject(prompts.clean, prompts.answer))
        other = replace(clean, tokens=clean.tokens + 1)

    # 2. One grid, or one for each canvas, and both runs.
    settings = replace(settings, layers=pick_indices("layers", settings.layers or None, cfg.n_layers))
    read = READOUTS[cfg.readout].rows(torch.tensor(clean.answer_positions)).tolist()
    grid = patch_grid(cfg, clean.tokens, other.tokens, settings, read)
    if loop is None:
        return grid
    n_given, length = clean.answer_positions[0], max(len(clean.tokens), clean.answer_positions[-1] + 1)
    n_answer, steps = len(clean.answer_tokens), loop.steps or 32
    n_canvases = len(at_step) if at_step else expected_canvases(cfg, steps, n_answer, length - n_given)
    return grid * n_canvases + denoising(cfg, length, n_given, loop) * 2
