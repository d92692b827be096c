"""Values together with the Python text that makes them, so that what runs and what is shown cannot differ."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Imports = frozenset[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class Written:
    """A value and the expression that makes it.

    Attributes:
        value: The value.
        text: The expression.
        imports: Module and name of everything that the expression uses.
    """

    value: Any
    text: str
    imports: Imports = frozenset()


def call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Written:
    """The result of a call, and the text of the call.

    Arguments may be `Written`. Keywords that are `None` are left out.
    """
    given = {name: value for name, value in keywords.items() if value is not None}
    value = function(*(_value(x) for x in arguments), **{name: _value(x) for name, x in given.items()})
    texts = [*map(_text, arguments), *(f"{name}={_text(x)}" for name, x in given.items())]
    inner = (x.imports for x in (*arguments, *given.values()) if isinstance(x, Written))
    own = frozenset({(function.__module__, function.__name__)})
    return Written(value, f"{function.__name__}({', '.join(texts)})", own.union(*inner))


def import_lines(imports: Iterable[tuple[str, str]]) -> str:
    """The import statements of expressions, one for each module; a name that is empty imports the module itself."""
    by_module: dict[str, list[str]] = {}
    for module, name in sorted(imports):
        by_module.setdefault(module, []).append(name)
    plain = [f"import {module}" for module, names in by_module.items() if names == [""]]
    return "\n".join(
        [*plain, *(f"from {module} import {', '.join(names)}" for module, names in by_module.items() if names != [""])]
    )


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Written) else x


def _text(x: Any) -> str:
    return x.text if isinstance(x, Written) else repr(x)
