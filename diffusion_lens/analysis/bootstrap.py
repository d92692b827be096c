"""Confidence intervals of means over facts, from resampling the facts."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

RESAMPLES = 2000
RESAMPLED_BYTES = 2**26


def bootstrap_interval(
    values: Float[Tensor, "fact layer"], level: float, seed: int
) -> tuple[Float[Tensor, "layer"], Float[Tensor, "layer"]]:
    """Ends of the bias-corrected and accelerated interval (Efron 1987) of the mean over facts.

    All layers share the resampled facts. Where all facts agree, both ends are their value; where one is NaN, and for
    fewer than two facts, both ends are NaN.

    Args:
        values: One row per fact.
        level: Probability that such an interval covers the mean.
        seed: Seed of `numpy.random.default_rng`.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level}; it must be between 0 and 1, e.g. 0.95")
    if len(values) < 2:
        nothing = torch.full(values.shape[1:], torch.nan, dtype=values.dtype)
        return nothing, nothing.clone()
    undefined = values.isnan().any(dim=0)
    ends = values[:1].masked_fill(undefined, torch.nan).repeat(2, 1)
    varied = (values != values[:1]).any(dim=0) & ~undefined
    if varied.any():
        from scipy import stats  # imported here because it takes half a second

        facts = values[:, varied].double().numpy()
        interval = stats.bootstrap(
            (facts,),
            np.mean,
            axis=0,
            confidence_level=level,
            n_resamples=RESAMPLES,
            batch=max(1, RESAMPLED_BYTES // facts.nbytes),
            method="BCa",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        ends[:, varied] = torch.tensor(np.stack(interval), dtype=values.dtype)
    return ends[0], ends[1]


def percentile_interval(
    values: Float[Tensor, "fact *rest"],
    level: float,
    seed: int,
    statistic: Callable[[Float[Tensor, "resample *rest"]], Float[Tensor, "resample"]] | None = None,
) -> tuple[float, float]:
    """Ends of the percentile interval (Efron 1979) of one number that is computed from means over facts.

    In contrast to `bootstrap_interval` it applies to any function of several means. For fewer than two facts both ends
    are NaN.

    Args:
        values: One row per fact, without NaN.
        level: Probability that such an interval covers the number.
        seed: Seed of `numpy.random.default_rng`.
        statistic: Function of the means of each resample; by default the mean itself, of values without further axes.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level}; it must be between 0 and 1, e.g. 0.95")
    if len(values) < 2:
        return float("nan"), float("nan")
    rng, facts = np.random.default_rng(seed), values.double()
    means = torch.stack([facts[rng.integers(len(facts), size=len(facts))].mean(dim=0) for _ in range(RESAMPLES)])
    numbers = means if statistic is None else statistic(means)
    low, high = np.quantile(numbers.numpy(), [(1 - level) / 2, (1 + level) / 2]).tolist()
    return low, high
