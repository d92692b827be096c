"""Wrap a hook so that it acts only at some steps, positions, or in one branch of guidance.

The wrapped function is still a plain `fn(activation, hook)`. Outside the denoising loop, where `hook.step` is `None`,
it does nothing. `by_step` joins the functions of several steps into one hook. `acts_by_step` recognises all these, and
the hook of `interventions.freeze`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from diffusion_lens.config import reached
from diffusion_lens.hook_identity import named_after
from diffusion_lens.hook_names import Hook
from diffusion_lens.loop_only import acts_by_step as acts_by_step
from diffusion_lens.loop_only import in_loop_only
from diffusion_lens.readout import READOUTS
from diffusion_lens.settings import whole_number, whole_numbers
from diffusion_lens.shapes import PosMask
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

    by_index = in_loop_only(wrapped)
    by_index.__qualname__ = "by_step"
    return by_index


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

    return named_after(_where(hook_fn, lambda step: step.masked, "while_masked"), hook_fn, "while masked")


def while_predicting(hook_fn: Hook, readout: str) -> Hook:
    """Act only on the rows whose logits predict a position that is not yet revealed; the others keep their activation.

    On a causal model this is the last row that the text has reached. Left padding before a masked first token counts as
    a row.

    Args:
        readout: "in_place" or "shifted", as in `model.cfg.readout`.
    """
    if readout not in READOUTS:
        raise ValueError(f"readout={readout!r}; it must be one of {', '.join(map(repr, READOUTS))}")

    def rows(step: StepState) -> PosMask:
        chosen = torch.zeros_like(step.masked)
        chosen[READOUTS[readout].locate(step.masked)] = True
        return chosen & reached(step.tokens)

    return named_after(_where(hook_fn, rows, "while_predicting"), hook_fn, "while predicting")


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


def _when(hook_fn: Hook, acts: Callable[[StepState], bool], when: str) -> Hook:
    """The hook, called only at steps where `acts` is true; `when` is added to its name."""

    def wrapped(activation: Tensor, hook: Any) -> Any:
        return hook_fn(activation, hook) if acts(hook.step) else None

    return named_after(in_loop_only(wrapped), hook_fn, when)
