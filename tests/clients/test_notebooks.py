"""The runner of notebooks, on a small notebook: each kind of result, and what is said about it."""

import json
from pathlib import Path

import pytest
from oracles.notebooks import Cell, Changes, code_cells, run_notebook

CELLS = [
    ("markdown", "# A demo\n## The *setup*"),
    ("code", "%pip --version\nmodel = load('gpt2', device=device)"),
    ("code", ""),
    ("markdown", "no heading"),
    ("code", "text = 'When Mary'\nprint(text)\nlayer = 5"),
    ("markdown", "### [Use](https://x)"),
    ("code", "answer: int = model[layer]\nraise KeyError('layer 5 is missing. There are 4')"),
    ("code", "total = answer + 1"),
    ("code", "print(total)"),
    ("code", "fetch()"),
    ("code", "half = 0.5"),
]


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    path = tmp_path / "demo.ipynb"
    cells = [{"cell_type": kind, "source": source.splitlines(keepends=True)} for kind, source in CELLS]
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    return path


def test_cells_are_numbered_as_in_the_notebook_and_know_their_heading(notebook: Path) -> None:
    cells = code_cells(notebook)
    assert [cell.number for cell in cells] == [1, 3, 4, 5, 6, 7, 8]
    assert [cell.section for cell in cells[:3]] == ["The setup", "The setup", "Use"]


def test_each_cell_has_its_result_and_its_reason(notebook: Path) -> None:
    changes = Changes(
        replaced={"prompts": {"When Mary": "Ada"}, "layers": {"layer = 5": "layer = 'missing'"}},
        patterns={"model": {r"load\([^)]*\)": "LOADED"}},
        left_out={"fetch()": "needs the network"},
        checks={"text = ": "text == 'Ada'", "half = ": "half == 1"},
        reasons={"'missing'": "no such layer"},
        notes={"text = ": "another name"},
    )
    rows = run_notebook(code_cells(notebook), changes, {"LOADED": {}})
    assert [row["cell"] for row in rows if row["checked"]] == [3, 8]
    found = [(row["cell"], row["changed"], row["result"], row["reason"], row["note"]) for row in rows]
    assert found == [
        (1, ["model"], "runs", "", ""),
        (3, ["prompts", "layers"], "runs", "", "another name"),
        (4, [], "fails", "no such layer", ""),
        (5, [], "fails", "needs `answer` of cell 4", ""),
        (6, [], "fails", "needs `total` of cell 5", ""),
        (7, [], "left out", "needs the network", ""),
        (8, [], "wrong", "`half == 1` is not true", ""),
    ]


def test_the_first_sentence_of_an_error_is_its_reason() -> None:
    cell = Cell(1, "", "raise ValueError('the first line\\nof [3]: and more')")
    (row,) = run_notebook([cell], Changes(), {})
    assert row["reason"] == "ValueError: the first line of [3]"


def test_a_change_that_no_cell_contains_is_an_error() -> None:
    changes = Changes(replaced={"prompts": {"John": "Ada"}}, notes={"absent": "x"})
    with pytest.raises(
        ValueError, match=r"no cell contains \['absent', 'John'\]: the changes were written for another"
    ):
        run_notebook([Cell(1, "", "pass")], changes, {})
