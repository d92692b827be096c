"""A TransformerLens hook point that knows the denoising step, and refuses what a hook may not return."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformer_lens.hook_points import HookPoint, LensHandle

from diffusion_lens.step_state import StepClock, StepState


class StepHookPoint(HookPoint):
    """An identity that hooks can read and replace; inside the denoising loop `step` says where.

    When guidance runs its two branches as one batch, hooks (torch's own too) are called for each branch, with the
    caller's batch size. What each hook returns must have the shape, the device and the kind of number that went in;
    floats and integers of another width are cast.

    Attaching and removing hooks is a `RuntimeError` while another thread runs the model.
    """

    def __init__(self, pos_dim: int = 1) -> None:
        super().__init__()
        self.clock = StepClock()
        self.pos_dim = pos_dim

    @property
    def step(self) -> StepState | None:
        """The step whose activation is passing, or `None` outside the loop."""
        return self.clock.step

    @property
    def is_hooked(self) -> bool:
        """Whether anything listens here, forwards or backwards: TransformerLens's hooks, or torch's own."""
        return is_hooked(self)

    def add_hook(self, hook: Any, dir: Literal["fwd", "bwd"] = "fwd", *args: Any, **kwargs: Any) -> LensHandle:
        """As in TransformerLens; what a forward hook returns is checked before the next one sees it."""
        with self.clock.held():
            handle = super().add_hook(self._checked(hook) if dir == "fwd" else hook, dir, *args, **kwargs)
        handle.user_hook = hook
        return handle

    def remove_hooks(self, *args: Any, **kwargs: Any) -> None:
        """As in TransformerLens, which resets every point of a model after every run with hooks at a few of them."""
        if self.fwd_hooks or self.bwd_hooks:
            with self.clock.held():
                super().remove_hooks(*args, **kwargs)

    def __call__(self, x: Tensor) -> Tensor:
        if self.clock.branches is None or not (self.is_hooked or _has_any_global_hook()):
            shown: Any = super().__call__(x)
            return x if shown is x else self._fitting(shown, x)
        halves = x.chunk(2)
        seen = []
        with self.clock.one_branch_at_a_time() as branches:
            for state, half in zip(branches, halves, strict=True):
                self.clock.step = state
                shown = super().__call__(half)
                seen.append(half if shown is half else self._fitting(shown, half))
        return x if all(new is old for new, old in zip(seen, halves, strict=True)) else torch.cat(seen)

    def _checked(self, user_hook: Any) -> Callable[..., Any]:
        """The hook, and right after it the check of what it returned, while it is known whose it is."""

        @wraps(user_hook)
        def checked(activation: Any, *, hook: Any) -> Any:
            returned = user_hook(activation, hook=hook)
            # What a conversion of the hook point shows is of another shape; it is checked when it is converted back.
            if returned is None or returned is activation or self.hook_conversion is not None:
                return returned
            return self._fitting(returned, activation, user_hook)

        return checked

    def _fitting(self, returned: Any, x: Tensor, hook: Any = None) -> Tensor:
        """What a hook returned, if it can stand for `x`; without a hook, what all of them made of it."""
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
        hooks = [handle.user_hook for handle in self.fwd_hooks] if hook is None else [hook]
        functions = [getattr(each, "__qualname__", repr(each)) for each in hooks]
        return f"a hook at {self.name!r} ({', '.join(functions) or 'of torch'})"


def is_hooked(point: nn.Module) -> bool:
    """Whether anything listens at a hook point of any kind; a module that acts by itself in its place counts."""
    return not isinstance(point, HookPoint) or _listens(point)


def hooked_modules(within: nn.Module, skip: nn.Module | None = None) -> Iterator[nn.Module]:
    """The modules of a network at which anything listens: hook points, and others that carry a hook of torch.

    It is asked at every step of the loop, and `nn.Module.modules`, which also makes names, takes several times as long.

    Args:
        skip: a part that is left out.
    """
    seen, waiting = {id(skip), id(None)}, [within]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if _listens(module):
            yield module
        waiting.extend(module._modules.values())  # type: ignore[arg-type]  # None is among those seen


def anything_listens(within: nn.Module, skip: nn.Module | None = None) -> bool:
    """Whether there are `hooked_modules`."""
    return any(True for _ in hooked_modules(within, skip))


def lend_clock(point: HookPoint, clock: StepClock) -> None:
    """Let a hook point know the step, a plain one of TransformerLens's (in a sparse autoencoder, say) included."""
    kind: Any = type(point)
    if not issubclass(kind, StepHookPoint):
        # Its owner holds this very object, so it is its class that changes.
        kind = StepHookPoint if kind is HookPoint else type(kind.__name__, (StepHookPoint, kind), {})
        point.__class__ = kind
    vars(point)["clock"] = clock


def position_axis(point: HookPoint) -> int:
    """Axis of the places in what passes a hook point: 1, but 2 (the query) for scores and patterns."""
    return 1 if point.pos_dim is None else point.pos_dim


def _listens(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._backward_hooks or module._forward_pre_hooks or module._backward_pre_hooks
    )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "floating"
    return "bool" if dtype == torch.bool else "integer"
