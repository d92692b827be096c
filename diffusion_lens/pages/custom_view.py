"""`CustomView`: a view of an explorer page that a user has written, with its data."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from diffusion_lens.pages.modules import FIRST, exported_names, require_safe, standing_alone
from diffusion_lens.pages.views import Stored, pack

_VIEW = re.compile(
    r"^export const view = \{\s*(?:/\*.*?\*/\s*)?name: [\"']([a-z][a-z0-9_]*)[\"']", re.MULTILINE | re.DOTALL
)
_IMPORTED = re.compile(r'^import \{([^}]*)\} from "[^"]+";$', re.MULTILINE)
_REST = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class CustomView:
    """A view of one's own, for `trajectory.explore(path, views=[...])`.

    The module is a JavaScript file with `export const view = {name: "...", title: ..., missing, create}`; the page
    "Add a view" describes these. It may import names of the explorer's own modules, such as
    `import { h } from "./elements.js";`, and nothing else. Its other names are its own.

    Attributes:
        module: The file.
        entry: Plain data for JSON. The view reads them as `seen.run[name]`.
        chunks: By name, the arrays of each chunk by name: tensors or arrays of integers or floats, stored in 32 bits,
            or `Stored`. The view reads them by `await seen.chunk("{view}/{chunk}")`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file has no view, imports something else, or contains a tag that would end its element.
        TypeError: The entry is not plain data, or an array contains no numbers.
    """

    module: str | Path
    entry: Mapping[str, Any] = field(default_factory=dict)
    chunks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ = self.script, self.packed
        try:
            json.dumps(dict(self.entry), allow_nan=False)
        except ValueError:
            raise ValueError("the entry contains NaN or infinity, which JSON does not have: use None") from None

    @cached_property
    def _text(self) -> str:
        return Path(self.module).read_text(encoding="utf-8")

    @property
    def name(self) -> str:
        """Name of the view."""
        found = _VIEW.search(self._text)
        if found is None:
            raise ValueError(
                f'{self.module} has no view. It must contain `export const view = {{ name: "...", ...}};`, where the '
                "name comes first and consists of small letters, digits and underscores"
            )
        return found[1]

    @cached_property
    def script(self) -> str:
        """The statement that adds the view to a page."""
        text, name = self._text, self.name
        imported = {part.strip() for names in _IMPORTED.findall(text) for part in names.split(",") if part.strip()}
        if unknown := sorted(imported - exported_names()):
            raise ValueError(
                f"{self.module} imports {', '.join(unknown)}, which no module of the explorer exports; the files under "
                f"diffusion_lens/pages/explorer, from {FIRST} on, say what there is"
            )
        alone = standing_alone(text)
        if rest := _REST.search(alone):
            raise ValueError(
                f"{self.module} contains {rest[0]!r}. A view may only import names of the explorer's modules, "
                '`import { a, b } from "./elements.js";`, and export constants and functions'
            )
        require_safe(str(self.module), text)
        # In a function, so that its names are its own; the name of the function tells where an error comes from.
        return f"addView((function {name}_view() {{\n{alone}\nreturn view;\n}})());"

    @cached_property
    def packed(self) -> dict[str, bytes]:
        """The bytes of each chunk by its full name."""
        return {
            f"{self.name}/{chunk}": pack({array: _stored(f"{chunk}/{array}", x) for array, x in arrays.items()})
            for chunk, arrays in self.chunks.items()
        }


def _stored(name: str, x: Any) -> Stored:
    """An array as a chunk stores it."""
    if isinstance(x, Stored):
        return x
    kind = x.detach().cpu().float().numpy() if isinstance(x, Tensor) and x.is_floating_point() else np.asarray(x)
    if kind.dtype.kind in "biu":
        if kind.size and not -(2**31) <= int(kind.min()) <= int(kind.max()) < 2**31:
            raise ValueError(f"{name} has integers that do not fit into 32 bits: {kind.min()} to {kind.max()}")
        return Stored.integers(kind)
    if kind.dtype.kind == "f":
        return Stored.numbers(kind)
    raise TypeError(f"{name} is an array of {kind.dtype}; a chunk contains integers and floats")
