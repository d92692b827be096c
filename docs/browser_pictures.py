"""Pictures that Chromium takes: the explorer before the pages are read, the home page after they are written.

The build warns if there is no Chromium, since a page would then show a picture that is missing.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import chromium
import explorer_pages
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

logger = getLogger(__name__)
WIDTH = 1280  # pixels
GRAPH = "_made/explorer_graph.png"
HOME = "_static/home.png"


def photograph(page: Any, target: Path) -> None:
    """Save what the page shows, once it is drawn."""
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # Moving is atomic, so that two simultaneous builds never see partial pictures.
        picture = Path(scratch) / target.name
        page.screenshot(path=picture)
        picture.replace(target)


def photograph_file(path: Path, target: Path, drawn: str, fragment: str = "") -> None:
    """Save a picture of an HTML file once an element is there. Warns if there is no browser."""
    try:
        with chromium.started() as browser:
            page = browser.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme="light")
            page.goto(f"{path.as_uri()}{fragment}")
            page.wait_for_selector(drawn)
            # High enough to show it whole, so that what sticks to an edge is at the end.
            height = page.evaluate("document.documentElement.scrollHeight")
            page.set_viewport_size({"width": WIDTH, "height": height})
            photograph(page, target)
    except chromium.Missing as error:
        logger.warning("%s is not made: %s", target.name, error)


def change_a_block(page: Any) -> None:
    """Run again without the attention of the selected block."""
    page.get_by_role("button", name="Change…").first.click()
    page.get_by_role("button", name="Apply").click()
    page.get_by_role("button", name="→").wait_for()


def measure_facts(page: Any) -> None:
    """Fill the table of facts, and sort it by what the second model recalls."""
    page.get_by_role("button", name="Facts").click()
    page.get_by_role("button", name="Measure").click()
    page.locator("tfoot td", has_text="%").first.wait_for()
    page.locator(".dl-explorer:not(.dl-computing)").wait_for(timeout=180_000)
    page.get_by_role("button", name="Sort by recalled, site-ar").click()


# What is done on the live page of the bundled pair before its picture is taken.
EXPLORED: dict[str, Callable[[Any], None]] = {
    "explorer": lambda page: None,
    "explorer_change": change_a_block,
    "explorer_facts": measure_facts,
}


def draw_explorer(app: Sphinx) -> None:
    """The live page of a bundled pair, as the page on the explorer describes it."""
    command = [sys.executable, "-m", "diffusion_lens", "explore", "site-mdm", "--against", "pair", "--no-browser"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    try:
        with (
            chromium.started() as browser,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server,
        ):
            try:
                assert server.stdout is not None
                address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
                for name, act in EXPLORED.items():
                    window = {"width": WIDTH, "height": 800}
                    page = browser.new_page(viewport=window, color_scheme="light", reduced_motion="reduce")
                    page.goto(address)
                    page.wait_for_selector(chromium.DRAWN)
                    act(page)
                    photograph(page, Path(app.srcdir) / "_made" / f"{name}.png")
                    page.close()
            finally:
                server.terminate()
    except chromium.Missing as error:
        logger.warning("the explorer has no pictures: %s", error)


def draw_graph(app: Sphinx) -> None:
    """The graph of a run in the explorer: two nodes are a group, and a third one is selected."""
    run, graph = explorer_pages.graphed()
    chosen = {
        "pinnedIds": ["4_1_4", "2_7_1"],
        "supernodes": [["reads the name", "4_1_4", "2_7_1"]],
        "clickedId": "13_3_6",
    }
    with tempfile.TemporaryDirectory() as scratch:
        page = explorer_pages.write(run.explore(graph=graph), Path(scratch), "graph")
        fragment = f"#step=5&position=6&view=graph&graph={quote(json.dumps(chosen))}"
        photograph_file(page, Path(app.srcdir) / GRAPH, chromium.DRAWN, fragment)


def draw_home(app: Sphinx, error: Exception | None) -> None:
    """The home page as it is built, beside the built pages."""
    if error is None and app.builder.format == "html":
        photograph_file(Path(app.outdir) / "index.html", Path(app.outdir) / HOME, "article h1")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", draw_explorer)
    app.connect("builder-inited", draw_graph)
    app.connect("build-finished", draw_home)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
