"""Confidence intervals of means over facts, some of which belong to one cluster, such as the wordings of one person.

Facts of one cluster are not independent, so clusters are the units. With S_c the sum of the n_c facts of cluster c, of
n facts and G clusters in all, the mean is m = Σ S_c / n. Its standard error is that of the jackknife over clusters,
with m_-c the mean without cluster c:

    se² = (G - 1) / G · Σ_c (m - m_-c)²,    m - m_-c = (S_c - n_c m) / (n - n_c)

A ratio of means Σ x / Σ w, such as the share of the total effects that a restored state recovers, is such a mean too:
S_c is then the sum of the x of a cluster, and n_c and n are the sums of the w of the cluster and of all facts.

Two methods use it. Neither takes the interval of few clusters from the spread of resampled means, as the percentile and
the BCa interval do, which are much too short then. `benchmarks/coverage.py` measures the coverage.

mean    The percentile-t interval (Efron 1982; Hall 1988, Annals of Statistics 16). Clusters are resampled, and the
        quantiles of t = (m* - m) / se*, each resample divided by its own error, replace those of Student's law. So the
        interval is as skewed as the facts.
share   Wilson's interval (1927), for right and wrong answers and other numbers from 0 to 1. The number of facts is
        replaced by the effective one, of independent right and wrong answers with the same error; Korn and Graubard
        (1998, Survey Methodology 24) correct it for few clusters. Wilson's interval never has length 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.settings import check_level

RESAMPLES = 2000
FEWEST = 4  # Clusters with an interval of a mean: of fewer, too many resamples contain one cluster only.
_ROUNDING = 1e-12

Ends = tuple[Float[Tensor, "*rest"], Float[Tensor, "*rest"]]


@dataclass(frozen=True)
class _Sums:
    """Means over facts and their residuals by cluster; the axes of the values after the first are joined in one."""

    weight: Float[Tensor, ""]  # number of facts, or sum of their weights
    mean: Float[Tensor, "entry"]
    residuals: Float[Tensor, "cluster entry"]
    sizes: Float[Tensor, "cluster"]  # weight of each cluster
    error: Float[Tensor, "entry"]  # standard error of the mean by the jackknife over clusters
    variance: Float[Tensor, "entry"]  # mean square of the differences from the mean
    agree: Tensor  # Bool[entry]: whether all facts have the same value

    @classmethod
    def of(
        cls,
        values: Float[Tensor, "fact *rest"],
        clusters: Sequence[str],
        level: float,
        weights: Float[Tensor, "fact"] | None = None,
    ) -> "_Sums":
        level = check_level(level)
        numbers = values.double().reshape(len(values), math.prod(values.shape[1:]))
        rows = {name: row for row, name in enumerate(sorted(set(clusters)))}
        owner = torch.tensor([rows[name] for name in clusters], dtype=torch.long)
        each = numbers.new_ones(len(numbers)) if weights is None else weights.double()
        weight, n_clusters = each.sum(), len(rows)
        mean = numbers.sum(dim=0) / weight
        differences = numbers - mean * each[:, None]
        residuals = numbers.new_zeros(n_clusters, numbers.shape[1]).index_add_(0, owner, differences)
        sizes = each.new_zeros(n_clusters).index_add_(0, owner, each)
        squares = (residuals / (weight - sizes)[:, None]).square().sum(dim=0)
        # People who agree, each about facts that differ, give 0, or what rounding leaves of it.
        squares = torch.where(squares * weight**2 > _ROUNDING * differences.square().sum(dim=0), squares, 0.0)
        most = each.abs().argsort(descending=True)[:1]  # A fact of weight 0 and value 0 agrees with all others.
        return cls(
            weight=weight,
            mean=mean,
            residuals=residuals,
            sizes=sizes,
            error=(squares * (n_clusters - 1) / max(n_clusters, 1)).sqrt(),
            variance=differences.square().mean(dim=0),
            agree=(numbers * each[most, None] == numbers[most] * each[:, None]).all(dim=0),
        )


def mean_interval(
    values: Float[Tensor, "fact *rest"],
    clusters: Sequence[str],
    level: float,
    seed: int,
    within: tuple[float, float] = (-math.inf, math.inf),
    weights: Float[Tensor, "fact"] | None = None,
) -> Ends:
    """Ends of the percentile-t interval of the mean over facts.

    Where all facts agree, both ends are their value. Both are NaN where a fact is NaN, where the resamples do not bound
    the mean, where the clusters have one mean although their facts differ, and for fewer than `FEWEST` clusters.

    With weights, the interval is that of the ratio of means Σ values / Σ weights. A resample whose weights have a sum
    of 0 or less does not bound it.

    Args:
        values: Values of the facts. All axes after the first share the resamples.
        clusters: Cluster of each fact.
        level: Probability that such an interval covers the mean.
        seed: Seed of the resamples.
        within: Range of the values, at which the ends are cut.
        weights: Denominator of each fact in a ratio of means.
    """
    sums = _Sums.of(values, clusters, level, weights)
    n_clusters = len(sums.sizes)
    if n_clusters < FEWEST:
        return _no_interval(values)
    # How often each resample contains each cluster
    chances = [1 / n_clusters] * n_clusters
    counts = torch.from_numpy(np.random.default_rng(seed).multinomial(n_clusters, chances, size=RESAMPLES)).double()
    weight = (counts @ sums.sizes)[:, None]  # n*, the number of facts or the sum of their weights
    shift = counts @ sums.residuals / weight  # m* - m
    # Squared errors of the resamples without the factor (G - 1) / G: Σ r*² / (n* - n_c)² with r* = r - n_c (m* - m),
    # expanded for matrix products.
    factors = torch.where(counts > 0, counts / (weight - sums.sizes).square(), 0.0)
    squares, crossed = factors @ sums.residuals.square(), factors @ (sums.residuals * sums.sizes[:, None])
    spread = squares - 2 * shift * crossed + shift.square() * (factors @ sums.sizes.square())[:, None]
    # Clusters that agree give 0, or what rounding leaves of it.
    error = torch.where(spread > _ROUNDING * squares, spread, 0.0).mul((n_clusters - 1) / n_clusters).sqrt()
    ratios = (shift / error).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    tail = (1 - level) / 2
    ratios = ratios.sort(dim=0).values[[math.ceil((1 - tail) * (RESAMPLES - 1)), math.floor(tail * (RESAMPLES - 1))]]
    bounded = ratios.isfinite().all(dim=0) & (sums.error > 0) & bool((weight > 0).all())
    ends = torch.where(bounded, (sums.mean - ratios * sums.error).clamp(*within), math.nan)
    return _shaped(torch.where(sums.agree, sums.mean, ends), values)


def share_interval(values: Float[Tensor, "fact *rest"], clusters: Sequence[str], level: float) -> Ends:
    """Ends of Wilson's interval of a share, the mean over facts of numbers from 0 to 1.

    Where all facts agree there is no error to take the effective number of facts from, and the number of clusters
    stands for it, as if the facts of each were one. So where 40 answers about 4 people are right, the interval is wider
    than where one is wrong, which shows that they are not. Where a fact is NaN, and for fewer than two clusters, both
    ends are NaN.

    Args:
        values, clusters, level: Those of `mean_interval`.
    """
    from scipy import stats  # imported here because it takes half a second

    sums, n = _Sums.of(values, clusters, level), len(values)
    n_clusters = len(sums.sizes)
    if n_clusters < 2:
        return _no_interval(values)
    upper = (1 + level) / 2
    few_clusters = (stats.t.ppf(upper, n_clusters - 1) / stats.t.ppf(upper, n - 1)) ** 2
    product, z = sums.mean * (1 - sums.mean), stats.norm.ppf(upper)
    # Facts that differ more within clusters than between them count as independent, not as more than that. Few scores
    # that nearly agree do not say how others may differ: their deviation is at least 1/n of that of n answers.
    alone = torch.maximum(sums.variance, product / n**2)
    error = torch.maximum(sums.error.square() * (n - 1), alone) / n * few_clusters
    z_squared = z**2 / torch.where(sums.agree, n_clusters, product / error)
    centre, half = sums.mean + z_squared / 2, (z_squared * (product + z_squared / 4)).sqrt()
    return _shaped(torch.stack([centre - half, centre + half]).div(1 + z_squared).clamp(0, 1), values)


def _no_interval(values: Float[Tensor, "fact *rest"]) -> Ends:
    nothing = torch.full(values.shape[1:], math.nan, dtype=values.dtype)
    return nothing, nothing.clone()


def _shaped(ends: Float[Tensor, "2 entry"], values: Float[Tensor, "fact *rest"]) -> Ends:
    low, high = ends.to(values.dtype).reshape(2, *values.shape[1:])
    return low, high
