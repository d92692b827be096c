"""Checks every annotation of a package while the tests run: shapes by jaxtyping, all other types by beartype.

jaxtyping's own import hook binds the arguments of every call and checks them twice, which costs more than the tests.
Here each function is checked once, by beartype, and the names of axes are compared within one call. The first call of a
function after `begin_test` is checked. For its other calls the function has its own code again, so that they cost
nothing.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, TypeCheckError, config, jaxtyped
from jaxtyping._storage import pop_shape_memo, push_shape_memo

DECORATOR = "__types_checked__"
FOR_TYPE_CHECKERS = "__for_type_checkers__"
_beartype = beartype(conf=BeartypeConf(violation_type=TypeCheckError))
_checked_code: dict[types.CodeType, tuple[dict[str, Any], Any]] = {}
_pending: dict[types.CodeType, list[bool]] = {}  # whether the next call of a function is to be checked
_called: list[Any] = []  # the checks of the functions that this test has called


def begin_test() -> None:
    """Check the next call of every function again."""
    for check in _called:
        _arm(check)
    _called.clear()


def check_package(package: str) -> None:
    """Checks the modules of a package that are imported from here on."""
    sys.meta_path.insert(0, _Finder(package))


def types_checked(target: Any) -> Any:
    """A function, or a dataclass, that refuses values other than its annotations say."""
    if isinstance(target, type):
        if dataclasses.is_dataclass(target) and "__init__" in vars(target):
            _resolve_inherited(target)
            target.__init__ = _checked(target.__init__)  # type: ignore[misc]
        return target
    return _checked(target)


def _checked(function: Any) -> Any:
    _resolve(function)  # beartype resolves a class that is not defined yet when the function is called
    annotations = function.__annotations__.values()
    if all(annotation in (Any, object) for annotation in annotations):
        return function
    if inspect.isgeneratorfunction(function) and any(_has_axes(annotation) for annotation in annotations):
        return jaxtyped(function, typechecker=_beartype)  # compares axes when it is called
    pending = _pending.setdefault(function.__code__, [True])
    check = _Check(function=function, pending=pending, call=None, armed=None)
    vars(check).update(config=config, begin=_begin, end=pop_shape_memo)
    if "<locals>" not in function.__qualname__ and not function.__code__.co_freevars:
        return _checking_itself(function, check)
    wrapper = _wrapped(function, check)
    # In the module of the function, as beartype does: warnings skip the frames of the package.
    wrapper = types.FunctionType(wrapper.__code__, function.__globals__, closure=wrapper.__closure__)
    return functools.update_wrapper(wrapper, function)


class _Check:
    """The check of a function."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def _arm(check: Any) -> None:
    """The next call is to be checked."""
    check.pending[0] = True
    if check.armed is not None:
        check.itself.__code__ = check.armed


def _begin(check: Any) -> Any:
    """The checked function, written when it is first called. Axes have one length each from here to `end`."""
    if check.call is None:
        check.call = _by_beartype(check.function)
    _called.append(check)
    check.pending[0] = False
    if check.armed is not None:
        check.itself.__code__ = check.function.__code__
    push_shape_memo({})
    return check.call


def _checking_itself(function: Any, check: Any) -> Any:
    """The function, which from now on has the code of `_first_call` until it is called, and then its own again.

    It has no variables of an outer function: its code would have to copy them into every frame.
    """
    check.function = types.FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__)
    check.function.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(check.function, function)
    del check.function.__wrapped__
    check.itself = functools.update_wrapper(function, check.function)
    constants = (check if constant == _THE_CHECK else constant for constant in _first_call.__code__.co_consts)
    check.armed = _first_call.__code__.replace(co_consts=tuple(constants))
    _arm(check)
    return function


_THE_CHECK = "the check of the function"


def _first_call(*args: Any, **kwargs: Any) -> Any:
    """The code of a function whose next call is checked, with the check in place of the constant."""
    check: Any = "the check of the function"
    if check.config.jaxtyping_disable:
        return check.function(*args, **kwargs)
    checked = check.begin(check)
    try:
        return checked(*args, **kwargs)
    finally:
        check.end()


def _wrapped(function: Any, check: Any) -> Any:
    """A function with variables of an outer one, of which each call may make another: they share `pending`."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not check.pending[0] or check.config.jaxtyping_disable:
            return function(*args, **kwargs)
        checked = check.begin(check)
        try:
            return checked(*args, **kwargs)
        finally:
            check.end()

    return wrapper


def _resolve(function: Any) -> None:
    """Evaluates annotations that are strings, where their names are known."""
    for name, annotation in function.__annotations__.items():
        if isinstance(annotation, str):
            with contextlib.suppress(NameError):
                function.__annotations__[name] = eval(annotation, function.__globals__)


def _resolve_inherited(cls: type) -> None:
    """Evaluates the annotations of a dataclass's fields in the modules of the classes that define them."""
    annotations = cls.__init__.__annotations__
    for base in reversed(cls.__mro__[1:]):
        for name in annotations.keys() & vars(base).get("__annotations__", {}).keys():
            if isinstance(annotations[name], str) and name not in cls.__annotations__:
                annotations[name] = eval(annotations[name], vars(sys.modules[base.__module__]))


def _without_names_for_type_checkers(function: Any) -> None:
    """Lets an annotation pass that names what only type checkers import; of any other unknown name, beartype tells."""
    unknown = function.__globals__.get(FOR_TYPE_CHECKERS, ())
    for name, annotation in function.__annotations__.items():
        if isinstance(annotation, str) and any(word in unknown for word in re.findall(r"\w+", annotation)):
            function.__annotations__[name] = Any


def _by_beartype(function: Any) -> Any:
    """The function checked; of functions defined inside another one, the check is written once."""
    _resolve(function)
    _without_names_for_type_checkers(function)
    inner = "<locals>" in function.__qualname__
    annotations, checked = _checked_code.get(function.__code__, (None, None))
    if not inner or annotations != function.__annotations__:
        annotations, checked = dict(function.__annotations__), _beartype(function)
        if not inner:
            return checked
        _checked_code[function.__code__] = annotations, checked
    if checked.__kwdefaults__ is None:  # nothing to check
        return function
    again = types.FunctionType(checked.__code__, function.__globals__, closure=checked.__closure__)
    again.__kwdefaults__ = {**checked.__kwdefaults__, "__beartype_func": function}
    return again


def _has_axes(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return True
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray):
        return True
    parts = typing.get_args(annotation)
    return any(_has_axes(part) for part in parts if not isinstance(part, str))


def _decorate(body: list[Any]) -> None:
    """Puts the decorator on every class (outermost: it sees a dataclass) and every function (innermost)."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            node.decorator_list.insert(0, ast.Name(DECORATOR, ast.Load(), lineno=node.lineno, col_offset=0))
        elif isinstance(node, ast.FunctionDef):
            node.decorator_list.append(ast.Name(DECORATOR, ast.Load(), lineno=node.lineno, col_offset=0))
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            _decorate(getattr(node, field, None) or [])


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:  # compiled anew: no cache may mix both forms
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        self.for_type_checkers = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for statement in node.body
            for alias in getattr(statement, "names", ())
        }
        _decorate(tree.body)
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)[DECORATOR] = types_checked
        super().exec_module(module)
        vars(module)[FOR_TYPE_CHECKERS] = self.for_type_checkers


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
