"""`denoise`, also with a cache or a check of the hooks: run the loop from a canvas, and return the trajectory.

`generate` takes and returns what TransformerLens's does. The loop runs every step, whatever it writes. So what ends a
text there, an end token or a stop string, ends it here in the tokens and the text that are returned. In a prompt with
masks inside, each stretch that the run wrote ends by itself.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsFloat, SupportsIndex

import torch
from jaxtyping import Bool, Int
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
from diffusion_lens.model.text import require_tokenizer
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import run_of
from diffusion_lens.settings import Whole, check_bool, not_negative, warn_user, whole_numbers


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
        about = {**trajectory.record, **request.describe(run.tokens.shape[1])}
        return trajectory, TrajectoryCache(cached, n_steps, model, trajectory.canvases, about)


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


RETURN_TYPES = ("trajectory", "tokens", "str", "input")
_LOGITS = "change the logits in a hook at 'denoise.hook_logits'"
_WITH_CACHE = "denoise_with_cache returns activations by step, also those of 'denoise.hook_logits'"
# Arguments of TransformerLens's `generate` that do not exist here: their default value there, which changes nothing,
# and what to use.
INSTEAD: dict[str, tuple[Any, str]] = {
    "input": (None, "pass the prompt as the first argument"),
    "top_k": (None, _LOGITS),
    "top_p": (None, _LOGITS),
    "freq_penalty": (0.0, _LOGITS),
    "repetition_penalty": (1.0, _LOGITS),
    "forced_bos_token_id": (None, _LOGITS),
    "stop": (None, "name the texts at which it stops stop_strings="),
    "stopping_criteria": (None, "cut the text that is returned"),
    "padding_side": (None, "texts of several lengths are padded as the model needs"),
    "output_logits": (False, _WITH_CACHE),
    "return_cache": (False, _WITH_CACHE),
    "names_filter": (None, _WITH_CACHE),
    "return_input_tokens": (False, "the tokens that are returned begin with the prompt"),
    "device": (None, "move the model"),
    "pixel_values": (None, "these models read text only"),
}


def refuse_others(given: Mapping[str, Any]) -> None:
    """Raise a `TypeError` that says what to use for arguments of `INSTEAD`, unless they have their default there."""
    refused = []
    for name, value in given.items():
        default, instead = INSTEAD[name]
        if value is not default and not (isinstance(value, int | float) and value == default):
            refused.append(f"{name}: {instead}")
    if refused:
        raise TypeError(f"generate does not take {'; '.join(refused)}")


def temperature_of(do_sample: bool | None, temperature: SupportsFloat | None) -> float:
    """The temperature of the loop."""
    given = None if temperature is None else not_negative("temperature", temperature)
    if do_sample is None:
        return given or 0.0
    if check_bool("do_sample", do_sample):
        if given == 0:
            raise ValueError(
                "do_sample=True needs a temperature above 0; leave do_sample out to take the likeliest token"
            )
        return 1.0 if given is None else given
    if given:
        raise ValueError(
            f"do_sample=False takes the likeliest token, so temperature={given} has no effect; leave one out"
        )
    return 0.0


def end_tokens(model: Any, given: SupportsIndex | Sequence[SupportsIndex] | None) -> list[int]:
    """The ids at which a text ends: those that are given, or the tokenizer's end token, if it has one."""
    if given is None:
        given = getattr(model.tokenizer, "eos_token_id", None)
    ends = [] if given is None else whole_numbers("eos_token_id", given)
    if unknown := [end for end in ends if not 0 <= end < model.cfg.d_vocab]:
        raise ValueError(f"eos_token_id={unknown[0]} is not among the {model.cfg.d_vocab} tokens of the model")
    return ends


def ended_positions(
    model: Any, trajectory: Trajectory, ends: Sequence[int], stop_strings: str | Sequence[str] | None
) -> Bool[Tensor, "batch pos"]:
    """The positions that the run wrote from the first end token of a stretch on, and after a token that completes a
    stop string."""
    written = ~trajectory.given & trajectory.real
    n_ends = torch.isin(trajectory.tokens, torch.tensor(ends, dtype=torch.long)).cumsum(dim=1)
    n_before_stretch = n_ends.masked_fill(written, 0).cummax(dim=1).values
    ended: Tensor = n_ends > n_before_stretch
    stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
    if "" in stops:
        raise ValueError("stop_strings contains an empty text, at which every text would end")
    for row, tokens in enumerate(trajectory.tokens if stops else ()):
        stretch: list[int] = []
        for position in written[row].nonzero().flatten().tolist():
            stretch = [*stretch, position] if stretch and stretch[-1] == position - 1 else [position]
            before = ended[row, position - 1] if len(stretch) > 1 else False
            ended[row, position] |= before or any(stop in model.to_string(tokens[stretch[:-1]]) for stop in stops)
    return ended


def filled_with_ends(
    model: Any, trajectory: Trajectory, ended: Bool[Tensor, "batch pos"], ends: Sequence[int]
) -> Int[Tensor, "batch pos"]:
    """The tokens, with an end token wherever a text has ended."""
    if not ended.any():
        return trajectory.tokens
    if not (ends := ends or end_tokens(model, None)):
        raise ValueError(
            f"a text has ended, and {model.cfg.model_name!r} has no end token for the positions after it: pass "
            "eos_token_id=, or take return_type='str'"
        )
    return trajectory.tokens.masked_fill(ended, ends[0])


def text_of(model: Any, trajectory: Trajectory, row: int, kept: Bool[Tensor, "pos"]) -> str:
    """The text of some positions of one row, without a given BOS at the beginning."""
    shown = (trajectory.real[row] & kept).nonzero().flatten()
    bos = require_tokenizer(model).bos_token_id
    if len(shown) and int(trajectory[row][shown[0]]) == bos and bool(trajectory.given[row, shown[0]]):
        shown = shown[1:]
    return str(model.to_string(trajectory[row][shown]))
