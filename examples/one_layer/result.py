"""Results of the one-layer experiment: curves of single trainings, and all of them as a table and a figure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.over_facts.study import StudyResult
from diffusion_lens.plots.axes import panels
from diffusion_lens.records.results import Saved, Table, one_line, shaped
from one_layer.objectives import OBJECTIVES
from one_layer.toy import INFILL, VARIANTS, Cell

# Panels of the figure: the title, and the measure.
PANELS = {
    "p(answer), as trained": "same_probability",
    "p(answer), in reverse": "reverse_probability",
    "evidence percentile, in reverse": "percentile_reverse",
    "correlation of routes": "routes",
    "gradient cosine, attn.v": "cosine_v",
    "gradient cosine, unembed": "cosine_u",
}
# Columns of the text table.
COLUMNS = ("same_accuracy", "reverse_accuracy", "reverse_probability", "percentile_reverse", "routes", "cosine_v",
           "cosine_u", "cosine_q")  # fmt: skip
NAMES = {"mdm": "MDM", "ar": "AR", **{name: objective.title for name, objective in OBJECTIVES.items()}}
# Measures whose curves are written to JSON: what recall and each signature is judged by, and the baselines.
FOLLOWED = (
    "same_accuracy", "reverse_accuracy", "same_probability", "reverse_probability", "percentile_reverse", "reuse",
    "routes", *(f"{kind}_{matrix}" for kind in ("cosine", "shuffled") for matrix in ("v", "down", "u", "q")),
)  # fmt: skip
_DIGITS = 4
_PANEL_COLUMNS = 3
Panels = Mapping[str, Mapping[str, Float[Tensor, "run step"]]]
Group = tuple[str, str, str, int]  # positions, variant, data, depth


class Spread(NamedTuple):
    """Mean, smallest and largest value over the seeds."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class CellCurves(Saved):
    """One training.

    Attributes:
        values: Float[step measure], the measures of the study at every measured step.
        final_loss: Mean loss of the last 20 steps.
        seconds: Duration of the training in seconds.
    """

    KIND: ClassVar[str] = "one-layer training"

    values: Float[Tensor, "step measure"]
    final_loss: float
    seconds: float

    __repr__ = one_line

    def equals(self, other: "CellCurves") -> bool:
        """Whether both are identical to the bit, NaN included; their durations may differ."""
        same_values = torch.equal(self.values.view(torch.int32), other.values.view(torch.int32))
        return same_values and self.final_loss == other.final_loss


