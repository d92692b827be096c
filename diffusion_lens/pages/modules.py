"""The explorer's ES modules, put together as one that stands in an HTML file.

Each module imports names of its neighbours, `import { a, b } from "./neighbour.js";`, and exports its own. The one
module has them in the order of their imports, without these statements: all names are in one scope, so each is unique.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath

FIRST = "mount.js"  # imports the others
_IMPORT = re.compile(r'^import \{[^}]*\} from "([^"]+)";\n', re.MULTILINE)
_TYPE = r"(?:/\*\*.*\*/ )?"  # a JSDoc comment before a statement on its line
_EXPORT = re.compile(rf"^({_TYPE})export (?=(?:async )?(?:function|class|const|let)\b)", re.MULTILINE)
_NOTHING = re.compile(r"^export \{\};\n", re.MULTILINE)
_EXPORTED = re.compile(rf"^{_TYPE}export (?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)
_VIEW = re.compile(r"^export const \w+ = \{\n  name: \"(\w+)\"", re.MULTILINE)
_NAMED = re.compile(rf"^{_TYPE}(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)
_ALSO = re.compile(r"^(?:export )?(?:const|let) \w+ = [^({\[\n]*;", re.MULTILINE)  # further names in one statement


@cache
def explorer_files() -> tuple[str, str]:
    """The explorer as one module, and its style, safe to stand inside an HTML element.

    Raises:
        ValueError: Two modules define one name, or a file contains a tag that would end its element.
    """
    texts = dict(_ordered(FIRST))
    counted = Counter(name for text in texts.values() for name in _names(text))
    if twice := [name for name, count in counted.items() if count > 1]:
        raise ValueError(f"several modules of the explorer define {', '.join(twice)}; rename all but one")
    module = "\n".join(standing_alone(text) for text in texts.values())
    style = _read("explorer.css")
    require_safe("the module", module)
    require_safe("explorer.css", style)
    return module, style


def _names(text: str) -> set[str]:
    """The names that a module defines for all others."""
    return {*_NAMED.findall(text), *(name for line in _ALSO.findall(text) for name in re.findall(r", (\w+) = ", line))}


@cache
def exported_names() -> frozenset[str]:
    """The names that the explorer's modules export."""
    return frozenset(name for _, text in _ordered(FIRST) for name in _EXPORTED.findall(text))


@cache
def view_names() -> frozenset[str]:
    """The names of the explorer's own views."""
    return frozenset(name for _, text in _ordered(FIRST) for name in _VIEW.findall(text))


def require_safe(name: str, text: str) -> None:
    """Raise a `ValueError` if a text would end or escape its HTML element."""
    if any(mark in text.lower() for mark in ("</script", "</style", "<!--")):
        raise ValueError(f"{name} contains an HTML tag that would end its element; write it in two parts")


def standing_alone(text: str) -> str:
    """A module without its imports and exports."""
    return _EXPORT.sub(r"\1", _NOTHING.sub("", _IMPORT.sub("", text)))


def _ordered(name: str, known: set[str] | None = None) -> Iterator[tuple[str, str]]:
    """A module and those that it imports, each once and after those that it needs."""
    known = set() if known is None else known
    if name in known:
        return
    known.add(name)
    text = _read(name)
    for path in _IMPORT.findall(text):
        yield from _ordered(_joined(PurePosixPath(name).parent, path), known)
    yield name, text


def _joined(folder: PurePosixPath, path: str) -> str:
    """The name of a module that another one in this folder imports."""
    parts: list[str] = [*folder.parts]
    for part in PurePosixPath(path).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


def _read(name: str) -> str:
    return files("diffusion_lens.pages").joinpath("explorer", *name.split("/")).read_text(encoding="utf-8")
