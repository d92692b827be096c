"""Hooking and caching as in TransformerLens, with checked names and hook points that know the denoising step.

Hook points that take much memory pass only where a flag of the config is on, under TransformerLens's names
(`OptionalHooks`). Hooks that fill a cache are TransformerLens's too; `pos_slice` selects positions on the axis of each
hook point. The methods of the model are in its class; here are the functions behind them, which take the model.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial, wraps
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformer_lens import ActivationCache
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.devices import warn_if_mps
from transformer_lens.utilities.slice import Slice
from transformer_lens.utilities.tensors import remove_batch_dim

from diffusion_lens.hooks.names import ByHookPoint, NamesFilter, loop_hook, mlp_out, select_names, shared_out
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.hook_points import StepHookPoint, hooked_modules, lend_clock, listens, position_axis
from diffusion_lens.model.inputs import require_sum
from diffusion_lens.model.layers import Linear, Norm
from diffusion_lens.settings import check_keywords, keywords_of, warn_user

# As in TransformerLens: an index (the axis stays), a slice or a tuple of its bounds, or several indices.
PosSlice: TypeAlias = Any
Hooks = list[tuple[str, Callable[..., None]]]
# The flag of the config under which a hook point of a block passes, by the part of the block that has it.
_OPTIONAL = {
    "attn.": {
        "hook_result": "use_attn_result",
        "hook_q_input": "use_split_qkv_input",
        "hook_k_input": "use_split_qkv_input",
        "hook_v_input": "use_split_qkv_input",
        "hook_attn_in": "use_attn_in",
    },
    "": {"hook_mlp_in": "use_hook_mlp_in"},
}
FLAGS = {name: flag for points in _OPTIONAL.values() for name, flag in points.items()}
# The modules of a block whose weights are used directly under a flag: hooks at them do not run, nor does other code.
_BYPASSED = {
    "use_attn_result": ("attn.o",),
    "use_split_qkv_input": ("ln1", "attn.q", "attn.k", "attn.v"),
    "use_attn_in": ("ln1", "attn.q", "attn.k", "attn.v"),
}

_HOOKED = "carries a hook"
_LOOP = loop_hook("")


@dataclass(frozen=True)
class OptionalHooks:
    """The flags of one forward pass, with their meaning in `model.set_use_attn_result` and so on."""

    use_attn_result: bool = False
    use_split_qkv_input: bool = False
    use_attn_in: bool = False
    use_hook_mlp_in: bool = False

    @classmethod
    def of(cls, cfg: DiffusionConfig) -> "OptionalHooks":
        """The flags of a config."""
        return cls(cfg.use_attn_result, cfg.use_split_qkv_input, cfg.use_attn_in, cfg.use_hook_mlp_in)

    @property
    def copies_by_head(self) -> bool:
        """Whether every head reads a copy of the residual stream of its own."""
        return self.use_split_qkv_input or self.use_attn_in


class LoopHooks(nn.Module):
    """The denoising loop's own hook points, reached as `denoise.hook_*`."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_tokens = StepHookPoint()
        self.hook_logits = StepHookPoint()
        self.hook_candidates = StepHookPoint()
        self.hook_confidence = StepHookPoint()
        self.hook_reveal = StepHookPoint()


