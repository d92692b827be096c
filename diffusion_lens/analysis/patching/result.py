"""The grid that a patching sweep leaves behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.patching.attribution import EstimateError
from diffusion_lens.records import as_dataclass, load_result, save_result

_TENSORS = ("scores", "clean", "corrupted")
_ERROR_TENSORS = ("cells", "estimated", "exact")


@dataclass(frozen=True, eq=False)
class PatchGrid:
    """One site swept.

    Attributes:
        scores: the metric of the corrupted run with one cell patched; its axes are named in `axes`. NaN where a place
            is not reached yet in a step.
        axes: "step", "layer", "pos", "head", as they apply. Of k and v the heads are the key/value heads; of the
            pattern, "pos" is the query.
        site: what was patched.
        clean: the metric of the clean run (of each step); NaN where that run is laid out otherwise, so that the
            metric's rows mean something else there.
        corrupted: the metric of the corrupted run (of each step).
        coordinates: what stands along each axis: numbers of steps, layers and heads; for "pos" a place, or the
            [clean, corrupted] pairs that are patched together.
        labels: the text at each entry of "pos", in the batch's first row, for each step.
        error: with method "attribution", how the estimate compares with exact patching.
        record: method, metric, rows, guidance, both runs' tokens (of each step), models, weights' hashes, hooks,
            modules, versions; with steps, under "trajectory", by what network the clean and the corrupted canvases were
            written.
    """

    scores: Float[Tensor, "*axes"]
    axes: tuple[str, ...]
    site: str
    clean: Float[Tensor, "*step"]
    corrupted: Float[Tensor, "*step"]
    coordinates: dict[str, list[Any]]
    labels: list[list[str]]
    error: EstimateError | None
    record: dict[str, Any]

    @property
    def effect(self) -> Float[Tensor, "*axes"]:
        """What the patch adds to the corrupted run: scores - corrupted."""
        n_cell_axes = self.scores.dim() - self.corrupted.dim()
        return self.scores - self.corrupted.view(*self.corrupted.shape, *[1] * n_cell_axes)

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        if self.error is not None:
            tensors |= {f"error.{name}": getattr(self.error, name) for name in _ERROR_TENSORS}
        record = {name: value for name, value in vars(self).items() if name not in (*_TENSORS, "error")}
        return save_result(path, "patch grid", tensors, record)

    @classmethod
    def load(cls, path: str | Path) -> "PatchGrid":
        """Read what `save` wrote."""
        tensors, record = load_result(path, "patch grid")
        error = {name.removeprefix("error."): tensors.pop(name) for name in list(tensors) if name.startswith("error.")}
        return as_dataclass(cls, {**tensors, **record, "error": EstimateError(**error) if error else None})

    def plot(
        self,
        step: int | None = None,
        head: int | None = None,
        ax: Any = None,
        title: str | None = None,
        limits: tuple[float, float] | None = None,
    ) -> Any:
        """Heat map of the effect: places (or, all places patched together, heads) down, layers across.

        Args:
            step, head: which, by its number, where the grid has several.
            limits: effects at the ends of the colour scale; by default the largest, either way.

        Returns:
            The matplotlib axes.
        """
        down = "pos" if "pos" in self.axes else "head" if "head" in self.axes and head is None else None
        effect, labels = self.effect, self.labels[0]
        for axis, number in (("head", head), ("step", step)):
            index = None if axis == down else self._index(axis, number)
            if index is not None:
                effect = effect.select(self.axes.index(axis), index)
                labels = self.labels[index] if axis == "step" else labels
        if down is None:
            effect, labels = effect[:, None], ["all places"]
        elif down == "head":
            labels = [f"head {number}" for number in self.coordinates["head"]]
        bound = float(effect.nan_to_num().abs().max())
        return plots.labelled_map(
            effect.T,
            rows=labels,
            layers=self.coordinates["layer"],
            xlabel=f"layer whose {self.site} is patched",
            hue="RdBu",
            limits=limits or (-bound, bound),
            bar="effect",
            title=title or "Effect of patching a clean state into the corrupted run",
            ax=ax,
        )

    def _index(self, axis: str, number: int | None) -> int | None:
        """Where a step or head stands along its axis; `None` if the grid has no such axis."""
        if axis not in self.axes:
            if number is not None:
                raise ValueError(f"this grid of {self.site!r} has no {axis} axis; its axes are {', '.join(self.axes)}")
            return None
        along = self.coordinates[axis]
        if number not in along and (number is not None or len(along) > 1):
            raise ValueError(f"{axis}={number}: say which {axis} to draw, one of {along}")
        return 0 if number is None else along.index(number)
