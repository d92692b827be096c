"""Hook factories: each returns a plain `fn(activation, hook)` for any model with TransformerLens hooks.

An intervention sets a state to another value; what then changes downstream is caused by that state. The factories
differ in the source of the new value:

    replace                a value given by the caller
    swap                   another run, at the same hook point; at the same step, if that run was cached by step
    restore                another run, at one position of each row, for grids with one cell per row
    mean_ablate            the mean of another run
    zero_ablate            zeros; `skip_layers` gives the hooks that skip whole blocks so
    ablate_direction       the activation without its component along a direction
    mask_tokens            the embedding of [MASK]
    freeze                 this run, at an earlier denoising step
    add_noise              a value given by the caller, added to the activation
    add_direction, steer   a direction, added to the activation with a strength, which may depend on the step

To fix a state at its value in a corrupted run (a severed path), use `swap` with that run.

The hooks fit every hook point [batch pos ...] of both variants, inside and outside the denoising loop: the residual
stream, `hook_attn_out`, `hook_mlp_out`, `mlp.hook_post`, and with heads [batch pos head ...] `attn.hook_q`, `hook_k`,
`hook_v` (the last two have the key/value heads), `hook_z`, `hook_result`. They treat `hook_attn_scores` and
`hook_pattern` as [batch query head key], so that positions are queries.

`positions` and `heads` are an index, a slice, or several indices without repetition; negative ones count from the end,
and `None` selects all. A single index keeps its axis. `positions` may also be Int[batch selected], which differ by row.

No hook writes into the tensor that it receives; each returns a new tensor of the same dtype, on the same device.
Positions, heads and values that do not fit raise a `ValueError`; a run without the hook point or step, a `KeyError`.

In the loop a hook receives the whole canvas, and one branch of guidance at a time. `at_steps`, `on_branch`,
`while_masked` and `while_predicting` wrap a hook so that it acts only there, and `by_step` joins the functions of
several steps; outside the loop, where `hook.step` is `None`, these do nothing. `named` gives a hook a name for records
and folders.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens import ActivationCache

from diffusion_lens.hooks.names import Hook as Hook
from diffusion_lens.hooks.names import nearest
from diffusion_lens.hooks.step import BRANCHES, RunIdentity, StepState
from diffusion_lens.model.config import reached
from diffusion_lens.model.readout import READOUTS
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import NamedHook, name_of, names_its_hook, value_in_words
from diffusion_lens.records.identity import named as named
from diffusion_lens.settings import checked_arguments, one_of, pick_indices, plain_number, whole_number, whole_numbers
from diffusion_lens.settings.arguments import kind_of, shown

Indices = int | slice | Sequence[int] | Tensor | None
OneRun = ActivationCache | Mapping[str, Tensor]
# One activation for each hook point (a cache or a dict), or such a cache for each denoising step (`TrajectoryCache`).
Activations = OneRun | Mapping[int, OneRun]

_IN_LOOP_ONLY = "acts_by_step"  # an attribute of the function, which `functools.wraps` copies

# Another value for an activation


@checked_arguments
@names_its_hook
def replace(value: Tensor, positions: Indices = None, *, heads: Indices = None) -> Hook:
    """Replace the activation by `value`.

    Args:
        value: Tensor that broadcasts to [batch selected ...], with heads to [batch selected head ...]: one vector for
            all, one for each position, or one for each row and position.
    """
    return _edit(lambda old, hook: _fit(value, old, hook.name), positions, heads)


@runtime_checkable
class ByStep(Protocol):
    """Activations that know of which steps, positions and branch they are: a `TrajectoryCache`."""

    record: dict[str, Any]

    def require_fits(self, step: StepState) -> None: ...


@checked_arguments
@names_its_hook
def swap(
    cache: Activations, positions: Indices = None, *, source_positions: Indices = None, heads: Indices = None
) -> Hook:
    """Take the activation of the same hook point from another run (activation patching; resample ablation).

    Args:
        cache: Activations of that run, which has as many rows as this one, or a single row: an `ActivationCache`, or
            tensors by hook point. A `TrajectoryCache` gives each step of the loop its own activation. It contains one
            branch, so under guidance wrap the hook in `on_branch`.
        source_positions: Positions of the other run, in the order of `positions`; by default the same. Of a cache with
            `pos_slice`, they count its own positions from 0.

    Raises:
        ValueError: A cache by step with `pos_slice`, without `source_positions`; or, as the hook is called, a cache by
            step of a run of another number of steps, or of the other branch. (Tensors, and a cache of one step, do not
            say of which positions they are.)
    """
    cached = cache.record.get("positions") if isinstance(cache, ByStep) else None
    if cached is not None and source_positions is None:
        raise ValueError(
            f"the cache has {len(cached)} positions alone, from {cached[0]} to {cached[-1]}: say which of these to "
            f"take, source_positions= from 0 to {len(cached) - 1}, or cache all positions"
        )
    source = _Selection(positions if source_positions is None else source_positions, heads)
    return _edit(lambda old, hook: source.of_other_run(_activation(cache, hook), old, hook.name), positions, heads)


@checked_arguments
@names_its_hook
def restore(value: Tensor, positions: Int[Tensor, "batch"], *, heads: Indices = None) -> Hook:
    """Restore one position of each row: row r gets `value[positions[r]]` at `positions[r]`.

    Args:
        value: Activation of the hook point in the other run, [pos ...] or [batch pos ...].
        positions: Int[batch], the position of each row.
    """
    source = _Selection(positions[:, None], heads)
    return _edit(lambda old, hook: source.of_other_run(value, old, hook.name), positions[:, None], heads)


@checked_arguments
@names_its_hook
def mean_ablate(cache: Activations, positions: Indices = None, *, heads: Indices = None) -> Hook:
    """Replace the activation by its mean over rows and positions of another run; for other means, use `replace`.

    Args:
        cache: Activations of that run, as in `swap`, with any number of rows and positions.

    Raises:
        ValueError: As the hook is called, a cache by step of a run of another number of steps, or of the other branch.
    """
    selection = _Selection(None, heads)

    def mean(old: Tensor, hook: Any) -> Tensor:
        where = f"the other run's {hook.name!r}"
        averaged = _with_rows(_activation(cache, hook), old, hook.name).mean(dim=(0, 1), keepdim=True)
        return _fit(averaged[selection.index(averaged, where)], old, hook.name)

    return _edit(mean, positions, heads)


@checked_arguments
@names_its_hook
def zero_ablate(positions: Indices = None, *, heads: Indices = None) -> Hook:
    """Replace the activation by zeros."""
    return replace(torch.zeros(()), positions, heads=heads)


@checked_arguments
def skip_layers(model: DiffusionTransformer, layers: SupportsIndex | Iterable[SupportsIndex]) -> list[tuple[str, Hook]]:
    """The hooks under which some blocks leave the residual stream as it is, by setting what they add to it to zero.

    Layer skipping of Goel et al. 2026, arXiv 2603.07475. For `denoise(fwd_hooks=...)`, or for `model.hooks(fwd_hooks=)`
    around an analysis or a measure of recall.

    Args:
        layers: Layers, negative ones from the end.

    Raises:
        ValueError: There is no such layer, or blocks of the network multiply the stream by a factor, which zeros leave.
    """
    if model.cfg.architecture.layer_scalars:
        raise ValueError(
            f"the blocks of {model.cfg.model_name!r} scale the stream, so that a block that adds nothing "
            "to it still changes it: ablate hook_attn_out or hook_mlp_out by zero_ablate() instead"
        )
    picked = pick_indices("layers", whole_numbers("layers", layers), model.cfg.n_layers)
    added = [
        f"blocks.{layer}.{name}" for layer in picked for name in ("hook_attn_out", "hook_mlp_out", "hook_shared_out")
    ]
    return [(name, zero_ablate()) for name in added if name in model.hook_dict]


@checked_arguments
def mask_tokens(model: DiffusionTransformer, positions: Indices = None) -> Hook:
    """At `hook_embed`, replace embeddings by that of [MASK], as if these positions of the canvas were masked.

    Raises:
        ValueError: The model has no [MASK].
    """
    if not model.cfg.has_mask:
        raise ValueError(f"{model.cfg.model_name!r} has no [MASK]; corrupt with add_noise, zero_ablate or swap instead")
    embedding = model.W_E[model.cfg.blank].to(model.cfg.main_device)
    masked = replace(embedding, positions)

    def hook_fn(activation: Tensor, hook: Any) -> Any:
        if hook.name != "hook_embed":
            raise ValueError(f"mask_tokens was attached to {hook.name!r}; attach it to 'hook_embed', the embeddings")
        return masked(activation, hook)

    return NamedHook(
        lambda: f"mask_tokens({value_in_words(embedding)}, positions={value_in_words(positions)})", hook_fn
    )


@checked_arguments
@names_its_hook
def add_noise(noise: Tensor, positions: Indices = None, *, heads: Indices = None) -> Hook:
    """Add `noise` to the activation; row r of the batch gets sample r.

    Args:
        noise: Tensor that broadcasts as in `replace`.
    """
    return _edit(lambda old, hook: old + _fit(noise, old, hook.name), positions, heads)


@checked_arguments
@names_its_hook
def add_direction(
    direction: Tensor,
    strength: float | Callable[[StepState], Any] = 1.0,
    positions: Indices = None,
    *,
    heads: Indices = None,
) -> Hook:
    """Add `strength * direction` (Turner et al. 2023, arXiv 2308.10248).

    With a function as strength the hook acts in the loop only, and the strength follows the run, as in Zhou et al.
    2026, arXiv 2605.10971. `named("what it does", function)` gives the function a name for records.

    Args:
        direction: Float[d_model], or a tensor that broadcasts as in `replace`; it is not normalised.
        strength: Factor of the direction, or a function of the `StepState` that returns it: a number, Float[batch] or
            Float[batch pos]. `lambda step: step.t` fades out as the canvas fills.

    Raises:
        TypeError: A strength is no number.
        ValueError: A strength is not finite, or has another shape.
    """
    if not callable(strength):
        factor = plain_number("strength", strength)
        if not math.isfinite(factor):
            raise ValueError(f"strength={factor}; it must be a finite number")
        return add_noise(factor * direction, positions, heads=heads)
    of_step, selection = strength, _Selection(positions, None)

    def add(old: Tensor, hook: Any) -> Tensor:
        factors = _strengths(of_step(hook.step), hook.step).to(old.device)
        if factors.dim() == 2:  # that of each position on the canvas
            factors = factors[selection.index(factors, "the strength")]
        factors = factors.view(*factors.shape, *[1] * (old.dim() - factors.dim()))
        return old + _fit(factors * direction.to(old.device), old, hook.name)

    return in_loop_only(_edit(add, positions, heads))


@checked_arguments
@names_its_hook
def steer(direction: Tensor, strength: float = 1.0, positions: Indices = None, *, heads: Indices = None) -> Hook:
    """`add_direction` with one strength for all steps, inside and outside the loop."""
    return add_direction(direction, strength, positions, heads=heads)


@checked_arguments
@names_its_hook
def ablate_direction(direction: Float[Tensor, "d"], positions: Indices = None, *, heads: Indices = None) -> Hook:
    """Remove the component along a direction: x - (x · d) d, with d the direction of length 1.

    At every hook point where something is written to the residual stream, this removes the direction from the model
    (Arditi et al. 2024, arXiv 2406.11717); `analysis.orthogonalize` does the same in the weights.

    Args:
        direction: Vector along the last axis of the activation, such as d_model. Its length does not matter.

    Raises:
        ValueError: The direction has no length, is not finite, or has another size than the activation.
    """
    unit = unit_vector(direction)

    def ablate(old: Tensor, hook: Any) -> Tensor:
        if old.shape[-1] != len(unit):
            raise ValueError(
                f"the direction has {len(unit)} entries, and {hook.name!r} is [..., {old.shape[-1]}]: give a direction "
                "of the last axis of the activation"
            )
        wide = old.to(torch.promote_types(old.dtype, torch.float32))
        along = unit.to(wide.device, wide.dtype)
        return (wide - (wide @ along)[..., None] * along).to(old.dtype)

    return _edit(ablate, positions, heads)


@checked_arguments
def unit_vector(direction: Float[Tensor, "d"]) -> Float[Tensor, "d"]:
    """The direction with length 1, in float32; a `ValueError` if it has none."""
    length = float(direction.detach().float().norm())
    if not (math.isfinite(length) and length > 0):
        raise ValueError(f"the direction has length {length}; it must be finite and above 0")
    return direction.detach().float() / length


@checked_arguments
@names_its_hook
def freeze(positions: Indices = None, *, heads: Indices = None) -> Hook:
    """Fix the activation, for the rest of a denoising run, at its value when the hook first acts.

    `at_steps(freeze(), range(k, n_steps))` fixes it at its value in step k. Each hook point and each branch of guidance
    has its own value. Every run begins with new values, also after a run that ended with an exception. The hook does
    nothing outside the loop, and raises a `ValueError` in an analysis that computes a single step.
    """
    values: WeakKeyDictionary[RunIdentity, dict[tuple[str, str], Tensor]] = WeakKeyDictionary()

    def first(old: Tensor, hook: Any) -> Tensor:
        step: StepState = hook.step
        if step.run is None:
            raise ValueError(
                f"freeze() fixes {hook.name!r} at the value of an earlier step, and this analysis computes step "
                f"{step.index} alone: use swap() with a cache of the loop, model.denoise_with_cache(...), instead"
            )
        return values.setdefault(step.run, {}).setdefault((hook.name, step.branch), old)

    return in_loop_only(_edit(first, positions, heads))


# When and where a hook acts


@checked_arguments
def at_steps(hook_fn: Hook, steps: SupportsIndex | Iterable[SupportsIndex]) -> Hook:
    """Act at these steps only; negative numbers count from the end.

    A step that the run does not have is a `ValueError`, raised when the hook is first called.
    """
    indices = frozenset(whole_numbers("steps", steps))
    if not indices:
        raise ValueError("steps is empty, so the hook never acts; give at least one step")

    def acts(step: StepState) -> bool:
        if outside := sorted(index for index in indices if not -step.n_steps <= index < step.n_steps):
            raise ValueError(
                f"at_steps was given the steps {outside}, and this run has the {step.n_steps} steps 0 to "
                f"{step.n_steps - 1} (-1 is the last); give steps of this run"
            )
        return step.index in indices or step.index - step.n_steps in indices

    return _when(hook_fn, acts, f"at steps {sorted(indices)}")


@checked_arguments
def by_step(hooks: Mapping[int, Hook], n_steps: SupportsIndex) -> Hook:
    """Call another function at each step; steps without one keep their activation.

    Args:
        hooks: Function of each step, by the step's index.
        n_steps: Number of steps of the runs for which the functions were made. In a run of another number of steps, an
            index stands for another time, which is a `ValueError` when the hook is first called.
    """
    count = whole_number("n_steps", n_steps)
    functions = {whole_number("a step", index): hook_fn for index, hook_fn in hooks.items()}
    if not functions or (outside := sorted(index for index in functions if not 0 <= index < count)):
        given = f"the steps {outside}" if functions else "no step"
        raise ValueError(f"by_step was given {given}; give a function for at least one of the steps 0 to {count - 1}")

    def wrapped(activation: Tensor, hook: Any) -> Any:
        step: StepState = hook.step
        if step.n_steps != count:
            raise ValueError(
                f"by_step was made for runs of {count} steps, and this run has {step.n_steps}, in which an index is "
                f"another time: denoise with steps={count}, or make hooks for runs of {step.n_steps} steps"
            )
        hook_fn = functions.get(step.index)
        return None if hook_fn is None else hook_fn(activation, hook)

    def name() -> str:
        listed = ", ".join(f"{step}: {name_of(functions[step])}" for step in sorted(functions))
        return f"by_step({listed}, n_steps={count})"

    return NamedHook(name, in_loop_only(wrapped))


@checked_arguments
def on_branch(hook_fn: Hook, branch: str) -> Hook:
    """Act in one branch of guidance only, "conditional" or "unconditional"; a run without guidance is "conditional"."""
    one_of(*BRANCHES)("branch", branch)
    return _when(hook_fn, lambda step: step.branch == branch, f"on the {branch} branch")


@checked_arguments
def while_masked(hook_fn: Hook) -> Hook:
    """Act on masked positions only; the others keep their activation.

    For activations [batch pos ...]. The function receives the whole activation; what it returns, or writes in place, is
    used at the masked positions. On a causal model these are the positions that the text has not reached, which no
    other position sees.
    """

    return _named_after(_where(hook_fn, lambda step: step.masked, "while_masked"), hook_fn, "while masked")


@checked_arguments
def while_predicting(hook_fn: Hook, readout: str) -> Hook:
    """Act only on the rows whose logits predict a position that is not yet revealed; the others keep their activation.

    On a causal model this is the last row that the text has reached. Left padding before a masked first token counts as
    a row.

    Args:
        readout: "in_place" or "shifted", as in `model.cfg.readout`.
    """
    one_of(*READOUTS)("readout", readout)

    def rows(step: StepState) -> PosMask:
        chosen = torch.zeros_like(step.masked)
        chosen[READOUTS[readout].locate(step.masked)] = True
        return chosen & reached(step.tokens)

    return _named_after(_where(hook_fn, rows, "while_predicting"), hook_fn, "while predicting")


def in_loop_only(hook_fn: Hook) -> Hook:
    """The same hook, which does nothing outside the denoising loop, where `hook.step` is `None`."""

    def in_loop(activation: Any, hook: Any) -> Any:
        return None if hook.step is None else hook_fn(activation, hook)

    vars(in_loop)[_IN_LOOP_ONLY] = True
    return in_loop


def acts_by_step(hook_fn: Any) -> bool:
    """Whether a hook acts in the loop only, as those of `at_steps`, `on_branch`, `while_masked` and `freeze` do.

    Such a hook is also recognised if it was named, in a `functools.partial`, and in a function that `functools.wraps`
    it. A hook that reads `hook.step` itself is not recognised, because it is unknown what it does if that is `None`;
    nor is a `swap` with a cache by step, which raises an error outside the loop.
    """
    if isinstance(hook_fn, functools.partial):
        return any(map(acts_by_step, (hook_fn.func, *hook_fn.args, *hook_fn.keywords.values())))
    within = hook_fn.function if isinstance(hook_fn, NamedHook) else getattr(hook_fn, "__wrapped__", None)
    return _IN_LOOP_ONLY in getattr(hook_fn, "__dict__", ()) or (within is not None and acts_by_step(within))


def _named_after(wrapper: Hook, hook: Hook, when: str) -> NamedHook:
    """The wrapper under the name of the hook inside, followed by when it acts."""
    return NamedHook(lambda: f"{name_of(hook)} {when}", wrapper)


def _when(hook_fn: Hook, acts: Callable[[StepState], bool], when: str) -> Hook:
    """The hook, called only at steps where `acts` is true; `when` is added to its name."""

    def wrapped(activation: Tensor, hook: Any) -> Any:
        return hook_fn(activation, hook) if acts(hook.step) else None

    return _named_after(in_loop_only(wrapped), hook_fn, when)


def _where(hook_fn: Hook, rows: Callable[[StepState], PosMask], name: str) -> Hook:
    """The hook, whose result is used at some rows."""

    def wrapped(activation: Tensor, hook: Any) -> Tensor:
        if hook.name.endswith(("hook_attn_scores", "hook_pattern")):
            raise ValueError(f"{hook.name} is [batch head query key]: {name} needs [batch pos ...]")
        chosen = rows(hook.step)
        copy = activation.clone()
        returned = hook_fn(copy, hook)
        changed = copy if returned is None else returned
        return torch.where(chosen.view(*chosen.shape, *[1] * (activation.dim() - 2)), changed, activation)

    return in_loop_only(wrapped)


def _edit(new: Callable[[Tensor, Any], Tensor], positions: Indices, heads: Indices) -> Hook:
    """A hook that replaces the selected part of an activation, [batch selected ...], by `new(that part, hook)`."""
    selection = _Selection(positions, heads)

    def hook_fn(activation: Tensor, hook: Any) -> Tensor:
        whole = _by_position(activation, hook.name)
        index = selection.index(whole, repr(hook.name))
        edited = whole.clone()
        edited[index] = new(whole[index], hook)
        return _by_position(edited, hook.name)

    return hook_fn


@dataclass(frozen=True)
class _Selection:
    """Selected positions and heads of activations [batch pos ...]."""

    positions: Indices
    heads: Indices

    def __post_init__(self) -> None:
        for name, selected in vars(self).items():
            if selected is None or isinstance(selected, slice):
                continue
            try:
                indices = torch.as_tensor(selected)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                raise TypeError(f"{name}={shown(selected)} is {kind_of(selected)}; give indices") from None
            if not indices.numel():
                raise ValueError(f"{name} is empty, so the hook changes nothing (None selects all {name})")
            if indices.dtype == torch.bool or indices.is_floating_point():
                raise TypeError(f"{name} are {indices.dtype}; give indices (of a mask, mask.nonzero()[:, 0])")
            if indices.dim() > (2 if name == "positions" else 1):
                raise ValueError(f"{name} has shape {list(indices.shape)}; give [selected], [batch selected] or [head]")

    def index(self, x: Tensor, where: str) -> tuple[Tensor, ...]:
        """The index that selects [batch selected ...] from `x`; `where` names `x` in errors."""
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        positions = _resolve(self.positions, x.shape[1], "positions", where).to(x.device)
        if positions.dim() == 2 and len(positions) != len(rows):
            raise ValueError(f"positions of {len(positions)} rows were given, but {where} has {len(rows)} rows")
        if self.heads is None:
            return rows, positions
        if x.dim() != 4:
            raise ValueError(f"{where} {list(x.shape)} has no axis of heads; attn.hook_z, q, k and v have one")
        heads = _resolve(self.heads, x.shape[2], "heads", where).to(x.device)
        return rows[..., None], positions[..., None], heads

    def of_other_run(self, other: Tensor, old: Tensor, name: str) -> Tensor:
        """The selected part of another run's activation, in the shape of `old` of this run."""
        where = f"the other run's {name!r}"
        other = _with_rows(other, old, name)
        if other.shape[0] not in (1, old.shape[0]):
            raise ValueError(f"{where} has {other.shape[0]} rows; it needs one, or the {old.shape[0]} of this run")
        other = other.expand(old.shape[0], *other.shape[1:])
        new = other[self.index(other, where)]
        if new.shape != old.shape:
            raise ValueError(
                f"{where} gives {list(new.shape)} for {list(old.shape)} [batch selected ...]; give as many "
                "source_positions as positions"
            )
        return _fit(new, old, name)


