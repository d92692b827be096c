"""The rows of a probe, as they are read: the sums over them, and those that are kept."""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.probes.fit import CONSTANT, PARTS, LinearFits, Moments
from diffusion_lens.model.shapes import PosMask

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