def eager_while_hooked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Run `forward` outside of code that torch.compile made while a hook is attached, which that code may not have.

    Dynamo does not notice hooks that come and go after it has compiled (`skip_nnmodule_hook_guards`), but it does
    notice `clock.hooked`. The `TypeError` of an unknown keyword names the nearest.
    """
    known = keywords_of(forward)

    @wraps(forward)
    def passed(model: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if model.clock.hooked and "torch._dynamo" in sys.modules:  # importing it takes seconds
                return torch.compiler.disable(_eager)(forward, model, args, kwargs)
            return forward(model, *args, **kwargs)
        except TypeError:
            check_keywords("model", kwargs, known)
            raise

    return passed


def _eager(forward: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model.clock.hooked = bool(hooked_modules(model))  # for the next pass
    with torch.compiler.set_stance("force_eager"):  # for blocks that were compiled by themselves
        return forward(model, *args, **kwargs)


def optional_hooks_of_pass(model: Any) -> OptionalHooks | None:
    """The flags of the config in a forward pass, `None` if none is on."""
    cfg = model.cfg
    flags = None
    if cfg.use_attn_result or cfg.use_split_qkv_input or cfg.use_attn_in or cfg.use_hook_mlp_in:
        flags = OptionalHooks.of(cfg)
        for flag, value in asdict(flags).items():
            if value:
                refuse_bypassed(model, flag, by_predicate_too=False)
    # Without a call for each point, as this is asked in every forward pass.
    for i, block in enumerate(model.blocks._modules.values()):
        for part, points in _OPTIONAL.items():
            owner = block._modules.get(part[:-1]) if part else block
            parts = {} if owner is None else owner._modules
            for name, flag in points.items():
                point = parts.get(name)
                if type(point) is StepHookPoint and not (
                    point._forward_hooks
                    or point._forward_pre_hooks
                    or point._backward_hooks
                    or point._backward_pre_hooks
                ):
                    continue
                passes = flags is not None and getattr(flags, flag)
                if not passes and (reason := _why_it_matters(point, by_predicate_too=False)):
                    raise ValueError(
                        f"'blocks.{i}.{part}{name}' {reason}, and passes only after model.set_{flag}(True): call it, "
                        "or take it away"
                    )
    return flags


def refuse_bypassed(model: Any, flag: str, by_predicate_too: bool = True) -> None:
    """Raise a `ValueError` if a flag would pass over a hook or a replaced module; see `_why_it_matters`."""
    for i, block in enumerate(model.blocks):
        for name in _BYPASSED.get(flag, ()):
            if reason := _why_not_bypassed(block.get_submodule(name), by_predicate_too):
                raise ValueError(
                    f"'blocks.{i}.{name}' {reason}, and {flag} uses its weight directly, so that it would have no "
                    "effect: take it away first, or leave the flag off"
                )


def refuse_hooks_that_would_stop(model: Any, flags: Iterable[str]) -> None:
    """Raise a `ValueError` if a hook is at a hook point that passes only under one of these flags."""
    stopping = set(flags)
    for name, point in model.hook_dict.items():
        if FLAGS.get(name.rpartition(".")[2]) in stopping and hooked_modules(point):
            raise ValueError(f"the hook at {name!r} would not be called here: remove it first")


def name_hook_points(model: Any) -> None:
    """Name the loop's hook points, and give all hook points the model's clock, after TransformerLens's `setup`."""
    model.hook_dict, model.mod_dict = ByHookPoint(model.hook_dict), ByHookPoint(model.mod_dict)
    # `model.denoise` is the method that runs the loop, so the loop's hook points are stored as `model.loop_hooks` and
    # renamed here.
    for name, _ in model.loop_hooks.named_children():
        point: Any = model.hook_dict.pop(f"loop_hooks.{name}")
        del model.mod_dict[f"loop_hooks.{name}"]
        point.name = loop_hook(name)
        model.hook_dict[point.name] = model.mod_dict[point.name] = point
    for hook_point in model.hook_points():
        lend_clock(hook_point, model.clock)


def select_passing(model: Any, names_filter: NamesFilter, in_loop: bool = True) -> list[str]:
    """The hook points of a filter that pass; without any, or if a name is among the others, a `ValueError`."""
    selected = _select(model, names_filter)
    silent = {name: reason for name in selected if (reason := why_silent(model, name, in_loop))}
    names = [name for name in selected if name not in silent]
    if not names or (silent and not callable(names_filter) and names_filter is not None):
        raise ValueError("; ".join(f"{name!r} {reason}" for name, reason in silent.items()))
    return names


def check_hookable(model: Any, name: str | Callable[[str], bool], in_loop: bool = True) -> list[str]:
    """The hook points of a filter; it may not select only those that this kind of call never reaches."""
    points = _select(model, name)
    for point in points:
        if why_silent(model, point, in_loop) is None:
            return points
    raise ValueError(f"{points[0]!r} {why_silent(model, points[0], in_loop)}")


