"""Tell functions and objects apart by what they do: their code, and everything that they can reach.

Two hooks of one factory, such as a steering at two strengths, have one name and give other numbers. So a digest is
taken over the code of a function, its defaults, the values it has closed over and the globals that its code names; over
the class and all attributes of an object; over the contents of a container; and so on for whatever these hold. The
digest of a whole is made of the digests of its parts, so only contents count, not which parts are one object.

Modules, functions and classes of Python, of installed packages and of this library are told by their name. What cannot
be told, such as a generator or an open file, is listed in `Told.gaps`. Code is compared as compiled instructions, so
another minor version of Python gives other digests.
"""

import copyreg
import functools
import hashlib
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens import HookedRootModule

from diffusion_lens.code_names import library_name, loaded_by, names_in, own_name
from diffusion_lens.model.rotary import Rotary
from diffusion_lens.step_state import RunIdentity, StepClock

Part = tuple[str, Any]  # how errors name it, and what it is

_DEEPEST = 100
_SHOWN = 3
_PLAIN = (type(None), bool, int, float, complex, str, range, torch.dtype, torch.device, torch.layout)
_PLAIN_KINDS = frozenset((*_PLAIN, type(Ellipsis), type(NotImplemented)))
# Told by their type alone: they hold nothing that a number depends on, or belong to one run.
_EMPTY = (type(threading.Lock()), type(threading.RLock()), StepClock, RunIdentity, RemovableHandle)
_DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
_SETS = (set, frozenset, weakref.WeakSet)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_OF_CLASSES = frozenset(("__module__", "__doc__", "__dict__", "__weakref__", "__slots__", "_abc_impl"))
_OF_TOOLS = frozenset(("__annotations__", "__firstlineno__", "__slotnames__", "__match_args__", "__parameters__")) | {
    "__dataclass_fields__",
    "__dataclass_params__",
}
_UNSEEN = frozenset(("eval", "exec", "globals", "__import__"))  # built-ins that reach what no code names
MODULE_HOOKS = frozenset(name for name in vars(nn.Module()) if "hook" in name)
_CACHES: tuple[tuple[type, frozenset[str]], ...] = (
    (HookedRootModule, frozenset(("_weight_digests", "is_caching", "context_level"))),
    (Rotary, frozenset(("_tables",))),
)


@dataclass(frozen=True)
class Told:
    """What something is known by.

    Attributes:
        digest: SHA-256 over all that could be read.
        gaps: what could not be read, each with where it is.
    """

    digest: bytes
    gaps: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.digest.hex()[:8]


class Teller:
    """Digests of many things that share parts; each part is read once.

    Args:
        known: by id, what is told elsewhere and is not entered, such as the modules of the model that is run.
    """

    def __init__(self, known: Mapping[int, str] | None = None) -> None:
        self._elsewhere = known or {}
        self._told: dict[int, Told] = {}
        self._kept: list[Any] = []  # an id stays taken as long as its object is kept
        self._above: dict[int, int] = {}

    def tell(self, value: Any) -> Told:
        """The digest of anything."""
        kind = type(value)
        if kind in _PLAIN_KINDS:
            return Told(_hash(f"{kind.__name__} {value!r}".encode()))
        if kind in (bytes, bytearray, memoryview):
            return Told(_hash(kind.__name__.encode(), value.tobytes() if kind is memoryview else value))
        if (name := self._elsewhere.get(id(value)) or library_name(value)) is not None:
            return Told(_hash(f"name {name}".encode()))
        if id(value) in self._told:
            return self._told[id(value)]
        depth = len(self._above)
        if id(value) in self._above:
            return Told(_hash(f"{depth - self._above[id(value)]} up".encode()))
        if depth == _DEEPEST:
            return Told(b"", (f": a {kind.__name__} in {_DEEPEST} others",))
        self._kept.append(value)
        self._above[id(value)] = depth
        try:
            told = self._unordered(value) if isinstance(value, _SETS) else self.combine(_parts(value))
        except Exception as error:  # whatever the code of others raises, the value cannot be told
            told = Told(b"", (f": a {kind.__name__} ({type(error).__name__}: {str(error)[:60]})",))
        finally:
            del self._above[id(value)]
        self._told[id(value)] = told
        return told

    def _unordered(self, value: Any) -> Told:
        told = [self.tell(held) for held in value]
        digests = b"".join(sorted(each.digest for each in told))
        whole = self.combine((("", type(value)), ("", digests), *attributes(value)))
        return Told(whole.digest, (*(gap for each in told for gap in each.gaps), *whole.gaps)[:_SHOWN])

    def combine(self, parts: Iterable[Part]) -> Told:
        """The digest of parts together, each told with its name."""
        digest, gaps = hashlib.sha256(), []
        for name, part in parts:
            told = self.tell(part)
            digest.update(f"{name}\0".encode(errors="surrogatepass") + told.digest)
            gaps += [name + gap for gap in told.gaps[:_SHOWN]]
        return Told(digest.digest(), tuple(dict.fromkeys(gaps))[:_SHOWN])


def attributes(value: Any) -> Iterator[Part]:
    """What an object holds in its `__dict__` and its slots, by name."""
    held: dict[str, Any] = {}
    with suppress(TypeError):
        held.update(vars(value))
    for cls in type(value).__mro__:
        if "__slots__" in vars(cls):
            for name, slot in vars(cls).items():
                if isinstance(slot, types.MemberDescriptorType):
                    with suppress(AttributeError):  # a slot that is not filled
                        held[name] = slot.__get__(value)
    for kind, caches in _CACHES:
        for name in caches & held.keys() if isinstance(value, kind) else ():
            del held[name]
    if isinstance(value, nn.Module):
        for name in MODULE_HOOKS & held.keys():  # their keys count all hooks of the process
            held[name] = list(held[name].values()) if isinstance(held[name], Mapping) else held[name]
    yield from ((f".{name}", held[name]) for name in sorted(held, key=str))


