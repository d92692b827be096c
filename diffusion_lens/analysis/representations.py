"""Similarity of two sets of vectors whose rows belong to the same facts, such as keys queried in each direction.

    forward = torch.stack([key.vector for key in forward_keys])
    reverse = torch.stack([key.vector for key in reverse_keys])
    compare(forward, reverse, ids=ids).table()

Each statistic is 1 if the sets x and y agree:

- "cosine", "centred_cosine": are the two vectors of a fact the same? Mean cosine between them, as they are, and after
  the mean of each set is subtracted. The mean is shared by all facts, so it makes any two vectors similar.
- "retrieval": does the vector identify its fact? Share of vectors whose nearest vector in the other set is their own
  fact's.
- "subspace": do both sets vary along the same directions? Mean cos² of the principal angles between the leading
  principal components. This does not depend on the pairing of the facts, so it is computed in halves: on every other
  fact, and on the rest. It is above chance for unrelated facts too, because all vectors at one layer of one model share
  directions.
- "procrustes": are the sets the same up to a rotation? R is the orthogonal map that brings x nearest to y (Schönemann
  1966). With fewer facts than dimensions R has enough parameters to fit unrelated sets. So it is fitted in the leading
  principal components, and without the fact i on which it is evaluated:

      ρ = Σ_i ⟨x_i R_(−i), y_i⟩ / (‖x‖ ‖y‖)

  At the best scale the residual is 1 − ρ².
- "cka": do both sets have the same geometry? Linear CKA (Kornblith et al. 2019, arXiv 1905.00414): the cosine between
  the two matrices of inner products between facts. They are centred as in Székely & Rizzo 2014 (arXiv 1310.2926), which
  gives HSIC_1 (Song et al. 2012) divided by its norms. Unlike the usual estimate it is about 0 for unrelated sets, even
  with few facts, and may be negative. Where the means of small groups were removed, it is above 0 for unrelated sets:
  in 64 dimensions by .16 for two groups of ten facts, by .006 for two of sixty. The distribution by chance has this
  bias too.

Two models have no common axes, even if the widths agree (`shared_axes=False`). For them only "procrustes" and "cka",
which need neither common axes nor equal widths, are meaningful. Each statistic has

- a distribution by chance: facts of one set are paired with facts of the other at random. p is the share of pairings,
  the true one included, that are at least as similar (Phipson & Smyth 2010).
- an interval over facts. A bootstrap would sample some facts twice, and such a fact is its own nearest neighbour. So
  the statistic is computed on random subsets of two thirds of the facts, and its deviations are scaled to all facts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.records.results import PicturedResult, Saved, Table, installed_version, shown_model
from diffusion_lens.settings import check_level, checked_arguments, takes
from diffusion_lens.settings.figures import styled
from diffusion_lens.settings.shared import CompareSettings

Vectors = Float[Tensor, "fact d"]
OtherVectors = Float[Tensor, "fact d_other"]
Orders = Int[Tensor, "resample fact"]  # permutations of the rows of the second set
Values = Float[Tensor, "resample"]
Statistic: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x, y and orders
NEVER_NEGATIVE = ("retrieval", "subspace")
ROUND_OFF = 1e-10
EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(PicturedResult, Saved):
    """Two sets of vectors compared, by default named "forward" and "reverse".

    Columns of the data frame: statistic, value, low, high, chance, chance_low, chance_high, p.

    Attributes:
        values: Float[statistic], value of each statistic; 1 if the sets agree.
        null: Float[resample statistic], values by chance, with the facts of one set shuffled.
        deviations: Float[resample statistic], deviations from the mean that other facts would give
            (`deviations`).
        singular_values: Float[2 component], singular values of each set without its mean, the largest first.
        coordinates: Float[2 fact 2], each set without its mean, in the first two principal components of both sets
            together; None if the sets have no common axes.
        explained: Float[2], share of the variance of both sets in these directions; None likewise.
        statistics: Name of each column.
        ids: The fact of each row.
        names: Names of the two sets.
        record: Rank, permutations, seed, widths, source, versions.
    """

    KIND = "comparison"
    SHOWS = "two sets of vectors in their common principal components, with a line between the two vectors of each fact"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"source": dict[str, Any]}
    AXES = (("statistic", "statistics"), ("fact", "ids"))

    values: Float[Tensor, "statistic"]
    null: Float[Tensor, "resample statistic"]
    deviations: Float[Tensor, "resample statistic"]
    singular_values: Float[Tensor, "2 component"]
    coordinates: Float[Tensor, "2 fact 2"] | None
    explained: Float[Tensor, "2"] | None
    statistics: list[str]
    ids: list[str]
    names: tuple[str, str]
    record: dict[str, Any]

    def _check(self) -> None:
        if not len(self.null) or not self.singular_values.numel():
            raise ValueError("there are no resamples or no singular values")

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

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """Principal components, with a line between the two vectors of each fact. Returns the matplotlib axes.

        Raises:
            ValueError: The two sets have no common axes.
        """
        if self.coordinates is None or self.explained is None:
            raise ValueError("these two sets of vectors have no common axes; plot_spectra() needs none")
        return plots.paired_scatter(self.coordinates, self.explained, self.names, ax=ax, title=title or self._title())

    @styled
    def plot_spectra(self, ax: Any = None, title: str | None = None) -> Any:
        """The singular values of both sets. Returns the matplotlib axes."""
        return plots.spectra(
            self.singular_values, self.effective_ranks, self.names, ax=ax, title=title or self._title()
        )

    def _table(self) -> Table:
        return _rows_of([{"statistic": statistic, **row} for statistic, row in self.table().items()])

    def _settings(self) -> Mapping[str, Any]:
        """With the model that the source names."""
        source = self.record["source"]
        return {**{name: source[name] for name in ("model", "mode") if name in source}, **self.record}

    def _title(self) -> str:
        source = self.record["source"]
        parts = [shown_model(source)] if "model" in source else []
        parts += [f"{axis} {source[axis]}" for axis in ("layer", "step") if axis in source]
        return ", ".join([*parts, f"{len(self.ids)} facts"])


@dataclass(frozen=True, eq=False)
class Comparisons(PicturedResult, Saved):
    """One comparison per layer, or per step.

    Columns of the data frame: layer or step, then those of a `Comparison`.

    Attributes:
        axis: "layer" or "step".
        at: The comparison at each layer or step, in order.
    """

    KIND = "comparisons"
    SHOWS = "how similar two sets of vectors are, with intervals and what chance gives"

    axis: str
    at: dict[int, Comparison]

    def table(self, statistic: str, level: float = 0.95) -> dict[int, dict[str, float]]:
        """The row of one statistic in `Comparison.table`, by layer or step.

        Each p is that of one layer. Among many layers some p are small by chance
        (`scipy.stats.false_discovery_control`).
        """
        known = next(iter(self.at.values())).statistics
        if statistic not in known:
            raise ValueError(f"{statistic!r} was not computed; the statistics here are {', '.join(known)}")
        return {index: comparison.table(level)[statistic] for index, comparison in self.at.items()}

    def _check(self) -> None:
        if not self.at:
            raise ValueError("there is no comparison")

    @styled
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
        return _rows_of(
            [{self.axis: index, "statistic": name, **row} for index, table in tables for name, row in table.items()]
        )

    def _settings(self) -> Mapping[str, Any]:
        return next(iter(self.at.values()))._settings()

    def __repr__(self) -> str:
        first = next(iter(self.at.values()))
        return f"Comparisons({len(self.at)} {self.axis}s, {len(first.ids)} facts, {', '.join(first.statistics)})"


@takes(CompareSettings)
def compare(
    forward: Tensor,
    reverse: Tensor,
    *,
    ids: Sequence[str] | None = None,
    names: tuple[str, str] = ("forward", "reverse"),
    groups: Sequence[str] | None = None,
    shared_axes: bool = True,
    only: Sequence[str] | None = None,
    settings: CompareSettings,
    source: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare two sets of vectors of the same facts.

    Args:
        forward: Float[fact d], one set of vectors.
        reverse: Float[fact d], the other set: the same facts in the same order.
        ids: Names of the facts, by default their row numbers.
        names: Names of the two sets, for errors and figures.
        groups: Group of each fact, if groups differ as a whole, such as facts trained in different directions. The mean
            of each group is moved to the mean of its set, and random pairings stay within a group. Otherwise the sets
            would be similar because they have the same groups.
        shared_axes: Whether axis i means the same in both sets; it does not for two models, or for keys and values.
            Without shared axes, or if the widths differ, only "procrustes" and "cka" are computed.
        only: Statistics to compute, such as ["cka"]; by default all, of which "procrustes" takes most of the time.
        settings: How they are compared.
        source: Origin of the vectors, e.g. {"model": ..., "layer": 3, "site": ...}. It is part of the record, and
            titles show model, layer and step.

    Raises:
        ValueError: The sets have different facts, `rank` needs more facts, a vector is zero or not finite, or the
            vectors of different facts are almost equal.
    """
    # 1. Check the sets, and express them in few axes.
    ids = [str(row) for row in range(len(forward))] if ids is None else list(ids)
    if len(set(ids)) != len(ids):
        raise ValueError(f"two facts have the same id: {next(name for name in ids if ids.count(name) > 1)!r}")
    sets = [_as_matrix(vectors, name, ids) for vectors, name in zip((forward, reverse), names, strict=True)]
    widths = [vectors.shape[1] for vectors in sets]
    if groups is not None and len(groups) != len(ids):
        raise ValueError(f"{len(groups)} groups for {len(ids)} facts; give each fact its group")
    labels = [""] * len(ids) if groups is None else list(groups)
    members = [torch.tensor([i for i, own in enumerate(labels) if own == label]) for label in dict.fromkeys(labels)]
    sets = [_without_groups(vectors, members) for vectors in sets]
    one_space = shared_axes and widths[0] == widths[1]
    x, y = _in_few_axes(torch.cat(sets)).chunk(2) if one_space else map(_in_few_axes, sets)
    rank, resamples = settings.rank, settings.resamples
    require_facts(len(ids), rank)
    _check_rank(rank, (x, y), names)

    # 2. Sample pairings within the groups, and subsets of the facts.
    n_facts, rng = len(ids), np.random.default_rng(settings.seed)
    paired = torch.arange(n_facts)[None]
    orders = paired.repeat(resamples, 1)
    for group in members:
        orders[:, group] = torch.from_numpy(rng.permuted(group.expand(resamples, -1).numpy(), axis=1))
    subsets = torch.from_numpy(rng.permuted(paired.expand(resamples, -1).numpy(), axis=1))[:, : n_facts - n_facts // 3]

    # 3. Compute every statistic of the true pairing, of the sampled ones and of the subsets.
    known = statistics(rank, one_space)
    if only is not None and (not only or any(name not in known for name in only)):
        raise ValueError(f"only={list(only)}; the statistics of these two sets are {', '.join(known)}")
    selected = {name: statistic for name, statistic in known.items() if only is None or name in only}
    coordinates, explained = _shared_components(x, y) if one_space else (None, None)
    return Comparison(
        values=torch.cat([statistic(x, y, paired) for statistic in selected.values()]),
        null=torch.stack([statistic(x, y, orders) for statistic in selected.values()], dim=1),
        deviations=torch.stack([deviations(statistic, x, y, subsets) for statistic in selected.values()], dim=1),
        singular_values=torch.stack([_singular_values(vectors, n_facts - len(members)) for vectors in (x, y)]),
        coordinates=coordinates,
        explained=explained,
        statistics=list(selected),
        ids=ids,
        names=names,
        record={
            **settings.describe(),
            "groups": None if groups is None else list(groups),
            "widths": widths,
            "source": dict(source or {}),
            "versions": {name: installed_version(name) for name in ("diffusion-lens", "torch", "numpy", "scipy")},
        },
    )


@checked_arguments
def compare_along(
    axis: str,
    sets: Mapping[int, tuple[Tensor, Tensor]],
    *,
    source: Mapping[str, Any] | None = None,
    progress: bool = False,
    **settings: Any,
) -> Comparisons:
    """`compare` at each of several layers or denoising steps.

    Args:
        axis: "layer" or "step".
        sets: The two sets by layer or step, all of the same facts.
        source, settings: The same as in `compare`.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: `compare` refuses the sets of a layer or step, which the message names.
    """
    if axis not in ("layer", "step"):
        raise ValueError(f"axis={axis!r}; it must be 'layer' or 'step'")
    if not sets:
        raise ValueError(f"there is nothing to compare; give two sets of vectors by {axis}")
    comparisons = {}
    for index in tqdm(sorted(sets), desc="compare", unit=axis, disable=not progress):
        try:
            comparisons[index] = compare(*sets[index], source={**(source or {}), axis: index}, **settings)
        except ValueError as error:
            raise ValueError(f"at {axis} {index}: {error}") from error
    return Comparisons(axis, comparisons)


def statistics(rank: int, one_space: bool) -> dict[str, Statistic]:
    """All statistics by name; without common axes only "procrustes" and "cka", which need none."""
    without_axes: dict[str, Statistic] = {"procrustes": partial(procrustes, rank=rank), "cka": cka}
    if not one_space:
        return without_axes
    return {
        "cosine": cosine,
        "centred_cosine": centred_cosine,
        "retrieval": retrieval,
        "subspace": partial(subspace_overlap, rank=rank),
        **without_axes,
    }


def cosine(x: Vectors, y: Vectors, orders: Orders) -> Values:
    """Mean over facts of the cosine between a fact's two vectors."""
    return (unit(x) @ unit(y).T)[torch.arange(len(x)), orders].mean(dim=1)


def centred_cosine(x: Vectors, y: Vectors, orders: Orders) -> Values:
    """`cosine` after the mean of each set is subtracted."""
    return cosine(centred(x), centred(y), orders)


def retrieval(x: Vectors, y: Vectors, orders: Orders) -> Values:
    """Share of vectors whose nearest in the other set, by centred cosine, is their own fact's; mean over both sets."""
    cosines = unit(centred(x)) @ unit(centred(y)).T
    nearest_in_y, nearest_in_x = cosines.argmax(dim=1), cosines.argmax(dim=0)
    hits = (nearest_in_y == orders).double() + (nearest_in_x[orders] == torch.arange(len(x))).double()
    return hits.mean(dim=1) / 2


def subspace_overlap(x: Vectors, y: Vectors, orders: Orders, rank: int) -> Values:
    """Mean cos² of the angles between the leading principal components; mean over the two halves of the facts.

    Random subspaces of a d-dimensional space have an overlap of rank / d on average.
    """
    overlaps = torch.zeros(len(orders), dtype=x.dtype)
    for half in (range(0, len(x), 2), range(1, len(x), 2)):
        axes = principal_axes(x[half], rank)
        overlaps += torch.stack([(axes.T @ principal_axes(y[order[half]], rank)).square().sum() for order in orders])
    return overlaps / (2 * rank)


def procrustes(x: Vectors, y: OtherVectors, orders: Orders, rank: int) -> Values:
    """ρ, the correlation of y with the rotated x in `rank` principal components; R is fitted to the other facts."""
    x, y = (centred(vectors) @ principal_axes(vectors, rank) for vectors in (x, y))
    norms = x.norm() * y.norm()
    return torch.stack([_held_out_products(x, y[order]).sum() / norms for order in orders])


def cka(x: Vectors, y: OtherVectors, orders: Orders) -> Values:
    """Unbiased linear CKA; needs at least four facts."""
    x, y = _u_centred(centred(x)), _u_centred(centred(y))
    norms = x.norm() * y.norm()
    return torch.stack([(x * y[order][:, order]).sum() / norms for order in orders])


def deviations(statistic: Statistic, x: Vectors, y: OtherVectors, subsets: Int[Tensor, "resample subset"]) -> Values:
    """Deviations of the statistic from its mean that other facts would give, estimated from random subsets of these.

    The variance of a mean over m of n facts around the mean over all n is proportional to 1/m − 1/n, and that of the
    mean over n around the true one to 1/n. So deviations are scaled by √(m / (n − m)) (Politis & Romano 1994).
    """
    n_facts, size = len(x), subsets.shape[1]
    paired = torch.arange(size)[None]
    values = torch.cat([statistic(x[subset], y[subset], paired) for subset in subsets])
    return (values - values.mean()) * math.sqrt(size / (n_facts - size))


def principal_axes(x: Vectors, rank: int) -> Float[Tensor, "d rank"]:
    """Orthonormal directions in which the facts vary most; vectors of length 0 if there are fewer directions."""
    from scipy.linalg import eigh  # Imported here because scipy is slow to import.

    x = centred(x)
    x = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    variances, facts = eigh((x @ x.T).numpy(), subset_by_index=(len(x) - rank, len(x) - 1))
    lengths = torch.from_numpy(variances).clamp(min=len(x) * torch.finfo(x.dtype).eps).sqrt()
    axes: Tensor = x.T @ torch.from_numpy(facts) / lengths
    return axes


def effective_rank(singular_values: Float[Tensor, "component"]) -> float:
    """exp of the entropy of the singular values as shares of their sum (Roy & Vetterli 2007)."""
    return float(torch.special.entr(singular_values / singular_values.sum()).sum().exp())


def centred(x: Vectors) -> Vectors:
    """The vectors without their mean over facts."""
    return x - x.mean(dim=0)


def unit(x: Vectors) -> Vectors:
    """The vectors scaled to length 1; a vector of length 0 stays 0."""
    return torch.nn.functional.normalize(x, dim=1, eps=torch.finfo(x.dtype).tiny)


def require_facts(n_facts: int, rank: int) -> None:
    """Raise a `ValueError` if a comparison needs more facts, because "subspace" uses half of two thirds of them."""
    if n_facts < (fewest := 3 * (rank + 2)):
        smaller = f", or use rank={n_facts // 3 - 2}" if n_facts >= 12 else ""
        raise ValueError(f"{n_facts} facts are too few for rank={rank}: give at least {fewest}{smaller}")


def _as_matrix(vectors: Tensor, name: str, ids: Sequence[str]) -> Vectors:
    if vectors.dim() != 2:
        raise ValueError(f"the {name} vectors must be a matrix with a row per fact; got {list(vectors.shape)}")
    if len(vectors) != len(ids):
        raise ValueError(f"{len(vectors)} {name} vectors for {len(ids)} facts; both sets need one row per fact")
    vectors = vectors.detach().double().cpu()
    for problem, rows in (
        ("has NaN or infinite entries", ~vectors.isfinite().all(dim=1)),
        ("is zero", (vectors == 0).all(dim=1)),
    ):
        if rows.any():
            raise ValueError(
                f"the {name} vector of {ids[int(rows.nonzero()[0])]!r} {problem}; leave the fact out of both sets"
            )
    return vectors


def _without_groups(vectors: Vectors, members: Sequence[Tensor]) -> Vectors:
    """The vectors with the mean of each group moved to the mean of the set."""
    if len(members) == 1:
        return vectors
    moved, mean = vectors.clone(), vectors.mean(dim=0)
    for group in members:
        moved[group] += mean - vectors[group].mean(dim=0)
    return moved


def _check_rank(rank: int, sets: Sequence[Float[Tensor, "fact _"]], names: Sequence[str]) -> None:
    for vectors, name in zip(sets, names, strict=True):
        n_directions = int((torch.linalg.svdvals(centred(vectors)) > EPSILON * vectors.norm()).sum())
        if n_directions < rank:
            raise ValueError(
                f"the {name} vectors of different facts vary in {n_directions} directions, fewer than rank={rank}"
            )


def _in_few_axes(vectors: Float[Tensor, "entry d"]) -> Float[Tensor, "entry component"]:
    """The vectors in an orthonormal basis of their span, cheaper for large d; angles and lengths stay."""
    coordinates: Tensor = torch.linalg.qr(vectors.T, mode="r").R.mT
    return coordinates


def _shared_components(x: Vectors, y: Vectors) -> tuple[Float[Tensor, "2 fact 2"], Float[Tensor, "2"]]:
    """Coordinates of both sets in the first two principal components of all vectors, and the shares of the variance."""
    u, s, _ = torch.linalg.svd(torch.cat([centred(x), centred(y)]), full_matrices=False)
    coordinates = (u * s)[:, :2]
    largest = coordinates.gather(0, coordinates.abs().argmax(dim=0, keepdim=True))
    return (coordinates * largest.sign()).unflatten(0, (2, len(x))), (s.square() / s.square().sum())[:2]


def _singular_values(x: Vectors, count: int) -> Float[Tensor, "component"]:
    """The `count` largest singular values of the centred vectors, padded with 0 if the vectors are narrower."""
    values = torch.linalg.svdvals(centred(x))[:count]
    return torch.nn.functional.pad(values, (0, count - len(values)))


def _held_out_products(x: Float[Tensor, "fact rank"], y: Float[Tensor, "fact rank"]) -> Float[Tensor, "fact"]:
    """⟨x_i R, y_i⟩ of each fact, with R fitted to the other facts; x and y are centred."""
    n_facts = len(x)
    # The factor n / (n - 1) accounts for centring again without fact i.
    products = x[:, :, None] * y[:, None, :]
    u, _, vh = torch.linalg.svd(products.sum(dim=0) - products * (n_facts / (n_facts - 1)))
    return torch.einsum("ir,irs,is->i", x, u @ vh, y)


def _u_centred(x: Vectors) -> Float[Tensor, "fact fact"]:
    """Inner products between different facts, centred so that every row and column sums to 0; the diagonal is 0."""
    n_facts = len(x)
    products = (x @ x.T).fill_diagonal_(0)
    sums = products.sum(dim=0) / (n_facts - 2)
    mean = sums.sum() / (n_facts - 1)
    return (products - sums[:, None] - sums[None, :] + mean).fill_diagonal_(0)


def _rows_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table({name: [row[name] for row in rows] for name in rows[0]})


def _tails(
    values: Float[Tensor, "resample statistic"], level: float
) -> tuple[Float[Tensor, "statistic"], Float[Tensor, "statistic"]]:
    level = check_level(level)
    low, high = values.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=values.dtype), dim=0)
    return low, high
