"""The pictures of the pages, made by their own code each time the site is built: `docs/_made/*.png`.

Where the code of such a page prints something else than the page says, the build warns.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from snippets import blocks, run_python
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

logger = getLogger(__name__)
FOLDER = "_made"


def pages_with_pictures(source: Path) -> list[Path]:
    """The pages that show a picture which Python on a page of this kind has drawn."""
    return [
        page
        for page in sorted(source.glob("*.md"))
        if f"({FOLDER}/" in page.read_text(encoding="utf-8")
        and any(block.language == "python" for block in blocks(page))
    ]


def make_pictures(page: Path) -> list[Path]:
    """Run a page in a folder of its own and keep what it draws; returns the paths."""
    made = page.parent / FOLDER
    made.mkdir(exist_ok=True)
    here = Path.cwd()
    with tempfile.TemporaryDirectory(dir=made) as scratch:
        os.chdir(scratch)
        try:
            for block, said in run_python(page):
                if said != (block.output or ""):
                    where = f"{page}:{block.line}"
                    logger.warning("the page says something else than is printed:\n%s", said, location=where)
        finally:
            os.chdir(here)
        drawn = sorted(Path(scratch).glob("*.png"))
        # Moved whole: two builds at a time do not see half of one another's pictures.
        return [Path(shutil.move(picture, made / picture.name)) for picture in drawn]


def make_all(app: Sphinx) -> None:
    """Every page's pictures; no two pages draw one of the same name."""
    drawn: dict[str, Path] = {}
    for page in pages_with_pictures(Path(app.srcdir)):
        for picture in make_pictures(page):
            if picture.name in drawn:
                logger.warning("%s is drawn by %s too", picture.name, drawn[picture.name].name, location=str(page))
            drawn[picture.name] = page


def setup(app: Sphinx) -> dict[str, bool]:
    torch.set_num_threads(1)  # the models are small: more threads only wait for one another
    app.connect("builder-inited", make_all)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
