"""Settings: each is declared once and checked once.

A setting is a field of a frozen dataclass: its name, type, default, help text and check.

    @dataclass(frozen=True)
    class TraceSettings(Settings):
        window: int = setting(10, "Number of blocks restored around each layer.", partial(at_least, 1))

From the fields are made
- the keywords, the signature and the `Args` of a public function: `@takes(TraceSettings)`;
- the options of a command, with their help: an argument with the class as its annotation (`cli/options.py`); the
  fields are then in `settings/shared.py`, which does not import torch;
- the record of a result and of a study: `settings.describe()`;
- whatever lists settings, such as the explorer: `fields_of(TraceSettings)`.

A check takes the name and the value, and returns the value as a plain Python number, text or tuple: NumPy's and torch's
scalars are accepted too, and are converted because results record settings as JSON.

Seeds of rows, texts and facts, and warnings that point to the user's line, are at the end.
"""

import dataclasses
import hashlib
import json
import operator
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from difflib import get_close_matches
from functools import partial, wraps
from inspect import Parameter, Signature, isclass, signature
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, cast

from diffusion_lens.settings.arguments import RECEIVERS, Arguments, check_type, kind_of, shown

# Annotations of such settings: plain Python numbers, NumPy's scalars, or a tensor of one number.
Whole = SupportsIndex
Real = SupportsFloat
Check = Callable[[str, Any], Any]

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_LARGEST = 1e38  # larger numbers overflow float32
_MOST = f", and at most {_LARGEST:g}"
CHECKED = "_has_checked_arguments"
# The value of a field that a subclass declares again for its type alone, such as one that needs torch.
INHERITED: Any = object()
# Frames of torch's decorators are between ours and, if annotations are checked, those of jaxtyping and beartype.
_NOT_THE_USERS = ("diffusion_lens", "transformer_lens", "torch", "jaxtyping", "beartype")


def setting(default: Any, help: str, check: Check | None = None, *, option: bool | str = True) -> Any:
    """Declare a setting: a field of a `Settings` class.

    Args:
        default: Default value; where it is `None`, the check is left out for `None`.
        help: Meaning of the setting, for help texts of Python and of the command line.
        check: Function of name and value that returns the value to keep, or raises an error that names the setting. By
            default the type of the field is checked.
        option: Whether commands have an option for it, or the name of the option if it is not that of the field.
    """
    return dataclasses.field(default=default, metadata={"help": help, "check": check, "option": option})


class Settings:
    """Base of frozen dataclasses whose fields are settings."""

    def __init_subclass__(cls) -> None:
        """Complete the class's docstring with a line for each field, those of its bases first.

        A field whose value is `INHERITED` is that of the base with another type.
        """
        bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
        inherited = {name: each for base in reversed(bases) for name, each in fields_of(base).items()}
        for name in [name for name, value in vars(cls).items() if value is INHERITED]:
            setattr(cls, name, copy(inherited[name]))
        own = {name: each for name, each in vars(cls).items() if isinstance(each, dataclasses.Field)}
        if cls.__doc__ is not None and "Attributes:" not in cls.__doc__:
            cls.__doc__ = f"{cls.__doc__.rstrip()}\n\n    Attributes:\n{_entries({**inherited, **own})}"

    def __post_init__(self) -> None:
        """Check every field, and keep the value that its check returns; a default is as it should be."""
        values = vars(self)
        for each in dataclasses.fields(cast(Any, self)):
            if values.get(each.name, each.default) is not each.default:
                check = each.metadata.get("check") or partial(check_type, each.type)
                values[each.name] = check(each.name, values[each.name])

    def describe(self) -> dict[str, Any]:
        """The settings for a record, as JSON types."""
        values = {name: getattr(self, name) for name in fields_of(type(self))}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def fields_of(kind: type[Any]) -> "dict[str, dataclasses.Field[Any]]":
    """The settings of a class by name: default, type, and in `metadata` the help and the check."""
    return {each.name: each for each in dataclasses.fields(kind) if "help" in each.metadata}


