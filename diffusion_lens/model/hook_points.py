"""A TransformerLens hook point that knows the denoising step."""

from transformer_lens.hook_points import HookPoint

from diffusion_lens.step_state import StepClock, StepState


class StepHookPoint(HookPoint):
    """An identity that hooks can read and replace; inside the denoising loop `step` says where."""

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
