"""Tell functions apart by what they do: their code, and the values that they hold.

Two hooks of one factory, such as a steering at two strengths, have one name and give other numbers. So a digest is
taken over the code of a function, its defaults, the values it has closed over, and those globals that are plain values.

Values are told by their content: numbers, texts, tensors, containers, dataclasses, caches, other functions. Of another
object the digest holds the class and those attributes that are plain values or tensors. Code is compared as compiled
instructions, so another minor version of Python gives other digests.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, range, np.generic, torch.dtype, torch.device)


def function_digest(function: Callable[..., Any]) -> str:
    """Eight hexadecimal digits over the code and the values of a function or callable object."""
    digest = hashlib.sha256()
    for piece in _pieces(function, frozenset()):
        digest.update(piece + b"\0")
    return digest.hexdigest()[:8]


def _pieces(value: Any, above: frozenset[int]) -> Iterator[bytes]:
    """What tells `value` from others; `above` are the objects that contain it, which are not entered again."""
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}".encode()
        return
    yield type(value).__qualname__.encode()
    if id(value) in above:
        return
    for part in _parts(value):
        if isinstance(part, bytes):
            yield part
        else:
            yield from _pieces(part, above | {id(value)})


def _parts(value: Any) -> Iterator[Any]:
    """The contents of a value: bytes as they are, and other values to be entered."""
    if isinstance(value, Tensor | np.ndarray):
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        yield f"{tensor.dtype} {list(tensor.shape)}".encode()
        yield tensor.view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, CodeType):
        yield value.co_code
        yield from (value.co_names, value.co_consts)
    elif isinstance(value, Mapping) and not isinstance(value, WeakKeyDictionary):  # what is held weakly comes and goes
        yield from (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, set | frozenset):
        yield from sorted(value, key=repr)
    elif isinstance(value, nn.Module):
        # The weights of a model that can be hooked are in the record beside its hooks.
        yield from () if hasattr(value, "hook_dict") else value.state_dict().values()
    elif isinstance(held := getattr(value, "cache_dict", None), Mapping):
        yield held
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in fields(value))
    else:
        held = getattr(value, "__dict__", {}) if not isinstance(value, type) else {"": value.__qualname__}
        yield from (each for item in held.items() if isinstance(item[1], (*_PLAIN, Tensor)) for each in item)


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield function.__code__
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is not bound yet
            yield None
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        if isinstance(found, (*_PLAIN, Tensor)):
            yield from (name, found)
