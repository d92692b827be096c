"""Intervals of a mean: against normal theory, against the procedure written out, and where there is nothing to say."""

import numpy as np
import pytest
import scipy
import torch

from diffusion_lens.analysis.over_facts import study
from diffusion_lens.analysis.over_facts.study import bootstrap_interval


def bca_written_out(x, level, n_resamples=40000):
    """Efron 1987, equations 4.4 and 7.3, in words of numpy."""
    rng = np.random.default_rng(123)
    means = rng.choice(x, size=(n_resamples, len(x))).mean(axis=1)
    bias = scipy.stats.norm.ppf((means < x.mean()).mean())
    without_one = np.array([np.delete(x, i).mean() for i in range(len(x))])
    pull = without_one.mean() - without_one
    acceleration = (pull**3).sum() / (6 * (pull**2).sum() ** 1.5)
    ends = bias + scipy.stats.norm.ppf([(1 - level) / 2, (1 + level) / 2])
    return np.quantile(means, scipy.stats.norm.cdf(bias + ends / (1 - acceleration * ends)))


def test_a_large_normal_sample_has_the_textbook_interval():
    values = torch.from_numpy(np.random.RandomState(0).randn(400, 2)) * torch.tensor([1.0, 3.0])
    low, high = bootstrap_interval(values, 0.95, seed=0)
    error = values.std(dim=0) / 20
    torch.testing.assert_close(low, values.mean(dim=0) - 1.96 * error, rtol=0, atol=0.03)
    torch.testing.assert_close(high, values.mean(dim=0) + 1.96 * error, rtol=0, atol=0.03)


def test_a_skewed_sample_has_the_corrected_interval():
    x = np.random.RandomState(1).exponential(size=25) ** 2
    low, high = bootstrap_interval(torch.from_numpy(x)[:, None], 0.9, seed=0)
    expected = bca_written_out(x, 0.9)
    assert low.item() == pytest.approx(expected[0], rel=0.03)
    assert high.item() == pytest.approx(expected[1], rel=0.03)
    percentile = np.quantile(np.random.default_rng(5).choice(x, size=(40000, 25)).mean(axis=1), 0.95)
    assert high.item() > 1.05 * percentile


@pytest.mark.parametrize("values", [torch.empty(0, 3), torch.rand(1, 3)])
def test_nothing_to_resample(values):
    low, high = bootstrap_interval(values, 0.95, seed=0)
    assert low.isnan().all()
    assert high.isnan().all()
    assert low.shape == (3,)


def test_layers_share_their_facts_and_do_not_mix():
    values = torch.stack([torch.linspace(0, 1, 9), torch.full((9,), 0.3), torch.linspace(0, 2, 9)], dim=1)
    low, high = bootstrap_interval(values, 0.95, seed=0)
    assert low[1] == high[1] == values[0, 1]  # all facts agree
    assert low[0] < high[0]
    torch.testing.assert_close(low[2], 2 * low[0])
    torch.testing.assert_close(bootstrap_interval(values[:, 2:], 0.95, seed=0)[1], high[2:])


def test_a_seed_decides_and_batches_do_not(monkeypatch):
    values = torch.rand(30, 2, generator=torch.Generator().manual_seed(0))
    at_once = bootstrap_interval(values, 0.95, seed=4)
    monkeypatch.setattr(study, "RESAMPLED_BYTES", 30 * 2 * 8 * 7)
    by_seven = bootstrap_interval(values, 0.95, seed=4)
    assert torch.equal(torch.stack(at_once), torch.stack(by_seven))
    assert not torch.equal(torch.stack(at_once), torch.stack(bootstrap_interval(values, 0.95, seed=5)))


@pytest.mark.parametrize("n_facts", [2, 3, 4, 7])
def test_few_facts_of_any_size_give_ends_and_no_warning(n_facts):
    rng = np.random.RandomState(n_facts)
    for scale in (1.0, 1e-8, 1e-30):
        values = torch.from_numpy(rng.choice([0.0, 0.5, 1.0, -0.3], size=(n_facts, 20)) * scale)
        low, high = bootstrap_interval(values, 0.95, seed=0)
        agree = (values == values[:1]).all(dim=0)
        assert torch.equal(low[agree], values[0, agree])
        assert torch.equal(high[agree], values[0, agree])
        assert (low <= high).all()


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0])
def test_bad_levels(level):
    with pytest.raises(ValueError, match=f"level={level}"):
        bootstrap_interval(torch.rand(4, 1), level, seed=0)
