"""The one-layer experiment: `{one-layer-table} FILE DATA`, read from the `command.json` that its command wrote.

The files are `one_layer.json`, of the default settings, and `one_layer_long.json`, of trainings of 3000 steps.
"""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import markdown, parsed

HERE = Path(__file__).parent
COLUMNS = {
    "same_accuracy": "as trained",
    "reverse_accuracy": "in reverse",
    "reverse_probability": "p in reverse",
    "percentile_reverse": "evidence percentile",
    "cut_reverse": "edge cut (nats)",
    "routes": "routes",
    "cosine_v": "cosine W_V",
    "cosine_u": "cosine W_U",
    "cosine_q": "cosine W_Q",
}
WITH_RANGE = ("reverse_accuracy", "reverse_probability", "routes", "cosine_v")
VARIANTS = {"mdm": "MDM", "ar": "AR"}


def study(file: str) -> dict[str, Any]:
    """What the command wrote."""
    found: dict[str, Any] = json.loads((HERE / file).read_text(encoding="utf-8"))
    return found


def table_lines(written: dict[str, Any], data: str) -> list[str]:
    """A row for each depth, kind of positions and variant: means over the seeds, with the range of some.

    Raises:
        ValueError: The study has no such data.
    """
    found = [row for row in written["results"]["table"] if row["data"] == data]
    if not found:
        raise ValueError(f"the study has no data {data!r}; it has {written['settings']['data']}")
    order = {(row["depth"], VARIANTS[row["variant"]]): None for row in found}
    rows = [
        (str(depth), variant, f"`{row['positions']}`", *(_cell(row[name], name in WITH_RANGE) for name in COLUMNS))
        for depth, variant in sorted(order, key=lambda each: (each[0], each[1] != "MDM"))
        for row in found
        if (row["depth"], VARIANTS[row["variant"]]) == (depth, variant)
    ]
    settings = written["settings"]
    return [
        *markdown(("layers", "", "positions", *COLUMNS.values()), rows),
        "",
        f"After {settings['steps']} steps; means over {settings['seeds']} seeds, and the smallest and largest value.",
    ]


def _cell(spread: list[Any], with_range: bool) -> str:
    if any(value is None for value in spread):  # NaN in JSON
        return "–"
    mean, low, high = (round(float(value), 2) + 0.0 for value in spread)  # no -0.00
    return f"{mean:.2f} ({low:.2f}–{high:.2f})" if with_range and f"{low:.2f}" != f"{high:.2f}" else f"{mean:.2f}"


class OneLayerTable(SphinxDirective):
    """`{one-layer-table} one_layer.json one-way`."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        return parsed(self, table_lines(study(self.arguments[0]), self.arguments[1]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("one-layer-table", OneLayerTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