def takes(kind: type[Settings]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Let a function with an argument `settings` take the settings as keywords too.

    The keywords stand in its signature, and in its docstring in place of the line on `settings`, so that help,
    notebooks and Sphinx show them. If `settings` may be given by position, so may the first of them. Callers give
    keywords or the object `settings=`, not both.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        arguments = None
        own, fields = list(signature(function).parameters.values()), fields_of(kind)
        place = [each.name for each in own].index("settings")
        by_position = own[place].kind is Parameter.POSITIONAL_OR_KEYWORD
        keywords = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for name, each in fields.items()
        ]
        keywords += [Parameter("settings", Parameter.KEYWORD_ONLY, default=None, annotation=kind | None)]
        first = [keywords.pop(0).replace(kind=Parameter.POSITIONAL_OR_KEYWORD)] if by_position else []
        known = Signature(
            sorted([*own[:place], *first, *keywords, *own[place + 1 :]], key=lambda each: each.kind),
            return_annotation=signature(function).return_annotation,
        )

        @wraps(function)
        def called(*args: Any, **given: Any) -> R:
            nonlocal arguments
            if by_position and len(args) > place:
                name = "settings" if isinstance(args[place], Settings) else first[0].name
                args, given = (*args[:place], *args[place + 1 :]), {name: args[place], **given}
            if not given.keys() <= known.parameters.keys():
                check_keywords(function.__name__, given, known.parameters)
            chosen, settings = {}, given.pop("settings", None)
            for name in fields:
                if name in given:
                    chosen[name] = _plain(name, given.pop(name))
            if settings is None:
                settings = kind(**chosen)
            elif chosen:
                raise ValueError(
                    f"settings= has its own {', '.join(chosen)}: leave the keyword out, or change the object with "
                    "dataclasses.replace"
                )
            elif type(settings) is not kind:
                raise TypeError(f"settings= is {kind_of(settings)}; {function.__name__} takes {kind.__name__}")
            # As in `checked_arguments`, without another call between the caller and the function.
            given["settings"] = settings
            if arguments is None:
                arguments = Arguments(function.__qualname__, function, signature(function))
            try:
                with arguments.context():
                    arguments.accepts(*args, **given)
            except TypeError as error:
                args, given = arguments.uncompiled(args, given, error)
            return function(*args, **given)

        vars(called)[CHECKED] = True
        vars(called)["__signature__"] = known

        def listed(line: re.Match[str]) -> str:
            return _entries(fields, line[1]) + f"{line[1]}settings: All of these as one `{kind.__name__}`.\n"

        called.__doc__ = re.sub(r"(?m)^( +)settings: .*\n(?:\1    .*\n)*", listed, function.__doc__ or "")
        return called

    return decorate


def _plain(name: str, value: Any) -> Any:
    """One number or a row of numbers of NumPy or torch as Python's own; anything else as it is."""
    if not hasattr(value, "ndim"):
        return value
    if value.ndim > 1:  # Whether its rows are pairs or groups would be a guess.
        raise TypeError(
            f"{name}= is an array {list(value.shape)}; it must have one axis: give one of its rows, or a list"
        )
    return value.tolist()


def _entries(fields: "dict[str, dataclasses.Field[Any]]", indent: str = " " * 8) -> str:
    """The lines of a docstring on these fields."""
    entries = [f"{name}: {each.metadata['help']}" for name, each in fields.items()]
    deeper = indent + "    "
    return "".join(
        textwrap.fill(entry, 120, initial_indent=indent, subsequent_indent=deeper, break_on_hyphens=False) + "\n"
        for entry in entries
    )


def checked_arguments(target: F) -> F:
    """Decorate a public function, or a class for its constructor: each call is checked by the annotations.

    The `TypeError` of an argument that does not fit says what the function takes; that of an unknown keyword suggests
    the nearest one, or lists all if none has a similar name.
    """
    if isclass(target):
        target.__init__ = checked_arguments(target.__init__)  # type: ignore[method-assign]
        return target
    if CHECKED in vars(target):
        return target
    name = target.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
    known = keywords_of(target)
    any_keyword, arguments = takes_any_keyword(target), None

    @wraps(target)
    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal arguments
        if not any_keyword and not kwargs.keys() <= known.keys():
            check_keywords(name, kwargs, known)
        if arguments is None:
            arguments = Arguments(name, target, signature(target))
        try:
            with arguments.context():
                arguments.accepts(*args, **kwargs)
        except TypeError as error:  # beartype raises others than `Unfit` of a tensor without axes
            args, kwargs = arguments.uncompiled(args, kwargs, error)
        return target(*args, **kwargs)

    vars(checked)[CHECKED] = True
    return cast(F, checked)


