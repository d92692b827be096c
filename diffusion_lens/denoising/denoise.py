"""`denoise` and `denoise_with_cache`: run the loop from a canvas under settings, and return the trajectory."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.denoising.cache import CacheFilter, TrajectoryCache
from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.loop import Run, run_loop
from diffusion_lens.denoising.sampler import Sampler, row_seeds
from diffusion_lens.denoising.settings import DenoiseSettings
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.clock import restoring
from diffusion_lens.hooks.names import FwdHooks, loop_hook
from diffusion_lens.model.hook_points import NO_POSITIONS
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import describe_hooks, run_of
from diffusion_lens.settings import warn_user


def denoise(
    model: DiffusionTransformer,
    canvas: Canvas,
    settings: DenoiseSettings,
    *,
    fwd_hooks: FwdHooks = (),
    progress: bool = False,
) -> Trajectory:
    """`HookedDiffusionTransformer.denoise`, from the canvas of `lay_out` and with the settings as one object."""
    with run_of(model, fwd_hooks, edits=False):
        run = prepare(model, canvas, settings)
        record = run_loop(run, fwd_hooks=fwd_hooks, progress=progress)
        return Trajectory.of(run, {**run.describe(), **record})


def denoise_with_cache(
    model: DiffusionTransformer,
    canvas: Canvas,
    settings: DenoiseSettings,
    cache_filter: CacheFilter,
    *,
    fwd_hooks: FwdHooks = (),
    progress: bool = False,
) -> tuple[Trajectory, TrajectoryCache]:
    """Run the loop and cache activations; `HookedDiffusionTransformer.denoise_with_cache` lists the errors."""
    run = prepare(model, canvas, settings)
    n_steps = len(run.times) - 1
    request = cache_filter.on(model, n_steps, guided=run.settings.cfg_scale > 0)
    request.require_fits(model.cfg, *run.tokens.shape)
    cached: dict[int, dict[str, Tensor]] = {}

    def around(step: int) -> AbstractContextManager[Any]:
        # The hooks that cache are attached step by step, after the caller's hooks: so the cache contains what those
        # returned, and steps that are not cached cost nothing extra.
        return model.hooks(fwd_hooks=request.hooks(cached)) if step in request.steps else nullcontext()

    with run_of(model, fwd_hooks, edits=False):
        record = run_loop(run, fwd_hooks=fwd_hooks, around=around, progress=progress)
        trajectory = Trajectory.of(run, {**run.describe(), **record})
        return trajectory, TrajectoryCache(cached, n_steps, model, trajectory.canvases)


def denoise_as_generate(
    model: DiffusionTransformer, canvas: Canvas, settings: DenoiseSettings, *, fwd_hooks: FwdHooks, progress: bool
) -> Trajectory:
    """`denoise`, and a `UserWarning` if in the first step a hook changes the last position of the canvas alone.

    TransformerLens's `generate` shows hooks the text written so far, whose last row predicts the next token; here they
    see the whole canvas, and most code that steers there writes to `activation[:, -1]`.
    """
    changed_last: list[str] = []
    kept: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: Any) -> None:
        kept[hook.name] = x.clone()

    def compare(x: Tensor, hook: Any) -> None:
        changed = (x != kept.pop(hook.name)).movedim(hook.pos_dim, 0).flatten(1).any(dim=1)
        if changed[-1] and not changed[:-1].any():
            changed_last.append(hook.name)

    @restoring
    def watched() -> Iterator[None]:
        with model.hooks():
            for name in describe_hooks(model):
                point: Any = model.hook_dict.get(name)
                if point is not None and point.pos_dim != NO_POSITIONS and not name.startswith(loop_hook("")):
                    point.add_hook(keep, level=model.context_level, prepend=True)
                    point.add_hook(compare, level=model.context_level)
            yield

    with run_of(model, fwd_hooks, edits=False):
        run = prepare(model, canvas, settings)
        _, rows = model.readout.locate(canvas.masked(canvas.tokens), canvas.real)
        record = run_loop(
            run, fwd_hooks=fwd_hooks, around=lambda step: nullcontext() if step else watched(), progress=progress
        )
        trajectory = Trajectory.of(run, {**run.describe(), **record})
    last = canvas.tokens.shape[1] - 1
    if changed_last and set(rows.tolist()) != {last}:
        first = f"row {int(rows[0])}" if model.cfg.is_autoregressive else f"rows {sorted(set(rows.tolist()))}"
        warn_user(
            f"the hook at {changed_last[0]!r} changes the last position of the canvas alone, {last}. In the loop hooks "
            "see the whole canvas, with every position to write, so activation[:, -1] is not the row that predicts "
            f"the next token: the first step reads {first}. To steer what each step predicts, let a hook change every "
            "row and wrap it, interventions.while_predicting(hook, model.cfg.readout); hook.step says what is masked"
        )
    return trajectory


def prepare(model: DiffusionTransformer, canvas: Canvas, settings: DenoiseSettings) -> Run:
    """A run that has not begun; a `ValueError` if the settings do not fit the model or the canvas."""
    settings = settings.on(model.cfg, model.cfg.model_name)
    assert isinstance(settings.sampler, Sampler)
    seeds = row_seeds(settings.seed, canvas.tokens.shape[0])
    if canvas.uniform_noise:
        canvas = canvas.started(seeds, model.cfg.d_vocab_out)
    blanks = canvas.blanks(canvas.tokens)
    if canvas.reach is None or canvas.blocks is None:
        n_steps = settings.sampler.n_steps(settings.steps, blanks)
    else:
        n_steps = settings.sampler.n_steps_by_blocks(settings.steps, blanks, canvas.blocks, canvas.reach.size)
    return Run(
        model=model,
        canvas=canvas,
        settings=settings,
        seeds=seeds,
        times=settings.sampler.times(n_steps),
        revealed_at=torch.full_like(canvas.tokens, -1),
        confidence=torch.full(blanks.shape, float("nan"), device=blanks.device),
    )
