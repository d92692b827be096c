"""Do the same sites come first, whatever the number of masks, the steps of the loop or the seed of the noise?

Results of the same sites, under settings that should not matter, are compared two by two by how they rank their sites,
the largest indirect effect first:

    spearman  rank correlation ρ, of all sites
    kendall   rank correlation τ_b (Kendall 1945), by the share of pairs of sites in one order; ties count half
    overlap   share of the k first sites of one that are among the k first of the other

A site is a (role, layer) cell of an average, or a (position, layer) cell of a trace. Many sites have no effect, and
their order is noise: a low ρ beside a high overlap says that only they changed places.

Each statistic has the range of 95% of its resamples of persons, the same for both results, since these have the same
facts. So the range shows what another choice of facts would change, and not what another seed would. It is no
confidence interval: resampled effects are noisier than the effects, so that rankings agree less in resamples, and ρ and
τ of the true effects are outside more often than the level says. In simulations of 30 sites, the ranges of 95% contain
those of 6, 20 and 60 persons in 73, 87 and 89% (ρ) and in 76, 90 and 90% (τ). A resample also moves the sites of both
results together, and may make them more alike: the statistic is then near the lower end.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.causal_tracing.average_result import AverageEffect
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace
from diffusion_lens.records.results import PicturedResult, Saved, Table, network_of, shown_model
from diffusion_lens.settings import Whole, at_least, check_level, check_seed, checked_arguments, one_of
from diffusion_lens.settings.figures import styled

STATISTICS = ("spearman", "kendall", "overlap")
FEWEST = 6  # Persons with a range: resamples of fewer repeat too few of them to show what a choice of facts changes.
Ranked: TypeAlias = AverageEffect | CausalTrace


@dataclass(frozen=True, eq=False, repr=False)
class RankStability(PicturedResult, Saved):
    """How alike several results rank the same sites.

    Columns of the data frame: statistic, one, other (names of two results), value, low, high.

    Attributes:
        values: Float[statistic entry entry], "spearman" and "kendall" from -1 to 1 and "overlap" from 0 to 1, of each
            pair of results. NaN where all sites of a result have one effect, and of "overlap" also where its k-th site
            and the next have one effect.
        low, high: Float[statistic entry entry], ends of the ranges of the resamples; NaN for traces, and for fewer than
            six persons.
        names: Name of each result.
        record: k, number of sites, facts in common, level, resamples, seed, network and settings of each result.
    """

    KIND = "rank stability"
    SHOWS = "how alike several results rank the same sites"
    _SAID = ("statistic",)
    ENTRIES: ClassVar[Mapping[str, Any]] = {"top_k": int, "sites": int, "facts": list[str]}
    AXES = (("entry", "names"), ("statistic", len(STATISTICS)))

    values: Float[Tensor, "statistic entry entry"]
    low: Float[Tensor, "statistic entry entry"]
    high: Float[Tensor, "statistic entry entry"]
    names: list[str]
    record: dict[str, Any]

    def between(self, one: str, other: str, statistic: str = "spearman") -> tuple[float, float, float]:
        """A statistic of two results, and the ends of its range.

        Raises:
            ValueError: There is no such result or statistic.
        """
        of_names = one_of(*self.names)
        cell = (
            self._index(statistic),
            self.names.index(of_names("one", one)),
            self.names.index(of_names("other", other)),
        )
        value, low, high = (each[cell].item() for each in self._ends().values())
        return value, low, high

    @styled
    def plot(self, statistic: str = "spearman", ax: Any = None, title: str | None = None) -> Any:
        """The matrix of one statistic, "spearman", "kendall" or "overlap". Returns the matplotlib axes."""
        values = self.values[self._index(statistic)]
        label = f"top {self.record['top_k']}" if statistic == "overlap" else "ρ" if statistic == "spearman" else "τ"
        return plots.token_map(
            values,
            [["" if math.isnan(value) else f"{value:.2f}" for value in row] for row in values.tolist()],
            rows=self.names,
            layers=self.names,
            xlabel=f"{self.record['sites']} sites, {len(self.record['facts']) or 'no'} facts in common",
            hue="Blues",
            limits=(min(0.0, float(values.nan_to_num().min())), 1.0),
            bar=label,
            title=title or f"How alike the sites are ranked ({statistic})",
            ax=ax,
        )

    def _shows(self, statistic: str = "spearman") -> str:
        by = {"spearman": "the rank correlation ρ of Spearman", "kendall": "the rank correlation τ of Kendall"}
        top = f"the overlap of the top {self.record['top_k']}"
        return f"{self.SHOWS}, by {by.get(STATISTICS[self._index(statistic)], top)}"

    def _table(self) -> Table:
        pairs = list(combinations(range(len(self.names)), 2))
        cells = [(i, one, other) for i in range(len(STATISTICS)) for one, other in pairs]
        return Table(
            {
                "statistic": [STATISTICS[i] for i, _, _ in cells],
                "one": [self.names[one] for _, one, _ in cells],
                "other": [self.names[other] for _, _, other in cells],
                **{name: [each[cell].item() for cell in cells] for name, each in self._ends().items()},
            }
        )

    def _ends(self) -> dict[str, Tensor]:
        return {"value": self.values, "low": self.low, "high": self.high}

    def _settings(self) -> Mapping[str, Any]:
        """With the models of the results."""
        models = dict.fromkeys(
            shown_model(each) for each in self.record.get("results", {}).values() if each.get("model")
        )
        return {**({"model": " and ".join(models)} if models else {}), **self.record}

    def _index(self, statistic: str) -> int:
        return STATISTICS.index(one_of(*STATISTICS)("statistic", statistic))


@checked_arguments
def rank_stability(
    results: Mapping[str, Ranked] | Sequence[Ranked],
    top_k: Whole = 5,
    *,
    level: float = 0.95,
    resamples: Whole = 1000,
    seed: Whole = 0,
) -> RankStability:
    """Compare how several averages or traces rank the same sites.

    Args:
        results: Averages of the same roles and layers, over the facts that all have in common; or traces of the same
            positions and layers. By name, such as {"16 masks": ..., "32 masks": ...}, or in order. Of an average by
            step take one step, `average.at(offset)`, and of a trace by step `trace.at_step(step)`.
        top_k: Number k of the first sites that overlap.
        level: Share of the resamples that is inside a range; not the probability that it covers the statistic.
        resamples: Number of resamples of the persons.
        seed: Seed of the resamples.

    Raises:
        ValueError: Fewer than two results, averages beside traces, other sites in one result than in another, no fact
            in common, or fewer sites than `top_k`.
    """
    named = dict(results) if isinstance(results, Mapping) else {str(i): result for i, result in enumerate(results)}
    count, n_resamples = at_least(1, "top_k", top_k), at_least(1, "resamples", resamples)
    share = check_level(level)
    if len(named) < 2:
        raise ValueError(f"{len(named)} results are given; a ranking is stable between two or more")
    facts, clusters, effects = _effects_of(named)
    means = [each.nanmean(dim=0) for each in effects]
    known = ~torch.stack(means).isnan().any(dim=0)
    if (n_sites := int(known.sum())) < max(count, 2):
        raise ValueError(f"top_k={count}, and the results have {n_sites} sites with an effect in common: give fewer")
    effects = [each[:, known] for each in effects]

    # 1. The statistics, and those of each resample of the persons.
    values = _statistics(torch.stack(means)[:, known].double(), count)
    low = high = torch.full_like(values, torch.nan)
    if len(persons := sorted(set(clusters))) >= FEWEST:
        owner = [persons.index(name) for name in clusters]
        chances = [1 / len(persons)] * len(persons)
        rng = np.random.default_rng(check_seed("seed", seed))
        counts = rng.multinomial(len(persons), chances, size=n_resamples)[:, owner]
        weights = torch.from_numpy(counts).double()
        # Cells of which a resample has no fact are NaN.
        resampled = [(weights @ each.nan_to_num().double()) / (weights @ (~each.isnan()).double()) for each in effects]
        drawn = torch.stack([_statistics(rows, count) for rows in torch.stack(resampled, dim=1)])
        ends = torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=drawn.dtype)
        low, high = torch.nanquantile(drawn, ends, dim=0)

    # 2. The record says of what.
    return RankStability(
        values,
        low,
        high,
        list(named),
        {
            "top_k": count,
            "sites": n_sites,
            "facts": facts,
            "level": share,
            "resamples": n_resamples,
            "seed": int(seed),
            "results": {name: _described(result) for name, result in named.items()},
        },
    )


def _effects_of(named: Mapping[str, Ranked]) -> tuple[list[str], list[str], list[Float[Tensor, "fact cell"]]]:
    """The facts in common, their clusters, and the effects of each result at its sites."""
    first_name, first = next(iter(named.items()))
    for name, result in named.items():
        if type(result) is not type(first):
            raise ValueError(
                f"{first_name!r} is {type(first).__name__} and {name!r} {type(result).__name__}: compare averages with "
                "averages, and traces with traces"
            )
        for axis in ("roles" if isinstance(first, AverageEffect) else "positions", "layers"):
            if (own := getattr(result, axis)) != (others := getattr(first, axis)):
                raise ValueError(
                    f"{first_name!r} has the {axis} {others} and {name!r} {own}: rank the same sites, with the same "
                    f"{axis}= in both"
                )
    averages = [each for each in named.values() if isinstance(each, AverageEffect)]
    if not averages:
        return [], [], [each.indirect_effect.reshape(1, -1) for each in named.values() if isinstance(each, CausalTrace)]
    facts = [fact_id for fact_id in averages[0].ids if all(fact_id in each.ids for each in averages)]
    if not facts:
        raise ValueError(
            "the averages have no fact in common: average the same facts, such as those that all recall "
            "(known= with their ids)"
        )
    clusters = dict(zip(averages[0].ids, averages[0].clusters, strict=True))
    rows = [[each.ids.index(fact_id) for fact_id in facts] for each in averages]
    effects = [each.effects[of_facts].flatten(1) for each, of_facts in zip(averages, rows, strict=True)]
    return facts, [clusters[fact_id] for fact_id in facts], effects


def _statistics(means: Float[Tensor, "entry cell"], top_k: int) -> Float[Tensor, "statistic entry entry"]:
    """The statistics of each pair of rankings, one a row, over the sites that have an effect in all."""
    from scipy import stats  # imported here because it takes half a second

    effects = means[:, ~means.isnan().any(dim=0)].numpy()
    n_results, ranks = len(effects), stats.rankdata(effects, axis=1)
    first = [set(np.argsort(-row, kind="stable")[:top_k].tolist()) for row in effects]
    values = np.ones((len(STATISTICS), n_results, n_results))
    for one in range(n_results):
        if ranks[one].std() == 0:
            values[:2, one] = values[:2, :, one] = np.nan
        if ranks.shape[1] > top_k and np.ptp(np.sort(ranks[one])[::-1][top_k - 1 : top_k + 1]) == 0:
            values[2, one] = values[2, :, one] = np.nan  # Nothing says which of the tied sites is among the first.
    for one, other in combinations(range(n_results), 2):
        if not np.isnan(values[0, one, other]):
            rho = np.corrcoef(ranks[one], ranks[other])[0, 1]
            values[:2, one, other] = values[:2, other, one] = rho, stats.kendalltau(ranks[one], ranks[other]).statistic
        if not np.isnan(values[2, one, other]):
            values[2, one, other] = values[2, other, one] = len(first[one] & first[other]) / top_k
    return torch.from_numpy(values)


def _described(result: Ranked) -> dict[str, Any]:
    """The network of a result and the settings in which results are likely to differ, as far as its record has them."""
    chosen = (
        "kind",
        "window",
        "corruption",
        "noise",
        "samples",
        "seed",
        "length",
        "n_masks",
        "known",
        "loop",
        "offset",
    )
    return {**network_of(result.record), **{name: result.record[name] for name in chosen if name in result.record}}
