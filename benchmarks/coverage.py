"""How often confidence intervals of means over facts cover the mean, by the number of clusters.

Samples are drawn from laws whose mean is known. Of each, `analysis.over_facts.intervals` gives an interval with a level
of 95 %; the coverage is the share of intervals that contain the mean. Beside it stand Student's interval of the means
of clusters, and the bias-corrected and accelerated bootstrap (BCa).

    even      cluster means uniform on [0, 1]
    skewed    exponential cluster means
    bimodal   cluster means from Beta(0.8, 0.2): most effects are near 1, some near 0
    rare      cluster means from Beta(0.2, 1.8): most are near 0
    share p   right and wrong answers; a cluster's own share is drawn from a Beta law of mean p, so that two answers of
              one cluster have a correlation of 0.5
    scores    numbers from 0 to 1 with a mean of 0.3: those of a cluster are from a Beta law around its own mean

Each cluster has three facts, or with `--sizes mixed` one, one, two or six. Facts of a cluster differ by normal noise.

    python benchmarks/coverage.py [--samples 2000] [--sizes equal] [--bca]
"""

import argparse
import warnings

import numpy as np
import torch
from scipy import stats

from diffusion_lens.analysis.over_facts.intervals import FEWEST, mean_interval, share_interval

CLUSTERS = (2, 3, 4, 6, 10, 15, 20, 30, 50)
SIZES = {"equal": (3,), "mixed": (1, 1, 2, 6)}
LEVEL = 0.95
MEANS = {
    "even": (0.5, lambda rng, shape: rng.random(shape)),
    "skewed": (1.0, lambda rng, shape: rng.exponential(size=shape)),
    "bimodal": (0.8, lambda rng, shape: rng.beta(0.8, 0.2, size=shape)),
    "rare": (0.1, lambda rng, shape: rng.beta(0.2, 1.8, size=shape)),
}
SHARES = (0.5, 0.8, 0.95)


def covered(ends: tuple[np.ndarray, np.ndarray], mean: float) -> float:
    """The share of the intervals that contain the mean."""
    return float(((ends[0] <= mean) & (mean <= ends[1])).mean())


def student(values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Student's interval of the means of clusters. `rows` has the cluster of each fact."""
    means = np.stack([values[rows == row].mean(axis=0) for row in range(rows.max() + 1)])
    half = stats.t.ppf((1 + LEVEL) / 2, len(means) - 1) * means.std(axis=0, ddof=1) / len(means) ** 0.5
    return means.mean(axis=0) - half, means.mean(axis=0) + half


def bca(values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The BCa interval of the means of clusters."""
    means = np.stack([values[rows == row].mean(axis=0) for row in range(rows.max() + 1)])
    with warnings.catch_warnings(action="ignore"):
        settings = {"confidence_level": LEVEL, "n_resamples": 1000, "batch": 50, "rng": np.random.default_rng(0)}
        return stats.bootstrap((means,), np.mean, axis=0, **settings).confidence_interval


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--sizes", choices=SIZES, default="equal")
    parser.add_argument("--bca", action="store_true", help="Compute BCa intervals too, which takes minutes.")
    given = parser.parse_args()
    heads = [*MEANS, *(f"share {p}" for p in SHARES), "scores"]
    print(f"{'clusters':10}{''.join(f'{head:>20}' for head in heads)}")
    for n_clusters in CLUSTERS:
        rng = np.random.default_rng(n_clusters)
        pattern = SIZES[given.sizes]
        sizes = [pattern[row % len(pattern)] for row in range(n_clusters)]
        rows = np.repeat(np.arange(n_clusters), sizes)
        clusters, shape = [f"{row}" for row in rows], (n_clusters, given.samples)
        cells = []
        for mean, law in MEANS.values():
            values = law(rng, shape)[rows] + 0.2 * rng.normal(size=(len(rows), given.samples))
            ends = mean_interval(torch.from_numpy(values), clusters, LEVEL, seed=0)
            ours = "-" if n_clusters < FEWEST else f"{covered((ends[0].numpy(), ends[1].numpy()), mean):.3f}"
            others = [student(values, rows), *([bca(values, rows)] if given.bca else [])]
            cells.append(" ".join([ours, *(f"{covered(each, mean):.3f}" for each in others)]))
        shares = {p: rng.random((len(rows), given.samples)) < rng.beta(p, 1 - p, size=shape)[rows] for p in SHARES}
        own = rng.beta(3, 7, size=shape)[rows]
        for p, answers in {**shares, 0.3: rng.beta(4 * own, 4 * (1 - own))}.items():
            scores = answers.astype(float)
            low, high = share_interval(torch.from_numpy(scores), clusters, LEVEL)
            others = [student(scores, rows), *([bca(scores, rows)] if given.bca else [])]
            both = [covered((low.numpy(), high.numpy()), p), *(covered(each, p) for each in others)]
            cells.append(" ".join(f"{each:.3f}" for each in both))
        print(f"{n_clusters:<10}{''.join(f'{cell:>20}' for cell in cells)}", flush=True)


if __name__ == "__main__":
    main()
