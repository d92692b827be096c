"""The identity of a model as results record it: its weights, the names of the caller's hooks, and its modules.

Two calls with the same settings and versions give the same numbers only if these three agree. A public call records
them once: `begins_run` decorates the public functions, `run_of` is the same as a context manager. The record leaves out
the hooks that the call attaches, the edits that it tries and the public functions that it calls in turn. A plain
forward pass records nothing.

A hook is identified by its hook point, its direction and its name. The hooks of `interventions` have names with their
settings, such as "steer(direction=#1f0c22ab, strength=4.0) at steps [3]", in which a tensor is a hash of its values.
`named` gives any function a name. One without a name is recorded as "my_hook (unnamed)", which says nothing about what
it does, so `require_named_hooks` refuses it where results are stored for later calls.

Modules are described by one hash of their classes' names, their attributes (such as the eps of a norm) and their
buffers, and by the class of each module that is neither this library's nor torch's.
"""

import functools
import hashlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar
from operator import attrgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import xxhash
from torch import Tensor, nn

from diffusion_lens.hooks.clock import interruptible, restoring
from diffusion_lens.hooks.names import Hook, hook_pairs, select_names
from diffusion_lens.model.hook_points import hooked_modules
from diffusion_lens.settings import checked_arguments
from weight_conversion.files import bytes_of

P = ParamSpec("P")
R = TypeVar("R")

ATTRIBUTES = "attributes"
UNNAMED = "(unnamed)"
_PLAIN = (type(None), bool, int, float, complex, str, range, slice, torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module()))
# Attributes of modules that are left out: the record contains them elsewhere, they belong to one call, or torch keeps
# its hooks there.
_LEFT_OUT = (
    frozenset(("_parameters", "_modules", "training", "cfg", "tokenizer", "clock", "mod_dict", "hook_dict"))
    | {"name", "ctx", "fwd_hooks", "bwd_hooks", "source", "placement", "_block_devices"}
    | {"_weight_digests", "_edits", "is_caching", "context_level", "_non_persistent_buffers_set"}
    | {name for name in _OF_TORCH if "hook" in name}
)
_DEEPEST = 3
_SAME_IN_TRAINING = (nn.ModuleList, nn.Linear, nn.Embedding, nn.Identity)
_ROW, _ROWS = 1 << 13, 1 << 10  # 8-byte words in a row, which is summed into one; rows summed at once (64 MiB)
# Bytes of weights below which threads take longer: in the first call, and in later ones.
_SMALL, _SMALL_KNOWN = 1 << 24, 1 << 30


class NamedHook:
    """A hook with the name by which records know it; the name may be a function, called when a record begins."""

    def __init__(self, name: str | Callable[[], str], function: Hook) -> None:
        self._name, self.function = name, function

    @property
    def name(self) -> str:
        return self._name if isinstance(self._name, str) else self._name()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return self.name


def named(name: str | Hook, hook: Hook | str) -> NamedHook:
    """The same hook under a name, by which records and result folders distinguish it from other hooks.

    A function wrapped around a named hook is another hook, without this name; `at_steps`, `while_masked` and
    `on_branch` keep the name and add when the hook acts.

    Args:
        name: What the hook does, with all that distinguishes it, such as "no attention in block 3".
        hook: Any function `fn(activation, hook)`.
    """
    if callable(name) and isinstance(hook, str):
        warnings.warn("named(hook, name) is now named(name, hook)", DeprecationWarning, stacklevel=2)
        name, hook = hook, name
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of a hook must be a non-empty string; got {name!r}")
    if not callable(hook):
        raise TypeError(f"a hook is a function fn(activation, hook); got {type(hook).__name__}")
    return NamedHook(name, hook)


