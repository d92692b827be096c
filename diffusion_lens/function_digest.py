"""Digests of functions and objects over their code and over everything that they refer to.

Two hooks from one factory, such as steering at two strengths, have the same name but give different numbers. Therefore
the digest of a function covers its code, its defaults, the values of its closure and the globals that its code names.
The digest of an object covers its class and all its attributes, that of a container its contents, and so on
recursively. It is computed from the digests of the parts, so it depends on contents only, not on object identity.

Modules, functions and classes of Python, of installed packages and of this library are represented by their names.
Values without a digest, such as a generator or an open file, are listed in `Digest.gaps`. Code is compared as compiled
instructions, so digests differ between minor versions of Python.
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

from diffusion_lens.code_names import NAMEABLE, library_name, loaded_by, names_in, own_name
from diffusion_lens.model.rotary import Rotary
from diffusion_lens.step_state import RunIdentity, StepClock

Part = tuple[str, Any]  # the name of a part in messages, and its value

_DEEPEST = 100
_SHOWN = 3
_PLAIN = (type(None), bool, int, float, complex, str, range, torch.dtype, torch.device, torch.layout)
PLAIN_KINDS = frozenset((*_PLAIN, type(Ellipsis), type(NotImplemented)))
# Represented by their type alone: no number depends on their contents, or they belong to one call.
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
_UNSEEN = frozenset(("eval", "exec", "globals", "__import__"))  # built-ins that reach values which no code names
MODULE_HOOKS = frozenset(name for name in vars(nn.Module()) if "hook" in name)
ROOT_CACHES = frozenset(("_weight_digests", "is_caching", "context_level"))
_CACHES: tuple[tuple[type, frozenset[str]], ...] = (
    (HookedRootModule, ROOT_CACHES),
    (Rotary, frozenset(("_tables",))),
)


@dataclass(frozen=True)
class Digest:
    """The digest of a value.

    Attributes:
        sha256: SHA-256 over everything that could be read.
        gaps: Parts that could not be read, each with its location in the value.
    """

    sha256: bytes
    gaps: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.sha256.hex()[:8]


class Digester:
    """Computes digests of values that share parts; each part is read once.

    Args:
        known: Names, by id, of values that are described elsewhere and not read, such as the modules of the model.
    """

    def __init__(self, known: Mapping[int, str] | None = None) -> None:
        self._known = known or {}
        self._digests: dict[int, Digest] = {}
        self._read: list[Any] = []  # keeps every value alive, so that no other value gets its id
        self._ancestors: dict[int, int] = {}  # ids of the values being read, with their depth

    def digest(self, value: Any) -> Digest:
        """The digest of any value."""
        # 1. Plain values and bytes.
        kind = type(value)
        if kind in PLAIN_KINDS:
            return Digest(_hash(f"{kind.__name__} {value!r}".encode()))
        if kind in (bytes, bytearray, memoryview):
            return Digest(_hash(kind.__name__.encode(), value.tobytes() if kind is memoryview else value))
        # 2. Values that were read before, or that a name identifies.
        if id(value) in self._digests:
            return self._digests[id(value)]
        name = self._known.get(id(value)) or (library_name(value) if isinstance(value, NAMEABLE) else None)
        if name is not None:
            self._read.append(value)
            return self._digests.setdefault(id(value), Digest(_hash(f"name {name}".encode())))
        # 3. A value that contains itself, directly or through others.
        depth = len(self._ancestors)
        if id(value) in self._ancestors:
            return Digest(_hash(f"{depth - self._ancestors[id(value)]} up".encode()))
        if depth == _DEEPEST:
            return Digest(b"", (f": a {kind.__name__} in {_DEEPEST} others",))
        # 4. Anything else by its parts.
        self._read.append(value)
        self._ancestors[id(value)] = depth
        try:
            digest = self._unordered(value) if isinstance(value, _SETS) else self.combine(_parts(value))
        except Exception as error:  # the user's code may raise anything; the value then has no digest
            digest = Digest(b"", (f": a {kind.__name__} ({type(error).__name__}: {str(error)[:60]})",))
        finally:
            del self._ancestors[id(value)]
        self._digests[id(value)] = digest
        return digest

    def _unordered(self, value: Any) -> Digest:
        """The digest of a set, independent of the order of its elements."""
        elements = [self.digest(element) for element in value]
        joined = b"".join(sorted(element.sha256 for element in elements))
        whole = self.combine((("", type(value)), ("", joined), *attributes(value)))
        return Digest(whole.sha256, (*(gap for element in elements for gap in element.gaps), *whole.gaps)[:_SHOWN])

    def combine(self, parts: Iterable[Part]) -> Digest:
        """The digest of named parts together."""
        sha256, gaps = hashlib.sha256(), []
        for name, part in parts:
            digest = self.digest(part)
            sha256.update(f"{name}\0".encode(errors="surrogatepass") + digest.sha256)
            gaps += [name + gap for gap in digest.gaps[:_SHOWN]]
        return Digest(sha256.digest(), tuple(dict.fromkeys(gaps))[:_SHOWN])


def attributes(value: Any) -> list[Part]:
    """The attributes of an object, in its `__dict__` and its slots, by name."""
    values: dict[str, Any] = {}
    with suppress(TypeError):
        values.update(vars(value))
    for cls in type(value).__mro__:
        if "__slots__" in vars(cls):
            for name, slot in vars(cls).items():
                if isinstance(slot, types.MemberDescriptorType):
                    with suppress(AttributeError):  # a slot without a value
                        values[name] = slot.__get__(value)
    for kind, caches in _CACHES:
        for name in caches & values.keys() if isinstance(value, kind) else ():
            del values[name]
    if isinstance(value, nn.Module):
        for name in MODULE_HOOKS & values.keys():  # torch numbers hooks process-wide, so their keys are left out
            values[name] = list(values[name].values()) if isinstance(values[name], Mapping) else values[name]
    return [(f".{name}", values[name]) for name in sorted(values, key=str)]


def _parts(value: Any) -> Iterator[Part]:
    """The contents of a value that is neither plain nor identified by a name."""
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
        raise ValueError("a module of yours; refer to what you use from it by name")
    else:
        yield "", type(value)
        if not isinstance(value, _EMPTY):
            yield from _contents(value)


def _contents(value: Any) -> Iterator[Part]:
    """The contents of an object, without its class."""
    if isinstance(value, Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        yield "", f"{array.dtype!r} {array.shape}"
        yield "", array.ravel().tolist() if array.dtype.hasobject else array.tobytes()
    elif isinstance(value, dict | types.MappingProxyType):
        base: Any = next(kind for kind in (OrderedDict, dict, types.MappingProxyType) if isinstance(value, kind))
        items = base.items(value)
        yield from (part for key, item in items for part in (("", key), (f"[{key!r:.40}]", item)))
        yield "", getattr(value, "default_factory", None)
    elif isinstance(value, _WEAK):  # hooks such as freeze() keep values for one run, which end with that run
        items = [item for item in value.items() if not isinstance(item[0], RunIdentity | type)]
        yield from (part for key, item in items for part in (("", key), (f"[{key!r:.40}]", item)))
        return
    elif isinstance(value, list | tuple | deque):
        yield "", getattr(value, "maxlen", None)
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, slice):
        yield from (("", part) for part in (value.start, value.stop, value.step))
    elif isinstance(value, weakref.ref):
        yield "", value()
        return
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, int | float | complex | str | bytes | bytearray):  # an instance of a subclass
        base = next(kind for kind in (int, float, complex, str, bytes, bytearray) if isinstance(value, kind))
        yield "", base.__repr__(value)
    elif not isinstance(value, nn.Module) and not isinstance(value, functools._lru_cache_wrapper):
        yield from _reduced(value)
    yield from attributes(value)


def _reduced(value: Any) -> Iterator[Part]:
    """What pickle would store of an object besides its attributes; a `TypeError` if it cannot be pickled."""
    kind = type(value)
    if (reduce := copyreg.dispatch_table.get(kind)) is not None:
        pickled: Any = reduce(value)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pickled = value.__reduce_ex__(4)
    own = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
    if reduce is None and all(getattr(kind, name, None) is getattr(object, name, None) for name in own):
        return
    if not isinstance(pickled, tuple):
        yield "", pickled
        return
    for i, part in enumerate(pickled):
        yield "", list(part) if i in (3, 4) and part is not None else part


def _of_tensor(value: Tensor) -> Iterator[Part]:
    yield "", f"{value.dtype} {list(value.shape)} {value.layout}"
    dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
    flat = dense.resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    yield "", flat.view(torch.uint8).numpy().data


def _of_function(function: types.FunctionType) -> Iterator[Part]:
    if isinstance(name := own_name(function), str):
        yield "", name
        return
    code = function.__code__
    yield from (("", code), (" default", function.__defaults__), (" default", function.__kwdefaults__))
    yield from ((f" {function.__qualname__}.{name}", value) for name, value in sorted(vars(function).items()))
    names = names_in(code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a name that is not bound yet
            yield from _named_value(f" {name}", cell.cell_contents, names)
    for name in sorted(loaded_by(code)):
        if name in function.__globals__:
            yield from _named_value(f" {name}", function.__globals__[name], names)
        elif name in sys.modules:
            yield from _named_value(f" {name}", sys.modules[name], names)
        elif name in _UNSEEN:
            raise ValueError(f"its code calls {name}()")


def _named_value(name: str, value: Any, names: frozenset[str], depth: int = 0) -> Iterator[Part]:
    """The value that code refers to by a name; of a user's module, only the attributes that the code names."""
    if not isinstance(value, types.ModuleType) or library_name(value) is not None or depth > _SHOWN:
        yield name, value
        return
    yield name, value.__name__
    for attribute in sorted(names & vars(value).keys()):
        yield from _named_value(f"{name}.{attribute}", vars(value)[attribute], names, depth + 1)


def _of_class(cls: type) -> Iterator[Part]:
    yield "", f"{cls.__module__}.{cls.__qualname__}"
    yield "", type(cls)
    yield from (("", base) for base in cls.__bases__)
    for name, value in sorted(vars(cls).items()):
        if name not in _OF_CLASSES | _OF_TOOLS and not name.startswith("__static"):
            yield f" {cls.__qualname__}.{name}", value


def _hash(*pieces: Any) -> bytes:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()
