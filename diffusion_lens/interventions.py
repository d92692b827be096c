"""Hook factories: each returns a plain `fn(activation, hook)` for any model with TransformerLens hooks.

An intervention sets a state to what it was not, whatever happens upstream; what then changes downstream, the state
caused. The factories differ in where the new value comes from:

    replace           from you
    swap              from another run, same hook point; step by step if that run was kept by step
    restore           from another run, at one place of each row, for grids with a cell in each row
    mean_ablate       the mean of another run
    zero_ablate       zeros
    mask_tokens       the embedding of [MASK]
    freeze            from this run, at an earlier denoising step
    add_noise, steer  added to what is there

To hold a state at its value in a corrupted run (a severed path), `swap` with that run.

They fit every hook point [batch pos ...], on both variants, in and outside the denoising loop: the residual stream,
`hook_attn_out`, `hook_mlp_out`, `mlp.hook_post`, and with heads [batch pos head ...] `attn.hook_q`, `hook_k`, `hook_v`
(the last two carry the key/value heads), `hook_z`, `hook_result`. `hook_attn_scores` and `hook_pattern` are taken as
[batch query head key]; places are the queries. `places` and `heads` are an index (its axis stays), a slice, or indices,
negative ones from the end, none twice; `None` is all. `places` may also be Int[batch selected], each row's own.

In the loop a hook sees the whole canvas, and one branch of guidance at a time; `at_steps`, `on_branch` and
`while_masked` of `denoising.step_hooks` say when it acts. `named` gives it a name for records and folders of results.

None writes into the tensor it is handed; each returns a new one, in its dtype and on its device. Places or heads
outside the activation and values that do not fit are a `ValueError`, a run that does not hold the hook point or the
step is a `KeyError`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens import ActivationCache

from diffusion_lens.hook_names import nearest
from diffusion_lens.identity import named as named
from diffusion_lens.loop_only import in_loop_only
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.step_state import RunIdentity, StepState

Hook = Callable[..., Any]
Indices = int | slice | Sequence[int] | Tensor | None
OneRun = ActivationCache | Mapping[str, Tensor]
# One activation a hook point (a cache, or a dict by name), or such a cache for each denoising step (`TrajectoryCache`).
Activations = OneRun | Mapping[int, OneRun]


def replace(value: Tensor, places: Indices = None, *, heads: Indices = None) -> Hook:
    """Put `value` there.

    Args:
        value: broadcast to [batch place ...], with heads [batch place head ...]: one vector for all, one a place, or
            one a row and place.
    """
    return _edit(lambda old, hook: _fit(value, old, hook.name), places, heads)


def swap(cache: Activations, places: Indices = None, *, source_places: Indices = None, heads: Indices = None) -> Hook:
    """Take the activation of the same hook point from another run (activation patching; resample ablation).

    Args:
        cache: that run, with as many rows as this one or a single one: an `ActivationCache` or tensors by hook point. A
            `TrajectoryCache` gives each step of the loop its own; it holds one branch, so under guidance wrap the hook
            in `on_branch`.
        source_places: where in the other run the values for `places` stand, one for one; by default the same places.
    """
    source = _Selection(places if source_places is None else source_places, heads)
    return _edit(lambda old, hook: source.of_other_run(_held(cache, hook), old, hook.name), places, heads)


def restore(value: Tensor, places: Int[Tensor, "batch"], *, heads: Indices = None) -> Hook:
    """Put back one place of each row: row r gets `value[places[r]]` at `places[r]`.

    Args:
        value: [pos ...] or [batch pos ...], the hook point's activation in the run that is put back.
    """
    source = _Selection(places[:, None], heads)
    return _edit(lambda old, hook: source.of_other_run(value, old, hook.name), places[:, None], heads)


def mean_ablate(cache: Activations, places: Indices = None, *, heads: Indices = None) -> Hook:
    """Put the mean, over rows and places, of the same hook point in another run: what it holds whatever the input.

    A mean of your own, over real tokens only or over many runs, goes in with `replace`.

    Args:
        cache: that run, as in `swap`, with any number of rows and places.
    """
    chosen = _Selection(None, heads)

    def mean(old: Tensor, hook: Any) -> Tensor:
        where = f"the other run's {hook.name!r}"
        averaged = _with_rows(_held(cache, hook), old, hook.name).mean(dim=(0, 1), keepdim=True)
        return _fit(averaged[chosen.index(averaged, where)], old, hook.name)

    return _edit(mean, places, heads)


def zero_ablate(places: Indices = None, *, heads: Indices = None) -> Hook:
    """Put zeros there."""
    return _called("zero_ablate", replace(torch.zeros(()), places, heads=heads))


def mask_tokens(model: DiffusionTransformer, places: Indices = None) -> Hook:
    """At `hook_embed`, put the embedding of [MASK]: the model sees a canvas with these places masked.

    Raises:
        ValueError: the model has no [MASK].
    """
    mask = model.cfg.mask_token_id
    if mask is None:
        raise ValueError(
            f"{model.cfg.model_name!r} has no [MASK] to hide a token behind; corrupt it with add_noise, zero_ablate "
            "or a swap from a run on other tokens"
        )
    masked = replace(model.W_E[mask], places)

    def hook_fn(activation: Tensor, hook: Any) -> Any:
        if hook.name != "hook_embed":
            raise ValueError(f"mask_tokens goes to 'hook_embed'; at {hook.name!r} no [MASK] looks like its embedding")
        return masked(activation, hook)

    return hook_fn


def add_noise(noise: Tensor, places: Indices = None, *, heads: Indices = None) -> Hook:
    """Add `noise` to the activation; row r of the batch gets draw r.

    Args:
        noise: broadcast as in `replace`.
    """
    return _edit(lambda old, hook: old + _fit(noise, old, hook.name), places, heads)


def steer(direction: Tensor, strength: float = 1.0, places: Indices = None, *, heads: Indices = None) -> Hook:
    """Add `strength * direction` (Turner et al. 2023, arXiv 2308.10248).

    Args:
        direction: Float[d_model], or broadcast as in `replace`; used at the length it has.
    """
    return _called("steer", add_noise(strength * direction, places, heads=heads))


def freeze(places: Indices = None, *, heads: Indices = None) -> Hook:
    """Hold the activation, through a run of the denoising loop, at the value it has when the hook first acts.

    `at_steps(freeze(), range(k, n_steps))` holds the value of step k from there on. Each hook point and each branch of
    guidance is held at its own. Every run is held anew, also one that ended with an exception and is begun again.
    Outside the loop the hook does nothing. Where an analysis runs the canvas of a step by itself there is no earlier
    value to hold, which is a `ValueError`.
    """
    held: WeakKeyDictionary[RunIdentity, dict[tuple[str, str], Tensor]] = WeakKeyDictionary()

    def first(old: Tensor, hook: Any) -> Tensor:
        step: StepState = hook.step
        if step.run is None:
            raise ValueError(
                f"freeze() holds {hook.name!r} at the value of an earlier step, and step {step.index} is run here by "
                "itself: give swap() what the loop kept, model.denoise_with_cache(...), instead"
            )
        return held.setdefault(step.run, {}).setdefault((hook.name, step.branch), old)

    return _called("freeze", in_loop_only(_edit(first, places, heads)))


def _edit(new: Callable[[Tensor, Any], Tensor], places: Indices, heads: Indices) -> Hook:
    """A hook that puts `new(old, hook)` where `old` stood; both are [batch place ...]."""
    chosen = _Selection(places, heads)

    def hook_fn(activation: Tensor, hook: Any) -> Tensor:
        whole = _by_place(activation, hook.name)
        index = chosen.index(whole, repr(hook.name))
        edited = whole.clone()
        edited[index] = new(whole[index], hook)
        return _by_place(edited, hook.name)

    return _called(new.__qualname__.partition(".")[0], hook_fn)


def _called(factory: str, hook: Hook) -> Hook:
    hook.__qualname__ = factory  # by which records name it
    return hook


@dataclass(frozen=True)
class _Selection:
    """Some places, and some heads, of activations [batch pos ...]."""

    places: Indices
    heads: Indices

    def __post_init__(self) -> None:
        for word, chosen in vars(self).items():
            if chosen is None or isinstance(chosen, slice):
                continue
            indices = torch.as_tensor(chosen)
            if not indices.numel():
                raise ValueError(f"{word} is empty: the hook would change nothing (None is all {word})")
            if indices.dtype == torch.bool or indices.is_floating_point():
                raise TypeError(f"{word} are {indices.dtype}; give indices (of a mask, mask.nonzero()[:, 0])")
            if indices.dim() > (2 if word == "places" else 1):
                raise ValueError(f"{word} are {list(indices.shape)}; they are [place], [batch place] or [head]")

    def index(self, x: Tensor, where: str) -> tuple[Tensor, ...]:
        """The index that picks [batch place ...] from `x`; `where` names it in errors."""
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        places = _resolve(self.places, x.shape[1], "places", where).to(x.device)
        if places.dim() == 2 and len(places) != len(rows):
            raise ValueError(f"places of {len(places)} rows were given, and {where} has {len(rows)} rows")
        if self.heads is None:
            return rows, places
        if x.dim() != 4:
            raise ValueError(f"{where} {list(x.shape)} has no heads to choose from; attn.hook_z, q, k and v have them")
        heads = _resolve(self.heads, x.shape[2], "heads", where).to(x.device)
        return rows[..., None], places[..., None], heads

    def of_other_run(self, held: Tensor, old: Tensor, name: str) -> Tensor:
        """These places of another run, for `old` of this one."""
        where = f"the other run's {name!r}"
        held = _with_rows(held, old, name)
        if held.shape[0] not in (1, old.shape[0]):
            raise ValueError(f"{where} has {held.shape[0]} rows; it needs one, or the {old.shape[0]} of this run")
        held = held.expand(old.shape[0], *held.shape[1:])
        picked = held[self.index(held, where)]
        if picked.shape != old.shape:
            raise ValueError(
                f"{where} gives {list(picked.shape)} for {list(old.shape)} [batch place ...]; give as many "
                "source_places there as places here"
            )
        return _fit(picked, old, name)


def _resolve(chosen: Indices, size: int, word: str, where: str) -> Int[Tensor, "*n"]:
    """The indices 0 to `size` - 1 that are meant."""
    if chosen is None:
        return torch.arange(size)
    if isinstance(chosen, slice):
        ends = [end for end in (chosen.start, chosen.stop) if end is not None]
        if not range(size)[chosen] or any(abs(end) > size for end in ends):
            raise ValueError(f"{word} {chosen} is empty or reaches outside the {size} {word} of {where}")
        return torch.tensor(range(size)[chosen])
    indices = torch.atleast_1d(torch.as_tensor(chosen)).long()
    outside = indices[(indices < -size) | (indices >= size)]
    if outside.numel():
        raise ValueError(f"{word} {outside.tolist()} are outside the {size} {word} of {where}")
    resolved: Tensor = indices % size
    if bool((resolved.sort(dim=-1).values.diff(dim=-1) == 0).any()):
        raise ValueError(f"{word} {indices.tolist()} name one of the {size} {word} of {where} twice")
    return resolved


def _held(cache: Activations, hook: Any) -> Tensor:
    """The hook point's activation in another run; of the same step, where that run was kept by step."""
    held: Any = cache
    if any(isinstance(key, int) for key in cache):
        if hook.step is None:
            raise ValueError(
                "a cache by step serves inside the denoising loop; here give that of one step, cache[step]"
            )
        if hook.step.index not in cache:
            steps = list(cache)
            raise KeyError(f"the cache holds the steps {steps}, and this is {hook.step.index}: at_steps(hook, {steps})")
        held = held[hook.step.index]
    if hook.name not in held:
        raise KeyError(f"the cache does not hold {hook.name!r}; nearest are: {nearest(hook.name, list(held))}")
    activation: Tensor = held[hook.name]
    return activation


