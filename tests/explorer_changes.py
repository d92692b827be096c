"""What a change of a page costs: how much is drawn, how many nodes and layouts it takes, and how long it lasts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import explorer_pages

CHANGES: dict[str, list[tuple[str, Any]]] = {
    "cells": [("map", cell) for cell in ([3, 40], [4, 20], [4, 30])],
    "next step": [("[aria-label='next step']", None)] * 5,
    "views": [(f"[data-view={name}]", None) for name in ("lens", "trace", "attention", "canvas", "token")],
    "steps": [("input[type=range]", step) for step in ("2", "30", "7", "20", "11")],
    "layers": [(f".dl-layers button:nth-child({layer})", None) for layer in (12, 5, 11)],
    "colours of the canvas": [
        ("[data-key*=confidence]", name) for name in ("entropy", "commitment", "margin", "confidence")
    ],
}
OF_VIEW: dict[str, dict[str, list[tuple[str, Any]]]] = {
    "lens": {"numbers": [("[data-key*=rank]", name) for name in ("rank", "entropy", "top", "probability", "rank")]},
    "attention": {"heads": [(f".dl-heads button:nth-child({head})", None) for head in (4, 2, 3)]},
}
_SORT = "[aria-label^='Sort by {}']"
OF_FACTS: dict[str, list[tuple[str, Any]]] = {
    "opening": [(".dl-tools [aria-pressed]", None)],
    "steps": [("[aria-label='next step']", None)] * 5,
    "orders": [(_SORT.format(name), None) for name in ("p(answer)", "p(answer)", "decided")],
    "filters": [("[aria-label=Filter]", text) for text in ("1", "", "town 7")],
    "all rows": [("[aria-label='Select all rows']", None)] * 2,
}
# Before the scripts of a page: count what is drawn on canvases, and the nodes that come and go.
COUNTING = """window.work = { drawn: 0, nodes: 0 };
const drawing = CanvasRenderingContext2D.prototype;
for (const name of ["fillRect", "fillText", "strokeRect", "stroke", "fill", "drawImage", "putImageData"]) {
    const draw = drawing[name];
    drawing[name] = function (...given) { work.drawn++; return draw.apply(this, given); };
}
new MutationObserver((changes) => {
    for (const { addedNodes, removedNodes } of changes) work.nodes += addedNodes.length + removedNodes.length;
}).observe(document, { subtree: true, childList: true });"""
# From an event to the frame after everything that it asked for is drawn.
_CHANGED = """async ([what, value]) => {
    const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
    const root = document.querySelector(".dl-explorer");
    const shown = () => [...document.querySelectorAll(".dl-map")].find((one) => one.checkVisibility()).heatMap;
    const element = what === "map" ? null : document.querySelector(what);
    await frame();
    const before = { ...work }, start = performance.now();
    if (what === "map") shown().go(...value);
    else if (value === null) element.click();
    else {
        element.value = value;
        element.dispatchEvent(new Event(["range", "search"].includes(element.type) ? "input" : "change"));
    }
    const rows = document.querySelectorAll(".dl-facts tbody tr").length;
    do await frame(); while (root.dataset.state !== "ready");
    const milliseconds = performance.now() - start;
    return { milliseconds, rows, drawn: work.drawn - before.drawn, nodes: work.nodes - before.nodes };
}"""
# Whether all rows that the filter leaves are there: they come in parts.
_ALL_ROWS = """() => {
    const rows = document.querySelectorAll(".dl-facts tbody tr").length;
    return rows === Number(document.querySelector(".dl-facts tfoot th").textContent.match(/\\d+/)[0]);
}"""


@dataclass(frozen=True)
class Cost:
    """What one change took.

    Attributes:
        milliseconds: Time that passed, up to the frame that shows the change.
        rows: Rows of the table of facts right after the event; more may come after that frame.
        drawn: Rectangles, texts and shapes drawn on canvases.
        nodes: Nodes that were added to the page or removed from it.
        layouts: How often the browser laid the page out.
    """

    milliseconds: float
    rows: int
    drawn: int
    nodes: int
    layouts: int


def costs(page: Any, changes: list[tuple[str, Any]]) -> list[Cost]:
    """Make the changes one after the other in a page that was opened with `COUNTING`."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def layouts() -> int:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return int(next(metric["value"] for metric in metrics if metric["name"] == "LayoutCount"))

    found = []
    for change in changes:
        before = layouts()
        counted = page.evaluate(_CHANGED, list(change))
        found.append(Cost(**counted, layouts=layouts() - before))
    return found


def costs_of_view(page: Any, view: str) -> dict[str, list[Cost]]:
    """The changes of a page that shows a view, which is shown again after each kind of them."""
    found = {}
    for name, changes in {**OF_VIEW.get(view, {}), **CHANGES}.items():
        if not (name == "cells" and view == "token"):
            page.wait_for_timeout(300)  # The neighbours of a step are decoded while nothing else happens.
            found[name] = costs(page, changes)
            costs(page, [(f"[data-view={view}]", None)])
    return found


def costs_of_facts(page: Any) -> dict[str, list[Cost]]:
    """The changes of a page with a table of facts, each after the rows of the one before are there."""
    found: dict[str, list[Cost]] = {}
    for name, changes in OF_FACTS.items():
        for change in changes:
            if found:
                page.wait_for_function(_ALL_ROWS)
            found.setdefault(name, []).extend(costs(page, [change]))
    return found


def write_facts(folder: Path, n_facts: int) -> Path:
    """Write a page with a table of facts that were measured on one model."""
    values = [
        dict(
            recalled=i % 3 == 0, p=i * 37 % 101 / 101, commitment=i % 16, effect=None, run=None, error=None, studied=[]
        )
        for i in range(n_facts)
    ]
    facts = [
        dict(
            id=i, prompt=f"Person {i} is the", subject=None, answer=f" miner of town {i}.", asked=None, values={"0": x}
        )
        for i, x in enumerate(values)
    ]
    page = replace(explorer_pages.large_page(12, 16, 2), facts=facts)
    return explorer_pages.write(page, folder, f"facts-{n_facts}")
