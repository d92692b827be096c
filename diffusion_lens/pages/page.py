"""`Page`: runs with their views, as one HTML file that needs no network or as an element of a notebook.

The explorer's ES modules are put together as one that stands in the file. Each imports names of its neighbours, `import
{ a, b } from "./neighbour.js";`, and exports its own. The one module has them in the order of their imports, without
these statements: all names are in one scope, so each is unique. A `CustomView` is one that a user has written, with its
data.
"""

import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from html import escape
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.pages.views import Stored, View, Words, pack, trace_entry, trace_view
from weight_conversion import renamed_when_whole

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


_OWN_VIEW = re.compile(
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
        found = _OWN_VIEW.search(self._text)
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


FORMAT = 1
LARGEST_PAGE = 16 * 2**20  # bytes
SHOWN_OF_HASH = 12  # characters of the SHA-256 of weights by which a link knows its model
_HEIGHT = 640  # pixels of the frame in a notebook
# Nothing is fetched and no form is sent, whatever the tokens contain. Scripts and styles are in the file itself.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
_BLANKS = ("", "[MASK]")
_MISSING = "This page contains a causal trace only. trajectory.explore(path, trace=...) writes one with all views."
# What the entry of a run does not need to give: its views, and what only runs of a model have.
_WITHOUT: dict[str, Any] = {
    **dict.fromkeys(
        (
            "spec",
            "base",
            "times",
            "revealed_at",
            "confidence",
            "predictions",
            "lens",
            "attention",
            "answer",
            "end",
            "verdict",
        )
    ),
    "model": 0,
    "prompt": "",
    "text": "",
    "python": {},
}


@dataclass(frozen=True)
class PageRun:
    """One run of a page.

    Attributes:
        entry: Its entry in the manifest, with all views.
        chunks: Bytes of each chunk, by name.
    """

    entry: dict[str, Any]
    chunks: dict[str, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, entry: Mapping[str, Any], traces: Sequence[View] = (), **views: View | None) -> "PageRun":
        """A run with its views, by name: predictions, lens, attention."""
        present = {name: view for name, view in views.items() if view is not None}
        chunks = {name: data for view in (*present.values(), *traces) for name, data in view.chunks.items()}
        entries = {name: view.entry for name, view in present.items()}
        return cls({**_WITHOUT, **entry, **entries, "traces": [view.entry for view in traces]}, chunks)


@dataclass(frozen=True)
class Page:
    """An explorer page; `write_page` writes it, and a notebook shows it.

    Attributes:
        title: Title of the page.
        models: Models of the runs, as plain data.
        runs: The runs, the first one shown first.
        facts: Facts of the table, as plain data; a run whose entry has a `fact` belongs to it.
        state: What the page shows at first, as its front end writes it; `None` for the beginning.
        scripts: Statements of JavaScript that add views (`CustomView.script`).
    """

    title: str
    models: Sequence[Mapping[str, Any]]
    runs: Sequence[PageRun]
    facts: Sequence[Mapping[str, Any]] = ()
    state: Mapping[str, Any] | None = None
    scripts: Sequence[str] = ()

    @property
    def manifest(self) -> dict[str, Any]:
        """What the page contains, as plain data; the numbers are in the chunks."""
        runs = [run.entry for run in self.runs]
        return {
            "format": FORMAT,
            "title": self.title,
            "models": list(self.models),
            "runs": runs,
            "facts": list(self.facts),
            "state": self.state,
        }

    def html(self) -> str:
        """The page as one HTML document, the same for the same data."""
        chunks = "".join(
            f'<script type="application/octet-stream;base64" data-run="{escape(run.entry["id"])}" '
            f'data-chunk="{escape(name)}">{_packed(data)}</script>\n'
            for run in self.runs
            for name, data in run.chunks.items()
        )
        return document(
            self.title,
            f'<script type="application/json" id="manifest">{_json(self.manifest)}</script>\n{chunks}',
            "\n".join([*self.scripts, 'mountFile(document.getElementById("explorer"));']),
            POLICY,
        )

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that neither side sees the other's styles and scripts."""
        return (
            f'<iframe title="{escape(self.title)}" srcdoc="{escape(self.html())}" '
            f'sandbox="allow-scripts allow-downloads" allow="clipboard-write" '
            f'style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'
        )

    def __repr__(self) -> str:
        views = sorted({"canvas"} | {name.partition("/")[0] for run in self.runs for name in run.chunks})
        return f"Page({self.title!r}, {len(self.runs)} run{'s' * (len(self.runs) != 1)}, {', '.join(views)})"


def write_page(page: Page, path: str | Path, max_bytes: int | None = None) -> Path:
    """Write a page as one `.html` file that needs no network. An interrupted write leaves no partial file.

    Args:
        max_bytes: Largest size that is written; a larger page is refused.

    Raises:
        ValueError: The path has another ending, or the page is too large.
    """
    target, text = html_path(path), page.html()
    if max_bytes is not None:
        require_size(page, text, max_bytes)
    with renamed_when_whole(target) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
    return target


def require_size(page: Page, text: str, max_bytes: int) -> str:
    """The text of a page; a `ValueError` that says what to leave out if it has more than `max_bytes`."""
    if (size := len(text.encode())) > max_bytes:
        raise ValueError(f"the page would have {size:,} bytes, and max_bytes is {max_bytes:,}: {_largest(page)}")
    return text


def step_slider(
    scores: Float[Tensor, "step pos layer"],
    *,
    str_canvases: Sequence[Sequence[str]],
    subject: tuple[int, int],
    steps: Sequence[int],
    layers: Sequence[int],
    positions: Sequence[int],
    kind: str,
    answer: Sequence[str],
    clean: Float[Tensor, "step"],
    corrupted: Float[Tensor, "step"],
    title: str,
) -> Page:
    """A heat map of each denoising step, with a slider over the steps and one colour scale for all.

    The scale goes from the lowest corrupted run to the highest score. Positions that the canvas does not contain yet
    (NaN) are grey.

    Args:
        str_canvases: Text of every position of the canvas, for each step; "" and "[MASK]" are masked.
        subject: First position of the subject, and one past its last.
        steps: Number of each step.
        layers: Layer of each column.
        positions: Position of each row.
        kind: Kind of state that was restored, "resid", "mlp" or "attn"; it selects the hue.
        answer: Text of each answer token.
        clean, corrupted: p(answer) in the clean and in the corrupted run.
    """
    texts = list(dict.fromkeys(word for canvas in str_canvases for word in canvas if word not in _BLANKS))
    words, by_id = Words(), dict(enumerate(texts))
    ids = {text: token for token, text in by_id.items()}
    canvases = [[words.index(ids.get(word, -1), by_id) for word in canvas] for canvas in str_canvases]
    trace = trace_entry(kind, kind, subject, positions, layers, steps, "".join(answer))
    entry = {
        "id": "trace",
        "label": title,
        "words": words.texts,
        "n_steps": len(steps),
        "first_step": steps[0],
        "steps": list(steps),
        "canvases": canvases,
        "given": [False] * len(canvases[0]),
        "real": [True] * len(canvases[0]),
        "missing": dict.fromkeys(("predictions", "lens", "attention"), _MISSING),
    }
    return Page(title, [], [PageRun.of(entry, [trace_view(trace, scores, clean.tolist(), corrupted.tolist())])])


def html_path(path: str | Path) -> Path:
    """The path of a page; one that does not end in .html is a `ValueError`."""
    target = Path(path)
    if target.suffix != ".html":
        raise ValueError(f"pages are HTML files; {target} should end in .html")
    return target


def document(title: str, body: str, start: str, policy: str, nonce: str = "") -> str:
    """An HTML document with the explorer's module and style.

    Args:
        body: Elements before the module.
        start: Statements at the end of the module.
        policy: Content security policy.
        nonce: Text by which the policy admits the module; empty where it admits every script of the document.
    """
    module, style = explorer_files()
    admitted = f' nonce="{escape(nonce)}"' if nonce else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<main id="explorer" class="dl-explorer"></main>\n{body}'
        f'<script type="module"{admitted}>{module}\n{start}</script>\n</body>\n</html>\n'
    )


