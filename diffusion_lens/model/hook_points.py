"""A TransformerLens hook point that knows the denoising step."""

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from diffusion_lens.step_state import StepClock, StepState


class StepHookPoint(HookPoint):
    """An identity that hooks can read and replace; inside the denoising loop `step` says where.

    When guidance runs its two branches as one batch, hooks are called for each branch, with the caller's batch size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = StepClock()

    @property
    def step(self) -> StepState | None:
        """The step whose activation is passing, or `None` outside the loop."""
        return self.clock.step

    @property
    def is_hooked(self) -> bool:
        """Whether anything listens here, forwards or backwards."""
        return bool(self._forward_hooks or self._backward_hooks or self._forward_pre_hooks or self._backward_pre_hooks)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            return x
        if self.clock.branches is None:
            shown: Tensor = super().__call__(x)
            return shown
        halves = x.chunk(2)
        seen = []
        for state, half in zip(self.clock.branches, halves, strict=True):
            self.clock.step = state
            seen.append(super().__call__(half))
        return x if all(new is old for new, old in zip(seen, halves, strict=True)) else torch.cat(seen)
