"""The pictures of the tutorial, made by its own code each time the site is built: `docs/_made/*.png`.

Where the code prints something else than the page says, the build warns.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from snippets import run_python
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

logger = getLogger(__name__)
PAGE = "tutorial.md"
FOLDER = "_made"


def make_pictures(source: Path) -> list[Path]:
    """Run the tutorial in a folder of its own and keep what it draws; returns the paths."""
    made = source / FOLDER
    made.mkdir(exist_ok=True)
    here = Path.cwd()
    with tempfile.TemporaryDirectory(dir=made) as scratch:
        os.chdir(scratch)
        try:
            for block, said in run_python(source / PAGE):
                if said != (block.output or ""):
                    where = f"{source / PAGE}:{block.line}"
                    logger.warning("the page says something else than is printed:\n%s", said, location=where)
        finally:
            os.chdir(here)
        drawn = sorted(Path(scratch).glob("*.png"))
        # Moved whole: two builds at a time do not see half of one another's pictures.
        return [Path(shutil.move(picture, made / picture.name)) for picture in drawn]


def setup(app: Sphinx) -> dict[str, bool]:
    torch.set_num_threads(1)  # the models are small: more threads only wait for one another
    app.connect("builder-inited", lambda app: make_pictures(Path(app.srcdir)))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
