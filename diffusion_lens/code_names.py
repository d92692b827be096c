"""Names in compiled code, and names that identify what they refer to: those of installed packages."""

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
_FUNCTIONS_AND_CLASSES = (type, types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper)
# The kinds of values that `library_name` may name.
NAMEABLE = (types.ModuleType, random.Random, *_FUNCTIONS_AND_CLASSES)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def names_in(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that a function's code names."""
    return frozenset(name for part in _codes(code) for name in part.co_names)


def loaded_by(code: types.CodeType) -> set[str]:
    """The globals and modules that a function's code loads."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
    return {step.argval for part in _codes(code) for step in dis.get_instructions(part) if step.opname in loads}


def own_name(hook: Any) -> Any:
    """The name that `identity.named` gave a function; `None` if `functools.wraps` copied it from another function."""
    if not isinstance(hook, types.FunctionType):
        return None
    name = vars(hook).get("hook_name")
    return None if name is getattr(vars(hook).get("__wrapped__"), "hook_name", None) else name


def library_name(value: Any) -> str | None:
    """The full name of a module, function, class or built-in of an installed package; `None` for anything else."""
    if isinstance(value, types.ModuleType):
        return value.__name__ if _is_library(value.__name__) else None
    if value is random._inst:
        return "random"
    if isinstance(value, type) and not value.__flags__ & 1 << 9:  # not created by a class statement
        return f"{value.__module__}.{value.__qualname__}"
    if not isinstance(value, _FUNCTIONS_AND_CLASSES):
        return None
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None and isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType):
        module = value.__self__.__name__
    if not isinstance(module, str) or not isinstance(qualname, str) or not _is_library(module):
        return None
    # The name identifies the value only if looking it up gives this very object.
    named: Any = sys.modules.get(module)
    for name in qualname.split("."):
        named = getattr(named, name, None)
    return f"{module}.{qualname}" if named is value else None


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    return tuple({Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@functools.cache
def _is_library(module: str) -> bool:
    """Whether a module belongs to Python, to an installed package or to this library."""
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
