"""Tables of what benchmarks/floor.py measured, from the JSON of its `--out`."""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import markdown, parsed


def measured() -> dict[str, Any]:
    """The numbers of the benchmark."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "scaling.json").read_text(encoding="utf-8"))
    return found


def floor_lines(table: dict[str, Any]) -> list[str]:
    """A row for each job of the models with most layers: rate, work and memory."""
    first = table["rows"][0]["model"].split(", ", 1)[1]
    rows = [
        (row["job"], f"{row['seconds']:.2f} s", f"{row['rate']:.0%}", f"{row['work']:.2f}", f"{row['memory']:.0%}")
        for row in table["rows"]
        if row["model"].endswith(first)
    ]
    return markdown((f"job, {first}", "time", "rate", "work", "memory"), rows)


def prediction_lines(table: dict[str, Any]) -> list[str]:
    """A row for each job, with the predicted over the measured time on each model."""
    priced = [row for row in table["rows"] if "ratio" in row]
    models = list(dict.fromkeys(row["model"] for row in priced))
    sizes = list(dict.fromkeys(model.split(", ", 1)[1] for model in models))
    jobs = list(dict.fromkeys((row["job"], row["model"].split(", ")[0], row["at_most"]) for row in priced))
    rows = []
    for job, kind, at_most in jobs:
        ratios = {row["model"]: row for row in priced if row["job"] == job and row["model"].startswith(kind)}
        cells = [ratios[f"{kind}, {size}"] for size in sizes]
        name = job if kind in job else f"{job}, {kind}"
        rows.append(
            (
                f"{name}, at most" if at_most else name,
                *(f"{c['ratio']:.2f} of {1e3 * c['seconds']:,.0f} ms" for c in cells),
            )
        )
    return markdown(("predicted over measured time", *sizes), rows)


def single_lines(table: dict[str, Any]) -> list[str]:
    """The time to start, and the search for v* beside another implementation."""
    starts = [(f"`{name}`", f"{seconds:.2f} s of processor time") for name, seconds in table["starts"].items()]
    searches = [(name.replace("v*", "v\\*"), f"{ratio:.2f} times as fast") for name, ratio in table["searches"].items()]
    return markdown(("measured", ""), [*starts, *searches])


class FloorTable(SphinxDirective):
    """`{floor-table}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, floor_lines(measured()))


class PredictionTable(SphinxDirective):
    """`{prediction-table}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, prediction_lines(measured()))


class SingleNumbers(SphinxDirective):
    """`{single-numbers}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, single_lines(measured()))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("floor-table", FloorTable)
    app.add_directive("prediction-table", PredictionTable)
    app.add_directive("single-numbers", SingleNumbers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
