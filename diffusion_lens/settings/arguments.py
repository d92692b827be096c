"""What a public function accepts, read from its annotations when it is first called.

beartype checks the arguments of a call, and jaxtyping the dtypes and shapes of its tensors, with one size for each
named axis. The annotations are read as a caller means them: for `int` and `float` any whole or real number fits, such
as NumPy's scalars, but no bool; a text, bytes or a mapping is no sequence of parts; and every entry of a list counts.
"""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from functools import cache, partial
from inspect import Parameter, Signature, isclass, unwrap
from reprlib import Repr
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, SupportsFloat, SupportsIndex, Union, get_args, get_origin, get_type_hints

RECEIVERS = ("self", "cls")
_WHOLE, _REAL = (int, SupportsIndex), (float, SupportsFloat)
_SEVERAL = (Sequence, Iterable, Collection, Set, list)
_BOOLS = ("bool", "torch.bool")
_WORDS: dict[Any, str] = {
    NoneType: "None",
    Any: "anything",
    bool: "True or False",
    str: "a text",
    Callable: "a function",
    **dict.fromkeys(_WHOLE, "a whole number"),
    **dict.fromkeys(_REAL, "a number"),
}
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class Unfit(TypeError):
    """What beartype raises of an argument that does not fit."""


class Arguments:
    """The arguments that a function accepts.

    Attributes:
        accepts: Does nothing with arguments that fit, and raises `Unfit` or Python's `TypeError` of others.
        context: Makes the context of a check, in which each axis has one size.
    """

    def __init__(self, name: str, function: Callable[..., Any], signature: Signature) -> None:
        from beartype import BeartypeConf, beartype  # both take longer than `diffusion-lens --help` may
        from jaxtyping import AbstractArray, jaxtyped

        self.name, self.signature = name, signature
        self.hints = dict(_resolved(function, signature))
        self.context: Callable[[], Any] = nullcontext
        parts = {part for hint in self.hints.values() for part in _parts(hint) if isclass(part)}
        if any(issubclass(part, AbstractArray) for part in parts):
            self.context = partial(jaxtyped, "context")
        bare = [
            each.replace(annotation=each.empty, default=each.default if each.default is each.empty else ...)
            for each in signature.parameters.values()
        ]
        # beartype checks the parameters of a function: here of one with these names and no body.
        does_nothing: Any = eval(f"lambda {str(Signature(bare))[1:-1]}: None")
        does_nothing.__name__, does_nothing.__qualname__ = name.rpartition(".")[2], name
        does_nothing.__annotations__ = {key: _as_meant(hint) for key, hint in self.hints.items()}
        self.accepts: Callable[..., None] = beartype(conf=BeartypeConf(violation_type=Unfit))(does_nothing)

    def uncompiled(self, args: Sequence[Any], given: Mapping[str, Any], error: TypeError) -> tuple[Any, dict[str, Any]]:
        """The arguments with models in place of what `torch.compile` made of them, in which hooks may be dead.

        Raises the refusal of a call that does not fit for another reason.
        """
        plain = tuple(getattr(each, "_orig_mod", each) for each in args)
        named = {name: getattr(each, "_orig_mod", each) for name, each in given.items()}
        if any(hasattr(each, "_orig_mod") for each in (*args, *given.values())):
            with suppress(TypeError), self.context():
                self.accepts(*plain, **named)
                return plain, named
        raise self.refusal(plain, named) or error from None

    def refusal(self, args: Sequence[Any], given: Mapping[str, Any]) -> TypeError | ValueError | None:
        """The error of a call with an argument that does not fit: which one, what it is, and what the function takes.

        `None` if each fits by itself. Of a call that does not fit the signature, Python's own `TypeError` is raised.
        """
        values = self.signature.bind(*args, **given).arguments
        with self.context():
            for name, hint in self.hints.items():
                if name in values and not _fits(values[name], hint):
                    break
            else:
                return None
        value, words = values[name], _in_words(hint)
        if _fits([value], hint):
            words += f": give a list, [{shown(value)}]"
        entries = [get_args(part)[0] for part in _options(hint) if get_origin(part) in _SEVERAL]
        options = [hint]
        for index, each in enumerate(value if entries and isinstance(value, list | tuple) else ()):
            fitting = [entry for entry in entries if _fits(each, entry)]
            if not fitting:
                name, value, words, options = f"{name}[{index}]", each, " or ".join(map(_in_words, entries)), entries
                break
            entries = fitting
        examples = [part.EXAMPLE for option in options for part in _parts(option) if hasattr(part, "EXAMPLE")]
        if examples:
            words += f", such as {examples[0].format(value if isinstance(value, str) else 'The Eiffel Tower is in')}"
        if any(get_origin(part) is Literal and isinstance(value, str) for part in _options(hint)):
            return ValueError(f"{self.name}: {name}={shown(value)}; it must be {words}")
        return TypeError(f"{self.name}: {name}={shown(value)} is {kind_of(value)}; it must be {words}")


