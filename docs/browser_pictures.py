"""Pictures that Chromium takes: the explorer before the pages are read, the home page after they are written.

The build warns if there is no Chromium, since a page would then show a picture that is missing.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import chromium
import explorer_pages
from snippets import run_python
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

logger = getLogger(__name__)
WIDTH = 1280  # pixels
EXPLORER = "_made/explorer.png"
OWN_VIEW = "_made/own_view.png"
HOME = "_static/home.png"


def photograph(page: Any, target: Path) -> None:
    """Save the whole page as one that is high enough to show it, so that what sticks to an edge is at the end."""
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": WIDTH, "height": height})
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
            photograph(page, target)
    except chromium.Missing as error:
        logger.warning("%s is not made: %s", target.name, error)


def draw_explorer(app: Sphinx) -> None:
    """The explorer page of a bundled model."""
    with tempfile.TemporaryDirectory() as scratch:
        page = explorer_pages.page_of(explorer_pages.explored("site-mdm"))
        path = explorer_pages.write(page, Path(scratch), "explorer")
        photograph_file(path, Path(app.srcdir) / EXPLORER, chromium.DRAWN, "#step=2&layer=3&position=4")


def draw_own_view(app: Sphinx) -> None:
    """The page with a view of one's own that the code of add_a_view.md writes."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            list(run_python(Path(app.srcdir) / "add_a_view.md"))
        finally:
            os.chdir(here)
        photograph_file(
            Path(scratch) / "margin.html", Path(app.srcdir) / OWN_VIEW, chromium.DRAWN, "#step=1&position=6&view=margin"
        )


def draw_home(app: Sphinx, error: Exception | None) -> None:
    """The home page as it is built, beside the built pages."""
    if error is None and app.builder.format == "html":
        photograph_file(Path(app.outdir) / "index.html", Path(app.outdir) / HOME, "article h1")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", draw_explorer)
    app.connect("builder-inited", draw_own_view)
    app.connect("build-finished", draw_home)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