def names_its_hook(factory: Callable[P, Hook]) -> Callable[P, Hook]:
    """Decorate a function that makes hooks: each gets the name of the factory with its settings."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(factory).parameters.items()}

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Hook:
        settings = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        return NamedHook(
            functools.partial(_call_in_words, factory.__name__, settings, defaults), factory(*args, **kwargs)
        )

    return make


def name_of(hook: Any) -> str:
    """The name of a hook, or the qualified name of a function without one, marked as unnamed."""
    if isinstance(hook, NamedHook):
        return hook.name
    function = hook.func if isinstance(hook, functools.partial) else hook
    return f"{getattr(function, '__qualname__', None) or type(hook).__qualname__} {UNNAMED}"


def require_named_hooks(record: Mapping[str, Any], where: str) -> None:
    """Raise a `ValueError` if a record has a hook without a name."""
    for point, hooks in record.get("hooks", {}).items():
        for hook in hooks:
            if UNNAMED in hook:
                raise ValueError(
                    f"{where} stores results that later calls use only under the same hooks, and the hook at {point!r} "
                    f'has no name: {hook}. Give it one, interventions.named("what it does", fn), or make the call '
                    "without a folder"
                )


class Identity(NamedTuple):
    """A model as it was when a public call began: what the functions of these names return."""

    weights_sha256: str
    hooks: dict[str, list[str]]
    modules: dict[str, str]


# Identities of the models of the public calls in progress, by `id(model)`; `None` until it is first asked for.
_RECORDED: ContextVar[dict[int, Identity | None]] = ContextVar("_RECORDED", default={})  # noqa: B039


def identity_of(model: nn.Module) -> Identity:
    """The identity that the call in progress recorded; outside any call, the model's identity now."""
    recorded = _RECORDED.get()
    if id(model) not in recorded and vars(model).get("_edits"):
        _refuse_cut_off_edits(model)
    identity = recorded.get(id(model)) or _identify(model)
    if id(model) in recorded:
        recorded[id(model)] = identity
    return identity


@restoring
def run_of(model: nn.Module, fwd_hooks: Sequence[tuple[Any, Any]] = (), edits: bool = True) -> Iterator[None]:
    """Record the model's identity, with the caller's hooks that this call is going to attach, until the block ends.

    Inside another call with the same model nothing is recorded: the outer record stays. A model with an edit that could
    not be taken out is a `RuntimeError`.

    Args:
        edits: Whether the call itself may change the model. Otherwise only hooks can, and without any the identity is
            recorded when it is first asked for, as the result is made.
    """
    recorded = _RECORDED.get()
    if id(model) in recorded:
        yield
        return
    clock = vars(model).get("clock")
    if clock is not None and clock.drop_hooks is not None and clock.holder is None:
        clock.drop_hooks()  # before they are recorded
    if vars(model).get("_edits"):
        _refuse_cut_off_edits(model)
    at_once = edits or fwd_hooks or hooked_modules(model)
    token = _RECORDED.set({**recorded, id(model): _identify(model, fwd_hooks) if at_once else None})
    try:
        yield
    finally:
        _RECORDED.reset(token)


def _refuse_cut_off_edits(model: nn.Module) -> None:
    for edit in getattr(model, "_edits", ()):
        if edit.is_cut_off:
            raise RuntimeError(
                f"the {type(edit).__name__} of blocks {edit.layers} could not be taken out of the weights of this "
                "model, so that this call would read edited weights: call "
                "model.restore_edits() first"
            )


