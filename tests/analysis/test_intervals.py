"""Intervals of means and shares over facts: against textbooks, the procedure written out, and the measured coverage."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from diffusion_lens.analysis.over_facts.intervals import mean_interval, share_interval


def alone(values):
    """Each fact a cluster of its own."""
    return [f"fact {i}" for i in range(len(values))]


def covered(ends, mean):
    return ((ends[0] <= mean) & (mean <= ends[1])).double().mean().item()


def percentile_t_written_out(x, names, level, n_resamples=4000):
    """The percentile-t interval of the mean of all facts, one resample of clusters at a time."""

    def mean_and_error(clusters):
        mean = np.concatenate(clusters).mean()
        without_one = [np.concatenate(clusters[:i] + clusters[i + 1 :]).mean() for i in range(len(clusters))]
        return mean, math.sqrt((len(clusters) - 1) / len(clusters) * sum((m - mean) ** 2 for m in without_one))

    rng, clusters = np.random.default_rng(7), [x[np.array(names) == name] for name in dict.fromkeys(names)]
    mean, error = mean_and_error(clusters)
    ratios = []
    for _ in range(n_resamples):
        resampled, own = mean_and_error([clusters[i] for i in rng.integers(len(clusters), size=len(clusters))])
        ratios.append((resampled - mean) / own)
    return mean - error * np.quantile(ratios, [(1 + level) / 2, (1 - level) / 2])


def test_a_large_normal_sample_has_the_textbook_interval():
    values = torch.from_numpy(np.random.RandomState(0).randn(400, 2)) * torch.tensor([1.0, 3.0])
    error = values.std(dim=0) / 20
    for end, sign in zip(mean_interval(values, alone(values), 0.95, seed=0), (-1, 1), strict=True):
        torch.testing.assert_close(end, values.mean(dim=0) + sign * 1.96 * error, rtol=0, atol=0.04)


def test_skewed_clusters_have_the_interval_of_the_procedure_written_out():
    rng = np.random.RandomState(1)
    names = [f"person {i}" for i in range(12) for _ in range((1, 2, 3)[i % 3])]
    x = np.repeat(rng.exponential(size=12), [(1, 2, 3)[i % 3] for i in range(12)]) + 0.3 * rng.randn(24)
    ends = mean_interval(torch.from_numpy(x), names, 0.9, seed=0)
    assert [end.item() for end in ends] == pytest.approx(percentile_t_written_out(x, names, 0.9), abs=0.03)
    of_facts = mean_interval(torch.from_numpy(x), alone(x), 0.9, seed=0)
    assert of_facts[1] - of_facts[0] < 0.8 * (ends[1] - ends[0])


def test_the_ratio_of_means_has_the_interval_of_the_procedure_written_out():
    rng = np.random.RandomState(3)
    names = [f"person {i // 2}" for i in range(24)]
    totals = np.repeat(rng.uniform(0.05, 1, size=12), 2)
    effects = totals * np.repeat(rng.beta(3, 2, size=12), 2) + 0.05 * rng.randn(24)
    given = torch.from_numpy(effects), names, 0.9, 0

    def ratio_and_error(x, w, of):
        ratio, without = x.sum() / w.sum(), []
        for cluster in np.unique(of):
            without.append(x[of != cluster].sum() / w[of != cluster].sum())
        n = len(without)
        return ratio, math.sqrt((n - 1) / n * sum((each - ratio) ** 2 for each in without))

    ratio, error = ratio_and_error(effects, totals, np.arange(24) // 2)
    draws = np.random.default_rng(5)
    t = []
    for _ in range(4000):
        picked = draws.integers(12, size=12)
        rows = np.concatenate([[2 * i, 2 * i + 1] for i in picked])
        resampled, own = ratio_and_error(effects[rows], totals[rows], np.arange(24) // 2)
        t.append((resampled - ratio) / own)
    expected = ratio - error * np.quantile(t, [0.95, 0.05])
    ends = mean_interval(*given, weights=torch.from_numpy(totals))
    assert [end.item() for end in ends] == pytest.approx(expected, abs=0.03)
    torch.testing.assert_close(mean_interval(*given, weights=torch.ones(24)), mean_interval(*given))
    # Where a resample may have no denominator, nothing bounds the ratio.
    wild = torch.from_numpy(totals - totals.mean() + 0.01)
    assert torch.stack(mean_interval(*given, weights=wild)).isnan().all()


def test_a_fact_without_effect_widens_the_interval_wherever_it_stands():
    effects = torch.tensor([0, 0.3, 0.1, 0.5, 0.2, 0.4], dtype=torch.float64)
    totals = torch.tensor([0, 0.5, 0.6, 0.7, 0.3, 0.9], dtype=torch.float64)
    for order in ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]):
        low, high = mean_interval(effects[order], alone(effects), 0.95, 0, weights=totals[order])
        assert high - low > 0.1
    agreeing = mean_interval(totals / 2, alone(totals), 0.95, 0, weights=totals)
    assert [end.item() for end in agreeing] == [0.5, 0.5]


def test_the_interval_of_a_ratio_of_means_covers():
    rng = np.random.RandomState(4)
    totals = rng.uniform(0.2, 1, size=12)
    shares = rng.beta(2, 2, size=(12, 400))
    ends = mean_interval(
        torch.from_numpy(totals[:, None] * shares), alone(totals), 0.95, 0, weights=torch.tensor(totals)
    )
    assert 0.9 < covered(ends, 0.5) < 0.99


@pytest.mark.parametrize("n_clusters", [4, 6, 12])
def test_intervals_of_few_clusters_cover(n_clusters):
    """Three wordings of each person; most effects are near 1, some near 0."""
    rng = np.random.RandomState(n_clusters)
    own = np.repeat(rng.beta(0.8, 0.2, size=(n_clusters, 400)), 3, axis=0)
    names = [f"person {i // 3}" for i in range(3 * n_clusters)]
    effects = torch.from_numpy(own + 0.1 * rng.randn(*own.shape))
    assert covered(mean_interval(effects, names, 0.95, seed=0), 0.8) > 0.85
    right = torch.from_numpy(rng.rand(*own.shape) < own).double()
    assert covered(share_interval(right, names, 0.95), 0.8) > 0.93


@pytest.mark.parametrize(("right", "n"), [(0, 5), (21, 21), (3, 20), (150, 300)])
def test_the_share_of_independent_answers_has_wilsons_interval(right, n):
    values = torch.tensor([1.0] * right + [0.0] * (n - right), dtype=torch.float64)
    expected = stats.binomtest(right, n).proportion_ci(0.9, method="wilson")
    ends = share_interval(values, alone(values), 0.9)
    assert [end.item() for end in ends] == pytest.approx([expected.low, expected.high], abs=1e-9)
    assert ends[0] < ends[1]


def test_answers_about_one_person_count_as_much_as_they_differ():
    names = [f"person {i // 10}" for i in range(200)]
    by_person = torch.tensor([1.0] * 12 + [0.0] * 8, dtype=torch.float64)
    agreeing = share_interval(by_person.repeat_interleave(10), names, 0.95)
    expected = share_interval(by_person, alone(by_person), 0.95)
    torch.testing.assert_close(torch.stack(agreeing), torch.stack(expected), rtol=0, atol=0.02)
    # The same number of right answers of each person: as good as independent.
    even = torch.tensor([1.0] * 6 + [0.0] * 4, dtype=torch.float64).repeat(20)
    wilson = stats.binomtest(120, 200).proportion_ci(0.95, method="wilson")
    ends = share_interval(even, names, 0.95)
    assert [end.item() for end in ends] == pytest.approx([wilson.low, wilson.high], abs=0.01)
    # All answers right: as many answers as people.
    always = share_interval(torch.ones(200, dtype=torch.float64), names, 0.95)[0]
    assert always.item() == pytest.approx(stats.binomtest(20, 20).proportion_ci(0.95, method="wilson").low)


def test_scores_that_nearly_agree_do_not_have_an_interval_of_no_length():
    values = torch.tensor([0.9, 0.9, 0.9, 0.9001], dtype=torch.float64)
    low, high = share_interval(values, alone(values), 0.95)
    wilson = stats.binomtest(58, 64).proportion_ci(method="wilson")  # of four times four times four answers
    assert high - low == pytest.approx(wilson.high - wilson.low, rel=0.15)


@pytest.mark.parametrize("sharpness", [1, 10])
def test_the_interval_of_scores_covers_and_is_hardly_longer_than_students(sharpness):
    rng = np.random.RandomState(sharpness)
    scores = torch.from_numpy(rng.beta(3 * sharpness, 7 * sharpness, size=(40, 400)))
    low, high = share_interval(scores, alone(scores), 0.95)
    assert 0.9 < covered((low, high), 0.3) < 0.99
    students = 2 * stats.t.ppf(0.975, 39) * scores.std(dim=0) / 40**0.5
    assert 0.85 < (high - low).mean() / students.mean() < 1.15


@pytest.mark.parametrize("pair", [(0.0, 1.0), (0.2, 0.9), (0.1, 0.7)])
def test_people_who_agree_about_facts_that_differ_have_no_interval(pair):
    values = torch.tensor(pair * 6, dtype=torch.float64)
    ends = mean_interval(values, [f"person {i // 2}" for i in range(12)], 0.95, seed=0)
    assert torch.stack(ends).isnan().all()


def test_intervals_do_not_depend_on_the_order_of_facts():
    values, names = torch.rand(15, 4, dtype=torch.float64), [f"person {i % 6}" for i in range(15)]
    order = torch.randperm(15)
    for interval in (mean_interval, lambda *given, seed: share_interval(*given)):
        shuffled = interval(values[order], [names[i] for i in order], 0.95, seed=0)
        torch.testing.assert_close(shuffled, interval(values, names, 0.95, seed=0), rtol=0, atol=1e-12)


def test_a_mean_that_resamples_do_not_bound_is_not_cut_at_the_range():
    values = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.2], dtype=torch.float64)
    for within in ((-math.inf, math.inf), (0.0, 1.0)):
        assert torch.stack(mean_interval(values, alone(values), 0.95, 0, within=within)).isnan().all()


@pytest.mark.parametrize("n_clusters", [0, 1, 3])
def test_too_few_clusters_have_no_interval(n_clusters):
    names = [f"person {i % n_clusters}" for i in range(6)] if n_clusters else []
    values = torch.rand(len(names), 2, 3)
    for ends in (mean_interval(values, names, 0.95, seed=0), share_interval(values, names[:1] * len(names), 0.95)):
        assert torch.stack(ends).shape == (2, 2, 3)
        assert torch.stack(ends).isnan().all()


def test_layers_share_their_facts_and_do_not_mix():
    values = torch.stack([torch.linspace(0, 1, 9), torch.full((9,), 0.3), torch.linspace(0, 2, 9)], dim=1)
    values = torch.cat([values, torch.full((9, 1), torch.nan)], dim=1)
    low, high = mean_interval(values, alone(values), 0.95, seed=0)
    assert low[1] == high[1] == values[0, 1]  # all facts agree
    assert low[0] < high[0]
    torch.testing.assert_close(low[2], 2 * low[0])
    torch.testing.assert_close(mean_interval(values[:, 2], alone(values), 0.95, seed=0)[1], high[2])
    assert low[3].isnan()
    assert high[3].isnan()
    assert not torch.equal(low[:1], mean_interval(values, alone(values), 0.95, seed=5)[0][:1])


@pytest.mark.parametrize("n_facts", [4, 5, 7])
def test_few_facts_of_any_size_give_ends_around_the_mean(n_facts):
    rng = np.random.RandomState(n_facts)
    for scale in (1.0, 1e-8, 1e-30):
        values = torch.from_numpy(rng.choice([0.0, 0.5, 1.0, -0.3], size=(n_facts, 20)) * scale)
        low, high = mean_interval(values, alone(values), 0.95, seed=0)
        agree = (values == values[:1]).all(dim=0)
        assert torch.equal(low[agree], values[0, agree])
        assert torch.equal(high[agree], values[0, agree])
        bounded = ~low.isnan()
        assert torch.equal(bounded, ~high.isnan())
        assert ((low <= values.mean(dim=0)) & (values.mean(dim=0) <= high))[bounded].all()
        cut = torch.stack(mean_interval(values, alone(values), 0.95, 0, within=(-scale, scale)))
        assert (cut.abs() <= scale)[:, bounded].all()
        assert cut[:, ~bounded].isnan().all()


def average_of(people):
    """An average over three wordings of each person, saved with the names of the persons or without."""
    from diffusion_lens.analysis import AverageEffect

    n_facts = 3 * people
    own = torch.rand(people, generator=torch.Generator().manual_seed(2)).double().repeat_interleave(3)
    facts = {f"fact {i}": {"person": f"person {i // 3}"} for i in range(n_facts)}
    record = {
        "model": "small",
        "kind": "resid",
        "facts": facts,
        "seed": 1,
        "known": "all",
        "set_aside": {},
        "roles": ["answer"],
        "layers": [0],
    }
    effects = own.view(n_facts, 1, 1).float()
    return AverageEffect(effects, own, torch.zeros(n_facts).double(), list(facts), ["answer"], [0], {}, record)


def test_facts_of_one_person_say_no_more_than_one(tmp_path):
    average = average_of(6)
    each_once = average.clean[::3]
    expected = [end.item() for end in mean_interval(each_once, alone(each_once), 0.95, 1, within=(-1.0, 1.0))]
    assert average.ate_interval() == pytest.approx(expected)
    assert [end.item() for end in average.aie_interval()] == pytest.approx(expected, abs=1e-6)
    loaded = type(average).load(average.save(tmp_path / "average.safetensors"))
    assert loaded.clusters == average.clusters
    assert loaded.ate_interval() == average.ate_interval()
    assert all(math.isnan(end) for end in average_of(3).ate_interval())
    # A file that names no persons: every fact is alone.
    nameless = {**average.record, "facts": {name: {} for name in average.ids}}
    low, high = replace(average, record=nameless).ate_interval()
    assert high - low < 0.7 * (expected[1] - expected[0])


def test_the_mean_of_signatures_is_that_of_its_interval():
    """A person with 60 pairs of 100 counts 60 times, in the mean and in the interval."""
    from results import _studies

    (found,) = (each for each in _studies() if type(each).__name__ == "ReversalSignatures")
    facts = {fact_id: {"group": "a" if i < 60 else fact_id} for i, fact_id in enumerate(found.ids)}
    cuts = (
        found.cuts
        + torch.linspace(1, 2, 100)[:, None, None] * torch.cat([torch.zeros(60), torch.ones(40)])[:, None, None]
    )
    study = replace(
        found, cuts=cuts, percentiles=torch.ones_like(found.percentiles), record={**found.record, "facts": facts}
    )
    low, high = study.interval("edge_cut")
    assert (low < study.edge_cut).all()
    assert (study.edge_cut < high).all()
    # A share of 1 has an interval too, by 41 persons.
    low, high = study.interval("evidence_percentile")
    torch.testing.assert_close(low, torch.full_like(low, stats.binomtest(41, 41).proportion_ci(method="wilson").low))
    assert (high == 1).all()


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0])
def test_bad_levels(level):
    for interval in (lambda *given: mean_interval(*given, seed=0), share_interval):
        with pytest.raises(ValueError, match=f"level={level}"):
            interval(torch.rand(4, 1), list("abcd"), level)
