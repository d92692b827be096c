"""What a run is made by: the weights as they are, and the hooks that the caller has attached.

Two runs with the same settings give the same numbers only if both agree in these. So both are taken when a run begins:
`begins_run` marks the public functions that are such a door, `run_of` is the same as a `with`. Whatever a run does
inside, its own hooks, edits that it tries out, other public functions that it calls, the record names what the caller
handed in, and the weights are read once a call, however many facts it asks.

A hook is told by its point, its direction and its name: the one that `interventions.named` gives, otherwise the name
of its function and a digest of its code and of everything that it reaches (`function_digest`), "steer #1f0c22ab": so a
steering at two strengths is two hooks. A hook whose own values change from call to call, such as one that collects what
it sees, needs a name to be known again. Of a hook that reaches what no digest can tell, such as a generator, the record
says so, and `require_told` refuses it where results are kept for later calls.

Modules decide the numbers beside the weights: their classes, their attributes (the eps of a norm), their buffers, and
what a user has put in their place. `describe_modules` tells them.
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

from diffusion_lens.function_digest import MODULE_HOOKS, Teller, attributes
from diffusion_lens.hook_names import select_names
from diffusion_lens.hook_naming import UNTOLD, told_name, with_gaps
from diffusion_lens.hook_naming import name_of as name_of
from diffusion_lens.hook_naming import named as named
from diffusion_lens.hook_naming import named_after as named_after
from diffusion_lens.model.hook_points import StepHookPoint

P = ParamSpec("P")
R = TypeVar("R")

OWN_MODULES = "of this library and torch"
# Of a module's attributes: what the record holds elsewhere, what belongs to a run, and what torch keeps of its hooks.
_NOT_ITS_OWN = (
    frozenset(
        ("_parameters", "_modules", "training", "cfg", "tokenizer", "clock", "mod_dict", "hook_dict", "name", "ctx")
    )
    | {"fwd_hooks", "bwd_hooks"}
    | MODULE_HOOKS
)

_SAME_IN_TRAINING = (nn.ModuleList, nn.Linear, nn.Embedding, nn.Identity)

_ROW = 1 << 13  # words of 8 bytes that are summed into one
_ROWS = 1 << 10  # rows at once, 64 MiB
_SMALL = 1 << 24  # bytes below which threads cost more than they save


@dataclass(frozen=True)
class Identity:
    """A model as a run found it.

    Attributes:
        weights_sha256: as `weights_sha256` gives it.
        hooks: as `describe_hooks` gives them.
        modules: as `describe_modules` gives them.
    """

    weights_sha256: str
    hooks: dict[str, list[str]]
    modules: dict[str, str]


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
    teller = _teller(model)
    held = {names.get(id(module), path): _attached(module, teller) for path, module in model.named_modules()}
    for name, hook in fwd_hooks:
        for point in select_names(name, points):
            held[point].append(f"forward: {told_name(hook, teller)}")
    return {name: hooks for name, hooks in sorted(held.items()) if hooks}


def describe_modules(model: nn.Module) -> dict[str, str]:
    """What the modules of a model are beside their weights: a digest of all that are of this library and of torch.

    By its path, the class and the digest of each module that is of neither. Hooks and the config are told elsewhere.
    """
    teller = _teller(model)
    own, described = [], {}
    for path, module in model.named_modules():
        held = teller.combine(_parts(module))
        if type(module).__module__.startswith(("diffusion_lens.", "torch.nn.")):
            own.append((path, held.digest))
        else:
            described[path] = with_gaps(f"{type(module).__qualname__} #{held}", held)
    return {OWN_MODULES: f"#{teller.tell(own)}", **described}


def require_told(record: Mapping[str, Any], where: str) -> None:
    """Raise a `ValueError` where a hook or module of a record cannot be told from another one."""
    for point, hooks in record.get("hooks", {}).items():
        for hook in hooks:
            if UNTOLD in hook:
                raise ValueError(
                    f"{where} keeps results for later calls under the same hooks, and whether the hook at {point!r} is "
                    f"the same cannot be told: {hook}. Give it a name that says what it does, "
                    'interventions.named(hook, "..."), or run without a folder'
                )
    for path, module in record.get("modules", {}).items():
        if UNTOLD in module:
            raise ValueError(
                f"{where} keeps results for later calls of the same model, and whether its module {path!r} is the same "
                f"cannot be told: {module}. Let it hold plain values, or run without a folder"
            )


def _teller(model: nn.Module) -> Teller:
    """What a hook reaches of the model that is run is in the record beside the hooks."""
    return Teller({id(module): f"the model's {path!r}" for path, module in model.named_modules()})


def _parts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's attributes and buffers, without its weights and the modules in it."""
    yield "class", type(module)
    if type(module) is StepHookPoint:  # the many, so without asking what cannot be
        yield "hook point", f"{module.pos_dim} {module.backward_scale} {'forward' in vars(module)}"
        if (
            module.hook_conversion is None
            and "forward" not in vars(module)
            and not (module._buffers or module._modules)
        ):
            return
    yield "children", " ".join(module._modules)
    for name, held in attributes(module):
        if name.removeprefix(".") not in _NOT_ITS_OWN and (name != "._buffers" or held):
            yield name, held
    if not (type(module).__module__.startswith("diffusion_lens.") or isinstance(module, _SAME_IN_TRAINING)):
        yield "training", module.training


def _attached(module: nn.Module, teller: Teller) -> list[str]:
    # TransformerLens hands torch a function of its own around the caller's.
    handles = [*getattr(module, "fwd_hooks", ()), *getattr(module, "bwd_hooks", ())]
    given = {handle.hook.id: handle.user_hook for handle in handles}
    kinds = {
        "before": module._forward_pre_hooks,
        "forward": module._forward_hooks,
        "before backward": module._backward_pre_hooks,
        "backward": module._backward_hooks,
    }
    return [
        f"{kind}: {told_name(given.get(i, hook), teller)}" for kind, hooks in kinds.items() for i, hook in hooks.items()
    ]


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
    return Identity(weights_sha256(model), describe_hooks(model, fwd_hooks), describe_modules(model))


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
