"""A TransformerLens hook point that knows the denoising step and checks what hooks return."""

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformer_lens.hook_points import HookPoint, LensHandle

from diffusion_lens.hooks.clock import StepClock, held_whole
from diffusion_lens.hooks.step import StepState

NO_POSITIONS = -1  # as `pos_dim`, where `None` is an axis that TransformerLens does not know
# Hooks of torch at all modules, in dictionaries that torch fills and empties.
_GLOBAL_PRE, _GLOBAL, _GLOBAL_BACKWARD_PRE, _GLOBAL_BACKWARD = (
    getattr(torch_module, f"_global_{kind}_hooks") for kind in ("forward_pre", "forward", "backward_pre", "backward")
)


class StepHookPoint(HookPoint):
    """An identity function whose value hooks can read and replace; inside the denoising loop, `step` is the step.

    When guidance runs its two branches as one batch, hooks (torch's own too) are called once for each branch, with the
    caller's batch size. A hook must return the shape, the device and the kind of number that it received; floats and
    integers of another width are cast.

    Attaching and removing hooks is a `RuntimeError` while another thread runs the model.

    Args:
        pos_dim: Axis of the positions; `NO_POSITIONS` if the activation has none.
    """

    def __init__(self, pos_dim: int = 1) -> None:
        super().__init__()
        self.pos_dim = pos_dim

    @cached_property
    def clock(self) -> StepClock:
        """A clock of its own, until a model lends its clock."""
        return StepClock()

    @property
    def step(self) -> StepState | None:
        """The step of the current activation, or `None` outside the loop."""
        return self.clock.step_for_hooks

    @property
    def is_hooked(self) -> bool:
        """Whether a hook is attached, forward or backward: one of TransformerLens, or one of torch."""
        return is_hooked(self)

    @held_whole
    def add_hook(self, hook: Any, dir: Literal["fwd", "bwd"] = "fwd", *args: Any, **kwargs: Any) -> LensHandle:
        """As in TransformerLens; what a forward hook returns is checked before the next hook sees it."""
        attached: Any = self._forward_hooks if dir == "fwd" else self._backward_hooks
        before = attached.copy()
        with self.clock.held():
            self.clock.hooked = True
            try:
                handle = super().add_hook(self._checked(hook) if dir == "fwd" else hook, dir, *args, **kwargs)
            except BaseException:  # A hook of torch without a handle of TransformerLens could not be removed.
                for key in attached.keys() - before.keys():
                    del attached[key]
                raise
        handle.user_hook = hook
        return handle

    @held_whole
    def remove_hooks(self, *args: Any, **kwargs: Any) -> None:
        """As in TransformerLens, which resets every point of a model after every run with hooks at a few of them."""
        if self.fwd_hooks or self.bwd_hooks:
            with self.clock.held():
                super().remove_hooks(*args, **kwargs)

    def __call__(self, x: Tensor) -> Tensor:
        # Hook points are called dozens of times in a block, most of them without hooks: no call is made for these.
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or _GLOBAL
            or _GLOBAL_PRE
            or _GLOBAL_BACKWARD
            or _GLOBAL_BACKWARD_PRE
        ):
            return self._hooked(x)
        # A subclass, or another `forward` in its place, may compute something.
        if self.__class__ is StepHookPoint and "forward" not in self.__dict__:
            return x
        return self._of_torch(x)

    def _hooked(self, x: Tensor) -> Tensor:
        """What passes the hooks, of each branch of guidance by itself."""
        if (branches := self.clock.branches) is None:
            return self._of_torch(x)
        halves, results = x.chunk(2), []
        with self.clock.at(None):  # nested hook points see the branch that is set here, and no other
            for state, half in zip(branches, halves, strict=True):
                self.clock.step = state
                results.append(self._of_torch(half))
        return x if all(new is old for new, old in zip(results, halves, strict=True)) else torch.cat(results)

    def _of_torch(self, x: Tensor) -> Tensor:
        result: Any = super().__call__(x)
        return x if result is x else self._fitting(result, x)

    def _checked(self, user_hook: Any) -> Callable[..., Any]:
        """The hook, followed by the check of what it returned, so that an error can name the hook."""

        @wraps(user_hook)
        def checked(activation: Any, *, hook: Any) -> Any:
            returned = user_hook(activation, hook=hook)
            # A hook conversion changes the shape that hooks see; the result is checked after it is converted back.
            if returned is None or returned is activation or self.hook_conversion is not None:
                return returned
            return self._fitting(returned, activation, user_hook)

        return checked

    def _fitting(self, returned: Any, x: Tensor, hook: Any = None) -> Tensor:
        """What a hook returned, or without `hook` all hooks together, if it can replace `x`; otherwise an error."""
        if not isinstance(returned, Tensor):
            raise TypeError(
                f"{self._whose(hook)} returned {type(returned).__name__}; a hook returns a tensor {list(x.shape)}, or "
                "None to change nothing"
            )
        if returned.shape != x.shape:
            raise ValueError(
                f"{self._whose(hook)} returned {list(returned.shape)}; the activation is {list(x.shape)}, and what "
                "replaces it must be too (tensor.expand_as(activation) repeats one for all rows)"
            )
        if returned.device != x.device:
            raise ValueError(
                f"{self._whose(hook)} returned a tensor on {returned.device}; the activation is on {x.device}: return "
                "tensor.to(activation.device)"
            )
        if returned.dtype == x.dtype:
            return returned
        if _kind(returned.dtype) != _kind(x.dtype):
            raise TypeError(f"{self._whose(hook)} returned {returned.dtype}; the activation is {x.dtype}")
        return returned.to(x.dtype)

    def _whose(self, hook: Any) -> str:
        """Description of a hook, or of all hooks of this point, for errors."""
        hooks = [handle.user_hook for handle in self.fwd_hooks] if hook is None else [hook]
        functions = [getattr(each, "__qualname__", repr(each)) for each in hooks]
        return f"a hook at {self.name!r} ({', '.join(functions) or 'of torch'})"


