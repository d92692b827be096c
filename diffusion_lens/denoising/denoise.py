"""`denoise` and `denoise_with_cache`: run the loop from a canvas under settings, and return the trajectory."""

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
from diffusion_lens.hooks.names import FwdHooks
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import run_of


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
