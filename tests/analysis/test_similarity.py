"""Statistics of paired vectors: against loops and scipy's own, and the laws that give them their names."""

import math
from functools import partial
from itertools import permutations

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_lens.analysis.representations import (
    centred_cosine,
    cka,
    cosine,
    deviations,
    effective_rank,
    principal_axes,
    procrustes,
    retrieval,
    statistics,
    subspace_overlap,
)

RANK = 3
ALL = statistics(RANK, one_space=True)
ANYWHERE = tuple(statistics(RANK, one_space=False))
UNCENTRED = ("cosine",)


def gaussian(n_facts, d, seed=0):
    return torch.from_numpy(np.random.RandomState(seed).randn(n_facts, d))


def decaying(n_facts, d, seed=0):
    """As activations are: a few directions hold most of the variance, and all vectors share a mean."""
    scale = torch.arange(1, d + 1).double() ** -0.7
    return gaussian(n_facts, d, seed) * scale + gaussian(1, d, 99)


def rotation(d, seed=1):
    return torch.linalg.qr(gaussian(d, d, seed)).Q


def paired(statistic, x, y):
    return statistic(x, y, torch.arange(len(x))[None]).item()


def shuffles(n_facts, resamples, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([rng.permutation(n_facts) for _ in range(resamples)]))


def noisy_pair(n_facts, d, seed=0, noise=0.5):
    x = decaying(n_facts, d, seed)
    return x, x + noise * (decaying(n_facts, d, seed + 1000) - gaussian(1, d, 99))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("d", [8, 60])
def test_the_same_set_is_1(name, d):
    x = decaying(20, d)
    assert paired(ALL[name], x, x) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_a_rotated_copy_is_the_same_only_to_statistics_without_axes(name):
    x = decaying(20, 60)
    value = paired(ALL[name], x, x @ rotation(60))
    assert value == pytest.approx(1, abs=1e-9) if name in ANYWHERE else value < 0.6


