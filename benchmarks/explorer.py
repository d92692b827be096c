"""How long the changes of a large explorer page take in Chromium, up to the frame that shows them.

A run of 256 positions, 64 steps and 32 layers is changed in each view, and a table of 1,200 facts is ordered and
filtered. The floor is a click that changes nothing. The table gives milliseconds, the median of the changes of a kind
and the slowest one, and the most that one of them draws: `tests/browser/test_large.py` bounds that, on any machine.

    python benchmarks/explorer.py
"""

import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import chromium
import explorer_changes as changes
import explorer_pages

VIEWS = ("token", "canvas", "lens", "trace", "attention")
Kinds = dict[str, list[changes.Cost]]


def nothing(page: Any) -> Kinds:
    return {"nothing": changes.costs(page, [("body", None)] * 5)}


def measure(browser: Any, name: str, address: str, costs_of: Callable[[Any], Kinds]) -> None:
    """Open a page, make its changes, and print a row for each kind."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    context.add_init_script(changes.COUNTING)
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector(chromium.DRAWN)
    for kind, costs in costs_of(page).items():
        times = [cost.milliseconds for cost in costs]
        drawn, layouts = max(cost.drawn for cost in costs), max(cost.layouts for cost in costs)
        print(
            f"{name:<12}{kind:<24}{statistics.median(times):>8.0f}{max(times):>9.0f}{drawn:>8,}{layouts:>9}", flush=True
        )
    context.close()


def main() -> None:
    try:
        chromium.executable()
    except chromium.Missing as error:
        print(f"left out: {error}")
        return
    print(f"{'page':<12}{'change':<24}{'median':>8}{'slowest':>9}{'drawn':>8}{'layouts':>9}")
    with tempfile.TemporaryDirectory() as name, chromium.started() as browser:
        folder = Path(name)
        wide = explorer_pages.write(explorer_pages.large_page(256, 64, 32, different=16), folder, "wide").as_uri()
        measure(browser, "", wide, nothing)
        for view in VIEWS:
            address = f"{wide}#view={view}&layer=10&step=1&position=40"
            measure(browser, view, address, partial(changes.costs_of_view, view=view))
        measure(browser, "1,200 facts", changes.write_facts(folder, 1200).as_uri(), changes.costs_of_facts)


if __name__ == "__main__":
    main()
