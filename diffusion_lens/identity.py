"""The identity of a model as results record it: its weights, the caller's hooks, and its modules.

Two calls with the same settings give the same numbers only if these three agree. All three are recorded when a public
call begins: `begins_run` decorates the public functions, `run_of` is the same as a context manager. The record leaves
out the hooks that the call attaches, the edits that it tries and the public functions that it calls in turn. The
weights are hashed once a call, however many facts the call processes.

A hook is identified by its hook point, its direction and its name. The name is the one that `interventions.named`
gives; otherwise it is the name of the function with a digest of its code and of everything that the code refers to
(`function_digest`), such as "steer #1f0c22ab". Steering at two strengths therefore gives two names. A hook whose values
change from call to call, such as one that collects activations, has to be named to be recognised again. Where a hook
refers to something that has no digest, such as a generator, the record says so, and `require_identified` refuses the
hook where results are stored for later calls.

Modules also decide the numbers, by their classes, attributes (such as the eps of a norm) and buffers, and a user may
have replaced them: `describe_modules` describes them.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torch import nn
from transformer_lens import HookedRootModule

from diffusion_lens.function_digest import MODULE_HOOKS, PLAIN_KINDS, ROOT_CACHES, Digester, attributes
from diffusion_lens.hook_identity import UNIDENTIFIED, with_gaps
from diffusion_lens.hook_identity import name_of as name_of
from diffusion_lens.hook_identity import named as named
from diffusion_lens.hook_identity import named_after as named_after
from diffusion_lens.hook_names import hook_pairs, select_names
from diffusion_lens.model.hook_points import hooked_modules
from diffusion_lens.model.linear import Linear
from diffusion_lens.settings import naming_the_nearest
from diffusion_lens.weights_digest import weights_sha256 as weights_sha256

P = ParamSpec("P")
R = TypeVar("R")

OWN_MODULES = "of this library and torch"
# Attributes of modules that are left out: the record contains them elsewhere, they belong to one call, or torch keeps
# its hooks there.
_LEFT_OUT = (
    frozenset(("_parameters", "_modules", "training", "cfg", "tokenizer", "clock", "mod_dict", "hook_dict"))
    | {"name", "ctx", "fwd_hooks", "bwd_hooks", "source", "placement", "_block_devices"}
    | MODULE_HOOKS
)
# Attributes of the model's root that records name otherwise: records of one network stay equal.
_RECORDED_AS = {"positions": "_rotary"}
# Classes that compute what another class computes, under whose name records have them.
_SAME_AS: dict[type, type] = {Linear: nn.Linear}
_OF_BUFFERS = ("_buffers", "_non_persistent_buffers_set")
_SAME_IN_TRAINING = (nn.ModuleList, nn.Linear, nn.Embedding, nn.Identity)


@dataclass(frozen=True)
class Identity:
    """A model as it was when a public call began.

    Attributes:
        weights_sha256: Return value of `weights_sha256`.
        hooks: Return value of `describe_hooks`.
        modules: Return value of `describe_modules`.
    """

    weights_sha256: str
    hooks: dict[str, list[str]]
    modules: dict[str, str]


# Identities of the models of the public calls in progress, by `id(model)`.
_RECORDED: ContextVar[Mapping[int, Identity]] = ContextVar("_RECORDED", default={})  # noqa: B039


def identity_of(model: nn.Module) -> Identity:
    """The identity recorded when the call in progress began; outside any call, the model's identity now."""
    return _RECORDED.get().get(id(model)) or _identify(model)


@contextmanager
def run_of(model: nn.Module, fwd_hooks: Sequence[tuple[Any, Any]] = ()) -> Iterator[None]:
    """Record the model's identity, which `identity_of` then returns until the block ends.

    Inside another call with the same model nothing is recorded: the outer record stays.

    Args:
        fwd_hooks: The caller's hooks that this call is going to attach.
    """
    recorded = _RECORDED.get()
    if id(model) in recorded:
        yield
        return
    token = _RECORDED.set({**recorded, id(model): _identify(model, fwd_hooks)})
    try:
        yield
    finally:
        _RECORDED.reset(token)


