"""Wrap a hook so that it acts only at some steps, at masked positions, or in one branch of guidance.

The wrapped function is still a plain `fn(activation, hook)`. Outside the denoising loop, where `hook.step` is `None`,
it does nothing. `acts_by_step` recognises such hooks, and that of `interventions.freeze`.
"""

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from diffusion_lens.hook_identity import named_after
from diffusion_lens.hook_names import Hook
from diffusion_lens.loop_only import acts_by_step as acts_by_step
from diffusion_lens.loop_only import in_loop_only
from diffusion_lens.settings import whole_numbers
from diffusion_lens.step_state import StepState


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


def on_branch(hook_fn: Hook, branch: str) -> Hook:
    """Act in one branch of guidance only, "conditional" or "unconditional"; a run without guidance is "conditional"."""
    if branch not in ("conditional", "unconditional"):
        raise ValueError(f"branch={branch!r}; it must be 'conditional' or 'unconditional'")
    return _when(hook_fn, lambda step: step.branch == branch, f"on the {branch} branch")


def while_masked(hook_fn: Hook) -> Hook:
    """Act on masked positions only; the others keep their activation.

    For activations [batch pos ...]. The function receives the whole activation; what it returns, or writes in place, is
    used at the masked positions. On a causal model these are the positions that the text has not reached, which no
    other position sees.
    """

    def wrapped(activation: Tensor, hook: Any) -> Tensor:
        if hook.name.endswith(("hook_attn_scores", "hook_pattern")):
            raise ValueError(f"{hook.name} is [batch head query key]: while_masked needs [batch pos ...]")
        masked = hook.step.masked
        copy = activation.clone()
        returned = hook_fn(copy, hook)
        changed = copy if returned is None else returned
        return torch.where(masked.view(*masked.shape, *[1] * (activation.dim() - 2)), changed, activation)

    return named_after(in_loop_only(wrapped), hook_fn, "while masked")


def _when(hook_fn: Hook, acts: Callable[[StepState], bool], when: str) -> Hook:
    """The hook, called only at steps where `acts` is true; `when` is added to its name."""

    def wrapped(activation: Tensor, hook: Any) -> Any:
        return hook_fn(activation, hook) if acts(hook.step) else None

    return named_after(in_loop_only(wrapped), hook_fn, when)
