"""Other people's code on the bundled models: `{notebook-totals}`, `{notebook-tables}` and `{tool-table}`.

The tables are read from JSON. benchmarks/transformer_lens_notebooks.py writes that of the notebooks, and
tests/test_transformer_lens_analysis.py tests each row of that of the tools.
"""

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import markdown, parsed

HERE = Path(__file__).parent
RESULTS = ("runs", "wrong", "fails", "left out")
VARIANTS = {"tiny-mdm": "diffusion model", "tiny-ar": "AR baseline"}
# What a row of the tool table says of both models.
TOOL_RESULTS = {"holds": "works", "tensors": "works", "refuses": "no"}


def notebooks() -> dict[str, Any]:
    """The table of the notebooks."""
    found: dict[str, Any] = json.loads((HERE / "transformer_lens_notebooks.json").read_text(encoding="utf-8"))
    return found


def tools() -> list[dict[str, str]]:
    """The rows of the tools."""
    found: list[dict[str, str]] = json.loads((HERE / "transformer_lens_tools.json").read_text(encoding="utf-8"))
    return found


def total_lines(table: dict[str, Any]) -> list[str]:
    """For each notebook, how many cells have which result, and in how many that run the numbers of layers change."""
    rows = []
    for notebook in table["notebooks"]:
        cells = notebook["cells"]
        layers = sum("layers" in cell["changed"] and cell["tiny-ar"]["result"] == "runs" for cell in cells)
        counts = [Counter(cell[model]["result"] for cell in cells) for model in VARIANTS]
        outcomes = [", ".join(f"{count[result]} {result}" for result in RESULTS if count[result]) for count in counts]
        rows.append((notebook["name"], str(len(cells)), *outcomes, str(layers)))
    both = [Counter(cell[model]["result"] for n in table["notebooks"] for cell in n["cells"]) for model in VARIANTS]
    outcomes = [", ".join(f"{count[result]} {result}" for result in RESULTS if count[result]) for count in both]
    n_cells = sum(len(notebook["cells"]) for notebook in table["notebooks"])
    n_layers = sum(int(row[-1]) for row in rows)
    rows.append(("**all**", str(n_cells), *outcomes, str(n_layers)))
    return [
        *markdown(("notebook", "cells", *VARIANTS.values(), "run with changed layers"), rows),
        "",
        f"Made on {table['date']} with diffusion_lens {table['diffusion_lens']} and the notebooks of TransformerLens "
        f"{table['transformer_lens']}. Why cells fail:",
        "",
        *failure_lines(table),
    ]


def failure_lines(table: dict[str, Any]) -> list[str]:
    """A line for each reason of a failure, with the cells that fail for it. Cells that need others are not listed."""
    cells_of: dict[str, dict[str, list[str]]] = {}
    for notebook in table["notebooks"]:
        for cell in notebook["cells"]:
            failing = [model for model in VARIANTS if cell[model]["result"] in ("fails", "wrong")]
            for reason in {
                cell[model]["reason"] for model in failing if not cell[model]["reason"].startswith("needs `")
            }:
                who = "both models" if len(failing) == 2 else f"the {VARIANTS[failing[0]]}"
                cells_of.setdefault(f"{who}: {_escaped(reason)}", {}).setdefault(notebook["name"], []).append(
                    str(cell["cell"])
                )
    return [
        f"- {reason} (" + "; ".join(f"{name} {', '.join(cells)}" for name, cells in by_notebook.items()) + ")"
        for reason, by_notebook in sorted(cells_of.items())
    ]


def notebook_lines(table: dict[str, Any]) -> list[str]:
    """A table to open for each notebook; a row for neighbouring cells of a section that have the same results."""
    lines = []
    for notebook in table["notebooks"]:
        rows = []
        for (section, changed, *outcomes), cells in groupby(notebook["cells"], key=_row):
            numbers = [cell["cell"] for cell in cells]
            span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
            rows.append((span, section, changed, *outcomes))
        lines += [
            f"<details><summary>{notebook['name']}</summary>",
            "",
            *markdown(("cells", "section", "changed", *VARIANTS.values()), rows),
            "",
            "</details>",
            "",
        ]
    return lines


def tool_lines(rows: list[dict[str, str]]) -> list[str]:
    """One line for each public name of `transformer_lens.tools.analysis`."""
    cells = []
    for row in rows:
        notes = ["takes tensors"] * (row["result"] == "tensors") + [row["note"]] * bool(row["note"])
        cells.append((f"`{row['tool']}`", TOOL_RESULTS[row["result"]], "; ".join(notes)))
    return markdown(("`transformer_lens.tools.analysis`", "on both models", "note"), cells)


def _row(cell: dict[str, Any]) -> tuple[str, ...]:
    return (_escaped(cell["section"]), ", ".join(cell["changed"]), *(_outcome(cell[model]) for model in VARIANTS))


def _outcome(outcome: dict[str, str]) -> str:
    result = outcome["result"] if outcome["result"] == "runs" else f"**{outcome['result']}**"
    result += ", checked" if outcome.get("checked") and outcome["result"] == "runs" else ""
    more = _escaped(outcome.get("reason") or outcome.get("note") or "")
    return f"{result}: {more}" if more else result


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<")


class NotebookTotals(SphinxDirective):
    """`{notebook-totals}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, total_lines(notebooks()))


class NotebookTables(SphinxDirective):
    """`{notebook-tables}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, notebook_lines(notebooks()))


class ToolTable(SphinxDirective):
    """`{tool-table}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, tool_lines(tools()))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("notebook-totals", NotebookTotals)
    app.add_directive("notebook-tables", NotebookTables)
    app.add_directive("tool-table", ToolTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
