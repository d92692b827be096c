"""Sphinx extension for docstrings in plain text with `code` in backticks.

The only other markup is *emphasis* between stars. Bars, underscores and single stars are escaped. An indented block
after a blank line (a formula or a table) is shown verbatim. The text between backticks becomes a link if exactly one
documented name ends in it; otherwise it is set as code. Roles in the pages, such as `{py:func}`, resolve names in the
same way. An unknown name in a page is a warning, which fails the build.
"""

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

_CODE = re.compile(r"`([^`]+)`(?=(\w?))")
_NAME = re.compile(r"[A-Za-z_][\w.]*(\(.*\))?")
_SEVERAL = re.compile(r"^(    )(\w+(?:, \w+)+): (.*\n(?:     .*\n)*)", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.napoleon")
    app.config.default_role = "py:obj"
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)  # Napoleon has priority 500.
    app.connect("missing-reference", find_by_its_end)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def as_restructured_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape plain text for reStructuredText, in place."""
    text = _SEVERAL.sub(_one_by_one, "\n".join([*lines, ""]))
    lines[:] = [*_escape_outside_blocks(text.split("\n"))]
    if what == "property":
        lines.insert(0, "\\ ")  # Otherwise napoleon takes the text before a colon for a type.


def _one_by_one(entry: re.Match[str]) -> str:
    """Split an entry for several names, "before, after: ...". Napoleon supports such entries for arguments only."""
    return "".join(f"{entry[1]}{name}: {entry[3]}" for name in entry[2].split(", "))


def _escape_outside_blocks(lines: list[str]) -> Iterator[str]:
    """Escape special characters, except in indented blocks between blank lines, which become literal blocks."""
    text, literal = "", False
    for i, line in enumerate(lines):
        indented = line.startswith("    ")
        if indented and i and not lines[i - 1] and not literal and not text.startswith(" "):
            literal = True
            yield from ("::", "")
        elif line and not indented:
            literal = False
        yield line if literal else _escaped(line)
        text = line or text


def _escaped(line: str) -> str:
    pieces, end = [], 0
    for code in _CODE.finditer(line):
        shown = f"`{code[1]}`" if _NAME.fullmatch(code[1]) else f"``{code[1]}``"
        pieces += [_plain(line[end : code.start()]), shown, "\\ " if code[2] else ""]
        end = code.end(1) + 1
    return "".join([*pieces, _plain(line[end:])])


def _plain(text: str) -> str:
    escaped = re.sub(r"([\\*|`])|(?<=\w)(_)(?!\w)", r"\\\1\2", text)
    return re.sub(r"(?<![\w*])\\\*(\w[^*]*)\\\*(?![\w*])", r"*\1*", escaped)


def find_by_its_end(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> Any:
    """Resolve a reference to the only documented object of its kind whose dotted name ends in the target."""
    if node.get("refdomain") != "py":
        return None
    python, role = env.get_domain("py"), node["reftype"]
    target = re.sub(r"\(.*\)$", "", node["reftarget"].lstrip("."))
    kinds = set(python.objtypes_for_role(role) or ()) - {"module"}
    if "." not in target:
        kinds -= {"attribute", "property"}  # A bare word more likely names a parameter.
    matches = {
        name: entry
        for name, entry in python.objects.items()
        if entry.objtype in kinds and not entry.aliased and (name == target or name.endswith(f".{target}"))
    }
    if len(matches) == 1:
        ((name, entry),) = matches.items()
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, name)
    # Annotations may name types of other packages or internal types. An explicit reference in the text must resolve.
    may_be_unknown = role == "obj" or "refexplicit" not in node
    return contnode if may_be_unknown else None