def why_silent(model: Any, name: str, in_loop: bool = False) -> str | None:
    """The reason why a forward pass, a plain one or one of the loop, never reaches a hook point, or `None`."""
    if name.startswith(_LOOP):
        return None if in_loop else "passes only inside the denoising loop: model.denoise(..., fwd_hooks=[...])"
    cfg, flag = model.cfg, FLAGS.get(name.rpartition(".")[2])
    if flag is not None and not getattr(cfg, flag):
        return f"passes only after model.set_{flag}(True)"
    if ".ln1." in name and (cfg.use_split_qkv_input or cfg.use_attn_in):
        flag = "use_split_qkv_input" if cfg.use_split_qkv_input else "use_attn_in"
        return f"passes only after model.set_{flag}(False): now each head normalises its own copy of the stream"
    return None


def has_module_hooks(model: Any) -> bool:
    """Whether a hook of torch is attached to a module that is no hook point."""
    return any(not isinstance(module, StepHookPoint) for module in hooked_modules(model, skip=model.loop_hooks))


def require_set_up(model: Any) -> None:
    """Raise a `RuntimeError` if a hook is at a hook point added since `setup`, which would not know the step; warn of a
    backward hook, which the loop never calls."""
    for point in hooked_modules(model):
        if getattr(point, "bwd_hooks", ()):
            warn_user(
                f"the denoising loop computes no gradients, so the backward hook at {point.name!r} never acts: attach "
                "it to a pass on one canvas, run_with_hooks(canvas, bwd_hooks=...), and call backward() on its loss"
            )
        if isinstance(point, HookPoint) and vars(point).get("clock") is not model.clock:
            name = next(name for name, module in model.named_modules() if module is point)
            raise RuntimeError(
                f"the hook at {name!r} cannot read the step, because its hook point was added after the last "
                "call of model.setup(): call model.setup()"
            )


def _select(model: Any, names_filter: NamesFilter) -> list[str]:
    """The hook points that a filter selects; one that is no longer in the network is a `RuntimeError`."""
    # `dict.get` passes over aliases, which most names need not be looked up in.
    if isinstance(names_filter, str) and (point := dict.get(model.hook_dict, names_filter)) is not None:
        selected = [point.name or names_filter]
    else:
        named = [names_filter] if isinstance(names_filter, str) else names_filter
        for name in named if isinstance(named, Sequence | Set) else ():
            if name not in model.hook_dict:
                _refuse_replaced(model, name)
        selected = select_names(names_filter, model.hook_dict)
    for name in selected:
        if name.startswith(_LOOP):
            continue
        module = model
        for part in name.split("."):  # `get_submodule` takes several times as long
            module = None if module is None else module._modules.get(part)
        if module is not model.hook_dict[name]:
            raise RuntimeError(
                f"{name!r} is no longer the hook point that this model knows by that name: call model.setup() "
                "after adding modules"
            )
    return selected