@dataclass(frozen=True, eq=False)
class OneLayerStudy(StudyResult[CellCurves]):
    """The trainings of a study. The "facts" of its record are the trainings, each a `Cell`.

    Columns of the data frame: run, step, measure, positions, variant, data, depth, seed, value.

    Attributes:
        values: Float[run step measure]; the steps are `steps`, the measures those of the record.
        final_losses: Mean loss of the last 20 steps of each run.
        seconds: Duration of each run in seconds.
        ids: The id of each run.
        record: Recipe, all cells of the study by id, measured steps, measures, versions.
    """

    values: Float[Tensor, "run step measure"]
    final_losses: list[float]
    seconds: list[float]
    ids: list[str]
    record: dict[str, Any]

    KIND: ClassVar[str] = "one-layer study"
    SHOWS: ClassVar[str] = "recall and the three signatures by training step, mean over seeds"
    FACT_FILE: ClassVar[type[Any]] = CellCurves
    UNIT: ClassVar[str] = "training"

    @classmethod
    def of(cls, results: Mapping[str, CellCurves], record: dict[str, Any]) -> "OneLayerStudy":
        """One result from some trainings of a study."""
        found = list(results.values())
        empty = torch.empty(0, len(record["measured_at"]), len(record["measures"]))
        return cls(
            torch.stack([each.values for each in found]) if found else empty,
            [each.final_loss for each in found],
            [each.seconds for each in found],
            list(results),
            record,
        )

    def by_fact(self) -> dict[str, CellCurves]:
        """The inverse of `of`."""
        rows = zip(self.values, self.final_losses, self.seconds, strict=True)
        return {cell_id: CellCurves(*row) for cell_id, row in zip(self.ids, rows, strict=True)}

    @property
    def steps(self) -> list[int]:
        """Numbers of training steps after which the networks were measured."""
        steps: list[int] = self.record["measured_at"]
        return steps

    @property
    def cells(self) -> list[Cell]:
        """The cell of each run."""
        return [Cell(**self.record["facts"][cell_id]) for cell_id in self.ids]

    @property
    def groups(self) -> dict[Group, list[int]]:
        """The runs that differ in the seed only, by (positions, variant, data, depth)."""
        groups: dict[Group, list[int]] = {}
        for i, cell in enumerate(self.cells):
            groups.setdefault((cell.positions, cell.variant, cell.data, cell.depth), []).append(i)
        return groups

    def curves(
        self, measure: str, positions: str, variant: str, data: str = "one-way", depth: int = 1
    ) -> Float[Tensor, "run step"]:
        """One measure during the training, a row for each seed.

        Raises:
            ValueError: There is no such measure, or no such training in this study.
        """
        if measure not in self.record["measures"]:
            raise ValueError(f"measure={measure!r}; it must be one of {', '.join(self.record['measures'])}")
        if (group := (positions, variant, data, depth)) not in self.groups:
            there = "; ".join(" ".join(map(str, each)) for each in self.groups)
            raise ValueError(f"no training is {' '.join(map(str, group))}; there are {there}")
        return self.values[self.groups[group], :, self.record["measures"].index(measure)]

    def table(self, step: int = -1) -> dict[Group, dict[str, Spread]]:
        """Every measure over the seeds, by (positions, variant, data, depth).

        Args:
            step: Index among the measured `steps`; by default the last.
        """
        return {
            group: {
                name: Spread(float(column.mean()), float(column.min()), float(column.max()))
                for name, column in zip(self.record["measures"], self.values[runs, step].T, strict=True)
            }
            for group, runs in self.groups.items()
        }

    def rows(self, step: int = -1) -> list[dict[str, Any]]:
        """The table as JSON data: a row for each group, with [mean, smallest, largest] of every measure."""
        return [
            {
                **_named(group),
                "seeds": len(self.groups[group]),
                **{name: [_rounded(value) for value in spread] for name, spread in measures.items()},
            }
            for group, measures in self.table(step).items()
        ]

    def curve_rows(self) -> list[dict[str, Any]]:
        """The `FOLLOWED` curves as JSON data, and `INFILL`: a row for each group, with a list over steps for each of
        its `seeds`.

        A measure that does not exist for a group is left out.
        """
        return [
            {
                **_named(group),
                "seeds": [self.cells[run].seed for run in runs],
                **{
                    name: [[_rounded(value) for value in run] for run in self.curves(name, *group).tolist()]
                    for name in (*FOLLOWED, *(name for name in self.record["measures"] if name == INFILL))
                    if not self.curves(name, *group).isnan().all()
                },
            }
            for group, runs in self.groups.items()
        ]

    def to_text(self, step: int = -1) -> str:
        """The table as text: number of seeds, means over them, and the range of the reverse accuracy."""
        heads = ("same", "reverse", "(range)", "p", "percentile", "routes", "cos V", "cos U", "cos Q")
        lines = [f"after {self.steps[step]} steps, means over the seeds"]
        width = max([3, *(len(NAMES[group[1]]) for group in self.groups)])
        lines.append(
            f"{'positions':9} {'':{width}} {'data':9} depth seeds " + " ".join(f"{head:>10}" for head in heads)
        )
        for group, row in self.table(step).items():
            (positions, variant, data, depth), seeds = group, len(self.groups[group])
            reverse = row["reverse_accuracy"]
            cells = [_number(row[name].mean) for name in COLUMNS]
            cells.insert(2, f"{reverse.low:.2f}-{reverse.high:.2f}")
            shown = " ".join(f"{cell:>10}" for cell in cells)
            lines.append(f"{positions:9} {NAMES[variant]:{width}} {data:9} {depth:5} {seeds:5} {shown}")
        return "\n".join(lines)

    def plot(self, data: str | None = None, depth: int | None = None) -> list[Any]:
        """Draw accuracy and signatures by training step, one line for each kind of positions, the MDM above the others.

        Lines are means over the seeds, bands reach from the smallest to the largest value.

        Args:
            data: Name of the sentences; by default the study's first.
            depth: Number of layers; by default the study's smallest.

        Raises:
            ValueError: There is no such training in this study.
        """
        rows = {}
        data = data or next((group[2] for group in self.groups), "any")
        depth = depth or min((group[3] for group in self.groups), default=1)
        for variant in dict.fromkeys(group[1] for group in self.groups) or VARIANTS:
            kinds = [group[0] for group in self.groups if group[1:] == (variant, data, depth)]
            if not kinds:
                raise ValueError(f"this study has no training of {variant} on {data} data with {depth} layers")
            rows[NAMES[variant]] = {
                title: {kind: self.curves(name, kind, variant, data, depth) for kind in kinds}
                for title, name in PANELS.items()
            }
        return training_panels(rows, self.steps)

    def _table(self) -> Table:
        cells = self.cells
        of_runs = {
            name: shaped([getattr(cell, name) for cell in cells], -1, 1, 1)
            for name in ("positions", "variant", "data", "depth", "seed")
        }
        axes = {"run": self.ids, "step": self.steps, "measure": self.record["measures"]}
        return Table.of_cells(axes, {**of_runs, "value": self.values})

    def __repr__(self) -> str:
        return f"OneLayerStudy({len(self.ids)} of {len(self.record['facts'])} trainings of {self.steps[-1]} steps)"