def begins_run(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: each call records the identity of its models (`run_of`).

    They are all models among its arguments, and the `model` of any other argument, such as a `TracedTrajectory`. A call
    with an unknown keyword is refused first, with the nearest keyword in the `TypeError`.
    """

    @naming_the_nearest
    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as records:
            for argument in (*args, *kwargs.values()):
                model = argument if isinstance(argument, nn.Module) else getattr(argument, "__dict__", {}).get("model")
                if isinstance(model, nn.Module) and hasattr(model, "hook_dict"):
                    records.enter_context(run_of(model))
            return function(*args, **kwargs)

    return recorded


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
    modules: dict[str, nn.Module] = dict(model.named_modules())
    digester = _digester(modules)
    described = {
        names.get(id(module), path): _attached(module, digester) for path, module in modules.items() if module in hooked
    }
    for name, hook in hook_pairs(fwd_hooks):
        for point in select_names(name, points):
            described.setdefault(point, []).append(f"forward: {name_of(hook, digester)}")
    return dict(sorted(described.items()))


def describe_modules(model: nn.Module) -> dict[str, str]:
    """The modules of a model without their weights.

    One digest covers all modules whose class is this library's or torch's. Any other module is described by its path,
    its class and a digest of its own. Hooks and the config are recorded elsewhere.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    digester = _digester(modules)
    own, described = hashlib.sha256(), {}
    # The class that `lend_clock` makes of a caller's hook point has no name of the library, so its code counts.
    classes: dict[type, str] = {}
    for path, module in modules.items():
        if type(module).__module__.startswith(("diffusion_lens.", "torch.nn.")):
            kind = _SAME_AS.get(type(module), type(module))
            if kind not in classes:
                classes[kind] = digester.digest(kind).sha256.hex()
            own.update(f"{path}\n{classes[kind]}\n{_state(module, digester)}\n".encode())
        else:
            digest = digester.combine(_parts(module))
            described[path] = with_gaps(f"{type(module).__qualname__} #{digest}", digest)
    return {OWN_MODULES: f"#{own.hexdigest()[:8]}", **described}


def require_identified(record: Mapping[str, Any], where: str) -> None:
    """Raise a `ValueError` if a record has a hook or a module that cannot be identified completely."""
    for point, hooks in record.get("hooks", {}).items():
        for hook in hooks:
            if UNIDENTIFIED in hook:
                raise ValueError(
                    f"{where} stores results that later calls use only under the same hooks, and the hook at {point!r} "
                    f"cannot be identified: {hook}. Give it a name that says what it does, "
                    'interventions.named(hook, "..."), or make the call without a folder'
                )
    for path, module in record.get("modules", {}).items():
        if UNIDENTIFIED in module:
            raise ValueError(
                f"{where} stores results that later calls use only with the same model, and its module {path!r} cannot "
                f"be identified: {module}. Store plain values in it, or make the call without a folder"
            )


def _digester(modules: Mapping[str, nn.Module]) -> Digester:
    """A `Digester` that names the model's own modules by path: the record describes them separately."""
    return Digester({id(module): f"the model's {path!r}" for path, module in modules.items()})


def _state(module: nn.Module, digester: Digester) -> str:
    """Children and attributes of one of this library's or torch's modules, without digests of plain values."""
    kind, values, parts = type(module), vars(module), list(module._modules)
    if not (kind.__module__.startswith("diffusion_lens.") or isinstance(module, _SAME_IN_TRAINING)):
        parts.append(f"training {module.training}")
    is_root = isinstance(module, HookedRootModule)
    left_out, renamed = (_LEFT_OUT | ROOT_CACHES, _RECORDED_AS) if is_root else (_LEFT_OUT, {})
    named = {renamed.get(name, name): values[name] for name in values.keys() - left_out}
    for name, value in sorted(named.items()):
        if type(value) in PLAIN_KINDS:
            parts.append(f"{name} {value!r}")
        elif name not in _OF_BUFFERS or value:
            parts.append(f"{name} {digester.digest(value).sha256.hex()}")
    return "\0".join(parts)


def _parts(module: nn.Module) -> list[tuple[str, Any]]:
    """Class, children and attributes of another module, without its weights."""
    return [
        ("class", type(module)),
        ("children", " ".join(module._modules)),
        ("training", module.training),
        *((name, value) for name, value in attributes(module) if name.removeprefix(".") not in _LEFT_OUT),
    ]


def _attached(module: nn.Module, digester: Digester) -> list[str]:
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
        f"{kind}: {name_of(user_hooks.get(hook_id, hook), digester)}"
        for kind, hooks in kinds.items()
        for hook_id, hook in hooks.items()
    ]


def _identify(model: nn.Module, fwd_hooks: Sequence[tuple[Any, Any]] = ()) -> Identity:
    return Identity(weights_sha256(model), describe_hooks(model, fwd_hooks), describe_modules(model))