def _with_rows(held: Tensor, old: Tensor, name: str) -> Tensor:
    """What another run holds as [batch pos ...], also where its batch axis was removed."""
    if held.dim() not in (old.dim(), old.dim() - 1):
        raise ValueError(f"the other run's {name!r} is {list(held.shape)}; it must be an activation [batch pos ...]")
    return _by_place(held if held.dim() == old.dim() else held[None], name)


def _fit(value: Tensor, old: Tensor, name: str) -> Tensor:
    """`value` in the shape, dtype and device of what it goes to."""
    if not torch.can_cast(value.dtype, old.dtype):
        raise TypeError(f"{name!r} holds {old.dtype}, which cannot take values of {value.dtype}")
    value = value.to(device=old.device, dtype=old.dtype)
    try:
        fitted: Tensor = value.expand(old.shape)
    except RuntimeError as error:
        raise ValueError(
            f"a value of shape {list(value.shape)} does not broadcast to {list(old.shape)}, the [batch place ...] of "
            f"{name!r} that it is for"
        ) from error
    return fitted


def _by_place(x: Tensor, name: str) -> Tensor:
    """[... pos head key] for scores and patterns, [... head pos key] as they pass, and back; others as they are."""
    return x.transpose(-3, -2) if name.endswith(("hook_attn_scores", "hook_pattern")) else x