def _strengths(returned: Any, step: StepState) -> Float[Tensor, "*rest"]:
    """What a function of the step returned, as a tensor [], [batch] or [batch pos]."""
    canvas = tuple(step.tokens.shape)
    try:
        factors = torch.as_tensor(returned, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"the strength of step {step.index} is {shown(returned)}; it must be a number, Float[batch] or "
            f"Float[batch pos], here {list(canvas)}"
        ) from None
    if tuple(factors.shape) not in ((), canvas[:1], canvas):
        raise ValueError(
            f"the strength of step {step.index} has shape {list(factors.shape)}; it must be a number, [batch] or "
            f"[batch pos], here {list(canvas)}"
        )
    if not bool(factors.isfinite().all()):
        raise ValueError(f"the strength of step {step.index} is not finite")
    return factors


def _resolve(selected: Indices, size: int, name: str, where: str) -> Int[Tensor, "*rest"]:
    """The selection as indices from 0 to `size` - 1."""
    if selected is None:
        return torch.arange(size)
    if isinstance(selected, slice):
        ends = [end for end in (selected.start, selected.stop) if end is not None]
        if not range(size)[selected] or any(abs(end) > size for end in ends):
            raise ValueError(f"{name} {selected} is empty or reaches outside the {size} {name} of {where}")
        return torch.tensor(range(size)[selected])
    indices = torch.atleast_1d(torch.as_tensor(selected)).long()
    outside = indices[(indices < -size) | (indices >= size)]
    if outside.numel():
        raise ValueError(f"{name} {outside.tolist()} are outside the {size} {name} of {where}")
    resolved: Tensor = indices % size
    if bool((resolved.sort(dim=-1).values.diff(dim=-1) == 0).any()):
        raise ValueError(f"{name} {indices.tolist()} name one of the {size} {name} of {where} twice")
    return resolved


