"""Run the examples for the gallery: `python run_examples.py OUT`.

OUT/NAME.txt is what an example prints, and OUT/NAME.png the first figure that it writes. An `AssertionError` ends the
run where an example prints or writes other than `tests/example_checks.py` expects.
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
from example_checks import check
from figures import blank_figures
from quick_examples import QUICKLY

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def run(example: Path, out: Path) -> None:
    """Run one example in an empty folder, check it, and keep what it prints and its first figure."""
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        text = out / f"{example.stem}.txt"
        with text.open("w", encoding="utf-8") as printed, redirect_stdout(printed), blank_figures(drawn="*.png"):
            run_path(str(example))["main"](QUICKLY.get(example.stem, []))
        check(example.stem, text.read_text(encoding="utf-8"))
        figures = sorted(Path("out").glob("*.png"), key=lambda figure: figure.stat().st_mtime_ns)
        shutil.move(figures[0], out / f"{example.stem}.png")
        os.chdir(out)


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES[0].parent))  # packages beside the examples, as in `python examples/NAME.py`
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for example in EXAMPLES:
        run(example, out)