def keywords_of(*functions: Callable[..., Any]) -> dict[str, None]:
    """Names of the arguments that these functions take by keyword, in order, as the keys of a dictionary."""
    parameters = [p for function in functions for p in signature(function).parameters.values()]
    by_keyword = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return dict.fromkeys(name for name in by_keyword if name not in RECEIVERS)


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether a function has `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in signature(function).parameters.values())


def check_keywords(called: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise a `TypeError` for the first unknown keyword of a call; it suggests the nearest, or lists all."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"the nearest is {near[0]!r}" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}; {hint}")


def whole_number(name: str, value: Any) -> int:
    """`value` as an int; a `TypeError` unless it is a whole number. Bools and floats such as 3.0 are refused."""
    number = value if type(value) is int else None
    if number is None and not _is_bool(value):
        with suppress(TypeError):
            number = operator.index(value)
    if number is None:
        raise TypeError(
            f"{name}={value!r} is {kind_of(value)}; it must be a whole number, written without a decimal point"
        )
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{name}={shown(number)} is too large for a number of 64 bits")
    return number


def whole_numbers(name: str, value: SupportsIndex | Iterable[SupportsIndex]) -> list[int]:
    """One whole number or several, as a list."""
    plain = value.tolist() if hasattr(value, "tolist") else value  # Arrays and tensors have `tolist`.
    if isinstance(plain, Iterable) and not isinstance(plain, str | bytes | Mapping):
        return list(map(partial(whole_number, name), plain))
    return [whole_number(name, plain)]


def plain_number(name: str, value: Any) -> float:
    """`value` as a float; a `TypeError` unless it is a single number. A bool is refused."""
    if type(value) is float:
        return value
    if not _is_bool(value) and not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # Arrays and tensors of several numbers raise the last two.
            pass
        except OverflowError:
            raise ValueError(f"{name}={shown(value)} is too large for a number of 64 bits") from None
    raise TypeError(f"{name}={value!r} is {kind_of(value)}; it must be a number")


def check_bool(name: str, value: Any) -> bool:
    """`value`; a `TypeError` unless it is a bool, because a text such as "no" would count as True."""
    if not isinstance(value, bool) and (not _is_bool(value) or value.ndim):
        raise TypeError(f"{name}={shown(value)} is {kind_of(value)}; it must be True or False")
    return bool(value)


def text_tuple(name: str, value: Iterable[str]) -> tuple[str, ...]:
    """Several texts as a tuple; a `TypeError` for one text, whose characters nobody means."""
    return tuple(check_type(Sequence[str], name, value))


def as_given(name: str, value: Any) -> Any:
    """`value`, which is checked where it is used."""
    return value


def at_least(least: int, name: str, value: Any, reason: str = "", *, or_none: str = "") -> int:
    """`value` as an int; a `ValueError`, which may end with a reason, or with what `None` is for, if it is below
    `least`."""
    number = whole_number(name, value)
    if number < least:
        why = f", because {reason}" if reason else f", or None {or_none}" if or_none else ""
        raise ValueError(f"{name}={number}; it must be at least {least}{why}")
    return number


def check_seed(name: str, value: Any) -> int:
    """`value` as a seed of torch's generators."""
    return at_least(0, name, value)


def check_numpy_seed(name: str, value: Any) -> int:
    """`value` as a seed of `numpy.random.RandomState`."""
    if (seed := check_seed(name, value)) >= 2**32:
        raise ValueError(f"{name}={seed}; numpy.random.RandomState takes seeds below 2**32")
    return seed


def not_negative(name: str, value: Any, zero: str = "") -> float:
    """`value` as a float; a `ValueError`, which may explain what 0 means, unless it is finite and 0 or more."""
    number = plain_number(name, value)
    if not 0 <= number <= _LARGEST:
        raise ValueError(f"{name}={number}; it must be a finite number, 0 {zero and f'({zero}) '}or more{_MOST}")
    return number


def positive(name: str, value: Any) -> float:
    """`value` as a float; a `ValueError` unless it is finite and above 0."""
    number = plain_number(name, value)
    if not 0 < number <= _LARGEST:
        raise ValueError(f"{name}={number}; it must be a finite number above 0{_MOST}")
    return number


def check_level(level: Any) -> float:
    """The level of an interval as a float; a `ValueError` unless it is a probability between 0 and 1."""
    number = plain_number("level", level)
    if not 0 < number < 1:
        raise ValueError(f"level={level}; it must be between 0 and 1, e.g. 0.95")
    return number


def one_of(*choices: str) -> Check:
    """A check that a value is one of these texts; the `ValueError` names the nearest."""

    def check(name: str, value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return value
        near = get_close_matches(str(value), choices, n=1)
        hint = f", nearest is {near[0]}" if near else ""
        raise ValueError(f"{name}={value!r} is unknown{hint}; it must be one of {', '.join(choices)}")

    return check


def pick_layer(layer: Whole, n_layers: int) -> int:
    """The index of a layer; negative numbers count from the end. A `ValueError` if there is no such layer."""
    number = whole_number("layer", layer)
    if not -n_layers <= number < n_layers:
        raise ValueError(
            f"layer={number} is not one of the layers 0 to {n_layers - 1} of this model; negative numbers down to "
            f"{-n_layers} count from the end"
        )
    return number % n_layers


def pick_indices(name: str, indices: Iterable[Whole] | None, size: int) -> list[int]:
    """Positions or layers as indices from 0 to `size` - 1; negative numbers count from the end, `None` selects all.

    Raises:
        ValueError: There is no index, one is out of range, or one is given twice.
    """
    if indices is None:
        return list(range(size))
    numbers = list(map(partial(whole_number, name), indices))
    if not numbers or min(numbers) < -size or max(numbers) >= size:
        raise ValueError(f"{name}={numbers}; give numbers from 0 to {size - 1}, or negative ones from the end")
    resolved = [index % size for index in numbers]
    if len(set(resolved)) < len(resolved):
        raise ValueError(f"{name}={numbers} contains duplicates; give each once")
    return resolved


def unique_indices(name: str, given: Iterable[Whole] | None) -> tuple[int, ...] | None:
    """Indices as plain numbers, each given once; `None` stays `None`.

    Raises:
        ValueError: There is no index, or one is given twice.
        TypeError: An index is not a whole number.
    """
    if given is None:
        return None
    if not isinstance(given, Iterable):
        one = f"one number; give a sequence, {name}=[{shown(given)}]"
        is_one = hasattr(given, "__index__") and not isinstance(given, bool)
        words = one if is_one else f"{kind_of(given)}; it must be a sequence of whole numbers"
        raise TypeError(f"{name}={shown(given)} is {words}")
    numbers = whole_numbers(name, given)
    if not numbers:
        raise ValueError(f"{name}=[]; give one index or more, or leave {name}= out to select all")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{name}={numbers} contains duplicates; give each once")
    return tuple(numbers)


def own_seed(seed: Whole, key: int | str, bits: int = 53) -> int:
    """The seed of one row, text or fact; the same on every machine.

    It is a hash, because sums would overlap: row 1 of seed 0 would have the seed of row 0 of seed 1, and five calls of
    20 rows would have 24 different seeds instead of 100.

    Args:
        seed: Seed of the call.
        key: Index of the row, or name of the text or fact.
        bits: Number of bits of the result. Every JSON reader preserves integers of 53 bits.
    """
    digest = hashlib.sha256(json.dumps([whole_number("seed", seed), key]).encode()).digest()
    return int.from_bytes(digest, "big") >> (8 * len(digest) - bits)


def warn_user(message: str) -> None:
    """Issue a `UserWarning` at the innermost line that belongs to none of these packages."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
