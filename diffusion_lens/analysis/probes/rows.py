"""The rows of a probe as they are read, summed or kept, and their labels.

Labels are of texts, runs, or their positions: numbers or classes, or those of the control task.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.engine.inputs import CleanTexts, Inputs
from diffusion_lens.analysis.probes.fit import CONSTANT, PARTS, LinearFits, Moments
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.settings import one_of
from diffusion_lens.settings.arguments import shown

ROW_BYTES = 48  # of a row beside its states: both labels, its unit, position and place


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of the regression on one canvas of a pass.

    Attributes:
        batch, pos: Row of the batch and position of each; of a canvas, the first position of its mean.
        labels: Float[entry 2], the label and that of the control task.
        parts: Int[entry], index of the part.
        units: Int[entry], the text or run.
        means: Bool[batch pos], the positions of the mean of each canvas; `None` where a row is a position.
    """

    batch: Int[Tensor, "entry"]
    pos: Int[Tensor, "entry"]
    labels: Float[Tensor, "entry 2"]
    parts: Int[Tensor, "entry"]
    units: Int[Tensor, "entry"]
    means: PosMask | None

    def states(self, activation: Tensor) -> Float[Tensor, "entry d"]:
        """The states of the rows."""
        flat = activation.flatten(2)
        if self.means is None:
            return flat[self.batch.to(flat.device), self.pos.to(flat.device)]
        # Apple's GPUs have no float64.
        wide = torch.float32 if flat.device.type == "mps" else torch.float64
        means = self.means.to(flat.device)
        return torch.stack([flat[row, means[row]].to(wide).mean(dim=0) for row in self.batch.tolist()])


class Sums:
    """Sums by hook point and part, and those of the predictor that knows the position only; `kept` has held-out rows,
    or none."""

    def __init__(self, names: list[str], n_ctx: int, kept: "KeptRows") -> None:
        self.moments: dict[str, dict[str, Moments]] = {name: {} for name in names}
        self.kept = kept
        # By part: number of rows, sum of labels, and sum of their squares, at each position.
        self._positions = torch.zeros(len(PARTS), 3, n_ctx, dtype=torch.float64)

    def place(self, rows: Rows) -> Int[Tensor, "entry"]:
        """Count rows and labels; their places among the kept rows."""
        y = rows.labels[:, 0].double()
        for index, power in enumerate((torch.ones_like(y), y, y * y)):
            self._positions[:, index].index_put_((rows.parts, rows.pos), power, accumulate=True)
        return self.kept.place(rows)

    def add(self, name: str, rows: Rows, places: Int[Tensor, "entry"], x: Float[Tensor, "entry d"]) -> None:
        """Add the rows of a hook point."""
        x = x.cpu() if x.device.type == "mps" else x  # which has no float64
        self.kept.add(name, rows, places, x)
        for index in rows.parts.unique().tolist():
            own = rows.parts == index
            moments = Moments.of(_only(x, own), rows.labels[own].to(x.device))
            before = self.moments[name].get(PARTS[index])
            self.moments[name][PARTS[index]] = moments if before is None else before + moments

    def position_r2(self) -> float:
        """R² on the held-out part of the mean label of each position, or of all positions where it was never seen."""
        n, total, _ = self._positions[0] + self._positions[1]
        mean = torch.where(n > 0, total / n, total.sum() / n.sum())
        count, y, yy = self._positions[2]
        residual = (yy - 2 * mean * y + count * mean * mean).sum()
        spread = yy.sum() - y.sum() ** 2 / count.sum()
        return float(1 - residual / spread) if spread > CONSTANT * yy.sum() else float("nan")


def require_finite(name: str, sums: Tensor) -> None:
    """Raise a `ValueError` unless sums over the states of a hook point are finite."""
    if not bool(sums.isfinite().all()):
        raise ValueError(f"the states at {name!r} contain inf or NaN, so nothing can be read from them")


def _only(x: Float[Tensor, "entry d"], chosen: Tensor) -> Float[Tensor, "selected d"]:
    """Some of the states, which are not copied if they are all."""
    return x if bool(chosen.all()) else x[chosen.to(x.device)]


