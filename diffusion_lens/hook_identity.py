"""The names of hooks in records and result folders: given by the user, or derived from what the hook does."""

import functools
from collections.abc import Callable
from typing import Any

from diffusion_lens.code_names import own_name
from diffusion_lens.function_digest import Digest, Digester

UNIDENTIFIED = "cannot be told from others"


def named(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same hook under a name, by which records and result folders distinguish it from other hooks.

    The name should say what distinguishes the hook, such as "steer(refusal) at strength 4". Name the outermost
    function: a function wrapped around a named hook is another hook.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of a hook must be a non-empty string; got {name!r}")
    return _with_name(hook, hook, name)


def named_after(wrapper: Callable[..., Any], hook: Callable[..., Any], when: str) -> Callable[..., Any]:
    """A wrapper whose name is the name of the hook inside, taken when a call begins, followed by when it acts."""
    return _with_name(wrapper, hook, (hook, when))


def hook_within(hook: Any) -> Any:
    """The function that `named` or `named_after` wrapped; `None` for a hook without a name."""
    return getattr(hook, "__dict__", {}).get("hook_within")


def name_of(hook: Any, digester: Digester | None = None) -> str:
    """The name that a hook was given, or the name of its function with a digest of what the function does.

    Args:
        digester: Digester that several hooks share, so that the values they share are read once.
    """
    digester = digester or Digester()
    given = own_name(hook)
    if isinstance(given, str):
        return given
    if isinstance(given, tuple):
        hook_inside, when = given
        return f"{name_of(hook_inside, digester)} {when}"
    function = hook.func if isinstance(hook, functools.partial) else hook
    digest = digester.digest(hook)
    return with_gaps(f"{getattr(function, '__qualname__', None) or type(hook).__qualname__} #{digest}", digest)


def with_gaps(name: str, digest: Digest) -> str:
    """A name, followed by the parts that the digest does not cover."""
    return f"{name} ({UNIDENTIFIED}: {'; '.join(gap.strip(' :') for gap in digest.gaps)})" if digest.gaps else name


def _with_name(function: Callable[..., Any], like: Callable[..., Any], name: Any) -> Callable[..., Any]:
    @functools.wraps(like)
    def named_hook(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    del named_hook.__wrapped__  # `own_name` reads it to see whose name was copied
    named_hook.__dict__ |= {"hook_name": name, "hook_within": function}
    return named_hook
