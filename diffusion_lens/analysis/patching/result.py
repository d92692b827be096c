"""The result of a patching sweep, and how far its estimates are from exact patching."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens import plots
from diffusion_lens.records.results import PicturedResult, Saved, Table, shaped
from diffusion_lens.settings.figures import styled

_TITLE = "Effect of patching a clean state"


@dataclass(frozen=True, eq=False)
class EstimateError:
    """Estimated and exact effects of the cells with the largest estimates.

    Attributes:
        cells: Int[cell axis], index of each cell in the scores of the grid.
        estimated: Float[cell], estimated effect of each cell, score - corrupted.
        exact: Float[cell], effect of each cell when it is patched.
    """

    cells: Int[Tensor, "cell axis"]
    estimated: Float[Tensor, "cell"]
    exact: Float[Tensor, "cell"]

    @classmethod
    def by_step(cls, errors: Sequence["EstimateError | None"]) -> "EstimateError | None":
        """Joins the errors of several steps; the index of the step comes first in `cells`."""
        present = [(step, error) for step, error in enumerate(errors) if error is not None]
        if not present:
            return None
        return cls(
            torch.cat([F.pad(error.cells, (1, 0), value=step) for step, error in present]),
            torch.cat([error.estimated for _, error in present]),
            torch.cat([error.exact for _, error in present]),
        )

    @property
    def difference(self) -> Float[Tensor, "cell"]:
        """Estimated minus exact effect of each cell."""
        return self.estimated - self.exact

    @property
    def max_abs(self) -> float:
        """Largest absolute difference."""
        return float(self.difference.abs().max())

    @property
    def correlation(self) -> float:
        """Pearson's correlation of estimated and exact effects; NaN for fewer than two cells, or if all are equal."""
        if len(self.exact) < 2:
            return math.nan
        return float(torch.corrcoef(torch.stack([self.estimated, self.exact]))[0, 1])


