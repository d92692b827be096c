"""Wrap a hook so that it acts only at some steps, at masked places, or in one branch of guidance.

The wrapped function is still a plain `fn(activation, hook)`. Outside the denoising loop, where `hook.step` is `None`,
it does nothing; `acts_by_step` tells such a hook, and `interventions.freeze` is another one.
"""

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from diffusion_lens.hook_naming import named_after
from diffusion_lens.loop_only import acts_by_step as acts_by_step
from diffusion_lens.loop_only import in_loop_only
from diffusion_lens.settings import whole_numbers
from diffusion_lens.step_state import StepState

Hook = Callable[..., Any]


def at_steps(hook_fn: Hook, steps: SupportsIndex | Iterable[SupportsIndex]) -> Hook:
    """Act at these steps only; negative numbers count from the last step.

    A step that the run does not have is a `ValueError`, raised where the hook is first called.
    """
    chosen = frozenset(whole_numbers("steps", steps))
    if not chosen:
        raise ValueError("no steps were given: the hook would never act")

    def acts(step: StepState) -> bool:
        if outside := sorted(each for each in chosen if not -step.n_steps <= each < step.n_steps):
            raise ValueError(
                f"at_steps was given the steps {outside}, and this run has the {step.n_steps} steps 0 to "
                f"{step.n_steps - 1} (-1 is the last); the hook would never act there"
            )
        return step.index in chosen or step.index - step.n_steps in chosen

    return _when(hook_fn, acts, f"at steps {sorted(chosen)}")


def on_branch(hook_fn: Hook, branch: str) -> Hook:
    """Act in one branch of guidance only, "conditional" or "unconditional"; without guidance all is "conditional"."""
    if branch not in ("conditional", "unconditional"):
        raise ValueError(f"branch={branch!r}; it is 'conditional' or 'unconditional'")
    return _when(hook_fn, lambda step: step.branch == branch, f"on the {branch} branch")


def while_masked(hook_fn: Hook) -> Hook:
    """Act on the places that are still masked only; the others keep their activation.

    For activations [batch pos ...]. The function sees the whole activation; what it returns, or writes in place, is
    used at the masked places. On a causal model these are the places not reached yet, which nothing that is read sees.
    """

    def wrapped(activation: Tensor, hook: Any) -> Tensor:
        if hook.name.endswith(("hook_attn_scores", "hook_pattern")):
            raise ValueError(f"{hook.name} is [batch head query key]: while_masked needs [batch pos ...]")
        masked = hook.step.masked
        handed = activation.clone()
        returned = hook_fn(handed, hook)
        changed = handed if returned is None else returned
        return torch.where(masked.view(*masked.shape, *[1] * (activation.dim() - 2)), changed, activation)

    return named_after(in_loop_only(wrapped), hook_fn, "while masked")


def _when(hook_fn: Hook, acts: Callable[[StepState], bool], when: str) -> Hook:
    def wrapped(activation: Tensor, hook: Any) -> Any:
        return hook_fn(activation, hook) if acts(hook.step) else None

    return named_after(in_loop_only(wrapped), hook_fn, when)
