"""How the models in `diffusion_lens/loading/assets` were trained; `make tiny`, `make kinds`, `make pair` repeat it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def renamed_together(folder: Path) -> Iterator[Path]:
    """A temporary folder; unless an exception is raised, its files replace those of `folder`, whose others stay."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as temporary:
        yield Path(temporary)
        for file in Path(temporary).iterdir():
            os.replace(file, folder / file.name)
