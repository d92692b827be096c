"""The names of hooks in records and folders: given, or made of what the hook does."""

import functools
from collections.abc import Callable
from typing import Any

from diffusion_lens.code_names import own_name
from diffusion_lens.function_digest import Teller, Told

UNTOLD = "cannot be told from others"


def named(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same hook under a name, by which records and folders of results tell it from other hooks.

    Give what distinguishes it, such as "steer(refusal) at strength 4". Name the outermost function: what is put around
    a named hook is another hook.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"a hook is named by a text; {name!r} was given")
    return _noting(hook, hook, name)


def named_after(wrapper: Callable[..., Any], hook: Callable[..., Any], when: str) -> Callable[..., Any]:
    """A wrapper named as the hook inside, as that is when a run begins, and the words for when it acts."""
    return _noting(wrapper, hook, (hook, when))


def hook_within(hook: Any) -> Any:
    """What stands under a name, the hook that was named or a wrapper; `None` of a hook that has no name."""
    return getattr(hook, "__dict__", {}).get("hook_within")


def name_of(hook: Any) -> str:
    """The name that a hook was given, or that of its function with a digest of what the function does."""
    return told_name(hook, Teller())


def told_name(hook: Any, teller: Teller) -> str:
    """As `name_of`; hooks that share parts share the teller."""
    given = own_name(hook)
    if isinstance(given, str):
        return given
    if isinstance(given, tuple):
        return f"{told_name(given[0], teller)} {given[1]}"
    function = hook.func if isinstance(hook, functools.partial) else hook
    told = teller.tell(hook)
    return with_gaps(f"{getattr(function, '__qualname__', None) or type(hook).__qualname__} #{told}", told)


def with_gaps(name: str, told: Told) -> str:
    """A name, and what could not be told of what it stands for."""
    return f"{name} ({UNTOLD}: {'; '.join(gap.strip(' :') for gap in told.gaps)})" if told.gaps else name


def _noting(function: Callable[..., Any], like: Callable[..., Any], name: Any) -> Callable[..., Any]:
    @functools.wraps(like)
    def under_its_name(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    del under_its_name.__wrapped__  # `own_name` asks it whose name was copied
    under_its_name.__dict__ |= {"hook_name": name, "hook_within": function}
    return under_its_name
