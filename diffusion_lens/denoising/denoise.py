"""`denoise`, also with a cache or a check of the hooks: run the loop from a canvas, and return the trajectory."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.denoising.cache import CacheFilter, TrajectoryCache
from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.loop import Run, run_loop
from diffusion_lens.denoising.sampler import PositionNoise, Sampler, SequentialNoise, row_seeds
from diffusion_lens.denoising.settings import DenoiseSettings
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.clock import restoring
from diffusion_lens.hooks.names import FwdHooks
from diffusion_lens.model.hook_points import StepHookPoint, hooked_modules, position_axis
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import run_of
from diffusion_lens.settings import Whole, warn_user


def denoise(
    model: DiffusionTransformer,
    canvas: Canvas,
    settings: DenoiseSettings,
    *,
    fwd_hooks: FwdHooks = (),
    around: Callable[[int], AbstractContextManager[Any]] | None = None,
    predictions: Whole | None = None,
    progress: bool = False,
) -> Trajectory:
    """`HookedDiffusionTransformer.denoise`, from the canvas of `lay_out` and with the settings as one object.

    Args:
        around: The same as in `run_loop`.
    """
    with run_of(model, fwd_hooks, edits=False):
        run = prepare(model, canvas, settings)
        if predictions is not None:
            run.record_predictions(predictions)
        record = run_loop(run, fwd_hooks=fwd_hooks, around=around, progress=progress)
        return Trajectory.of(run, {**run.describe(), **record})


def denoise_with_cache(
    model: DiffusionTransformer,
    canvas: Canvas,
    settings: DenoiseSettings,
    cache_filter: CacheFilter,
    *,
    fwd_hooks: FwdHooks = (),
    predictions: Whole | None = None,
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
        if predictions is not None:
            run.record_predictions(predictions)
        record = run_loop(run, fwd_hooks=fwd_hooks, around=around, progress=progress)
        trajectory = Trajectory.of(run, {**run.describe(), **record})
        return trajectory, TrajectoryCache(cached, n_steps, model, trajectory.canvases)


def denoise_and_check_hooks(
    model: DiffusionTransformer, canvas: Canvas, settings: DenoiseSettings, *, fwd_hooks: FwdHooks, progress: bool
) -> Trajectory:
    """`denoise`, and a `UserWarning` if in the first step a hook changes the last position of the canvas alone.

    TransformerLens's `generate` shows hooks the text written so far, whose last row predicts the next token; here they
    see the whole canvas, and most code that steers there writes to `activation[:, -1]`.
    """
    n_pos, changed_last = canvas.tokens.shape[1], list[str]()
    kept = defaultdict[str, list[Tensor]](list)  # several where a hook calls the module of its own point again

    def keep(x: Tensor, hook: Any) -> None:
        kept[hook.name].append(x.clone())

    def compare(x: Tensor, hook: Any) -> None:
        before, axis = kept[hook.name].pop(), position_axis(hook)
        if axis is not None and x.shape[axis : axis + 1] == (n_pos,):
            differs = (x != before) & ~(x.isnan() & before.isnan())
            changed = differs.movedim(axis, 0).flatten(1).any(dim=1)
            if changed[-1] and not changed[:-1].any():
                changed_last.append(hook.name)

    @restoring
    def watched() -> Iterator[None]:
        with model.hooks():
            for point in hooked_modules(model, skip=model.loop_hooks):
                if isinstance(point, StepHookPoint):
                    point.add_hook(keep, level=model.context_level, prepend=True)
                    point.add_hook(compare, level=model.context_level)
            yield

    def around(step: int) -> AbstractContextManager[Any]:
        return nullcontext() if step else watched()

    trajectory = denoise(model, canvas, settings, fwd_hooks=fwd_hooks, around=around, progress=progress)
    rows = sorted(set(model.readout.locate(canvas.masked(canvas.tokens), canvas.real)[1].tolist()))
    if changed_last and rows != [n_pos - 1]:
        read = f"row {rows[0]}" if model.cfg.is_autoregressive else f"rows {rows}"
        warn_user(
            f"the hook at {changed_last[0]!r} changes the last position of the canvas alone, {n_pos - 1}. The first "
            f"step reads {read}: let the hook change every row, and wrap it, interventions.while_predicting(hook, "
            "model.cfg.readout)"
        )
    return trajectory


def prepare(model: DiffusionTransformer, canvas: Canvas, settings: DenoiseSettings) -> Run:
    """A run that has not begun; a `ValueError` if the settings do not fit the model or the canvas."""
    settings = settings.on(model.cfg, model.cfg.model_name)
    assert isinstance(settings.sampler, Sampler)
    noise: PositionNoise
    if isinstance(settings.seed, torch.Generator) and settings.sampler.hands_on:
        noise = SequentialNoise(settings.seed, canvas.positions)
    else:
        noise = PositionNoise(row_seeds(settings.seed, canvas.tokens.shape[0]), canvas.positions)
    if canvas.uniform_noise:
        canvas = canvas.started(noise, model.cfg.d_vocab_out)
    blanks = canvas.blanks(canvas.tokens)
    if canvas.reach is None or canvas.blocks is None:
        n_steps = settings.sampler.n_steps(settings.steps, blanks)
    else:
        n_steps = settings.sampler.n_steps_by_blocks(settings.steps, blanks, canvas.blocks, canvas.reach.size)
    return Run(
        model=model,
        canvas=canvas,
        settings=settings,
        noise=noise,
        times=settings.sampler.times(n_steps),
        revealed_at=torch.full_like(canvas.tokens, -1),
        confidence=torch.full(blanks.shape, float("nan"), device=blanks.device),
    )