def _activation(cache: Activations, hook: Any) -> Tensor:
    """Returns the hook point's activation from another run. For a cache by step, takes the current step."""
    of_run: Any = cache
    if any(isinstance(key, int) for key in cache):
        if hook.step is None:
            raise ValueError(
                "a cache by step works inside the denoising loop only; outside it, give one step, cache[step]"
            )
        if isinstance(cache, ByStep):
            cache.require_fits(hook.step)
        if hook.step.index not in cache:
            steps = list(cache)
            raise KeyError(f"the cache has the steps {steps} and not {hook.step.index}: use at_steps(hook, {steps})")
        of_run = of_run[hook.step.index]
    if hook.name not in of_run:
        raise KeyError(f"the cache has no {hook.name!r}; the nearest are: {nearest(hook.name, list(of_run))}")
    activation: Tensor = of_run[hook.name]
    return activation


def _with_rows(other: Tensor, old: Tensor, name: str) -> Tensor:
    """Another run's activation as [batch pos ...], also if its batch axis was removed."""
    if other.dim() not in (old.dim(), old.dim() - 1):
        raise ValueError(f"the other run's {name!r} is {list(other.shape)}; it must be an activation [batch pos ...]")
    return _by_position(other if other.dim() == old.dim() else other[None], name)


def _fit(value: Tensor, old: Tensor, name: str) -> Tensor:
    """`value` in the shape, dtype and device of `old`."""
    if not torch.can_cast(value.dtype, old.dtype):
        raise TypeError(f"{name!r} is {old.dtype}, which cannot represent values of {value.dtype}")
    value = value.to(device=old.device, dtype=old.dtype)
    try:
        fitted: Tensor = value.expand(old.shape)
    except RuntimeError as error:
        raise ValueError(
            f"a value of shape {list(value.shape)} does not broadcast to {list(old.shape)}, the selected part "
            f"[batch selected ...] of {name!r}"
        ) from error
    return fitted


def _by_position(x: Tensor, name: str) -> Tensor:
    """Exchange heads and queries of scores and patterns, [batch query head key] or back; return others unchanged."""
    return x.transpose(-3, -2) if name.endswith(("hook_attn_scores", "hook_pattern")) else x
