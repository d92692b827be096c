"""The notebooks of docs/notebooks are stored twice, as .ipynb to open and as .py to read, and both are the same.

`make docs` runs them.
"""

from pathlib import Path

import jupytext
import pytest
from jupytext.compare import compare_notebooks

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def test_every_notebook_is_a_pair_and_listed() -> None:
    assert len(NAMES) == 5
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    listed = (FOLDER.parent / "gallery.md").read_text(encoding="utf-8").splitlines()
    assert {f"notebooks/{name}" for name in NAMES} <= set(listed)


@pytest.mark.parametrize("name", NAMES)
def test_both_files_of_a_pair_agree(name: str) -> None:
    stored, text = jupytext.read(FOLDER / f"{name}.ipynb"), jupytext.read(FOLDER / f"{name}.py")
    compare_notebooks(stored, text, fmt="py:percent")
    assert [cell for cell in stored.cells if cell.get("outputs")] == [], "run `make notebooks`: outputs are not stored"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_says_how_to_open_it(name: str) -> None:
    first = jupytext.read(FOLDER / f"{name}.py").cells[0].source
    assert first.startswith("# ")
    assert "pip install" in first
    assert f"jupyter lab docs/notebooks/{name}.ipynb" in first