@dataclass(frozen=True, eq=False, repr=False)
class PatchGrid(PicturedResult, Saved):
    """The scores of one site.

    Columns of the data frame: those of step, layer, pos, head and neuron that are axes of the grid, score, effect; with
    pos also corrupted_pos (the position that is patched, where it differs from pos in the clean run) and token. Where
    cells have several positions or neurons that are patched together, their columns have texts, such as "1, 2".

    Attributes:
        scores: Float[*rest], metric of the corrupted run with one cell patched; `axes` names its axes. NaN at positions
            that are not reached yet in a step.
        axes: Those of "step", "layer", "pos", "head" and "neuron" that apply. The heads of k and v are key/value heads;
            "pos" of the pattern is the query.
        site: Activation that was patched.
        clean: Float[*step], metric of the clean run (of each step); NaN where that run is laid out differently, so that
            the metric's rows mean something else there.
        corrupted: Float[*step], metric of the corrupted run (of each step).
        coordinates: Coordinates along each axis: indices of steps, layers, heads and neurons; for "pos" a position, or
            the [clean, corrupted] pairs that are patched together.
        labels: Text at each entry of "pos" in the first row of the batch, for each step.
        error: Comparison of the estimates with exact patching; `None` for the exact method.
        record: Method, metric, rows, guidance, tokens of both runs (of each step), models, hashes of the weights,
            hooks, modules and versions. With steps, "trajectory" contains the networks that wrote the clean and the
            corrupted canvases.
    """

    KIND = "patch grid"
    SHOWS = "the effect of patching a state of one run into another, by position and layer"

    scores: Float[Tensor, "*rest"]
    axes: tuple[str, ...]
    site: str
    clean: Float[Tensor, "*step"]
    corrupted: Float[Tensor, "*step"]
    coordinates: dict[str, list[Any]]
    labels: list[list[str]]
    error: EstimateError | None
    record: dict[str, Any]

    def _shows(self) -> str:
        return f"the effect of patching {self.site} of one run into another, by position and layer"

    def _axes(self) -> Iterable[tuple[str, Any]]:
        return (("*step", self.coordinates.get("step")),)

    def _check(self) -> None:
        shape, n_steps = [len(self.coordinates[axis]) for axis in self.axes], len(self.coordinates.get("step", [0]))
        if list(self.scores.shape) != shape or "step" in self.axes[1:]:
            raise ValueError(f"the scores are {list(self.scores.shape)}, and the coordinates of their axes {shape}")
        others = [each for axis in self.axes if axis not in ("pos", "neuron") for each in self.coordinates[axis]]
        groups = [each if isinstance(each, list) else [each] for each in self.coordinates.get("neuron", ())]
        others += [neuron for group in groups for neuron in group]
        _both_sides(self.coordinates.get("pos", ()))
        if not all(isinstance(each, int) for each in others):
            raise ValueError("the coordinates of steps, layers, heads and neurons are whole numbers")
        n_pos = len(self.coordinates.get("pos", ()))
        if len(self.labels) < n_steps or ("pos" in self.axes and any(len(row) != n_pos for row in self.labels)):
            raise ValueError("labels needs a text for each position of each step")

    @property
    def effect(self) -> Float[Tensor, "*rest"]:
        """Change of the metric by the patch: scores - corrupted."""
        n_cell_axes = self.scores.dim() - self.corrupted.dim()
        return self.scores - self.corrupted.view(*self.corrupted.shape, *[1] * n_cell_axes)

    @styled
    def plot(
        self,
        step: int | None = None,
        head: int | None = None,
        ax: Any = None,
        title: str | None = None,
        limits: tuple[float, float] | None = None,
        *,
        neuron: int | Sequence[int] | None = None,
    ) -> Any:
        """Heat map of the effect: positions down (or heads or neurons, where all positions are patched together),
        layers across. Returns the matplotlib axes.

        Args:
            step, head, neuron: Step and head, or neuron or neurons patched together, to draw, where the grid has
                several.
            limits: Effects at the ends of the colour scale; by default minus and plus the largest absolute effect.
        """
        unit, chosen = ("neuron", neuron) if "neuron" in self.axes else ("head", head)
        down = "pos" if "pos" in self.axes else unit if unit in self.axes and chosen is None else None
        effect, labels = self.effect, self.labels[0]
        for axis, number in (("head", head), ("neuron", neuron), ("step", step)):
            index = None if axis == down else self._index(axis, number)
            if index is not None:
                effect = effect.select(self.axes.index(axis), index)
                labels = self.labels[index] if axis == "step" else labels
        if down is None:
            effect, labels = effect[:, None], ["all positions"]
        elif down == unit:
            labels = [f"{unit} {number}" for number in self.coordinates[unit]]
        bound = float(effect.nan_to_num().abs().max())
        return plots.labelled_map(
            effect.T,
            rows=labels,
            layers=self.coordinates["layer"],
            xlabel=f"layer whose {self.site} is patched",
            hue="RdBu",
            limits=limits or (-bound, bound),
            bar="effect",
            title=title or _TITLE,
            ax=ax,
        )

    def _table(self) -> Table:
        axes: dict[str, Any] = {axis: self.coordinates[axis] for axis in self.axes}
        if any(isinstance(each, list) for each in axes.get("neuron", ())):
            axes["neuron"] = [str(each).strip("[]") for each in axes["neuron"]]
        values: dict[str, Any] = {"score": self.scores, "effect": self.effect}
        if "pos" in axes:
            axes["pos"], corrupted = _both_sides(axes["pos"])
            of_pos = [len(axes[axis]) if axis == "pos" else 1 for axis in self.axes]
            of_labels = [len(axes[axis]) if axis in ("step", "pos") else 1 for axis in self.axes]
            labels = self.labels if "step" in axes else self.labels[:1]
            values["corrupted_pos"] = shaped(corrupted, *of_pos)
            values["token"] = shaped([label for of_step in labels for label in of_step], *of_labels)
        return Table.of_cells(axes, values, most="effect")

    def _picture(self) -> Any:
        """The step and the head with the largest effect, where the grid has several."""
        sizes = self.effect.abs().nan_to_num()
        chosen = {}
        for i, axis in enumerate(self.axes):
            if axis == "step" or (axis in ("head", "neuron") and "pos" in self.axes):
                chosen[axis] = self.coordinates[axis][int(sizes.movedim(i, 0).flatten(1).amax(dim=1).argmax())]
        said = ", ".join(f"{axis} {number}" for axis, number in chosen.items())
        return self.plot(**chosen, title=f"{_TITLE}\n{said}".rstrip())

    def _index(self, axis: str, number: int | Sequence[int] | None) -> int | None:
        """Index of a step, head or neuron along its axis; `None` if the grid has no such axis."""
        number = number if number is None or isinstance(number, int) else list(number)
        if axis not in self.axes:
            if number is not None:
                raise ValueError(f"this grid of {self.site!r} has no {axis} axis; its axes are {', '.join(self.axes)}")
            return None
        coordinates = self.coordinates[axis]
        if number not in coordinates and (number is not None or len(coordinates) > 1):
            raise ValueError(f"{axis}={number}: say which {axis} to draw, one of {coordinates}")
        return 0 if number is None else coordinates.index(number)


def _both_sides(cells: Sequence[int | Sequence[Sequence[int]]]) -> list[list[Any]]:
    """The clean and the corrupted positions of all cells: numbers, or texts if a cell has several positions."""
    pairs = [[[cell, cell]] if isinstance(cell, int) else cell for cell in cells]
    sides = [[[pair[side] for pair in of_cell] for of_cell in pairs] for side in (0, 1)]
    if all(len(of_cell) == 1 for of_cell in pairs):
        return [[of_cell[0] for of_cell in side] for side in sides]
    return [[", ".join(map(str, of_cell)) for of_cell in side] for side in sides]
