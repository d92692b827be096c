"""The result of linear probes."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.over_facts.intervals import Ends, mean_interval, share_interval
from diffusion_lens.analysis.steering_vectors import short_name
from diffusion_lens.hooks.names import nearest
from diffusion_lens.records.results import PicturedResult, Saved, Table
from diffusion_lens.settings import one_of


def _renamed(old: str, new: str) -> Any:
    def read(self: Any) -> Any:
        warnings.warn(f"{old} of a probe will be removed; use {new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read)


@dataclass(frozen=True, eq=False)
class LinearProbe(PicturedResult, Saved):
    """Linear probes of one label, one for each hook point.

    The score is R² for numbers, and accuracy for classes.

    Columns of the data frame: point, score, score_fitted, score_control, selectivity, penalty; of classes also low,
    high, selectivity_low and selectivity_high, the 95 % intervals over texts or runs.

    Attributes:
        weights: The weights by hook point, with the axes of the hook point after its positions, such as d_model; of
            classes with an axis for these before them.
        bias: Float[point *class].
        score: Float[point], score on the held-out texts or runs; R² is NaN if they all have the same label.
        score_fitted: Float[point], score on the rows that the probe was fitted to.
        score_control: Float[point], score on the held-out part of a probe of the control task.
        penalty: Float[point], relative penalty of each probe.
        score_position: Score on the held-out part of the mean or commonest label of each position; NaN for
            `rows="canvas"`.
        n_tested: Int[cluster], number of held-out rows of each held-out text or run that has any; `None` for numbers.
        right: Int[point cluster], number of these rows whose class is right; `None` for numbers.
        right_control: Int[point cluster], the same for the probe of the control task.
        record: Hook points, label, classes, positions, steps, kind of rows, split, penalties, seed, units and rows in
            each part, inputs, model, hash of the weights, hooks, versions.
    """

    KIND: ClassVar[str] = "linear probe"
    FORMER: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "time probe": {
            "r2": "score",
            "r2_fitted": "score_fitted",
            "r2_shuffled": "score_control",
            "r2_position": "score_position",
        }
    }
    ENTRIES: ClassVar[Mapping[str, Any]] = {"rows": str}

    weights: dict[str, Tensor]
    bias: Float[Tensor, "point *class"]
    score: Float[Tensor, "point"]
    score_fitted: Float[Tensor, "point"]
    score_control: Float[Tensor, "point"]
    penalty: Float[Tensor, "point"]
    score_position: float
    record: dict[str, Any]
    n_tested: Int[Tensor, "cluster"] | None = None
    right: Int[Tensor, "point cluster"] | None = None
    right_control: Int[Tensor, "point cluster"] | None = None

    r2, r2_fitted = _renamed("r2", "score"), _renamed("r2_fitted", "score_fitted")
    r2_shuffled, r2_position = _renamed("r2_shuffled", "score_control"), _renamed("r2_position", "score_position")

    def _axes(self) -> Iterable[tuple[str, Any]]:
        return (("point", self.names), ("*class", None if self.classes is None else len(self.classes)))

    def _check(self) -> None:
        if not self.weights:
            raise ValueError("there is no hook point")
        counts = (self.n_tested, self.right, self.right_control)
        if any((each is None) != (self.classes is None) for each in counts):
            raise ValueError("a probe of classes has numbers of right rows, and one of numbers has none")
        for right in (self.right, self.right_control):
            if right is not None and self.n_tested is not None and bool(((right < 0) | (right > self.n_tested)).any()):
                raise ValueError("more rows are right than were tested, or fewer than none")

    @property
    def names(self) -> tuple[str, ...]:
        """The hook points."""
        return tuple(self.weights)

    @property
    def classes(self) -> list[Any] | None:
        """The classes in their order: strings, whole numbers or `True` and `False`; `None` for a label of numbers."""
        classes: list[Any] | None = self.record.get("classes")
        return classes

    @property
    def selectivity(self) -> Float[Tensor, "point"]:
        """Score minus that of the control task."""
        return self.score - self.score_control

    def interval(self, name: str = "score", level: float = 0.95, seed: int = 0) -> Ends:
        """Ends of the confidence interval of the accuracy or the selectivity at each hook point.

        Rows of one text or run are not independent, so texts and runs are the clusters. An accuracy has Wilson's
        interval; selectivity, whose texts or runs are resampled, has none (NaN) with fewer than four of them.

        Args:
            name: "score" or "selectivity".
            level: Probability that such an interval covers the mean.
            seed: Seed of the resampling.

        Raises:
            ValueError: The label is a number: sums over rows do not tell the error of a text or run.
        """
        one_of("score", "selectivity")("name", name)
        if self.n_tested is None or self.right is None or self.right_control is None:
            raise ValueError("a probe of numbers has no interval: it keeps sums over all texts or runs alone")
        units = torch.arange(len(self.n_tested)).repeat_interleave(self.n_tested)
        first = (self.n_tested.cumsum(0) - self.n_tested)[units]
        number = torch.arange(len(units)) - first  # of a row in its unit; which of them are right does not matter
        clusters = list(map(str, units.tolist()))
        ends = []
        for right, control in zip(self.right, self.right_control, strict=True):
            values = (number < right[units]).double()
            if name == "score":
                ends.append(share_interval(values, clusters, level))
            else:
                values -= (number < control[units]).double()
                ends.append(mean_interval(values, clusters, level, seed, (-1.0, 1.0)))
        low, high = (torch.stack(each).float() for each in zip(*ends, strict=True))
        return low, high

    def predict(self, name: str, activations: Tensor) -> Tensor:
        """What the probe of a hook point reads from activations [... d_model], for each state: the number, or the
        index of the class in `classes`."""
        if name not in self.weights:
            raise KeyError(f"there is no probe of {name!r}; nearest are: {nearest(name, self.names)}")
        bias = self.bias[self.names.index(name)].to(activations.device)
        weights = self.weights[name].to(activations.device)
        shape = weights.shape[bias.dim() :]
        if activations.shape[-len(shape) :] != shape:
            raise ValueError(
                f"the activations are {list(activations.shape)}; the probe of {name!r} reads [... {shape[-1]}]"
            )
        states = activations.float().flatten(activations.dim() - len(shape))
        if self.classes is None:
            numbers: Tensor = states @ weights.flatten() + bias
            return numbers
        return (states @ weights.flatten(1).mT + bias).argmax(dim=-1)

    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The score by hook point with both controls; returns the matplotlib axes."""
        label = self.record.get("label", "time")
        control = "control task" if self.record.get("by_position") else f"{label}s permuted"
        lines = {"probe": self.score, control: self.score_control}
        if self.record["rows"] == "position":
            lines["position only"] = torch.full_like(self.score, self.score_position)
        labels = [short_name(name) for name in self.names]
        title = title or f"Linear probe of the {'denoising time' if label == 'time' else label}"
        score = "R²" if self.classes is None else "accuracy"
        values = torch.stack(list(lines.values()))
        return plots.labelled_lines(values, list(lines), labels, "hook point", f"{score} on held-out runs", title, ax)

    def _table(self) -> Table:
        columns = ("score", "score_fitted", "score_control", "selectivity", "penalty")
        values = {name: getattr(self, name) for name in columns}
        if self.classes is not None:
            values["low"], values["high"] = self.interval("score")
            values["selectivity_low"], values["selectivity_high"] = self.interval("selectivity")
        return Table({"point": self.names, **values})

    def __repr__(self) -> str:
        best = int(self.score.nan_to_num(nan=-torch.inf).argmax())
        score = "R²" if self.classes is None else f"accuracy of {len(self.classes)} classes"
        return (
            f"LinearProbe({len(self.names)} hook points, best {score} {float(self.score[best]):.3f} at "
            f"{self.names[best]!r})"
        )