class KeptRows:
    """The rows of every hook point, those of a part together; a part of size 0 keeps none."""

    def __init__(self, widths: dict[str, torch.Size], n_rows: dict[str, int]) -> None:
        n = sum(n_rows.values())
        self.x = {name: torch.empty(n, width.numel()) for name, width in widths.items()}
        self.labels, (self.units, self.pos) = torch.empty(n, 2).double(), torch.empty(2, n, dtype=torch.long)
        self.widths, self.sizes = widths, tuple(n_rows.values())
        self._next = [0, *accumulate(self.sizes)][:-1]

    def place(self, rows: Rows) -> Int[Tensor, "entry"]:
        """The places of rows, which are taken from now on; -1 of those that are not kept."""
        places = torch.full_like(rows.parts, -1)
        for index in rows.parts.unique().tolist():
            own = rows.parts == index
            if self.sizes[index]:
                places[own] = torch.arange(self._next[index], self._next[index] + int(own.sum()))
                self._next[index] += int(own.sum())
        chosen = places >= 0
        for kept, read in ((self.labels, rows.labels.double()), (self.units, rows.units), (self.pos, rows.pos)):
            kept[places[chosen]] = read[chosen]
        return places

    def add(self, name: str, rows: Rows, places: Int[Tensor, "entry"], x: Float[Tensor, "entry d"]) -> None:
        """Add the rows of a hook point."""
        chosen = places >= 0
        self.x[name][places[chosen]] = _only(x, chosen).float().cpu()

    def normalised(self, name: str) -> tuple[Tensor, Tensor, float]:
        """The states of a hook point, centred and scaled by one number in place, with their mean and this number."""
        x, n_fitted = self.x.pop(name), self.sizes[0] + self.sizes[1]
        mean = x[:n_fitted].mean(dim=0)
        x -= mean
        require_finite(name, torch.linalg.vector_norm(x))  # which makes no copy
        scale = float(torch.linalg.vector_norm(x[:n_fitted])) / math.sqrt(n_fitted * x.shape[1]) or 1.0
        return x.div_(scale), mean, scale

    def squares(self, fits: dict[str, LinearFits]) -> dict[str, Tensor]:
        """Sums of squares of each held-out unit: of its labels about the mean of all units, and of the errors of each
        regression; both also of the control task."""
        units, unit = self.units.unique(return_inverse=True)

        def sums(values: Float[Tensor, "entry 2"]) -> Float[Tensor, "2 cluster"]:
            return values.new_zeros(len(units), 2).index_add_(0, unit, values.square()).T

        errors = []
        for name, (w, b) in fits.items():
            x = self.x.pop(name)
            # No more rows at once in float64 than the matrices of the regression had.
            errors.append(sums(self.labels - torch.cat([each.double() @ w for each in x.split(x.shape[1])]) - b))
        total, residual = sums(self.labels - self.labels.mean(dim=0)), torch.stack(errors, dim=1)
        return {
            "n_tested": unit.bincount(minlength=len(units)),
            "squares": total[0],
            "squares_control": total[1],
            "residual": residual[0],
            "residual_control": residual[1],
        }

    def position_accuracy(self) -> float:
        """Accuracy on the held-out part of the commonest class of each position, or of all where it was never seen."""
        n_fitted = self.sizes[0] + self.sizes[1]
        pairs = list(zip(self.pos.tolist(), self.labels[:, 0].tolist(), strict=True))
        at: dict[int, Counter[float]] = {}
        for pos, own in pairs[:n_fitted]:
            at.setdefault(pos, Counter())[own] += 1
        commonest = sum(at.values(), Counter()).most_common(1)[0][0]
        guesses = {pos: counter.most_common(1)[0][0] for pos, counter in at.items()}
        right = [guesses.get(pos, commonest) == own for pos, own in pairs[n_fitted:]]
        return float(sum(right) / len(right))


READY = ("time", "token")  # labels that need not be given
_NEVER_GIVEN = ("masked", "predicting")  # positions that never select what a prompt gives, or the row that predicts it
GivenLabels = str | Sequence[Any] | Tensor | np.ndarray


