"""Large runs: small files whose views change within 100 ms, whose names can be read, and which are painted in parts."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import explorer_maps as maps
import explorer_pages
import pytest
from explorer_maps import ATTENTION, CANVAS, LENS
from playwright.sync_api import expect

MOST = 100  # milliseconds
# From an event to the frame after everything that it asked for is drawn, in ms.
TIMED = """async ([what, value]) => {
    const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
    const root = document.querySelector(".dl-explorer");
    const shown = () => [...document.querySelectorAll(".dl-map")].find((one) => one.checkVisibility()).heatMap;
    const element = what === "map" ? null : document.querySelector(what);
    await frame();
    const start = performance.now();
    if (what === "map") shown().go(...value);
    else if (value === null) element.click();
    else {
        element.value = value;
        element.dispatchEvent(new Event(["range", "search"].includes(element.type) ? "input" : "change"));
    }
    do await frame(); while (root.dataset.state !== "ready");
    return performance.now() - start;
}"""
# Whether all rows that the filter leaves are there: they come in parts.
ALL_ROWS = """() => {
    const rows = document.querySelectorAll(".dl-facts tbody tr").length;
    return rows === Number(document.querySelector(".dl-facts tfoot th").textContent.match(/\\d+/)[0]);
}"""
CHANGES = {
    "cells": [("map", cell) for cell in ([3, 40], [4, 20], [4, 30])],
    "next step": [("[aria-label='next step']", None)] * 5,
    "views": [(f"[data-view={name}]", None) for name in ("lens", "trace", "attention", "canvas", "token")],
    "steps": [("input[type=range]", step) for step in ("2", "30", "7", "20", "11")],
    "layers": [(f".dl-layers button:nth-child({layer})", None) for layer in (12, 5, 11)],
    "colours of the canvas": [
        ("[data-key*=confidence]", name) for name in ("entropy", "commitment", "margin", "confidence")
    ],
}
OWN = {
    "lens": [("[data-key*=rank]", name) for name in ("rank", "entropy", "top", "probability", "rank")],
    "attention": [(f".dl-heads button:nth-child({head})", None) for head in (4, 2, 3)],
}


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of 256 positions, 64 steps and 32 layers, and of 64 positions and 512 steps."""
    folder = tmp_path_factory.mktemp("large")
    made = {
        "wide": explorer_pages.large_page(256, 64, 32, different=16),
        "long": explorer_pages.large_page(64, 512, 1),
    }
    return {name: explorer_pages.write(page, folder, name) for name, page in made.items()}


def test_the_files_are_below_three_megabytes(pages: dict[str, Path], sizes: dict[str, Path]) -> None:
    assert pages["large"].stat().st_size < 3_000_000
    assert sizes["wide"].stat().st_size < 3_000_000


@pytest.mark.parametrize("view", ["token", "canvas", "lens", "trace", "attention"])
def test_views_change_at_once(opened: Callable[..., Any], sizes: dict[str, Path], view: str) -> None:
    """Every change of view, step, layer and colours takes less than 100 ms, of three tries in a page of their own."""
    slow: list[Any] = []
    for _ in range(3):
        page = opened(f"{sizes['wide'].as_uri()}#view={view}&layer=10&step=1&position=40")
        measured = {}
        for name, changes in {**({"own": OWN[view]} if view in OWN else {}), **CHANGES}.items():
            if not (name == "cells" and view == "token"):
                page.wait_for_timeout(300)  # The neighbours of a step are decoded while nothing else happens.
                measured[name] = timed(page, changes)
                page.evaluate(TIMED, [f"[data-view={view}]", None])
        page.close()
        slow = [(name, *times) for name, times in measured.items() if not is_fast(*times)]
        if not slow:
            break
    assert slow == []


def test_512_steps_of_64_positions_stay_responsive(opened: Callable[..., Any], sizes: dict[str, Path]) -> None:
    page = opened(f"{sizes['long'].as_uri()}#view=canvas&layer=1&step=1&canvas=entropy")
    for changes in (CHANGES["next step"], CHANGES["colours of the canvas"]):
        passed, worked = timed(page, changes)
        assert is_fast(passed, worked), (passed, worked)
    maps.click(page, CANVAS, 1, 20)
    page.keyboard.press("PageDown")
    page.wait_for_selector("[data-state=ready]")
    *_, last = maps.rows(page, CANVAS)  # steps up to 511
    assert last.endswith("511")
    expect(page.get_by_label("Step", exact=True)).to_have_value(last.partition("–")[0])
    inside = "map.y(values[0]) >= map.top && map.y(values[0] + 1) <= map.height + 1"
    assert maps.asked(page, CANVAS, inside, len(maps.rows(page, CANVAS)) - 1)


