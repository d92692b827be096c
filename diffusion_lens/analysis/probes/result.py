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
from diffusion_lens.settings.figures import styled


def _renamed(old: str, new: str) -> Any:
    def read(self: Any) -> Any:
        warnings.warn(f"{old} of a probe will be removed; use {new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read)


@dataclass(frozen=True, eq=False)
class LinearProbe(PicturedResult, Saved):
    """Linear probes of one label, one for each hook point.

    The score is R² for numbers, and accuracy for classes.

    Columns of the data frame: point, score, score_fitted, score_control, selectivity, penalty; and low, high,
    selectivity_low and selectivity_high, the 95 % intervals over texts or runs, unless the probe has none.

    Attributes:
        weights: The weights by hook point, with the axes of the hook point after its positions, such as d_model; of
            classes with an axis for these before them.
        bias: Float[point *class].
        score: Float[point], score on the held-out texts or runs; R² is NaN if they all have the same label.
        score_fitted: Float[point], score on the rows that the probe was fitted to.
        score_control: Float[point], score on the held-out part of a probe of the control task; NaN if that has one
            label only, as where all labels are those of one token.
        penalty: Float[point], relative penalty of each probe.
        score_position: Score on the held-out part of the mean or commonest label of each position; NaN for
            `rows="canvas"`.
        n_tested: Int[cluster], number of held-out rows of each held-out text or run that has any; `None` if there is
            no interval.
        right: Int[point cluster], number of these rows whose class is right; `None` for numbers.
        right_control: Int[point cluster], the same for the probe of the control task.
        residual: Float[point cluster], sum of the squared errors on these rows, so that R² is 1 minus the sum of
            `residual` over that of `squares`; `None` for classes.
        residual_control: Float[point cluster], the same for the probe of the control task.
        squares: Float[cluster], sum of the squared differences of their labels from the mean label of all held-out
            rows; `None` for classes.
        squares_control: Float[cluster], the same of the labels of the control task.
        record: Hook points, label, classes, positions, steps, kind of rows, split, penalties, seed, units and rows in
            each part, inputs, model, hash of the weights, hooks, versions.
    """

    KIND = "linear probe"
    SHOWS = "the score of a linear probe on held-out runs by hook point, beside its control"
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
    residual: Float[Tensor, "point cluster"] | None = None
    residual_control: Float[Tensor, "point cluster"] | None = None
    squares: Float[Tensor, "cluster"] | None = None
    squares_control: Float[Tensor, "cluster"] | None = None

    r2, r2_fitted = _renamed("r2", "score"), _renamed("r2_fitted", "score_fitted")
    r2_shuffled, r2_position = _renamed("r2_shuffled", "score_control"), _renamed("r2_position", "score_position")

    def _axes(self) -> Iterable[tuple[str, Any]]:
        return (("point", self.names), ("*class", None if self.classes is None else len(self.classes)))

    def _check(self) -> None:
        if not self.weights:
            raise ValueError("there is no hook point")
        has_counts, has_squares = self.classes is not None, self.classes is None and self.n_tested is not None
        if any((each is None) == has_counts for each in (self.right, self.right_control)) or (
            has_counts and self.n_tested is None
        ):
            raise ValueError("a probe of classes has numbers of right rows, and one of numbers has none")
        squares = (self.residual, self.residual_control, self.squares, self.squares_control)
        if any((each is None) == has_squares for each in squares):
            raise ValueError("a probe of numbers with an interval has sums of squares, and no other probe has")
        if any(each is not None and bool((each < 0).any()) for each in squares):
            raise ValueError("a sum of squares is below 0")
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
        """Ends of the confidence interval of the score or the selectivity at each hook point.

        Rows of one text or run are not independent, so texts and runs are the clusters. An accuracy has Wilson's
        interval. For R² and selectivity texts or runs are resampled, and there is no interval (NaN) with fewer than
        four of them. R² is 1 minus a ratio of means over texts or runs, of squared errors and of squared differences
        from the mean label. That of the control task is taken to first order in its denominator.

        Args:
            name: "score" or "selectivity".
            level: Probability that such an interval covers the score.
            seed: Seed of the resampling.

        Raises:
            ValueError: The label is a number, and the held-out rows, from which the errors of each text or run are
                computed, did not fit in `max_bytes`.
        """
        one_of("score", "selectivity")("name", name)
        if self.n_tested is None:
            needed = self.record.get("interval_bytes")
            raise ValueError(
                "this probe of numbers has no interval, because the held-out rows did not fit in max_bytes beside its "
                f"sums: probe again with max_bytes of at least {needed:,}, or with fewer hook points (names_filter)"
                if needed
                else "this probe was written by an earlier version, without an interval: probe again"
            )
        ends = (self._r2_interval if self.classes is None else self._share_interval)(name, level, seed)
        unknown = getattr(self, name).isnan()
        low, high = (each.float().masked_fill(unknown, torch.nan) for each in ends)
        return low, high

    def _r2_interval(self, name: str, level: float, seed: int) -> Ends:
        assert self.residual is not None
        assert self.residual_control is not None
        assert self.squares is not None
        assert self.squares_control is not None
        clusters, total = list(map(str, range(len(self.squares)))), self.squares.sum()
        if name == "score":
            values = self.squares - self.residual
            return mean_interval(values.T, clusters, level, seed, (-torch.inf, 1.0), self.squares)
        # With r = Σ e / Σ s of the control task, (e - r s) Σ S / Σ s + r S is to first order its error in units of S.
        ratio = (self.residual_control.sum(dim=1) / self.squares_control.sum())[:, None]
        rescaled = (self.residual_control - ratio * self.squares_control) * (total / self.squares_control.sum())
        values = rescaled + ratio * self.squares - self.residual
        return mean_interval(values.T, clusters, level, seed, weights=self.squares)

    def _share_interval(self, name: str, level: float, seed: int) -> Ends:
        assert self.n_tested is not None
        assert self.right is not None
        assert self.right_control is not None
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
        low, high = map(torch.stack, zip(*ends, strict=True))
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

    @styled
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
        if self.n_tested is not None:
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