def _parts(value: Any) -> Iterator[Part]:
    """The contents of a value that is neither plain nor told by a name."""
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.CodeType):
        arguments = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
        counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
        yield from (("", part) for part in (value.co_code, value.co_names, value.co_consts, arguments, counts))
        yield "", getattr(value, "co_exceptiontable", b"")
    elif isinstance(value, types.MethodType):
        yield from (("", value.__func__), ("", value.__self__))
    elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        yield from (("", value.__name__), ("", value.__self__))
    elif isinstance(value, _DESCRIPTORS):
        yield from (("", value.__name__), ("", value.__objclass__))
    elif isinstance(value, staticmethod | classmethod):
        yield from (("", type(value)), ("", value.__func__))
    elif isinstance(value, property):
        yield from (("", part) for part in (value.fget, value.fset, value.fdel))
    elif isinstance(value, type):
        yield from _of_class(value)
    elif isinstance(value, types.ModuleType):
        raise ValueError("a module of yours; name what is used of it")
    else:
        yield "", type(value)
        if not isinstance(value, _EMPTY):
            yield from _contents(value)


def _contents(value: Any) -> Iterator[Part]:
    """What an object holds, beside its class."""
    if isinstance(value, Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        yield "", f"{array.dtype!r} {array.shape}"
        yield "", array.ravel().tolist() if array.dtype.hasobject else array.tobytes()
    elif isinstance(value, dict | types.MappingProxyType):
        base: Any = next(each for each in (OrderedDict, dict, types.MappingProxyType) if isinstance(value, each))
        items = base.items(value)
        yield from (part for key, held in items for part in (("", key), (f"[{key!r:.40}]", held)))
        yield "", getattr(value, "default_factory", None)
    elif isinstance(value, _WEAK):  # what freeze() and its like hold of a run goes with the run
        items = [item for item in value.items() if not isinstance(item[0], RunIdentity | type)]
        yield from (part for key, held in items for part in (("", key), (f"[{key!r:.40}]", held)))
        return
    elif isinstance(value, list | tuple | deque):
        yield "", getattr(value, "maxlen", None)
        yield from ((f"[{i}]", held) for i, held in enumerate(value))
    elif isinstance(value, slice):
        yield from (("", part) for part in (value.start, value.stop, value.step))
    elif isinstance(value, weakref.ref):
        yield "", value()
        return
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, int | float | complex | str | bytes | bytearray):  # of a class of one's own
        base = next(each for each in (int, float, complex, str, bytes, bytearray) if isinstance(value, each))
        yield "", base.__repr__(value)
    elif not isinstance(value, nn.Module) and not isinstance(value, functools._lru_cache_wrapper):
        yield from _reduced(value)
    yield from attributes(value)


def _reduced(value: Any) -> Iterator[Part]:
    """What pickle would keep of an object beside its attributes; what cannot be pickled raises a `TypeError`."""
    kind = type(value)
    if (reduce := copyreg.dispatch_table.get(kind)) is not None:
        kept: Any = reduce(value)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept = value.__reduce_ex__(4)
    own = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
    if reduce is None and all(getattr(kind, name, None) is getattr(object, name, None) for name in own):
        return
    if not isinstance(kept, tuple):
        yield "", kept
        return
    for i, part in enumerate(kept):
        yield "", list(part) if i in (3, 4) and part is not None else part


def _of_tensor(value: Tensor) -> Iterator[Part]:
    yield "", f"{value.dtype} {list(value.shape)} {value.layout}"
    dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
    flat = dense.resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    yield "", flat.view(torch.uint8).numpy().data


def _of_function(function: types.FunctionType) -> Iterator[Part]:
    if isinstance(noted := own_name(function), str):
        yield "", noted
        return
    code = function.__code__
    yield from (("", code), (" default", function.__defaults__), (" default", function.__kwdefaults__))
    yield from ((f" {function.__qualname__}.{name}", held) for name, held in sorted(vars(function).items()))
    names = names_in(code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a name that is not bound yet
            yield from _found(f" {name}", cell.cell_contents, names)
    for name in sorted(loaded_by(code)):
        if name in function.__globals__:
            yield from _found(f" {name}", function.__globals__[name], names)
        elif name in sys.modules:
            yield from _found(f" {name}", sys.modules[name], names)
        elif name in _UNSEEN:
            raise ValueError(f"its code calls {name}()")


def _found(name: str, value: Any, names: frozenset[str], depth: int = 0) -> Iterator[Part]:
    """What code reaches by a name; of a module of the user's, what the code names of it."""
    if not isinstance(value, types.ModuleType) or library_name(value) is not None or depth > _SHOWN:
        yield name, value
        return
    yield name, value.__name__
    for attribute in sorted(names & vars(value).keys()):
        yield from _found(f"{name}.{attribute}", vars(value)[attribute], names, depth + 1)


def _of_class(cls: type) -> Iterator[Part]:
    yield "", f"{cls.__module__}.{cls.__qualname__}"
    yield "", type(cls)
    yield from (("", base) for base in cls.__bases__)
    for name, held in sorted(vars(cls).items()):
        if name not in _OF_CLASSES | _OF_TOOLS and not name.startswith("__static"):
            yield f" {cls.__qualname__}.{name}", held


def _hash(*pieces: Any) -> bytes:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()
