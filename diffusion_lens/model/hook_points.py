"""A TransformerLens hook point that knows the denoising step, and refuses what a hook may not return."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from transformer_lens.hook_points import HookPoint

from diffusion_lens.step_state import StepClock, StepState


class StepHookPoint(HookPoint):
    """An identity that hooks can read and replace; inside the denoising loop `step` says where.

    When guidance runs its two branches as one batch, hooks (torch's own too) are called for each branch, with the
    caller's batch size. What comes back must have the shape, the device and the kind of number that went in; floats and
    integers of another width are cast.
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
        return bool(self._forward_hooks or self._backward_hooks or self._forward_pre_hooks or self._backward_pre_hooks)

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

    def _fitting(self, returned: Any, x: Tensor) -> Tensor:
        """What the hooks returned, if it can stand for `x`."""
        if not isinstance(returned, Tensor):
            raise TypeError(
                f"{self._culprits()} returned {type(returned).__name__}; a hook returns a tensor {list(x.shape)}, or "
                "None to change nothing"
            )
        if returned.shape != x.shape:
            raise ValueError(
                f"{self._culprits()} returned {list(returned.shape)}; the activation is {list(x.shape)}, and what "
                "replaces it must be too (tensor.expand_as(activation) repeats one for all rows)"
            )
        if returned.device != x.device:
            raise ValueError(
                f"{self._culprits()} returned a tensor on {returned.device}; the activation is on {x.device}: return "
                "tensor.to(activation.device)"
            )
        if returned.dtype == x.dtype:
            return returned
        if _kind(returned.dtype) != _kind(x.dtype):
            raise TypeError(f"{self._culprits()} returned {returned.dtype}; the activation is {x.dtype}")
        return returned.to(x.dtype)

    def _culprits(self) -> str:
        functions = [getattr(handle.user_hook, "__qualname__", repr(handle.user_hook)) for handle in self.fwd_hooks]
        return f"a hook at {self.name!r} ({', '.join(functions) or 'of torch'})"


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


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "floating"
    return "bool" if dtype == torch.bool else "integer"
