"""Figures of the pages, drawn at every build.

The pages' own code draws `docs/_made/*.png`. If the code of such a page, or of one that takes long (`LONG` in
`tests/snippets.py`), does not print the output that the page shows, the build warns. The demonstration draws the
figures of README.md and docs/index.md, `docs/images/*.png`.
"""

import os
import re
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from snippets import LONG, blocks, run_python, same_output
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

from diffusion_lens.cli import demo

logger = getLogger(__name__)
FOLDER = "_made"


def pages_to_run(source: Path) -> list[Path]:
    """Pages that contain Python and show a figure from the folder of drawn figures, and those that take long."""
    return [source / page for page in sorted(LONG)] + [
        page
        for page in sorted(source.glob("*.md"))
        if f"({FOLDER}/" in page.read_text(encoding="utf-8")
        and any(block.language == "python" for block in blocks(page))
    ]


def make_pictures(page: Path) -> list[Path]:
    """Run a page in its own folder and keep the figures that it shows. Returns their paths."""
    made = Path(__file__).parent / FOLDER
    shown = set(re.findall(rf"\({FOLDER}/([^)]+)\)", page.read_text(encoding="utf-8")))
    made.mkdir(exist_ok=True)
    here = Path.cwd()
    with tempfile.TemporaryDirectory(dir=made) as scratch:
        os.chdir(scratch)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for block, output in run_python(page):
                    if not same_output(output, block.output or ""):
                        logger.warning(
                            "the page shows another output than its code prints:\n%s",
                            output,
                            location=f"{page}:{block.line}",
                        )
        finally:
            os.chdir(here)
        figures = sorted(figure for figure in Path(scratch).glob("*.png") if figure.name in shown)
        # Moving is atomic, so that two simultaneous builds never see partial figures.
        return [Path(shutil.move(figure, made / figure.name)) for figure in figures]


def draw_demo(folder: Path) -> None:
    """Draw the figures of the demonstration, which README.md and docs/index.md show, into a folder."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for figure in demo.run(Path(scratch)):
            shutil.move(figure, folder / figure.name)


def make_all(app: Sphinx) -> None:
    """Draw the figures of all pages. Two pages must not draw figures with the same name."""
    draw_demo(Path(app.srcdir) / "images")
    drawn: dict[str, Path] = {}
    for page in pages_to_run(Path(app.srcdir)):
        for picture in make_pictures(page):
            if picture.name in drawn:
                logger.warning("%s is drawn by %s too", picture.name, drawn[picture.name].name, location=str(page))
            drawn[picture.name] = page


def setup(app: Sphinx) -> dict[str, bool]:
    torch.set_num_threads(1)  # More threads only slow down small models.
    app.connect("builder-inited", make_all)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