def listens(module: nn.Module) -> bool:
    """Whether a module itself carries a hook of torch, as which TransformerLens attaches its own."""
    return bool(
        module._forward_hooks or module._backward_hooks or module._forward_pre_hooks or module._backward_pre_hooks
    )


def is_hooked(point: nn.Module) -> bool:
    """Whether a hook is attached to a hook point of any kind; another module in its place counts as a hook."""
    return bool(
        point._forward_hooks
        or point._forward_pre_hooks
        or point._backward_hooks
        or point._backward_pre_hooks
        or not isinstance(point, HookPoint)
    )


def hooked_modules(within: nn.Module, skip: nn.Module | None = None) -> list[nn.Module]:
    """The modules of a network that carry hooks: hook points, and other modules with a hook of torch.

    The loop calls this at every step, and `nn.Module.modules`, which also makes names, takes twice as long.

    Args:
        skip: Module that is left out, with all that it contains.
    """
    hooked, seen, modules = [], {None, skip, within}, [within]
    for module in modules:
        own = vars(module)  # attributes of a module take longer
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            hooked.append(module)
        for inside in own["_modules"].values():
            if inside not in seen:
                seen.add(inside)
                modules.append(inside)
    return hooked


def lend_clock(point: HookPoint, clock: StepClock) -> None:
    """Give a hook point the model's clock, also a plain one of TransformerLens (such as a sparse autoencoder's)."""
    kind: Any = type(point)
    if not issubclass(kind, StepHookPoint):
        # Its owner refers to this object, so the object stays and its class changes.
        kind = StepHookPoint if kind is HookPoint else type(kind.__name__, (StepHookPoint, kind), {})
        point.__class__ = kind
    vars(point)["clock"] = clock
    clock.hooked |= listens(point)


def position_axis(point: HookPoint) -> int | None:
    """Axis of the positions in an activation: 1, or 2 (the queries) for scores and patterns; `None` if it has none."""
    if point.pos_dim == NO_POSITIONS:
        return None
    return 1 if point.pos_dim is None else point.pos_dim


def _kind(dtype: torch.dtype) -> str:
    """The kind of number: "complex", "floating", "integer" or "bool"."""
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "floating"
    return "bool" if dtype == torch.bool else "integer"
