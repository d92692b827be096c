"""Results of `representations.compare`: similarities of two sets of vectors, with intervals and values by chance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.representations.similarity import NEVER_NEGATIVE, effective_rank
from diffusion_lens.display import PicturedResult, Table
from diffusion_lens.records import (
    as_dataclass,
    load_fields,
    load_result,
    save_fields,
    save_result,
    shown_model,
    split_fields,
)

ROUND_OFF = 1e-10


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(PicturedResult):
    """Two sets of vectors compared, by default named "forward" and "reverse".

    Columns of the data frame: statistic, value, low, high, chance, chance_low, chance_high, p.

    Attributes:
        values: Float[statistic], value of each statistic; 1 if the sets agree.
        null: Float[resample statistic], values by chance, with the facts of one set shuffled.
        deviations: Float[resample statistic], deviations from the mean that other facts would give
            (`similarity.deviations`).
        singular_values: Float[2 component], singular values of each set without its mean, the largest first.
        coordinates: Float[2 fact 2], each set without its mean, in the first two principal components of both sets
            together; None if the sets have no common axes.
        explained: Float[2], share of the variance of both sets in these directions; None likewise.
        angles: Float[rank] in radians, principal angles between the two leading subspaces; None likewise.
        statistics: Name of each column.
        ids: The fact of each row.
        names: Names of the two sets.
        record: Rank, permutations, seed, widths, source, versions.
    """

    values: Float[Tensor, "statistic"]
    null: Float[Tensor, "resample statistic"]
    deviations: Float[Tensor, "resample statistic"]
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
        """Share of random pairings that are at least as similar; near 1, the sets are less similar than by chance."""
        exceeding = (self.null >= self.values - ROUND_OFF).sum(dim=0)
        return ((1 + exceeding) / (1 + len(self.null))).where(~self.values.isnan(), torch.nan)

    @property
    def effective_ranks(self) -> tuple[float, float]:
        """Number of directions in which each set varies (Roy & Vetterli 2007), at most the number of facts less one."""
        first, second = map(effective_rank, self.singular_values)
        return first, second

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "statistic"], Float[Tensor, "statistic"]]:
        """Ends of the confidence interval over facts; they coincide if every subset of the facts gives the same value.

        The interval is valid for this number of facts: with more facts "retrieval" falls and "subspace" grows.
        """
        low, high = (self.values + deviation for deviation in _tails(self.deviations, level))
        lowest = torch.tensor([0.0 if name in NEVER_NEGATIVE else -1.0 for name in self.statistics])
        return low.maximum(lowest), high.clamp(max=1)

    def chance(self, level: float = 0.95) -> tuple[Float[Tensor, "statistic"], Float[Tensor, "statistic"]]:
        """Ends of the central interval of the statistics by chance."""
        return _tails(self.null, level)

    def table(self, level: float = 0.95) -> dict[str, dict[str, float]]:
        """Value, low, high, the same by chance, and p of each statistic; print it as `pandas.DataFrame(table).T`."""
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
        """Principal components, with a line between the two vectors of each fact. Returns the matplotlib axes.

        Raises:
            ValueError: The two sets have no common axes.
        """
        if self.coordinates is None or self.explained is None:
            raise ValueError("these two sets of vectors have no common axes; plot_spectra() needs none")
        return plots.paired_scatter(self.coordinates, self.explained, self.names, ax=ax, title=title or self._title())

    def plot_spectra(self, ax: Any = None, title: str | None = None) -> Any:
        """The singular values of both sets. Returns the matplotlib axes."""
        return plots.spectra(
            self.singular_values, self.effective_ranks, self.names, ax=ax, title=title or self._title()
        )

    def _table(self) -> Table:
        return _rows_of([({"statistic": statistic}, row) for statistic, row in self.table().items()])

    def _title(self) -> str:
        source = self.record["source"]
        parts = [shown_model(source)] if "model" in source else []
        parts += [f"{axis} {source[axis]}" for axis in ("layer", "step") if axis in source]
        return ", ".join([*parts, f"{len(self.ids)} facts"])


@dataclass(frozen=True, eq=False)
class Comparisons(PicturedResult):
    """One comparison per layer, or per step.

    Columns of the data frame: layer or step, then those of a `Comparison`.

    Attributes:
        axis: "layer" or "step".
        at: The comparison at each layer or step, in order.
    """

    axis: str
    at: dict[int, Comparison]

    def table(self, statistic: str, level: float = 0.95) -> dict[int, dict[str, float]]:
        """The row of one statistic in `Comparison.table`, by layer or step.

        Each p is that of one layer. Among many layers some p are small by chance
        (`scipy.stats.false_discovery_control`).
        """
        first = next(iter(self.at.values()))
        if statistic not in first.statistics:
            raise ValueError(f"{statistic!r} was not computed; the statistics here are {', '.join(first.statistics)}")
        return {index: comparison.table(level)[statistic] for index, comparison in self.at.items()}

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        parts = {index: split_fields(comparison) for index, comparison in self.at.items()}
        tensors = {f"{index}.{name}": value for index, (own, _) in parts.items() for name, value in own.items()}
        record = {"axis": self.axis, "at": {index: record for index, (_, record) in parts.items()}}
        return save_result(path, "comparisons", tensors, record)

    @classmethod
    def load(cls, path: str | Path) -> "Comparisons":
        """Read what `save` wrote."""
        tensors, record = load_result(path, "comparisons")
        at = {}
        for index, others in record["at"].items():
            own = {name.removeprefix(f"{index}."): t for name, t in tensors.items() if name.startswith(f"{index}.")}
            at[int(index)] = as_dataclass(Comparison, {**own, **others})
        return cls(record["axis"], at)

    def plot(
        self,
        statistic: str = "cka",
        level: float = 0.95,
        ax: Any = None,
        label: str | None = None,
        title: str | None = None,
    ) -> Any:
        """Plot one statistic by layer or step with its intervals, and its values by chance as a dotted line and a band.

        Args:
            label: Label of the curve; a second model can be drawn into the axes that this call returns.
        """
        return plots.similarity_curve(
            self.table(statistic, level), self.axis, statistic, ax=ax, label=label, title=title
        )

    def _table(self) -> Table:
        tables = ((index, comparison.table()) for index, comparison in self.at.items())
        rows = [({self.axis: index, "statistic": name}, row) for index, table in tables for name, row in table.items()]
        return _rows_of(rows)

    def _settings(self) -> Mapping[str, Any]:
        """The record of the first comparison; the others differ in the layer or step."""
        return next(iter(self.at.values())).record

    def __repr__(self) -> str:
        first = next(iter(self.at.values()))
        return f"Comparisons({len(self.at)} {self.axis}s, {len(first.ids)} facts, {', '.join(first.statistics)})"


def _rows_of(rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Table:
    """A table of rows, each in two parts: the coordinates, and the values."""
    whole = [{**coordinates, **values} for coordinates, values in rows]
    return Table({name: [row[name] for row in whole] for name in whole[0]})


def _tails(
    values: Float[Tensor, "resample statistic"], level: float
) -> tuple[Float[Tensor, "statistic"], Float[Tensor, "statistic"]]:
    if not 0 < level < 1:
        raise ValueError(f"level={level}; it must be between 0 and 1, e.g. 0.95")
    low, high = values.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=values.dtype), dim=0)
    return low, high