def test_a_table_of_1200_facts_stays_responsive(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Steps, selections, orders and filters take less than 100 ms each, of three tries."""
    values = [
        dict(
            recalled=i % 3 == 0, p=i * 37 % 101 / 101, commitment=i % 16, effect=None, run=None, error=None, studied=[]
        )
        for i in range(1200)
    ]
    facts = [
        dict(
            id=i, prompt=f"Person {i} is the", subject=None, answer=f" miner of town {i}.", asked=None, values={"0": x}
        )
        for i, x in enumerate(values)
    ]
    path = explorer_pages.write(replace(explorer_pages.large_page(12, 16, 2), facts=facts), tmp_path, "many")
    sort = "[aria-label^='Sort by {}']"
    changes = {
        "steps": [("[aria-label='next step']", None)] * 5,
        "orders": [(sort.format(name), None) for name in ("p(answer)", "p(answer)", "decided")],
        "filters": [("[aria-label=Filter]", text) for text in ("1", "", "town 7")],
        "all": [("[aria-label='Select all rows']", None)] * 2,
    }
    slow: list[Any] = []
    for _ in range(3):
        page, measured = opened(path.as_uri()), {"opening": []}
        page.wait_for_timeout(300)
        measured["opening"] = timed(page, [(".dl-tools [aria-pressed]", None)])
        for name, several in changes.items():
            measured[name] = ([], [])
            for change in several:
                page.wait_for_function(ALL_ROWS)
                for times, time in zip(measured[name], timed(page, [change]), strict=True):
                    times += time
        page.close()
        slow = [(name, *times) for name, times in measured.items() if not is_fast(*times)]
        if not slow:
            break
    assert slow == []


def test_the_colours_of_4096_steps_change_at_once(opened: Callable[..., Any], tmp_path: Path) -> None:
    path = explorer_pages.write(explorer_pages.large_page(8, 4096, 1), tmp_path, "longest")
    page = opened(f"{path.as_uri()}#view=canvas&step=1")
    page.wait_for_timeout(1_000)  # The steps that are near are decoded.
    passed, worked = timed(page, CHANGES["colours of the canvas"])
    assert is_fast(passed, worked), (passed, worked)


def timed(page: Any, changes: list[tuple[str, Any]]) -> tuple[list[float], list[float]]:
    """Milliseconds that pass, and for which the page's main thread has had a processor."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def work() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(1000 * metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    passed, worked = [], []
    for change in changes:
        before = work()
        passed.append(page.evaluate(TIMED, list(change)))
        worked.append(work() - before)
    return passed, worked


def is_fast(passed: list[float], worked: list[float]) -> bool:
    """Whether each change takes less than 100 ms. Beside other processes, which share the caches and units of a core,
    the time that passes says little; all changes but one then need the page's thread for less than that."""
    if os.getloadavg()[0] < (os.cpu_count() or 1):
        return bool(passed) and all(time < MOST for time in passed)
    return bool(worked) and sorted(worked)[-2 if len(worked) > 2 else -1] < MOST


def test_only_cells_in_view_are_painted(opened: Callable[..., Any], sizes: dict[str, Path]) -> None:
    page = opened(f"{sizes['wide'].as_uri()}#view=lens&layer=10&step=1&position=200&colour=top")
    counted = """(() => {
        const { cell } = map.shown, seen = [];
        map.shown.cell = (r, c) => { seen.push([r, c]); return cell(r, c); };
        map.repaint();
        map.shown.cell = cell;
        return seen;
    })()"""
    cells = maps.asked(page, LENS, counted)
    assert len(cells) < 33 * 90
    assert any(column == 200 for _, column in cells)  # the selected position has scrolled into view
    assert not any(column == 0 for _, column in cells)


@pytest.mark.parametrize("name", ["large", "wide"])
@pytest.mark.parametrize("view", [LENS, ATTENTION])
def test_names_of_many_columns_do_not_overlap(
    opened: Callable[..., Any], pages: dict[str, Path], sizes: dict[str, Path], view: str, name: str
) -> None:
    path = pages["large"] if name == "large" else sizes[name]
    page = opened(f"{path.as_uri()}#view={maps.VIEWS[view]}&layer=10&step=1")
    assert maps.asked(page, view, "map.isSlanted")
    apart = maps.asked(page, view, "map.cellWidth * Math.sin(55 * Math.PI / 180)")
    assert apart > 12  # pixels of a line of 11 pixel letters
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
