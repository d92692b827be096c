"""Run the examples for the gallery: `python run_examples.py OUT`.

OUT/NAME.txt is what an example prints, and OUT/NAME.png the first figure that it writes.
"""

import os
import shutil
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from runpy import run_path

import torch
from quick_examples import QUICKLY

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def run(example: Path, out: Path) -> None:
    """Run one example in an empty folder, and keep what it prints and its first figure."""
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        with (out / f"{example.stem}.txt").open("w", encoding="utf-8") as printed, redirect_stdout(printed):
            run_path(str(example))["main"](QUICKLY.get(example.stem, []))
        figures = sorted(Path("out").glob("*.png"), key=lambda figure: figure.stat().st_mtime_ns)
        shutil.move(figures[0], out / f"{example.stem}.png")
        os.chdir(out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for example in EXAMPLES:
        run(example, out)
