"""The result of `dictionary_loss`: losses with their standard errors, by noise level."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.display import PicturedResult, Table
from diffusion_lens.records import load_fields, save_fields, shown_model
from diffusion_lens.settings import Whole, whole_number

STATES = ("clean", "spliced", "zero_ablated", "mean_ablated")


class Estimate(NamedTuple):
    """A mean and its standard error over texts, NaN for a single text."""

    value: float
    standard_error: float


@dataclass(frozen=True, eq=False)
class DictionaryLoss(PicturedResult):
    """The model's loss in four states: clean, spliced, zero-ablated and mean-ablated.

    Columns of the data frame: level, state, low, high, loss, standard_error, variance_explained, l0.

    Attributes:
        losses: Float[entry level state], loss of each text at each noise level, in nats per position that counts; the
            states in the order clean, spliced, zero_ablated, mean_ablated.
        n_counted: Int[entry], number of positions of each text that count in the loss.
        texts: Int[entry], index of each text in the list that was given.
        spans: Float[level axis], lowest and highest noise level; equal for a single one, and 0 without [MASK].
        variance_explained: Float[level], share of the activations' variance at this level that the reconstruction
            explains.
        l0: Float[level], mean number of features that are not zero.
        n_rows: Int[level], number of positions at which activations were replaced.
        overall_variance_explained: Share of the variance at all levels together.
        record: Hook point, digest of the dictionary, positions (`mask`), seed, hash of the texts, facts set aside,
            model, hash of the weights, hooks, versions.
    """

    losses: Float[Tensor, "entry level state"]
    n_counted: Int[Tensor, "entry"]
    texts: Int[Tensor, "entry"]
    spans: Float[Tensor, "level axis"]
    variance_explained: Float[Tensor, "level"]
    l0: Float[Tensor, "level"]
    n_rows: Int[Tensor, "level"]
    overall_variance_explained: float
    record: dict[str, Any] = field(repr=False)

    def loss(self, state: str = "clean", level: Whole | None = None) -> Estimate:
        """Mean loss per position in a state, at one level or over all.

        Args:
            state: "clean", "spliced", "zero_ablated" or "mean_ablated".
            level: Index of a noise level, from 0.
        """
        return _ratio(self._sums(state, level), self._counts(level))

    def change(self, state: str = "spliced", level: Whole | None = None) -> Estimate:
        """Mean loss in a state less the clean loss; its standard error is that of the paired differences."""
        return _ratio(self._sums(state, level) - self._sums("clean", level), self._counts(level))

    def recovered(self, baseline: str = "zero_ablated", level: Whole | None = None) -> Estimate:
        """Share of the loss that the ablation costs and the reconstruction saves; NaN if the ablation costs nothing.

        Args:
            baseline: "zero_ablated" or "mean_ablated".
            level: Index of a noise level, from 0; by default over all.
        """
        if baseline not in STATES[2:]:
            raise ValueError(f"baseline={baseline!r}; it must be 'zero_ablated' or 'mean_ablated'")
        ablated = self._sums(baseline, level)
        return _ratio(ablated - self._sums("spliced", level), ablated - self._sums("clean", level))

    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The recovered shares and the variance explained by noise level, with standard errors. Returns the axes."""
        levels = range(len(self.spans))
        curves = {
            f"loss recovered from {baseline.removesuffix('_ablated')} ablation": [
                self.recovered(baseline, level) for level in levels
            ]
            for baseline in STATES[2:]
        }
        curves["variance explained"] = [Estimate(share, 0.0) for share in self.variance_explained.tolist()]
        return plots.level_curves(self.spans, curves, ax=ax, title=title or f"dictionary at {self.record['name']}")

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "dictionary loss", self)

    @classmethod
    def load(cls, path: str | Path) -> "DictionaryLoss":
        """Read what `save` wrote."""
        return load_fields(path, "dictionary loss", cls)

    def _sums(self, state: str, level: Whole | None) -> Float[Tensor, "entry"]:
        """Loss of each text in a state, summed over positions and levels."""
        if state not in STATES:
            raise ValueError(f"state={state!r}; it must be one of {', '.join(STATES)}")
        chosen = self.losses[..., STATES.index(state)] * self.n_counted[:, None]
        return chosen.sum(dim=1) if level is None else chosen[:, self._level(level)]

    def _counts(self, level: Whole | None) -> Float[Tensor, "entry"]:
        return self.n_counted.double() * (len(self.spans) if level is None else 1)

    def _level(self, level: Whole) -> int:
        index = whole_number("level", level)
        if not 0 <= index < len(self.spans):
            raise ValueError(f"level={index}; the {len(self.spans)} noise levels are numbered from 0")
        return index

    def _table(self) -> Table:
        losses = [[self.loss(state, level) for state in STATES] for level in range(len(self.spans))]
        values = {
            "low": self.spans[:, :1],
            "high": self.spans[:, 1:],
            "loss": [[loss.value for loss in row] for row in losses],
            "standard_error": [[loss.standard_error for loss in row] for row in losses],
            "variance_explained": self.variance_explained[:, None],
            "l0": self.l0[:, None],
        }
        return Table.of_cells({"level": range(len(self.spans)), "state": STATES}, values)

    def __repr__(self) -> str:
        clean, spliced, recovered = self.loss(), self.loss("spliced"), self.recovered()
        return (
            f"DictionaryLoss({self.record['name']} of {shown_model(self.record)}, {len(self.losses)} texts: loss "
            f"{clean.value:.3f}, spliced {spliced.value:.3f}; recovered {recovered.value:.3f} ± "
            f"{recovered.standard_error:.3f}, variance explained {self.overall_variance_explained:.3f}, "
            f"L0 {(self.l0 * self.n_rows).nansum().item() / self.n_rows.sum().item():.1f})"
        )


def _ratio(numerators: Float[Tensor, "entry"], denominators: Float[Tensor, "entry"]) -> Estimate:
    """Ratio of two sums over texts. Its error is that of the linearised ratio, with texts as independent units."""
    total, n_texts = denominators.sum().item(), len(denominators)
    if total == 0:
        return Estimate(math.nan, math.nan)
    ratio = numerators.sum().item() / total
    if n_texts == 1:
        return Estimate(ratio, math.nan)
    squares = (numerators - ratio * denominators).square().sum().item()
    return Estimate(ratio, math.sqrt(n_texts / (n_texts - 1) * squares) / abs(total))
