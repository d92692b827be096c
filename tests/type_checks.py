"""Checks every annotation of a package while the tests run: shapes by jaxtyping, all other types by beartype.

jaxtyping's own import hook binds the arguments of every call and checks them twice, which costs more than the tests.
Here each function is checked once, by beartype, and the names of axes are compared within one call. A function that a
test calls often is checked in its first `PER_TEST` calls.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, TypeCheckError, config, jaxtyped
from jaxtyping._storage import pop_shape_memo, push_shape_memo
from torch.utils.hooks import RemovableHandle

DECORATOR = "__types_checked__"
_beartype = beartype(conf=BeartypeConf(violation_type=TypeCheckError))
PER_TEST = 5
_checked_code: dict[types.CodeType, tuple[dict[str, Any], Any]] = {}
_calls: dict[types.CodeType, list[int]] = {}  # calls of each function that are still to be checked in this test


def begin_test() -> None:
    """Check the next calls of every function again."""
    for left in _calls.values():
        left[0] = PER_TEST


def check_package(package: str) -> None:
    """Checks the modules of a package that are imported from here on."""
    sys.meta_path.insert(0, _Finder(package))


def types_checked(target: Any) -> Any:
    """A function, or a dataclass, that refuses values other than its annotations say."""
    if isinstance(target, type):
        if dataclasses.is_dataclass(target) and "__init__" in vars(target):
            _resolve(target.__init__, otherwise=Any)  # fields of other packages' classes name what only those import
            target.__init__ = _checked(target.__init__)  # type: ignore[misc]
        return target
    return _checked(target)


def _checked(function: Any) -> Any:
    _resolve(function)  # beartype resolves a class that is not defined yet when the function is called
    check = _by_beartype(function)
    if check is function:
        return function
    left = _calls.setdefault(function.__code__, [PER_TEST])
    if not any(_has_axes(annotation) for annotation in function.__annotations__.values()):
        wrapper = _plain(function, _Check(check), left)
    elif inspect.isgeneratorfunction(function):
        return jaxtyped(function, typechecker=_beartype)  # compares axes when it is called
    else:
        wrapper = _scoped(function, _Check(check), left, push_shape_memo, pop_shape_memo)
    # In the module of the function, as beartype does: warnings skip the frames of the package.
    wrapper = types.FunctionType(wrapper.__code__, function.__globals__, closure=wrapper.__closure__)
    return functools.update_wrapper(wrapper, function)


class _Check(RemovableHandle):
    """A checked function, of a class that `function_digest` does not enter: a check changes no number."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.config = config


def _resolve(function: Any, **unresolved: Any) -> None:
    """Evaluates annotations that are strings, where their names are known."""
    for name, annotation in function.__annotations__.items():
        if isinstance(annotation, str):
            with contextlib.suppress(NameError):
                function.__annotations__[name] = eval(annotation, function.__globals__)
                continue
            function.__annotations__[name] = unresolved.get("otherwise", annotation)


def _by_beartype(function: Any) -> Any:
    """The function checked; of functions defined inside another one, the check is written once."""
    if "<locals>" not in function.__qualname__:
        return _beartype(function)
    annotations, checked = _checked_code.get(function.__code__, (None, None))
    if checked is None or annotations != function.__annotations__:
        annotations, checked = dict(function.__annotations__), _beartype(function)
        _checked_code[function.__code__] = annotations, checked
        function.__dict__.pop("__beartype_args_lens", None)  # `function_digest` tells attributes of functions
    if checked.__kwdefaults__ is None:  # nothing to check
        return function
    again = types.FunctionType(checked.__code__, function.__globals__, closure=checked.__closure__)
    again.__kwdefaults__ = {**checked.__kwdefaults__, "__beartype_func": function}
    return again


def _plain(function: Any, check: _Check, left: list[int]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not left[0] or check.config.jaxtyping_disable:
            return function(*args, **kwargs)
        left[0] -= 1
        return check.call(*args, **kwargs)

    return wrapper


def _scoped(function: Any, check: _Check, left: list[int], push: Any, pop: Any) -> Any:
    """Axes have one length each within a call."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not left[0] or check.config.jaxtyping_disable:
            return function(*args, **kwargs)
        left[0] -= 1
        push({})
        try:
            return check.call(*args, **kwargs)
        finally:
            pop()

    return wrapper


def _has_axes(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return True
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray):
        return True
    parts = typing.get_args(annotation)
    return any(_has_axes(part) for part in parts if not isinstance(part, str))


class _Decorated(ast.NodeTransformer):
    """Puts the decorator on every class (outermost: it sees a dataclass) and every function (innermost)."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list.insert(0, self._decorator(node))
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list.append(self._decorator(node))
        return self.generic_visit(node)

    def _decorator(self, node: ast.AST) -> ast.expr:
        return ast.copy_location(ast.Name(DECORATOR, ast.Load()), node)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:  # compiled anew: no cache may mix both forms
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        return compile(_Decorated().visit(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)[DECORATOR] = types_checked
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self._package:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
