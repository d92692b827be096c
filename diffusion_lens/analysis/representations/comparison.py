"""What `representations.compare` finds: similarities of two sets of vectors, their intervals, and what chance gives."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.representations.similarity import NEVER_NEGATIVE, effective_rank
from diffusion_lens.records import as_dataclass, load_fields, load_result, save_fields, save_result, split_fields

ROUND_OFF = 1e-10


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two sets of vectors compared, the first named "forward" and the second "reverse" unless `compare` was told other.

    Attributes:
        values: Float[statistic], 1 where the sets agree.
        null: Float[draw statistic], with the facts of one set shuffled: what chance gives.
        deviations: Float[draw statistic], how far from its mean it would be with other facts (`similarity.deviations`).
        singular_values: Float[2 component] of each set without its mean, the largest first.
        coordinates: Float[2 fact 2], each set without its mean in the two directions in which both together vary most;
            None where the widths differ.
        explained: Float[2], share of the variance of both sets in these directions; likewise.
        angles: Float[rank] in radians, the principal angles between the two leading subspaces; likewise.
        statistics: name of each column.
        ids: the fact of each row.
        names: of the two sets.
        record: rank, permutations, seed, widths, source, versions.
    """

    values: Float[Tensor, "statistic"]
    null: Float[Tensor, "draw statistic"]
    deviations: Float[Tensor, "draw statistic"]
    singular_values: Float[Tensor, "2 component"]
    coordinates: Float[Tensor, "2 fact 2"] | None
    explained: Float[Tensor, "2"] | None
    angles: Float[Tensor, "rank"] | None
    statistics: list[str]
    ids: list[str]
    names: tuple[str, str]
    record: dict[str, Any]

    @property
    def p(self) -> Float[Tensor, "statistic"]:
        """How often chance gives as much or more; near 1, the sets are less alike than by chance."""
        exceeding = (self.null >= self.values - ROUND_OFF).sum(dim=0)
        return ((1 + exceeding) / (1 + len(self.null))).where(~self.values.isnan(), torch.nan)

    @property
    def effective_ranks(self) -> tuple[float, float]:
        """In how many directions each set varies (Roy & Vetterli 2007); at most one less than there are facts."""
        first, second = map(effective_rank, self.singular_values)
        return first, second

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "statistic"], Float[Tensor, "statistic"]]:
        """Ends of the confidence interval over facts; without width where every subset of the facts gives the same.

        For as many facts as there are: "retrieval" falls with their number, "subspace" grows.
        """
        low, high = (self.values + deviation for deviation in _tails(self.deviations, level))
        lowest = torch.tensor([0.0 if name in NEVER_NEGATIVE else -1.0 for name in self.statistics])
        return low.maximum(lowest), high.clamp(max=1)

    def chance(self, level: float = 0.95) -> tuple[Float[Tensor, "statistic"], Float[Tensor, "statistic"]]:
        """Ends of the range in which chance stays so often."""
        return _tails(self.null, level)

    def table(self, level: float = 0.95) -> dict[str, dict[str, float]]:
        """By statistic: value, low, high, the same of chance, and p. `pandas.DataFrame(table).T` shows it."""
        columns = {
            "value": self.values,
            **dict(zip(("low", "high"), self.interval(level), strict=True)),
            "chance": self.null.mean(dim=0),
            **dict(zip(("chance_low", "chance_high"), self.chance(level), strict=True)),
            "p": self.p,
        }
        return {
            statistic: {name: float(column[i]) for name, column in columns.items()}
            for i, statistic in enumerate(self.statistics)
        }

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "comparison", self)

    @classmethod
    def load(cls, path: str | Path) -> "Comparison":
        """Read what `save` wrote."""
        return load_fields(path, "comparison", cls)

    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """Principal components, a line between the two vectors of each fact. Returns the matplotlib axes.

        Raises:
            ValueError: the two sets have other widths, hence no common axes.
        """
        if self.coordinates is None or self.explained is None:
            raise ValueError("these two sets of vectors have no axes in common to draw them in")
        return plots.paired_scatter(self.coordinates, self.explained, self.names, ax=ax, title=title or self._title())

    def plot_spectra(self, ax: Any = None, title: str | None = None) -> Any:
        """The singular values of both sets. Returns the matplotlib axes."""
        return plots.spectra(
            self.singular_values, self.effective_ranks, self.names, ax=ax, title=title or self._title()
        )

    def _title(self) -> str:
        source = self.record["source"]
        told = [str(source["model"])] if "model" in source else []
        told += [f"{word} {source[word]}" for word in ("layer", "step") if word in source]
        return ", ".join([*told, f"{len(self.ids)} facts"])


@dataclass(frozen=True, eq=False)
class Comparisons:
    """One comparison a layer, or a step.

    Attributes:
        axis: "layer" or "step".
        at: the comparison at each of them, in order.
    """

    axis: str
    at: dict[int, Comparison]

    def table(self, statistic: str, level: float = 0.95) -> dict[int, dict[str, float]]:
        """The row of one statistic in `Comparison.table`, by layer or step.

        Each p is of one layer alone; of many some are small by chance (`scipy.stats.false_discovery_control`).
        """
        first = next(iter(self.at.values()))
        if statistic not in first.statistics:
            raise ValueError(f"{statistic!r} was not computed; there are {', '.join(first.statistics)}")
        return {place: comparison.table(level)[statistic] for place, comparison in self.at.items()}

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        parts = {place: split_fields(comparison) for place, comparison in self.at.items()}
        tensors = {f"{place}.{name}": value for place, (own, _) in parts.items() for name, value in own.items()}
        record = {"axis": self.axis, "at": {place: record for place, (_, record) in parts.items()}}
        return save_result(path, "comparisons", tensors, record)

    @classmethod
    def load(cls, path: str | Path) -> "Comparisons":
        """Read what `save` wrote."""
        tensors, record = load_result(path, "comparisons")
        at = {}
        for place, others in record["at"].items():
            own = {name.removeprefix(f"{place}."): t for name, t in tensors.items() if name.startswith(f"{place}.")}
            at[int(place)] = as_dataclass(Comparison, {**own, **others})
        return cls(record["axis"], at)

    def plot(
        self,
        statistic: str = "cka",
        level: float = 0.95,
        ax: Any = None,
        label: str | None = None,
        title: str | None = None,
    ) -> Any:
        """One statistic by layer or step with its intervals; dotted, in a band, what chance gives.

        Args:
            label: of the curve; draw a second model into the axes that the first returned.
        """
        return plots.similarity_curve(
            self.table(statistic, level), self.axis, statistic, ax=ax, label=label, title=title
        )


def _tails(
    draws: Float[Tensor, "draw statistic"], level: float
) -> tuple[Float[Tensor, "statistic"], Float[Tensor, "statistic"]]:
    if not 0 < level < 1:
        raise ValueError(f"level={level}; it is between 0 and 1, e.g. 0.95")
    low, high = draws.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=draws.dtype), dim=0)
    return low, high
