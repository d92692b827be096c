"""Checks of what is read back from a saved result.

The schema of a result is its dataclass. pydantic checks the fields that a file keeps as JSON against their annotations,
and the entries of the record that the class lists in `ENTRIES`. jaxtyping checks dtypes and shapes of tensors, with one
size for each named axis across all fields. `_axes` of the class names the axes of its lists, and `_check` states what
no annotation can say. A file with a checksum of its content is refused if a byte of it has changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from json import dumps
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin

import torch
import xxhash
from jaxtyping import AbstractArray, Shaped, jaxtyped
from torch import Tensor

from weight_conversion.files import bytes_of

D = TypeVar("D")  # a dataclass
# Entries that most records have, which are shown with every result.
_SHOWN = {"model": str | None, "mode": str | None, "weights_sha256": str | None}
_FOUND = 60  # characters of a value in a message
_LONGEST_EMPTY = 2**20  # entries of an axis of a tensor without numbers, which takes no bytes whatever its size


def checksum(tensors: Mapping[str, Tensor], record: str) -> str:
    """Hash of the names, dtypes, shapes and bytes of all tensors, and of the record as it is written."""
    digest = xxhash.xxh3_128(record.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(bytes_of(tensor).numpy().data)
    return digest.hexdigest()


def built(result_type: type[D], saved: Mapping[str, Any], where: str = "a file") -> D:
    """An instance with the saved values, which are those of `split_fields`.

    Raises:
        ValueError: A field is missing, or does not fit its annotation or the other fields; the message begins with
            `where`, the name of the file.
    """
    reading = _Reading(where, getattr(result_type, "KIND", result_type.__name__))
    with jaxtyped("context"):
        result = reading.instance(result_type, saved)
        reading.entries(result_type, getattr(result, "record", {}))
        try:
            for axes, value in getattr(result, "_axes", tuple)():
                reading.listed(axes, value)
            getattr(result, "_check", lambda: None)()
        except _Misfit:
            raise
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise reading.misfit(f"has fields that do not fit each other: {error}") from error
    return result


def require_entries(result_type: type[Any], record: Mapping[str, Any], where: str) -> None:
    """Raise a `ValueError` that begins with `where` unless a record has the entries that results of this type read."""
    _Reading(where, getattr(result_type, "KIND", result_type.__name__)).entries(result_type, record)


def require_indices(name: str, indices: Sequence[int], size: int) -> None:
    """Raise a `ValueError` unless all these are indices of a sequence of this size."""
    if outside := [index for index in indices if not 0 <= index < size]:
        raise ValueError(f"{name} has {outside[0]}, where there are {size} entries")


class _Misfit(ValueError):
    """A field of a file does not fit."""


class _Reading:
    """The file that is read, by its name and kind for messages, and the sizes of the axes so far."""

    def __init__(self, where: str, kind: str) -> None:
        self.where, self.kind = where, kind
        self.sizes: dict[str, int] = {}

    def misfit(self, text: str) -> _Misfit:
        return _Misfit(
            f"{self.where}: the saved {self.kind} {text}. The file was changed, or another program or version wrote "
            "it: save the result again, or compute it again"
        )

    def entries(self, result_type: type[Any], record: Mapping[str, Any]) -> None:
        """Checks the entries of a record that this type reads."""
        required = getattr(result_type, "ENTRIES", {})
        for name, wanted in {**_SHOWN, **required}.items():
            if name in record or name in required:
                self.plain(wanted, f"record.{name}", record.get(name, MISSING))

    def instance(self, result_type: type[D], saved: Mapping[str, Any], inside: str = "") -> D:
        """A dataclass of these values; messages name its fields after the field that it is `inside`."""
        given = {}
        for field in fields(cast(Any, result_type)):
            value = self.value(field.type, saved, field.name, f"{inside}{field.name}")
            if value is not MISSING:
                given[field.name] = value
            elif field.default is MISSING and field.default_factory is MISSING:
                raise self.misfit(f"lacks the field {inside + field.name!r}")
        try:
            return result_type(**given)
        except (ValueError, TypeError) as error:
            raise self.misfit(f"cannot be made of its fields: {error}") from error

    def value(self, wanted: Any, saved: Mapping[str, Any], key: str, name: str) -> Any:
        """The value of a field with this annotation; `MISSING` if the file has none."""
        value, own, origin = saved.get(key, MISSING), _below(saved, f"{key}."), get_origin(wanted)
        options = get_args(wanted) if origin in (dict, Union, UnionType) else (wanted,)
        kind = next((each for each in options if _has_tensors(each) or is_dataclass(each)), wanted)
        if NoneType in options and value is None and not own:
            return None
        if origin is dict and is_dataclass(kind):
            read = self.plain(dict[get_args(wanted)[0], dict[str, Any]], name, value)  # type: ignore[misc]
            parts = {each: {**others, **_below(saved, f"{each}.")} for each, others in read.items()}
            return {each: built(cast(Any, kind), part, f"{self.where}, {each}") for each, part in parts.items()}
        if origin is dict and _has_tensors(kind):
            if value is MISSING:  # Earlier versions list the keys as the `names` of the record.
                value = self.plain(dict[str, Any], "record", saved.get("record", MISSING)).get("names", MISSING)
            keys = self.plain(list[str], name, value or [])
            return {each: self.tensor(kind, saved.get(f"{key}/{each}", MISSING), f"{name}/{each}") for each in keys}
        if is_dataclass(kind) and value is not MISSING:
            others = self.plain(dict[str, Any], name, value)
            return self.instance(cast(Any, kind), {**others, **own}, f"{name}.")
        if _has_tensors(kind):
            return value if value is MISSING else self.tensor(kind, value, name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()  # numbers that are kept in double precision
        return value if value is MISSING else self.plain(wanted, name, value)

    def tensor(self, wanted: Any, value: Any, name: str) -> Any:
        """A tensor with the dtype and the axes of its annotation."""
        axes = getattr(wanted, "dim_str", "").split()
        if not isinstance(value, wanted):
            found = "nothing" if value is MISSING else f"{value!r:.{_FOUND}}"
            if isinstance(value, Tensor):
                found = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            raise self.misfit(
                f"has {found} in the field {name!r}, which should be {_said(wanted)}{self._known(axes, 'other fields')}"
            )
        if not value.numel() and max(value.shape) > _LONGEST_EMPTY:
            raise self.misfit(f"has {list(value.shape)} in the field {name!r}, an axis of this length without numbers")
        if len(axes) == value.dim() and not any(axis.startswith(("*", ".")) for axis in axes):
            self.sizes |= {axis: size for axis, size in zip(axes, value.shape, strict=True) if axis.isidentifier()}
        return value

    def plain(self, wanted: Any, name: str, value: Any) -> Any:
        """A value of the JSON record, checked by pydantic, which makes tuples of lists and numbers of keys."""
        from pydantic import ValidationError  # when a file is read: its import takes a tenth of a second

        if value is MISSING:
            raise self.misfit(f"lacks the field {name!r}")
        try:
            return _adapter(wanted).validate_json(dumps(value))
        except TypeError:
            raise self.misfit(f"has a tensor in the field {name!r}, which should be {_said(wanted)}") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"[{part!r}]" for part in first["loc"])
            raise self.misfit(
                f"has {first['input']!r:.{_FOUND}} in the field '{name}{where}', where {name} should be "
                f"{_said(wanted)}: {first['msg']}"
            ) from error

    def listed(self, axes: str, value: Any) -> None:
        """Checks the length of a list, the lengths of lists in lists, or a number, against axes of the tensors;
        `None` is no axis."""
        sizes: list[int] = []
        for depth in range(0 if value is None else len(axes.split())):
            if depth and not value:
                break  # no list inside says how long the others would be
            lengths = {value} if isinstance(value, int) else {len(each) for each in (value if depth else [value])}
            if len(lengths) > 1:
                raise self.misfit(f"has lists of {sorted(lengths)} entries for one axis of {axes!r}")
            sizes.append(lengths.pop())
            value = [item for each in value for item in each] if depth else value
        stand_in = torch.empty(()).expand(sizes)  # one number in memory, whatever the sizes
        annotation: Any = Shaped[Tensor, " ".join(axes.split()[: len(sizes)])]
        if not isinstance(stand_in, annotation):
            raise self.misfit(f"has {sizes} entries for the axes {axes!r}{self._known(axes.split(), 'its tensors')}")

    def _known(self, axes: Sequence[str], where: str) -> str:
        known = [f"{axis} {self.sizes[axis]}" for axis in axes if axis in self.sizes]
        return f" with {', '.join(known)} as in {where}" if known else ""


def _below(saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}


def _has_tensors(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Tensor | AbstractArray)


def _said(kind: Any) -> str:
    """An annotation as it is written in the code."""
    return str(kind).replace("typing.", "") if get_args(kind) else getattr(kind, "__name__", str(kind))


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind, config=ConfigDict(strict=True))