def check_type(hint: Any, name: str, value: Any) -> Any:
    """`value`; a `TypeError` unless it is what the annotation says."""
    if not _fits(value, hint):
        raise TypeError(f"{name}={shown(value)} is {kind_of(value)}; it must be {_in_words(hint)}")
    return value


def kind_of(value: Any) -> str:
    """The type of a value with its article, such as "a float"."""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def shown(value: Any) -> str:
    """The value for a message, in at most about 60 characters; of a tensor or an array, its dtype and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape") and not isclass(value):
        return f"<{value.dtype} {list(value.shape)}>"
    return _SHORT.repr(value)


def _resolved(function: Callable[..., Any], signature: Signature) -> Iterable[tuple[str, Any]]:
    """Parameters and their annotations, without those that name what only type checkers import."""
    unread = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    known = {**vars(sys.modules[function.__module__]), **getattr(unwrap(function), "__globals__", {})}
    for name, parameter in signature.parameters.items():
        if parameter.annotation is parameter.empty or parameter.kind in unread or name in RECEIVERS:
            continue
        holder = SimpleNamespace(__annotations__={name: parameter.annotation})
        try:
            yield name, get_type_hints(holder, known, include_extras=True)[name]
        except NameError:
            continue


def _options(hint: Any) -> Sequence[Any]:
    """The members of a union; of another annotation, itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]


def _parts(hint: Any) -> Iterable[Any]:
    """An annotation and all that it is made of."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _fits(value: Any, hint: Any) -> bool:
    from beartype.door import is_bearable

    try:
        return is_bearable(value, _as_meant(hint))
    except TypeError:  # of a tensor without axes, which has no length
        return False


@cache
def _as_meant(hint: Any) -> Any:
    """The annotation as beartype should check it."""
    from beartype.door import is_bearable
    from beartype.vale import Is, IsAttr, IsEqual, IsInstance

    origin, parts = get_origin(hint), get_args(hint)
    if hint in _WHOLE or hint in _REAL:
        one = ~IsInstance[bool, complex] & ~IsAttr["ndim", ~IsEqual[0]]
        if torch := sys.modules.get("torch"):
            one &= ~IsAttr["dtype", IsEqual[torch.bool]]
        return Annotated[SupportsIndex if hint in _WHOLE else SupportsFloat, one]
    if hint is bool:  # NumPy's and torch's too
        scalar = Is[lambda value: str(getattr(value, "dtype", "")) in _BOOLS and not value.ndim]
        return bool | Annotated[Any, scalar]
    if origin in (Union, UnionType):
        options = tuple(map(_as_meant, parts))
        # As it is if nothing changes: beartype confuses Optional[X] with X | None.
        return hint if options == parts else Union[options]  # noqa: UP007
    if origin in _SEVERAL:
        entry = _as_meant(parts[0])
        several: Any = origin[entry]
        no_entry = IsInstance[str, bytes, Mapping] | IsAttr["ndim", IsEqual[0]]
        several = Annotated[several, ~no_entry]
        fits = partial(is_bearable, hint=entry)

        def each_fits(given: Any) -> bool:  # beartype itself looks at one entry; and shows a lambda by its source
            return not isinstance(given, list | tuple) or all(map(fits, given))

        several = Annotated[several, Is[each_fits]] if entry is not Any else several
        numbers = all(part in (*_WHOLE, *_REAL, bool, NoneType) for part in get_args(parts[0]) or parts)
        return several | Annotated[Any, Is[_is_row_of_numbers]] if numbers else several
    if origin is Annotated:
        return _as_meant(parts[0])
    if origin is tuple or origin in (dict, Mapping):
        meant: Any = origin[tuple(part if part is ... else _as_meant(part) for part in parts)]

        def fits_as_tuple(given: Any) -> bool:
            return is_bearable(tuple(given), meant)

        return meant | Annotated[list[Any], Is[fits_as_tuple]] if origin is tuple else meant
    return hint


def _is_row_of_numbers(value: Any) -> bool:
    """Whether a value is an array or a tensor with one axis, which is no `Sequence` for Python."""
    return getattr(value, "ndim", 0) == 1 and re.search("int|float|bool", str(value.dtype)) is not None


def _in_words(hint: Any) -> str:
    """The annotation for a message."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:  # with the words
        return str(parts[1])
    if hint in _WORDS or origin in _WORDS:
        return _WORDS[hint if hint in _WORDS else origin]
    if origin in (Union, UnionType, Literal):
        several = list(dict.fromkeys(repr(part) if origin is Literal else _in_words(part) for part in parts))
        return f"{', '.join(several[:-1])} or {several[-1]}" if len(several) > 1 else several[0]
    if origin in _SEVERAL:
        return f"a sequence (each: {_in_words(parts[0])})"
    if origin is tuple:
        return f"a tuple ({', '.join('...' if part is ... else _in_words(part) for part in parts)})"
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping ({_in_words(parts[0])}: {_in_words(parts[1])})"
    if origin is None and getattr(hint, "__name__", "") == "Tensor":
        return "a tensor"
    name = str(getattr(hint, "__name__", hint)).replace("[Tensor, '", "[").replace("']", "]")
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
