"""`Page`: runs with their views, as one HTML file that needs no network or as an element of a notebook."""

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.pages.modules import explorer_files
from diffusion_lens.pages.views import View, Words, trace_entry, trace_view
from weight_conversion import renamed_when_whole

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