def _packed(data: bytes) -> str:
    """Compressed without a time, so that the same data give the same file."""
    return base64.b64encode(gzip.compress(data, compresslevel=9, mtime=0)).decode("ascii")


def _json(data: Mapping[str, Any]) -> str:
    """JSON in ASCII without "<", so that no token ends the element or begins a comment in it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _largest(page: Page) -> str:
    """What to leave out: the largest views first."""
    sizes: dict[str, int] = {}
    for run in page.runs:
        for name, data in run.chunks.items():
            view = "facts" if "fact" in run.entry else name.partition("/")[0]
            sizes[view] = sizes.get(view, 0) + len(_packed(data))
        if "fact" in run.entry:
            sizes["facts"] += len(_json(run.entry))
    advice = {
        "attention": "cache fewer layers or steps of hook_pattern",
        "lens": "read fewer steps, positions or layers, or take a smaller top_k",
        "predictions": "give those of fewer tokens, predictions=trajectory.predictions(model, top_k=1)",
        "trace": "trace fewer steps",
        "facts": "give fewer of them",
        "circuit": "take fewer steps, circuit=scores.at_step(...)",
        "graph": "prune it, graph=graph.prune(0.9)",
        "experts": "cache fewer layers or steps of hook_experts",
    }
    largest: Iterable[str] = sorted(sizes, key=lambda view: -sizes[view])
    shown = "; ".join(f"{view} takes {sizes[view]:,} ({advice.get(view, 'give it fewer numbers')})" for view in largest)
    return f"{shown or 'the canvases alone take that much'}, or give a larger max_bytes"
