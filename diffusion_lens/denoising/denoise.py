"""`denoise` and `denoise_with_cache`: check the settings, lay out the canvas, run the loop, return a trajectory."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor
from transformer_lens.utilities.slice import Slice

from diffusion_lens.denoising.cache import CacheRequest, TrajectoryCache, check_budget, estimate_bytes, resolve_steps
from diffusion_lens.denoising.canvas import Prompt, lay_out
from diffusion_lens.denoising.loop import run_loop
from diffusion_lens.denoising.predictor import check_cfg_scale, require_mask
from diffusion_lens.denoising.randomness import Seed, row_seeds
from diffusion_lens.denoising.run import Run
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.samplers import resolve_sampler
from diffusion_lens.denoising.schedule import linear_times
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hook_names import NamesFilter, loop_hook, select_names
from diffusion_lens.identity import run_of
from diffusion_lens.model.caching import PosSlice
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import plain_number, whole_number


def denoise(
    model: DiffusionTransformer,
    prompt: Prompt,
    *,
    fwd_hooks: Sequence[tuple[Any, Any]] = (),
    progress: bool = False,
    **settings: Any,
) -> Trajectory:
    """Run the loop; see `HookedDiffusionTransformer.denoise` for the arguments."""
    with run_of(model, fwd_hooks):
        run = prepare(model, prompt, **settings)
        record = run_loop(run, fwd_hooks=fwd_hooks, progress=progress)
        return Trajectory.of(run, {**run.settings(), **record})


def denoise_with_cache(
    model: DiffusionTransformer,
    prompt: Prompt,
    names_filter: NamesFilter,
    *,
    steps_filter: SupportsIndex | Iterable[SupportsIndex] | None = None,
    pos_slice: PosSlice = None,
    branch: str = "conditional",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    fwd_hooks: Sequence[tuple[Any, Any]] = (),
    progress: bool = False,
    **settings: Any,
) -> tuple[Trajectory, TrajectoryCache]:
    """Run the loop and keep activations; see `HookedDiffusionTransformer.denoise_with_cache` for the arguments."""
    if names_filter is None:
        raise ValueError("name the activations to keep: everything at every step is a question about your disk")
    if branch not in ("conditional", "unconditional"):
        raise ValueError(f"branch={branch!r}; it is 'conditional' or 'unconditional'")
    run = prepare(model, prompt, **settings)
    names = select_names(names_filter, model.hook_dict)
    in_loop = [name for name in names if name.startswith(loop_hook(""))]
    silent = {name: reason for name in names if name not in in_loop and (reason := model.why_silent(name))}
    if silent and not callable(names_filter):
        raise ValueError("; ".join(f"{name!r} {reason}" for name, reason in silent.items()))
    if branch == "unconditional" and not run.cfg_scale:
        raise ValueError("branch='unconditional' needs guidance: without cfg_scale there is no such branch")
    if branch == "unconditional" and in_loop:
        raise ValueError(
            f"{in_loop} pass after guidance, which belongs to neither branch: keep them with 'conditional'"
        )
    n_steps = len(run.times) - 1
    request = CacheRequest(
        names=tuple(name for name in names if name not in silent),
        steps=resolve_steps(steps_filter, n_steps),
        branch=branch,
        pos_slice=Slice.unwrap(pos_slice),
        device=device,
        dtype=dtype,
    )
    check_budget(estimate_bytes(request, model.cfg, *run.tokens.shape), max_bytes)
    kept: dict[int, dict[str, Tensor]] = {}

    def around(step: int) -> AbstractContextManager[Any]:
        # Attached step by step, after the caller's own hooks: a cache shows what really ran, and a step that nobody
        # asked for costs what it costs without a cache.
        return model.hooks(fwd_hooks=request.hooks(kept)) if step in request.steps else nullcontext()

    with run_of(model, fwd_hooks):
        record = run_loop(run, fwd_hooks=fwd_hooks, around=around, progress=progress)
        return Trajectory.of(run, {**run.settings(), **record}), TrajectoryCache(kept, n_steps, model)


def prepare(
    model: DiffusionTransformer,
    prompt: Prompt,
    *,
    length: SupportsIndex | None = None,
    max_new_tokens: SupportsIndex | None = None,
    steps: SupportsIndex | None = None,
    sampler: str | Sampler | None = None,
    cfg_scale: SupportsFloat = 0.0,
    temperature: SupportsFloat = 0.0,
    seed: Seed = 0,
    attention_mask: Tensor | None = None,
    prepend_bos: bool | None = None,
) -> Run:
    """A checked run that has not begun."""
    chosen = resolve_sampler(sampler, model.cfg)
    asked = None if steps is None else whole_number("steps", steps)
    if asked is not None and asked < 1:
        raise ValueError(f"steps={asked}: at least one step is needed to reveal anything")
    weight, heat = check_cfg_scale(cfg_scale), plain_number("temperature", temperature)
    require_mask(weight, model.cfg, model.cfg.model_name)
    if not math.isfinite(heat) or heat < 0:
        raise ValueError(f"temperature={heat}; it must be a finite number, 0 (the likeliest token) or more")
    canvas = lay_out(model, prompt, length, max_new_tokens, attention_mask, prepend_bos)
    blanks = canvas.blanks(canvas.tokens)
    return Run(
        model=model,
        canvas=canvas,
        sampler=chosen,
        cfg_scale=weight,
        temperature=heat,
        seeds=row_seeds(seed, canvas.tokens.shape[0]),
        times=linear_times(chosen.n_steps(asked, blanks), chosen.eps).tolist(),
        revealed_at=torch.full_like(canvas.tokens, -1),
        confidence=torch.full(blanks.shape, float("nan"), device=blanks.device),
    )
