"""A run of 52 positions, 32 steps and 20 layers: a file below 3 MB whose views change within 200 ms."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import explorer_pages
import pytest
from playwright.sync_api import expect

# From an event to the frame in which everything that it asked for is drawn, in ms.
TIMED = """async ([selector, value]) => {
    const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
    const element = document.querySelector(selector), root = document.querySelector(".dl-explorer");
    await frame();
    const start = performance.now();
    if (value === null) element.click();
    else { element.value = value; element.dispatchEvent(new Event(element.type === "range" ? "input" : "change")); }
    do await frame(); while (root.dataset.state !== "ready");
    return performance.now() - start;
}"""
CELL = '.dl-{} [role=gridcell][data-row="{}"][data-column="{}"]'


def test_the_file_is_below_three_megabytes(pages: dict[str, Path]) -> None:
    assert pages["large"].stat().st_size < 3_000_000


@pytest.mark.parametrize(
    ("selector", "values"),
    [
        ("[aria-label='next step']", [None] * 5),
        ("input[type=range]", ["2", "30", "7", "20", "11"]),
        (CELL.format("canvas", 5, 20), [None] * 3),
        (CELL.format("lens", 4, 30), [None] * 3),
        (CELL.format("trace", 4, 30), [None] * 3),
        (".dl-heads button:nth-child(4)", [None] * 3),
        ("[data-key*=confidence]", ["entropy", "commitment", "margin", "confidence"]),
        ("[data-key*=rank]", ["rank", "entropy", "top", "probability", "rank"]),
    ],
)
def test_views_change_at_once(opened: Callable[..., Any], selector: str, values: list[str | None]) -> None:
    """The page's thread works for less than 200 ms, and no more passes; beside other processes, which share the caches
    and units of a core, for less than 400 ms."""
    page = opened("large", fragment="#layer=10&step=1")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    passed, worked = [], []
    for value in values:
        before = work(session)
        passed.append(page.evaluate(TIMED, [selector, value]))
        worked.append(1000 * (work(session) - before))
    idle = os.getloadavg()[0] < (os.cpu_count() or 1)
    assert min(worked) < (200 if idle else 400), worked
    if idle:
        assert min(passed) < 200, passed


def test_512_steps_of_64_positions_stay_responsive(opened: Callable[..., Any], tmp_path: Path) -> None:
    path = explorer_pages.write(explorer_pages.large_page(64, 512, 1), tmp_path, "long")
    page = opened(f"{path.as_uri()}#layer=1&step=1&canvas=entropy")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    for selector, values, most in (
        ("[aria-label='next step']", [None] * 3, 200),
        ("[data-key*=confidence]", ["commitment", "probability", "entropy"], 500),
    ):
        worked = []
        for value in values:
            before = work(session)
            page.evaluate(TIMED, [selector, value])
            worked.append(1000 * (work(session) - before))
        assert min(worked) < most * (1 if os.getloadavg()[0] < (os.cpu_count() or 1) else 2), worked
    page.locator(CELL.format("canvas", 1, 20)).click()
    page.keyboard.press("PageDown")
    expect(page.locator(CELL.format("canvas", 511, 20))).to_be_in_viewport()


def work(session: Any) -> float:
    """Seconds for which the page's main thread has had a processor."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def test_labels_of_52_columns_do_not_overlap(opened: Callable[..., Any]) -> None:
    page = opened("large", fragment="#layer=10&step=1")
    lines = page.evaluate(
        """() => [...document.querySelectorAll(".dl-lens [role=columnheader]:not(.dl-corner)")].map((head) => {
            const text = head.firstChild, angle = 55 * Math.PI / 180;
            const apart = head.getBoundingClientRect().width * Math.sin(angle);
            return [apart, parseFloat(getComputedStyle(text).lineHeight)];
        })"""
    )
    assert len(lines) == 52
    assert all(distance > height for distance, height in lines)


def test_wide_columns_show_tokens(opened: Callable[..., Any]) -> None:
    page = opened("large", fragment="#layer=10&step=1")
    cell = page.locator(CELL.format("lens", 0, 30))
    assert cell.inner_text() == ""
    page.get_by_label("Wide columns").check()
    page.wait_for_selector("[data-state=ready]")
    assert cell.inner_text() != ""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
