"""What code asks for by name, and which names stand for what they name: those of installed packages."""

import dis
import functools
import random
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OURS = frozenset(("diffusion_lens", "weight_conversion"))
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions it makes."""
    yield code
    for held in code.co_consts:
        if isinstance(held, types.CodeType):
            yield from _codes(held)


def names_in(code: types.CodeType) -> frozenset[str]:
    """Globals and attributes that a function's code names."""
    return frozenset(name for each in _codes(code) for name in each.co_names)


def loaded_by(code: types.CodeType) -> set[str]:
    """Globals and modules that a code asks for."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
    return {step.argval for each in _codes(code) for step in dis.get_instructions(each) if step.opname in loads}


def own_name(hook: Any) -> Any:
    """What `identity.named` has noted on a function; not what `functools.wraps` has copied from another one."""
    if not isinstance(hook, types.FunctionType):
        return None
    noted = vars(hook).get("hook_name")
    return None if noted is getattr(vars(hook).get("__wrapped__"), "hook_name", None) else noted


def library_name(value: Any) -> str | None:
    """The name that tells a module, function, class or built-in of an installed package; `None` for all else."""
    if isinstance(value, types.ModuleType):
        return value.__name__ if _is_library(value.__name__) else None
    if value is random._inst:
        return "random"
    if isinstance(value, type) and not value.__flags__ & 1 << 9:  # not made by a class statement
        return f"{value.__module__}.{value.__qualname__}"
    if not isinstance(value, _NAMED):
        return None
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None and isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType):
        module = value.__self__.__name__
    if not isinstance(module, str) or not isinstance(qualname, str) or not _is_library(module):
        return None
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return f"{module}.{qualname}" if found is value else None


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    return tuple({Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@functools.cache
def _is_library(module: str) -> bool:
    """Whether a module is Python's, an installed package's or this library's."""
    top = module.partition(".")[0]
    if top in _OURS or top in sys.builtin_module_names:
        return True
    if top == "__main__":
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return top in sys.stdlib_module_names
    path = Path(file).resolve()
    return "site-packages" in path.parts or any(folder in path.parents for folder in _library_folders())