def _named(group: Group) -> dict[str, str | int]:
    return dict(zip(("positions", "variant", "data", "depth"), group, strict=True))


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{round(value, 2) + 0.0:.2f}"  # no -0.00


def training_panels(rows: Mapping[str, Panels], steps: Sequence[int]) -> list[Any]:
    """Draw means with the range over the runs; returns the axes in reading order.

    Args:
        rows: By the title of a group, by the title of a panel, by the label of a line: a curve for each run. A line
            that is NaN is left out, and a panel without lines says that there are none.
        steps: Number of training steps of each column, drawn at equal distances.
    """
    n_panels = _PANEL_COLUMNS * -(-max(map(len, rows.values())) // _PANEL_COLUMNS)
    n_lines = n_panels // _PANEL_COLUMNS * len(rows)
    _, axes = panels(n_lines, _PANEL_COLUMNS, width=2.6 * _PANEL_COLUMNS, height=2.3 * n_lines)
    at = range(len(steps))
    for row, (row_title, row_panels) in enumerate(rows.items()):
        for unused in axes[row * n_panels + len(row_panels) : (row + 1) * n_panels]:
            unused.set_axis_off()
        for column, (title, lines) in enumerate(row_panels.items()):
            ax = axes[row * n_panels + column]
            ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
            for i, (label, curves) in enumerate(lines.items()):
                if bool(curves.isnan().all()):
                    continue
                ax.plot(at, curves.mean(dim=0).tolist(), color=f"C{i}", marker=".", label=label)
                low, high = curves.amin(dim=0).tolist(), curves.amax(dim=0).tolist()
                ax.fill_between(at, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
            if not ax.lines[1:]:
                ax.text(0.5, 0.5, "not defined", ha="center", transform=ax.transAxes, fontsize=8)
            ax.set_ylim(-1.05 if "correlation" in title or "cosine" in title else -0.03, 1.05)
            ax.set_xticks(list(at), [str(step) for step in steps], rotation=45)
            ax.tick_params(labelsize=7)
            ax.set_title(f"{row_title}: {title}", fontsize=8)
            if row + 1 == len(rows):
                ax.set_xlabel("training step", fontsize=8)
    axes[0].legend(fontsize=7)
    return axes
