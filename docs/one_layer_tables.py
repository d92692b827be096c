"""The one-layer experiment: `{one-layer-table} FILE DATA` and the figure, from what its command wrote.

The files are the `command.json` of four runs: `one_layer_seeds.json` (one layer, twelve seeds), `one_layer.json` (the
default settings), `one_layer_long.json` (3000 steps) and `one_layer_objectives.json` (other objectives). Every build
draws the figure `_made/one_layer.png` from the first.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import markdown, parsed

from diffusion_lens.plots import save_figure
from one_layer.result import NAMES, PANELS, training_panels
from one_layer.toy import INFILL

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
# Of a study with other objectives, whose signatures the page does not discuss.
OBJECTIVE_COLUMNS = {
    "same_accuracy": "as trained",
    INFILL: "A before “is B”",
    "reverse_accuracy": "in reverse",
    "reverse_probability": "p in reverse",
    "percentile_reverse": "evidence percentile",
}
DRAWN = "one_layer_seeds.json"
WITH_RANGE = (INFILL, "reverse_accuracy", "reverse_probability", "routes", "cosine_v")
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
    columns = OBJECTIVE_COLUMNS if INFILL in found[0] else COLUMNS
    order = {(row["depth"], NAMES[row["variant"]]): None for row in found}
    rows = [
        (str(depth), variant, f"`{row['positions']}`", *(_cell(row[name], name in WITH_RANGE) for name in columns))
        for depth, variant in sorted(order, key=lambda each: (each[0], each[1] != "MDM"))
        for row in found
        if (row["depth"], NAMES[row["variant"]]) == (depth, variant)
    ]
    settings = written["settings"]
    return [
        *markdown(("layers", "", "positions", *columns.values()), rows),
        "",
        f"After {settings['steps']} steps; means over {settings['seeds']} seeds, and the smallest and largest value.",
    ]


def _cell(spread: list[Any], with_range: bool) -> str:
    if any(value is None for value in spread):  # NaN in JSON
        return "–"
    mean, low, high = (round(float(value), 2) + 0.0 for value in spread)  # no -0.00
    return f"{mean:.2f} ({low:.2f}–{high:.2f})" if with_range and f"{low:.2f}" != f"{high:.2f}" else f"{mean:.2f}"


def panels_of(written: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """The panels of the figure, as `training_panels` takes them, from the curves in the file; and the steps."""
    steps: list[int] = written["results"]["steps"]
    rows: dict[str, Any] = {name: {title: {} for title in PANELS} for name in VARIANTS.values()}
    for curves in written["results"]["curves"]:
        undefined = [[math.nan] * len(steps)] * len(curves["seeds"])
        for title, measure in PANELS.items():
            lines = rows[VARIANTS[curves["variant"]]][title]
            lines[curves["positions"]] = torch.tensor(curves.get(measure, undefined))
    return rows, steps


def draw_figure(app: Sphinx) -> None:
    """Write the figure of the page."""
    axes = training_panels(*panels_of(study(DRAWN)))
    save_figure(axes[0], Path(app.srcdir) / "_made" / "one_layer.png")


class OneLayerTable(SphinxDirective):
    """`{one-layer-table} one_layer.json one-way`."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        return parsed(self, table_lines(study(self.arguments[0]), self.arguments[1]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("one-layer-table", OneLayerTable)
    app.connect("builder-inited", draw_figure)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