@pytest.mark.parametrize("name", ALL)
@given(scale=st.floats(1e-12, 1e12), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_size_does_not_matter_and_what_all_share_only_to_the_plain_cosine(name, scale, seed):
    x, y = noisy_pair(16, 24, seed)
    value = paired(ALL[name], x, y)
    assert paired(ALL[name], x * scale, y) == pytest.approx(value, abs=1e-7)
    shifted = paired(ALL[name], x + gaussian(1, 24, 5) * 10, y)
    assert (shifted == pytest.approx(value, abs=1e-7)) == (name not in UNCENTRED)


@pytest.mark.parametrize("name", ALL)
def test_facts_have_no_order(name):
    x, y = noisy_pair(16, 24)
    # Facts of one half stay together: "subspace" looks at every other one.
    order = torch.tensor([14, 3, 0, 5, 2, 15, 8, 7, 12, 9, 4, 11, 10, 1, 6, 13])
    assert paired(ALL[name], x[order], y[order]) == pytest.approx(paired(ALL[name], x, y), abs=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_both_sets_count_alike(name):
    x, y = noisy_pair(16, 24)
    assert paired(ALL[name], y, x) == pytest.approx(paired(ALL[name], x, y), abs=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_orders_are_other_pairings(name):
    x, y = noisy_pair(14, 24)
    orders = shuffles(14, 5)
    one_by_one = torch.tensor([paired(ALL[name], x, y[order]) for order in orders], dtype=torch.float64)
    torch.testing.assert_close(ALL[name](x, y, orders), one_by_one)
    assert one_by_one.unique().numel() > 1


@pytest.mark.parametrize("name", ALL)
def test_the_true_pairing_of_unrelated_sets_is_one_of_many(name):
    """Its rank among random pairings is uniform: what makes a p-value one."""
    ranks = []
    for seed in range(60):
        x, y = decaying(14, 20, seed), decaying(14, 20, seed + 500)
        true, *by_chance = ALL[name](x, y, torch.cat([torch.arange(14)[None], shuffles(14, 9, seed)]))
        above = torch.stack(by_chance) - true
        ties = above.abs() < 1e-12
        ranks.append(((above > 0) & ~ties).double().mean().item() + ties.double().mean().item() / 2)
    assert np.mean(ranks) == pytest.approx(0.5, abs=0.1)
    assert 0 < np.mean(np.array(ranks) < 0.1) < 0.25


def test_cosines_against_torch():
    x, y = noisy_pair(12, 30)
    cosines = torch.nn.functional.cosine_similarity
    assert paired(cosine, x, y) == pytest.approx(cosines(x, y).mean().item())
    assert paired(centred_cosine, x, y) == pytest.approx(cosines(x - x.mean(0), y - y.mean(0)).mean().item())


def test_retrieval_against_a_loop():
    x, y = gaussian(12, 5), gaussian(12, 5) + 1.2 * gaussian(12, 5, seed=5)
    dx, dy = (x - x.mean(0)).numpy(), (y - y.mean(0)).numpy()
    hits = 0
    for i in range(12):
        hits += i == min(range(12), key=lambda j: scipy.spatial.distance.cosine(dx[i], dy[j]))
        hits += i == min(range(12), key=lambda j: scipy.spatial.distance.cosine(dx[j], dy[i]))
    assert 2 < hits < 22
    assert paired(retrieval, x, y) == pytest.approx(hits / 24)


def hsic_1(k, m):
    """Song et al. 2012, equation 5: sums over facts that all differ."""
    n = len(k)
    pairs = sum(k[i, j] * m[i, j] for i, j in permutations(range(n), 2)) / math.perm(n, 2)
    threes = sum(k[i, j] * m[i, q] for i, j, q in permutations(range(n), 3)) / math.perm(n, 3)
    fours = sum(k[i, j] * m[q, r] for i, j, q, r in permutations(range(n), 4)) / math.perm(n, 4)
    return pairs - 2 * threes + fours


@pytest.mark.parametrize("n_facts", [4, 7])
def test_cka_against_sums_over_all_different_facts(n_facts):
    x, y = gaussian(n_facts, 6) + 2, gaussian(n_facts, 9, seed=1)
    k, m = (x @ x.T).numpy(), (y @ y.T).numpy()
    assert paired(cka, x, y) == pytest.approx(hsic_1(k, m) / math.sqrt(hsic_1(k, k) * hsic_1(m, m)))


def test_unrelated_sets_are_far_from_1_only_by_unbiased_cka():
    def biased(x, y):
        x, y = x - x.mean(0), y - y.mean(0)
        return ((x.T @ y).norm() ** 2 / (x.T @ x).norm() / (y.T @ y).norm()).item()

    sets = [(gaussian(10, 200, seed), gaussian(10, 200, seed + 500)) for seed in range(60)]
    assert np.mean([biased(x, y) for x, y in sets]) > 0.9
    assert abs(np.mean([paired(cka, x, y) for x, y in sets])) < 0.05


def test_procrustes_against_scipy_fact_by_fact():
    x, y = noisy_pair(12, 30)
    _, _, axes_x = np.linalg.svd((x - x.mean(0)).numpy(), full_matrices=False)
    _, _, axes_y = np.linalg.svd((y - y.mean(0)).numpy(), full_matrices=False)
    x, y = (x - x.mean(0)).numpy() @ axes_x[:RANK].T, (y - y.mean(0)).numpy() @ axes_y[:RANK].T
    product = 0.0
    for i in range(12):
        others = np.arange(12) != i
        turn, _ = scipy.linalg.orthogonal_procrustes(
            x[others] - x[others].mean(0), y[others] - y[others].mean(0), check_finite=True
        )
        product += x[i] @ turn @ y[i]
    expected = product / np.linalg.norm(x) / np.linalg.norm(y)
    assert 0.3 < expected < 0.95
    assert paired(partial(procrustes, rank=RANK), *noisy_pair(12, 30)) == pytest.approx(expected)


def test_one_minus_procrustes_squared_is_the_residual_of_many_facts():
    x, y = gaussian(300, 4), gaussian(300, 4) @ rotation(4) + 0.5 * gaussian(300, 4, seed=3)
    _, _, disparity = scipy.spatial.procrustes(x.numpy(), y.numpy())
    assert 0.1 < disparity < 0.4
    assert 1 - paired(partial(procrustes, rank=4), x, y) ** 2 == pytest.approx(disparity, abs=0.01)


def test_procrustes_tests_a_rotation_on_facts_it_was_not_fitted_to():
    sets = [(gaussian(14, 60, seed), gaussian(14, 60, seed + 500)) for seed in range(20)]
    fitted = [scipy.linalg.svdvals((x.T @ y).numpy()).sum() / (x.norm() * y.norm()).item() for x, y in sets]
    assert np.mean(fitted) > 0.9
    assert abs(np.mean([paired(partial(procrustes, rank=5), x, y) for x, y in sets])) < 0.1


def test_widths_may_differ_where_axes_do_not_matter():
    x = decaying(20, 30)
    wider = torch.cat([x, torch.zeros(20, 10)], dim=1) @ rotation(40)
    for name in ANYWHERE:
        assert paired(ALL[name], x, wider) == pytest.approx(1, abs=1e-9)


def test_a_shared_subspace_overlaps_whatever_the_pairing():
    shared = rotation(80)[:, :RANK]
    x, y = (gaussian(30, RANK, seed) @ shared.T + 0.02 * gaussian(30, 80, seed + 9) for seed in (0, 1))
    overlap = partial(subspace_overlap, rank=RANK)
    assert paired(overlap, x, y) > 0.98
    assert overlap(x, y, torch.arange(30).flip(0)[None]).item() > 0.98
    assert paired(cka, x, y) < 0.3


def test_overlap_is_the_mean_square_cosine_of_scipys_angles():
    x, y = noisy_pair(16, 40)
    expected = []
    for half in (slice(0, None, 2), slice(1, None, 2)):
        axes = [np.linalg.svd((rows[half] - rows[half].mean(0)).numpy())[2][:RANK].T for rows in (x, y)]
        expected.append((np.cos(scipy.linalg.subspace_angles(*axes)) ** 2).mean())
    assert paired(partial(subspace_overlap, rank=RANK), x, y) == pytest.approx(np.mean(expected))


def test_random_subspaces_overlap_by_their_share_of_the_dimensions():
    overlaps = [
        paired(partial(subspace_overlap, rank=RANK), gaussian(16, 20, seed), gaussian(16, 20, seed + 500))
        for seed in range(100)
    ]
    assert np.mean(overlaps) == pytest.approx(RANK / 20, abs=0.015)


def test_facts_share_a_subspace_beyond_that_of_their_layer():
    """What one fact has in common with itself shows in few facts; unrelated sets of one layer have the layer's only."""
    layer = torch.arange(1, 61).double() ** -1.0
    x, noise = gaussian(24, 60) * layer, 0.2 * gaussian(24, 60, seed=1) * layer
    orders = shuffles(24, 60)
    overlap = partial(subspace_overlap, rank=RANK)
    chance = overlap(x, x + noise, orders)
    assert 0.3 < chance.mean() < 0.85
    assert paired(overlap, x, x + noise) > chance.max()


@pytest.mark.parametrize("d", [6, 50])
def test_principal_axes_are_those_of_the_singular_value_decomposition(d):
    x = decaying(15, d)
    axes = principal_axes(x, RANK)
    _, _, expected = np.linalg.svd((x - x.mean(0)).numpy(), full_matrices=False)
    torch.testing.assert_close(axes @ axes.T, torch.from_numpy(expected[:RANK].T @ expected[:RANK]))


def test_effective_rank_counts_directions():
    assert effective_rank(torch.ones(7)) == pytest.approx(7)
    assert effective_rank(torch.tensor([2.0, 0.0, 0.0])) == pytest.approx(1)
    assert 1 < effective_rank(torch.tensor([2.0, 0.5, 0.0])) < 2


def subsets(n_facts, resamples):
    return shuffles(n_facts, resamples)[:, : n_facts - n_facts // 3]


@pytest.mark.parametrize("n_facts", [20, 60])
def test_a_mean_deviates_by_its_standard_error(n_facts):
    x, y = noisy_pair(n_facts, 40)
    cosines = torch.nn.functional.cosine_similarity(x, y)
    spread = deviations(cosine, x, y, subsets(n_facts, 1200))
    assert spread.mean().abs() < 1e-12
    assert spread.std().item() == pytest.approx(cosines.std().item() / math.sqrt(n_facts), rel=0.06)


@pytest.mark.parametrize("name", ["centred_cosine", "retrieval", "subspace", "procrustes", "cka"])
def test_deviations_are_as_wide_as_other_facts_would_make_them(name):
    sets = [noisy_pair(30, 30, seed, noise=0.8) for seed in range(24)]
    values = torch.tensor([paired(ALL[name], *pair) for pair in sets])
    spreads = [deviations(ALL[name], *pair, subsets(30, 40)).std().item() for pair in sets[:3]]
    assert 0.75 < np.mean(spreads) / values.std().item() < 2
