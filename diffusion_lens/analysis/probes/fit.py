"""The regressions of a probe: ridge from sums over rows, and logistic, of scikit-learn, from the rows themselves."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.settings import Settings, plain_number, positive, setting, whole_number
from diffusion_lens.settings.arguments import check_type

PARTS = ("train", "validation", "held_out")
REGRESSION_MATRICES = 8  # d x d matrices in float64 that `fit_numbers` computes from the sums
CLASS_COPIES = 6  # numbers of 8 bytes for each row and class that a logistic regression computes
CONSTANT = 1e-9  # Variance below this share of the mean square counts as none: it is rounding.
_ITERATIONS = 1000  # of a logistic regression, at most
LinearFits = tuple[Tensor, Tensor]  # weights Float[d axis] and bias Float[axis] of a linear function for each target


def _penalties(name: str, value: Any) -> tuple[float, ...]:
    numbers = tuple(positive("a penalty", penalty) for penalty in check_type(Iterable[float], name, value))
    if not numbers:
        raise ValueError(f"{name}={value}; give at least one, all above 0")
    return numbers


@dataclass(frozen=True)
class RidgeSettings(Settings):
    """How a probe is fitted and tested."""

    penalties: tuple[float, ...] = setting(
        (1e-6, 1e-4, 1e-2, 1.0),
        "Relative penalties; the one with the highest R² or accuracy on the validation units is used.",
        _penalties,
    )
    validation: float = setting(
        0.2, "Share of the units (texts, or rows of trajectories) on which the penalty is chosen.", plain_number
    )
    held_out: float = setting(0.2, "Share of the units on which the probe is tested.", plain_number)
    seed: int = setting(0, "Seed of the split, of the control and of the noise.", whole_number)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.validation > 0 and self.held_out > 0 and self.validation + self.held_out < 1):
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
    """Sums over rows of features x and one or more targets y: of x, x xᵀ, y, y² and x yᵀ."""

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

    def fit(self, penalties: tuple[float, ...]) -> list[LinearFits]:
        """The regressions of every target, one for each penalty."""
        mean_x, mean_y = self.x / self.n, self.y / self.n
        covariance = self.xx - self.n * torch.outer(mean_x, mean_x)
        target = self.xy - self.n * torch.outer(mean_x, mean_y)
        scale = float(covariance.trace()) / len(mean_x)
        if scale * len(mean_x) <= CONSTANT * float(self.xx.trace()):
            weights = [torch.zeros_like(target)] * len(penalties)
        else:
            values, vectors = torch.linalg.eigh(covariance)
            projected = vectors.mT @ target
            # Without `clamp`, rounding would give a few eigenvalues of a singular matrix below zero.
            weights = [vectors @ (projected / (values.clamp(min=0) + p * scale)[:, None]) for p in penalties]
        return [(w, mean_y - mean_x @ w) for w in weights]

    def r2(self, fits: LinearFits) -> Float[Tensor, "axis"]:
        """R² on these rows, 1 - Σ (y - ŷ)² / Σ (y - ȳ)²; NaN if their targets are all equal."""
        w, b = fits
        squared = (w * (self.xx @ w)).sum(0) + 2 * b * (self.x @ w) + self.n * b * b
        residual = self.yy - 2 * ((w * self.xy).sum(0) + b * self.y) + squared
        spread = self.yy - self.y * self.y / max(1, self.n)
        share = 1 - residual / spread
        return share.masked_fill(spread <= CONSTANT * self.yy.clamp(min=1e-12), torch.nan)


def fit_numbers(
    moments: dict[str, Moments], penalties: tuple[float, ...]
) -> tuple[LinearFits, float, Float[Tensor, "axis"], Float[Tensor, "axis"]]:
    """The regressions with their best penalty, that penalty, and R² on the held-out and on the fitted rows.

    Column 0 is the label, column 1 that of the control task, which may be the same in all rows. Each has its own
    penalty; that of the label is returned.
    """
    train, validation, held_out = (moments[part] for part in PARTS)
    on_validation = torch.stack([validation.r2(fits) for fits in train.fit(penalties)])
    if bool(on_validation[:, 0].isnan().any()):
        raise ValueError(
            f"the penalty cannot be chosen: R² on the validation part is not defined, because its {validation.n} rows "
            "all have the same time or label. Give more texts with samples= of at least 2, more steps or runs, or a "
            "larger share, ridge=RidgeSettings(validation=...)"
        )
    best = on_validation.argmax(dim=0).tolist()
    together = train + validation
    fits = together.fit(penalties)
    weights = torch.stack([fits[index][0][:, column] for column, index in enumerate(best)], dim=1)
    bias = torch.stack([fits[index][1][column] for column, index in enumerate(best)])
    r2_held_out, r2_fitted = (rows.r2((weights, bias)).cpu() for rows in (held_out, together))
    return (weights.cpu(), bias.cpu()), penalties[best[0]], r2_held_out, r2_fitted


class ClassFit(NamedTuple):
    """A logistic regression with its best penalty, tested on the held-out rows."""

    weights: Float[Tensor, "class d"]
    bias: Float[Tensor, "class"]
    penalty: float
    accuracy_fitted: float
    right: Tensor  # Bool[entry] of the held-out rows


def fit_classes(
    x: Float[Tensor, "entry d"],
    y: Int[Tensor, "entry"],
    sizes: tuple[int, ...],
    n_classes: int,
    penalties: tuple[float, ...],
) -> ClassFit:
    """The logistic regression with the penalty of the highest accuracy on the validation rows, the strongest of these.

    Args:
        x: States, centred and scaled so that the mean variance of a feature in the fitted rows is 1.
        y: Index of the class of each row.
        sizes: Number of rows of each part; the rows are in their order.
    """
    n_train, n_fitted = sizes[0], sizes[0] + sizes[1]

    def right(fitted: LinearFits, rows: slice) -> Tensor:
        return (x[rows] @ fitted[0].mT + fitted[1]).argmax(dim=1) == y[rows]

    def accuracy(penalty: float) -> float:
        fitted = _logistic(x[:n_train], y[:n_train], n_classes, penalty)
        return float(right(fitted, slice(n_train, n_fitted)).double().mean())

    best = max(penalties, key=lambda penalty: (accuracy(penalty), penalty)) if len(penalties) > 1 else penalties[0]
    fitted = _logistic(x[:n_fitted], y[:n_fitted], n_classes, best)
    on_fitted = float(right(fitted, slice(n_fitted)).double().mean())
    return ClassFit(*fitted, best, on_fitted, right(fitted, slice(n_fitted, None)))


def require_sklearn() -> Any:
    """The class of a logistic regression; an `ImportError` that says how to install it."""
    try:
        from sklearn.linear_model import LogisticRegression  # imported here because it takes a second
    except ImportError as error:
        raise ImportError("probes of classes need scikit-learn: pip install 'diffusion-lens[probes]'") from error
    return LogisticRegression


def _logistic(x: Float[Tensor, "entry d"], y: Int[Tensor, "entry"], n_classes: int, penalty: float) -> LinearFits:
    """Weights and bias of all classes; classes without a row are never chosen."""
    weights, bias = x.new_zeros(n_classes, x.shape[1]), x.new_full((n_classes,), -torch.inf)
    seen = y.unique()
    if len(seen) == 1:
        bias[seen] = 0.0
        return weights, bias
    # With weak penalties lbfgs does not converge in a thousand iterations.
    regression = require_sklearn()(C=1 / (penalty * len(x)), solver="newton-cg", max_iter=_ITERATIONS)
    regression.fit(x.numpy(), y.numpy())
    w, b = (torch.from_numpy(each).to(x) for each in (regression.coef_, regression.intercept_))
    if len(seen) == 2:  # one function, which is positive for the second class
        w, b = torch.cat([-w, w]) / 2, torch.cat([-b, b]) / 2
    weights[seen], bias[seen] = w, b
    return weights, bias