def _refuse_replaced(model: Any, name: str) -> None:
    """Raise a `KeyError` if a module of another kind has replaced a hook point of the network."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return
    if not name.rpartition(".")[2].startswith("hook_") or isinstance(module, HookPoint):
        return
    inside = [known for known in model.hook_dict if known.startswith(f"{name}.")]
    raise KeyError(
        f"a module {type(module).__name__} has replaced the hook point {name!r}; it has "
        f"{'the hook points ' + ', '.join(inside) if inside else 'no hook points'}. Use another hook point, or "
        "put a HookPoint back there and call model.setup()"
    )


class AliasedCache(ActivationCache):
    """TransformerLens's cache, in which other names of a hook point (`hooks.names.BLOCK_ALIASES`) reach it too."""

    def __init__(self, cache_dict: Mapping[str, Tensor], model: Any, has_batch_dim: bool = True) -> None:
        super().__init__(ByHookPoint(cache_dict), model, has_batch_dim)

    def __contains__(self, name: object) -> bool:
        return name in self.cache_dict

    def decompose_resid(self, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens; a layer's "mlp_out" includes the output of its shared expert, if it has one.

        A network whose stream is no sum of outputs refuses it (`ValueError`), and the methods for heads and neurons.
        """
        whole, model = dict(self.cache_dict), cast(Any, self.model)
        require_sum(model.cfg, "a decomposition adds up outputs")
        for layer in range(model.cfg.n_layers):
            if shared_out(layer) in model.hook_dict and mlp_out(layer) in whole:
                whole[mlp_out(layer)] = whole[mlp_out(layer)] + self.cache_dict[shared_out(layer)]
        summed = AliasedCache(whole, self.model, self.has_batch_dim)
        return ActivationCache.decompose_resid(summed, *args, **kwargs)

    def stack_head_results(self, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens."""
        require_sum(cast(Any, self.model).cfg, "results of heads are added up")
        return super().stack_head_results(*args, **kwargs)

    def stack_neuron_results(self, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens."""
        require_sum(cast(Any, self.model).cfg, "results of neurons are added up")
        return super().stack_neuron_results(*args, **kwargs)

    def to(self, device: str | torch.device) -> "AliasedCache":
        """As in TransformerLens."""
        super().to(device)
        self.cache_dict = ByHookPoint(self.cache_dict)
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> "AliasedCache":
        """As in TransformerLens."""
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        return AliasedCache(sliced.cache_dict, sliced.model, sliced.has_batch_dim)


def caching_hooks(
    points: Mapping[str, HookPoint],
    cache: dict[str, Tensor],
    incl_bwd: bool,
    device: Any,
    without_batch: bool,
    pos_slice: Slice,
) -> tuple[Hooks, Hooks]:
    """Forward and backward hooks that store activations in `cache`; names of gradients end in "_grad"."""
    if device is not None:
        warn_if_mps(device)

    def store(activation: Tensor, hook: HookPoint, suffix: str) -> None:
        # Positions are selected first, because removing the batch axis would shift their axis.
        selected = select_positions(activation.detach().to(device), pos_slice, hook)
        cache[f"{hook.name}{suffix}"] = remove_batch_dim(selected) if without_batch else selected

    forward: Hooks = [(name, partial(store, suffix="")) for name in points]
    backward: Hooks = [(name, partial(store, suffix="_grad")) for name in points] if incl_bwd else []
    return forward, backward


def select_positions(x: Tensor, pos_slice: Slice, hook: HookPoint) -> Tensor:
    """Some positions of an activation at a hook point; for scores and patterns, query positions."""
    axis = position_axis(hook)
    if axis is None:
        return x
    if pos_slice.mode != "identity":
        count_positions(pos_slice, x.shape[axis], repr(hook.name))
    selected: Tensor = pos_slice.apply(x, dim=axis)
    return selected


def count_positions(pos_slice: Slice, n_pos: int, where: str) -> int:
    """Number of selected positions; an `IndexError` if one is out of range, or none is selected."""
    try:
        count = int(pos_slice.indices(n_pos).size)
        if isinstance(pos_slice.slice, int) and not -n_pos <= pos_slice.slice < n_pos:
            raise IndexError
    except IndexError as error:
        raise IndexError(f"pos_slice={pos_slice.slice} reaches outside the {n_pos} positions of {where}") from error
    if not count:
        raise IndexError(f"pos_slice={pos_slice.slice} selects none of the {n_pos} positions of {where}")
    return count


def _why_not_bypassed(module: nn.Module, by_predicate_too: bool) -> str | None:
    """The reason why a norm or projection may compute something else than its weight says, or `None`."""
    if type(module).forward not in (Linear.forward, nn.Linear.forward, Norm.forward):
        return f"is a module {type(module).__name__}"
    for name, inside in module._modules.items():
        if name.startswith("hook_") and (reason := _why_it_matters(inside, by_predicate_too)):
            return reason if reason == _HOOKED else f"has in the place of {name!r} a module {type(inside).__name__}"
    hooked = any(not isinstance(each, HookPoint) for each in hooked_modules(module))
    return _HOOKED if hooked else None


def _why_it_matters(point: nn.Module | None, by_predicate_too: bool) -> str | None:
    """The reason why what is at a hook point may change an activation, or read it, or `None`.

    Without `by_predicate_too`, hooks that a predicate attached, at this hook point with others, do not count.
    """
    if point is None:
        return None
    if not isinstance(point, HookPoint) or type(point).forward is not HookPoint.forward:
        return f"is a module {type(point).__name__}"
    if not listens(point):
        return None
    hooks = (point._forward_hooks, point._forward_pre_hooks, point._backward_hooks, point._backward_pre_hooks)
    handles = point.fwd_hooks + point.bwd_hooks
    passed_over = 0 if by_predicate_too else sum(getattr(handle, "by_predicate", False) for handle in handles)
    return _HOOKED if sum(map(len, hooks)) > passed_over else None
