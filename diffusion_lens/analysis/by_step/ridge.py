"""Ridge regression from sums over rows, in float64: neither rows nor predictions are kept.

With centred X and y, the weights are w = (XᵀX + λ I)⁻¹ Xᵀy. The penalty λ is relative: a `penalty` times the mean
variance of a feature times the number of rows, so that one grid suits every hook point.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.settings import plain_number, whole_number

# Variance below this share of the mean square counts as none: it is rounding.
_CONSTANT = 1e-9


@dataclass(frozen=True)
class RidgeSettings:
    """How a probe is fitted and tested.

    Attributes:
        penalties: Relative penalties; the one with the highest R² on the validation units is used.
        validation: Share of the units (texts, or rows of trajectories) on which the penalty is chosen.
        held_out: Share of the units on which the probe is tested.
        seed: Seed of the split, of the shuffled control and of the noise.
    """

    penalties: tuple[float, ...] = (1e-6, 1e-4, 1e-2, 1.0)
    validation: float = 0.2
    held_out: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = tuple(plain_number("a penalty", penalty) for penalty in self.penalties)
        plain = {name: plain_number(name, getattr(self, name)) for name in ("validation", "held_out")}
        vars(self).update(plain, penalties=numbers, seed=whole_number("seed", self.seed))
        if not numbers or min(numbers) <= 0:
            raise ValueError(f"penalties={self.penalties}; give at least one, all above 0")
        if self.validation <= 0 or self.held_out <= 0 or self.validation + self.held_out >= 1:
            raise ValueError(
                f"validation={self.validation}, held_out={self.held_out}; both must be above 0, and their sum below 1"
            )

    def split(self, n_units: int) -> list[str]:
        """The part of each unit, "train", "validation" or "held_out", in random order; each part has at least one.

        Raises:
            ValueError: There are fewer than three units.
        """
        if n_units < 3:
            raise ValueError(
                f"there {'is' if n_units == 1 else 'are'} {n_units} text{'s' * (n_units != 1)} (or rows of "
                "trajectories); a probe needs at least 3: to fit, to choose the penalty and to test"
            )
        n_validation, n_held_out = (max(1, round(share * n_units)) for share in (self.validation, self.held_out))
        n_train = max(1, n_units - n_validation - n_held_out)
        n_validation = min(n_validation, n_units - n_train - 1)
        parts = ["train"] * n_train + ["validation"] * n_validation
        parts += ["held_out"] * (n_units - len(parts))
        order = torch.randperm(n_units, generator=torch.Generator().manual_seed(self.seed)).tolist()
        return [parts[i] for i in order]


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over rows of features x and one or more targets y.

    Attributes:
        n: Number of rows.
        x, xx: Float[d] and Float[d d], sums of x and of x xᵀ.
        y, yy, xy: Float[axis], Float[axis] and Float[d axis], sums of y, y² and x yᵀ, one column for each target.
    """

    n: int
    x: Float[Tensor, "d"]
    xx: Float[Tensor, "d d"]
    y: Float[Tensor, "axis"]
    yy: Float[Tensor, "axis"]
    xy: Float[Tensor, "d axis"]

    @classmethod
    def of(cls, x: Float[Tensor, "entry d"], y: Float[Tensor, "entry axis"]) -> "Moments":
        """The sums over some rows."""
        x, y = x.double(), y.double()
        return cls(len(x), x.sum(0), x.mT @ x, y.sum(0), (y * y).sum(0), x.mT @ y)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def fit(self, penalties: tuple[float, ...]) -> "list[LinearFits]":
        """The regressions of every target, one for each penalty."""
        mean_x, mean_y = self.x / self.n, self.y / self.n
        covariance = self.xx - self.n * torch.outer(mean_x, mean_x)
        target = self.xy - self.n * torch.outer(mean_x, mean_y)
        scale = float(covariance.trace()) / len(mean_x)
        if scale * len(mean_x) <= _CONSTANT * float(self.xx.trace()):
            weights = [torch.zeros_like(target)] * len(penalties)
        else:
            values, vectors = torch.linalg.eigh(covariance)
            projected = vectors.mT @ target
            # Without `clamp`, rounding would give a few eigenvalues of a singular matrix below zero.
            weights = [vectors @ (projected / (values.clamp(min=0) + p * scale)[:, None]) for p in penalties]
        return [LinearFits(w, mean_y - mean_x @ w) for w in weights]


@dataclass(frozen=True, eq=False)
class LinearFits:
    """A linear function for each target.

    Attributes:
        weights: Float[d axis].
        bias: Float[axis].
    """

    weights: Float[Tensor, "d axis"]
    bias: Float[Tensor, "axis"]

    def r2(self, rows: Moments) -> Float[Tensor, "axis"]:
        """R² on the rows of these sums, 1 - Σ (y - ŷ)² / Σ (y - ȳ)²; NaN if their targets are all equal."""
        w, b = self.weights, self.bias
        squared = (w * (rows.xx @ w)).sum(0) + 2 * b * (rows.x @ w) + rows.n * b * b
        residual = rows.yy - 2 * ((w * rows.xy).sum(0) + b * rows.y) + squared
        spread = rows.yy - rows.y * rows.y / max(1, rows.n)
        share = 1 - residual / spread
        return share.masked_fill(spread <= _CONSTANT * rows.yy.clamp(min=1e-12), torch.nan)