def begins_run(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: each call records the identity of its models (`run_of`).

    They are all models among its arguments, and the `model` of any other argument, such as a `TracedTrajectory`. The
    arguments are checked first (`checked_arguments`).
    """

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as records:
            for argument in (*args, *kwargs.values()):
                model = argument if isinstance(argument, nn.Module) else getattr(argument, "__dict__", {}).get("model")
                if isinstance(model, nn.Module) and hasattr(model, "hook_dict"):
                    records.enter_context(run_of(model))
            return function(*args, **kwargs)

    return checked_arguments(recorded)


def describe_hooks(model: nn.Module, fwd_hooks: Sequence[tuple[Any, Any]] = ()) -> dict[str, list[str]]:
    """The hooks on each hook point or other module, as "direction: name", in the order in which they were attached.

    Args:
        fwd_hooks: Pairs (name or predicate, function) that are to be attached after the present hooks.
    """
    hooked = set(hooked_modules(model))
    if not hooked and not fwd_hooks:
        return {}
    points: Mapping[str, Any] = getattr(model, "hook_dict", {})
    names = {id(point): name for name, point in points.items()}
    described = {
        names.get(id(module), path): _attached(module) for path, module in model.named_modules() if module in hooked
    }
    for name, hook in hook_pairs(fwd_hooks):
        for point in select_names(name, points):
            described.setdefault(point, []).append(f"forward: {name_of(hook)}")
    return dict(sorted(described.items()))


def describe_modules(model: nn.Module) -> dict[str, str]:
    """The modules of a model without their weights, hooks and config: one hash, and the classes of others' modules."""
    sha256, described = hashlib.sha256(), {}
    for path, module in model.named_modules():
        kind, values = type(module), vars(module)
        is_own = kind.__module__.startswith("diffusion_lens.")
        training = None if is_own or isinstance(module, _SAME_IN_TRAINING) else module.training
        plain, others = [], {}
        for name in sorted(values.keys() - _LEFT_OUT):
            value = values[name]
            if type(value) in _PLAIN:
                plain.append((name, value))
            elif value.__class__ is not dict or value:
                others[name] = value
        sha256.update(f"{path}\0{kind.__qualname__}\0{list(module._modules)}\0{training}\0{plain}\0".encode())
        if others:
            update_hash(sha256, others, 0)
        if not is_own and not kind.__module__.startswith("torch.nn."):
            described[path] = f"{kind.__module__}.{kind.__qualname__}"
    return {ATTRIBUTES: f"#{sha256.hexdigest()[:8]}", **described}


def value_in_words(value: Any) -> str:
    """A setting in a name: a plain value as it is, a function by its name, anything else by a hash of its contents."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if callable(value) and not isinstance(value, nn.Module | type):
        return name_of(value)
    if isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value):
        return repr(list(value))
    kind = "" if isinstance(value, Tensor | Mapping | list | tuple) else f"{type(value).__qualname__} "
    update_hash(sha256 := hashlib.sha256(), value, _DEEPEST)
    return f"{kind}#{sha256.hexdigest()[:8]}"


def update_hash(sha256: Any, value: Any, depth: int) -> None:
    """Add the contents of a value to a hash; of objects inside more than `depth` others, and functions, the name."""
    if isinstance(value, _PLAIN):
        sha256.update(f"{value!r}\0".encode())
    elif isinstance(value, Tensor):
        dense = value.detach().cpu()
        sha256.update(f"{value.dtype} {list(value.shape)}\0".encode())
        sha256.update(bytes_of(dense if dense.layout == torch.strided else dense.to_dense()).numpy().data)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            sha256.update(f"{key}\0".encode())
            update_hash(sha256, item, depth)
    elif isinstance(value, list | tuple):
        for item in value:
            update_hash(sha256, item, depth)
    else:
        sha256.update(f"{getattr(value, '__qualname__', type(value).__qualname__)}\0".encode())
        if depth and isinstance(value, nn.Module):
            update_hash(sha256, {**dict(value.named_parameters()), **dict(value.named_buffers())}, depth)
        if depth and hasattr(value, "__dict__") and not hasattr(value, "__qualname__"):
            left_out = _OF_TORCH | _LEFT_OUT - {"cfg"} if isinstance(value, nn.Module) else frozenset()
            update_hash(sha256, {name: vars(value)[name] for name in sorted(vars(value).keys() - left_out)}, depth - 1)


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 of the current weights: over the name, dtype, shape and SHA-256 of the bytes of each tensor.

    Every call reads every byte, so it notices every edit, however it was made (`.data`, numpy, an optimizer). Large
    weights are hashed in parallel, one thread per core: a billion float32 weights take 2.3 seconds of processor time on
    cores with SHA instructions. Later calls take 0.16 seconds: they compare a 128-bit hash of each tensor (XXH3), and
    compute SHA-256 where it has changed. Weights on an accelerator are fingerprinted there (`fingerprint`), and only
    those that have changed are copied to the CPU.
    """
    weights = dict(model.named_parameters())
    known: dict[str, tuple[bytes, str]] = model.__dict__.setdefault("_weight_digests", {})
    digest = functools.partial(_digest, known=known)
    digests: Iterator[str] = map(digest, weights, weights.values())
    if sum(map(attrgetter("nbytes"), weights.values())) >= (_SMALL_KNOWN if known else _SMALL):
        with ThreadPoolExecutor(_n_cores()) as threads:
            digests = threads.map(digest, weights, weights.values())
    sha256 = hashlib.sha256()
    for (name, weight), of_weight in zip(weights.items(), digests, strict=True):
        sha256.update(f"{name} {weight.dtype} {list(weight.shape)} {of_weight}\n".encode())
    return sha256.hexdigest()


def fingerprint(weight: Tensor) -> bytes:
    """A hash of a tensor's bytes, computed on the tensor's device.

    Each 64-bit word w is mixed, w ^ (w >> 29), and multiplied by a random odd number, one for each column; each row is
    summed modulo 2^64. The mixing copies changes of the upper bits, where the signs are, to lower bits. Without it the
    highest bit would stay the highest bit under every odd factor, and an even number of changed signs would cancel. Two
    different rows have the same sum with a probability of at most 2^-33. SHA-256 over the sums makes their order count.
    """
    flat = bytes_of(weight.detach())
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


def _call_in_words(function: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """A call such as "steer(direction=#1f0c22ab, strength=4.0)", without the settings that are the default."""
    given = {name: value_in_words(value) for name, value in settings.items() if value is not defaults[name]}
    words = (f"{name}={text}" for name, text in given.items() if text != repr(defaults[name]))
    return f"{function}({', '.join(words)})"


@interruptible  # it hashes all weights, and changes nothing
def _identify(model: nn.Module, fwd_hooks: Sequence[tuple[Any, Any]] = ()) -> Identity:
    return Identity(weights_sha256(model), describe_hooks(model, fwd_hooks), describe_modules(model))


def _attached(module: nn.Module) -> list[str]:
    # TransformerLens registers a wrapper with torch; `user_hook` is the caller's function inside it.
    handles = [*getattr(module, "fwd_hooks", ()), *getattr(module, "bwd_hooks", ())]
    user_hooks = {handle.hook.id: handle.user_hook for handle in handles}
    kinds = {
        "before": module._forward_pre_hooks,
        "forward": module._forward_hooks,
        "before backward": module._backward_pre_hooks,
        "backward": module._backward_hooks,
    }
    return [
        f"{kind}: {name_of(user_hooks.get(hook_id, hook))}"
        for kind, hooks in kinds.items()
        for hook_id, hook in hooks.items()
    ]


def _digest(name: str, weight: Tensor, known: dict[str, tuple[bytes, str]]) -> str:
    """SHA-256 of one tensor's bytes. It is computed, and a tensor on an accelerator is copied, only after a change."""
    flat = bytes_of(weight.detach())
    current = xxhash.xxh3_128_digest(flat.numpy().data) if weight.is_cpu else fingerprint(weight)
    if name not in known or known[name][0] != current:
        known[name] = current, _sha256(weight.cpu())
    return known[name][1]


def _sha256(weight: Tensor) -> str:
    return hashlib.sha256(bytes_of(weight.detach()).numpy().data).hexdigest()


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _factors() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator) | 1
