"""What a run is made by: the weights as they are, and the hooks that the caller has attached.

Two runs with the same settings give the same numbers only if both agree in these. So both are taken when a run begins:
`begins_run` marks the public functions that are such a door, `run_of` is the same as a `with`. Whatever a run does
inside, its own hooks, edits that it tries out, other public functions that it calls, the record names what the caller
handed in, and the weights are read once a call, however many facts it asks.

A hook is told by its point, its direction and its name. Its name is its attribute `hook_name`, which
`interventions.named` gives, otherwise the name of its function and a digest of the function's code and of the values
that it holds (`function_digest`), "steer #1f0c22ab": so a steering at two strengths is two hooks. A hook whose own
values change from call to call, such as one that collects what it sees, needs a name to be known again.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from diffusion_lens.function_digest import function_digest
from diffusion_lens.hook_names import select_names

P = ParamSpec("P")
R = TypeVar("R")

_ROW = 1 << 13  # words of 8 bytes that are summed into one
_ROWS = 1 << 10  # rows at once, 64 MiB
_SMALL = 1 << 24  # bytes below which threads cost more than they save


@dataclass(frozen=True)
class Identity:
    """A model as a run found it.

    Attributes:
        weights_sha256: as `weights_sha256` gives it.
        hooks: as `describe_hooks` gives them.
    """

    weights_sha256: str
    hooks: dict[str, list[str]]


_BEGUN: ContextVar[Mapping[int, Identity]] = ContextVar("_BEGUN", default={})  # noqa: B039


def identity_of(model: nn.Module) -> Identity:
    """The model as the run in progress found it, or where none is, as it is now."""
    return _BEGUN.get().get(id(model)) or _taken(model)


@contextmanager
def run_of(model: nn.Module, fwd_hooks: Sequence[tuple[Any, Any]] = ()) -> Iterator[None]:
    """Inside, `identity_of` says what was there at the beginning; inside another run of the model, of that one.

    Args:
        fwd_hooks: hooks of the caller that the run is going to attach for them.
    """
    begun = _BEGUN.get()
    if id(model) in begun:
        yield
        return
    token = _BEGUN.set({**begun, id(model): _taken(model, fwd_hooks)})
    try:
        yield
    finally:
        _BEGUN.reset(token)


def begins_run(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as a run of every model among its arguments."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as begun:
            for each in (*args, *kwargs.values()):
                if isinstance(each, nn.Module) and hasattr(each, "hook_dict"):
                    begun.enter_context(run_of(each))
            return function(*args, **kwargs)

    return run


def describe_hooks(model: nn.Module, fwd_hooks: Sequence[tuple[Any, Any]] = ()) -> dict[str, list[str]]:
    """By hook point, or other module, the direction and the name of each hook in the order in which they were attached.

    Args:
        fwd_hooks: (name or predicate, function) pairs to be attached after those that are there.
    """
    points: Mapping[str, Any] = getattr(model, "hook_dict", {})
    names = {id(point): name for name, point in points.items()}
    held = {names.get(id(module), path): _attached(module) for path, module in model.named_modules()}
    for name, hook in fwd_hooks:
        for point in select_names(name, points):
            held[point].append(f"forward: {name_of(hook)}")
    return {name: hooks for name, hooks in sorted(held.items()) if hooks}


def named(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same hook under a name, by which records and folders of results tell it from other hooks.

    Give what distinguishes it, such as "steer(refusal) at strength 4". Name the outermost function: what is put around
    a named hook is another hook.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"a hook is named by a text; {name!r} was given")

    @functools.wraps(hook)
    def under_its_name(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    under_its_name.__dict__["hook_name"] = name
    return under_its_name


def name_of(hook: Any) -> str:
    """The name that a hook was given, or that of its function with a digest of what the function does."""
    if isinstance(given := getattr(hook, "hook_name", None), str):
        return given
    function = hook.func if isinstance(hook, functools.partial) else hook
    return f"{getattr(function, '__qualname__', None) or type(hook).__qualname__} #{function_digest(hook)}"


def _attached(module: nn.Module) -> list[str]:
    # TransformerLens hands torch a function of its own around the caller's.
    handles = [*getattr(module, "fwd_hooks", ()), *getattr(module, "bwd_hooks", ())]
    given = {handle.hook.id: handle.user_hook for handle in handles}
    kinds = {
        "before": module._forward_pre_hooks,
        "forward": module._forward_hooks,
        "before backward": module._backward_pre_hooks,
        "backward": module._backward_hooks,
    }
    return [f"{kind}: {name_of(given.get(i, hook))}" for kind, hooks in kinds.items() for i, hook in hooks.items()]


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 of the weights as they are now: over name, dtype, shape and the SHA-256 of the bytes of each.

    Every byte is read at every call, so no edit is overlooked, whoever writes it (`.data`, numpy, an optimizer). The
    tensors are hashed side by side, in a thread for each core: a billion float32 weights take 4.2 seconds of processor
    time together (matrices of the sizes of a 24-block model, 4.3 GB, on cores with SHA instructions). Weights on an
    accelerator are hashed there (`fingerprint`) to see which ones have changed, and only those are copied.
    """
    weights = dict(model.named_parameters())
    known: dict[str, tuple[bytes, str]] = model.__dict__.setdefault("_weight_digests", {})
    with ThreadPoolExecutor(_n_threads(weights.values())) as threads:
        digests = threads.map(lambda name: _digest(weights[name], name, known), weights)
        lines = [
            f"{name} {weight.dtype} {list(weight.shape)} {digest}\n"
            for (name, weight), digest in zip(weights.items(), digests, strict=True)
        ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def fingerprint(weight: Tensor) -> bytes:
    """A hash of a tensor's bytes, computed where the tensor is; of other bytes it is another one.

    Each word of 64 bits is mixed, w ^ (w >> 29), and multiplied by an odd number drawn for its column; each row is
    summed modulo 2^64. The mixing spreads what changes in the upper bits, where the signs are: times an odd number, the
    highest bit alone would be the highest bit in every column, and an even count of changed signs would sum to nothing.
    Two different rows give one sum with a chance of at most 2^-33. The sums go through SHA-256, so that their order
    counts.
    """
    flat = _bytes(weight)
    whole = len(flat) - len(flat) % (8 * _ROW)
    digest = hashlib.sha256(f"{weight.dtype} {list(weight.shape)}".encode())
    digest.update(flat[whole:].cpu().numpy().data)
    if whole:
        factors = _factors().to(flat.device)
        body = flat[:whole] if flat.data_ptr() % 8 == 0 else flat[:whole].clone()
        sums = [
            ((rows ^ ((rows >> 29) & (1 << 35) - 1)) * factors).sum(dim=1)
            for rows in body.view(torch.int64).view(-1, _ROW).split(_ROWS)
        ]
        digest.update(torch.cat(sums).cpu().numpy().data)
    return digest.digest()


def _taken(model: nn.Module, fwd_hooks: Sequence[tuple[Any, Any]] = ()) -> Identity:
    return Identity(weights_sha256(model), describe_hooks(model, fwd_hooks))


def _digest(weight: Tensor, name: str, known: dict[str, tuple[bytes, str]]) -> str:
    """SHA-256 of one tensor's bytes. Those on an accelerator travel only when their fingerprint has changed."""
    if _is_near(weight):
        return hashlib.sha256(_bytes(weight).numpy().data).hexdigest()
    seen = fingerprint(weight)
    if name not in known or known[name][0] != seen:
        known[name] = seen, hashlib.sha256(_bytes(weight.cpu()).numpy().data).hexdigest()
    return known[name][1]


def _is_near(weight: Tensor) -> bool:
    return weight.device.type == "cpu"


def _bytes(weight: Tensor) -> Tensor:
    return weight.detach().contiguous().view(-1).view(torch.uint8)


def _n_threads(weights: Any) -> int:
    if sum(weight.nbytes for weight in weights) < _SMALL:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _factors() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator) | 1