class _Unit(NamedTuple):
    """A text, or a row of a trajectory."""

    tokens: Int[Tensor, "_"]  # of the text, or at the end of the run
    readable: PosMask  # false at padding, and at positions whose states are never read
    order: Int[Tensor, "_"] | None = None  # columns of tokens that were given with padding, which comes last here


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of all units; those of the time are known with the canvases.

    Attributes:
        name: "time", "token" or "label".
        of_units: The numbers, or indices of classes, of each unit, Float[pos], or Float[1] where the whole unit has
            one; NaN where there is none.
        by_position: Whether positions have labels.
        classes: The classes in their order; `None` for numbers.
        tokens: Tokens of each unit.
    """

    name: str
    of_units: list[Float[Tensor, "_"]]
    by_position: bool
    classes: list[Any] | None
    tokens: list[Int[Tensor, "_"]]

    @classmethod
    def of(
        cls, labels: GivenLabels, given: CleanTexts | Inputs, positions: str | list[int], real: PosMask | None = None
    ) -> "Labels":
        """The labels that a caller gives, checked against the units.

        Args:
            real: Bool[batch pos], false at the padding of texts that were given as tokens with padding.

        Raises:
            TypeError: Labels of several kinds.
            ValueError: Labels for another number of units or positions, at positions that are never read, or of one
                class.
        """
        units = _units_of(given, positions in _NEVER_GIVEN, real)
        tokens = [unit.tokens for unit in units]
        if isinstance(labels, str):
            if one_of(*READY)("labels", labels) == "time":
                return cls("time", [], False, None, tokens)
            values = [unit.tokens.masked_fill(~unit.readable, -1).tolist() for unit in units]
            return cls("token", *_indexed(values), tokens)
        if not isinstance(listed := _listed(labels), list):
            raise TypeError(f"labels={shown(labels)} is one value; give one for each text or run, or for each position")
        values = listed
        if isinstance(given, CleanTexts) and len(values) == len(units) + len(given.set_aside):
            values = [values[index] for index in given.indices]
        if len(values) != len(units):
            raise ValueError(f"{len(values)} labels for {len(units)} texts or rows of trajectories; give each its own")
        of_positions = [isinstance(each, list) for each in values if not _is_missing(each)]
        if len(set(of_positions)) > 1:
            raise TypeError("some labels are lists, one label for each position, and some are not; give one kind")
        if any(of_positions):
            values = [
                _checked(index, unit, [] if _is_missing(own) else own, positions)
                for index, (own, unit) in enumerate(zip(values, units, strict=True))
            ]
        return cls("label", *_indexed(values), tokens)

    def control(self, parts: Sequence[str], seed: int) -> list[Float[Tensor, "_"]]:
        """The labels of the control task: those of positions are drawn for each token of the vocabulary from the labels
        of all positions, those of units permuted among the units of a part."""
        noise = torch.Generator().manual_seed(seed)
        flat, sizes = torch.cat(self.of_units), list(map(len, self.of_units))
        known = ~flat.isnan()
        if not self.by_position:
            flat[known] = permuted(flat[known], [part for part, has in zip(parts, known, strict=True) if has], seed)
        else:
            types, inverse = torch.cat(self.tokens)[known].unique(return_inverse=True)
            flat[known] = flat[known][torch.randint(int(known.sum()), (len(types),), generator=noise)][inverse]
        return list(flat.split(sizes))

    def only(self, kept: Sequence[int]) -> "Labels":
        """The labels of some classes, by their index; the others are taken away."""
        assert self.classes is not None
        new = torch.full((len(self.classes) + 1,), torch.nan)
        new[list(kept)] = torch.arange(len(kept)).float()
        of_units = [new[own.nan_to_num(nan=len(self.classes)).long()] for own in self.of_units]
        return replace(self, of_units=of_units, classes=[self.classes[index] for index in kept])


def permuted(labels: Float[Tensor, "entry"], parts: Sequence[str], seed: int) -> Float[Tensor, "entry"]:
    """The labels, permuted among all of the same part."""
    new, noise = labels.clone(), torch.Generator().manual_seed(seed)
    for part in PARTS:
        rows = torch.tensor([i for i, own in enumerate(parts) if own == part], dtype=torch.long)
        new[rows] = labels[rows[torch.randperm(len(rows), generator=noise)]]
    return new


def _units_of(given: CleanTexts | Inputs, only_masked: bool, real: PosMask | None) -> list[_Unit]:
    if isinstance(given, CleanTexts):
        orders = [None] * len(given.tokens) if real is None else (~real.cpu()).int().argsort(dim=1, stable=True)
        return [
            _Unit(row, torch.ones_like(row, dtype=torch.bool), order)
            for row, order in zip(given.tokens, orders, strict=True)
        ]
    units = []
    for run in given.trajectories:
        readable = run.real & ~run.given if only_masked else run.real
        units += [_Unit(*each) for each in zip(run.tokens.cpu(), readable.cpu(), strict=True)]
    return units


def _listed(value: Any) -> Any:
    """Tensors, arrays and tuples as lists, and NumPy's scalars as Python's; anything else as it is."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_listed(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _is_missing(value: Any) -> bool:
    """Whether a value stands for no label: `None`, NaN or the whole number -1."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value) == -1
    return value is None or (isinstance(value, Real) and value != value)


def _checked(index: int, unit: _Unit, own: list[Any], positions: str | list[int]) -> list[Any]:
    """The labels of the positions of a unit, as many as it has positions."""
    n_pos = len(unit.tokens)
    own = own or [None] * n_pos
    if unit.order is not None and len(own) == len(unit.order):
        own = [own[column] for column in unit.order.tolist()]
    if len(own) < n_pos or not all(map(_is_missing, own[n_pos:])):
        raise ValueError(
            f"text or row {index} has {len(own)} labels and {n_pos} positions: give each position one, None where "
            "there is none"
        )
    for position, (value, readable) in enumerate(zip(own, unit.readable.tolist(), strict=False)):
        if not readable and not _is_missing(value):
            where = f"the label {shown(value)} is of position {position} of row {index}, which"
            if positions not in _NEVER_GIVEN:
                raise ValueError(f"{where} is padding: give None there")
            raise ValueError(
                f"{where} the prompt gives, or which is padding. It is never masked, so that positions={positions!r} "
                "would never read it: give None there, or positions='all'"
            )
    return own[:n_pos]


def _indexed(values: list[Any]) -> tuple[list[Float[Tensor, "_"]], bool, list[Any] | None]:
    """The labels as numbers for each unit, whether they are of positions, and the classes."""
    by_position = any(isinstance(own, list) for own in values)
    rows = values if by_position else [[own] for own in values]
    known = [value for own in rows for value in own if not _is_missing(value)]
    if not known:
        raise ValueError("no text, row or position has a label: None, NaN and -1 mean that there is none")
    kinds = {_kind(value) for value in known}
    if float in kinds and any(isinstance(value, int) and value == -1 for own in rows for value in own):
        raise ValueError(
            "some labels are real numbers, and some the whole number -1, which means no label: give -1.0 "
            "where it is a number, and None where there is none"
        )
    if kinds == {int, float}:  # 1 among others such as 0.5
        kinds = {float}
    if len(kinds) > 1 or not kinds <= {str, bool, int, float}:
        found = " and ".join(sorted(f"{kind.__name__}" for kind in kinds))
        raise TypeError(f"the labels are {found}; give all as strings, as whole numbers, as bools or as real numbers")
    classes = None if kinds == {float} else sorted({kinds.copy().pop()(value) for value in known})
    if classes is not None and len(classes) == 1:
        raise ValueError(f"all labels are {shown(classes[0])}: a probe of classes needs at least two")
    number = float if classes is None else {value: float(index) for index, value in enumerate(classes)}.__getitem__
    of_units = [torch.tensor([math.nan if _is_missing(value) else number(value) for value in own]) for own in rows]
    if any(bool(own.isinf().any()) for own in of_units):
        raise ValueError("a label is infinite; give finite numbers, and None where there is none")
    return of_units, by_position, classes


def _kind(value: Any) -> type[Any]:
    kinds = ((bool, bool), (int, Integral), (float, Real), (str, str))
    return next((kind for kind, of in kinds if isinstance(value, of)), type(value))
