"""Hooks that act in the denoising loop only: outside it, where `hook.step` is `None`, they do nothing."""

import functools
from typing import Any

from diffusion_lens.hook_identity import hook_within
from diffusion_lens.hook_names import Hook

_MARK = "acts_by_step"  # an attribute of the function, which `functools.wraps` copies


def in_loop_only(hook_fn: Hook) -> Hook:
    """The same hook, which does nothing outside the loop; `acts_by_step` recognises it."""

    def in_loop(activation: Any, hook: Any) -> Any:
        return None if hook.step is None else hook_fn(activation, hook)

    vars(in_loop)[_MARK] = True
    return in_loop


def acts_by_step(hook_fn: Any) -> bool:
    """Whether a hook acts in the loop only, as those of `at_steps`, `on_branch`, `while_masked` and `freeze` do.

    Such a hook is also recognised if it was named, in a `functools.partial`, and in a function that `functools.wraps`
    it. A hook that reads `hook.step` itself is not recognised, because it is unknown what it does if that is `None`;
    nor is a `swap` with a cache by step, which raises an error outside the loop.
    """
    if isinstance(hook_fn, functools.partial):
        return any(map(acts_by_step, (hook_fn.func, *hook_fn.args, *hook_fn.keywords.values())))
    within = hook_within(hook_fn)
    return _MARK in getattr(hook_fn, "__dict__", ()) or (within is not None and acts_by_step(within))
