"""Stability of the ranking of sites: against scipy and a loop over resamples, laws, and what cannot be compared."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from diffusion_lens.analysis import AverageEffect, RankStability, average_indirect_effect, causal_trace, rank_stability
from diffusion_lens.data.toy_facts import SENTENCE_LENGTH, load

ROLES, LAYERS = ["subject_last", "prompt_last", "answer"], [0, 1, 2, 3]


def average_of(effects, ids=None, persons=6):
    """An average with these effects [fact, role, layer], of facts about so many persons in turn."""
    ids = ids or [f"fact {i}" for i in range(len(effects))]
    facts = {fact_id: {"person": f"person {int(fact_id.split()[1]) % persons}"} for fact_id in ids}
    record = {"model": "m", "kind": "resid", "seed": 1, "known": "all", "facts": facts, "set_aside": {}}
    ones = torch.ones(len(effects), dtype=torch.float64)
    return AverageEffect(effects, ones, 0 * ones, ids, ROLES, LAYERS, {}, record)


def drawn(seed, n_facts=12, noise=0.3):
    """Effects with the same means, and noise of its own for each seed."""
    rng = np.random.RandomState(seed)
    means = np.random.RandomState(99).rand(3, 4)
    return torch.from_numpy(means + noise * rng.randn(n_facts, 3, 4)).float()


def test_statistics_are_scipys():
    averages = {f"seed {seed}": average_of(drawn(seed)) for seed in range(3)}
    found = rank_stability(averages, top_k=3, resamples=50)
    aies = {name: average.aie.flatten().numpy() for name, average in averages.items()}
    for one, a in aies.items():
        for other, b in aies.items():
            value, low, high = found.between(one, other)
            assert value == pytest.approx(stats.spearmanr(a, b).statistic)
            assert found.between(one, other, "kendall")[0] == pytest.approx(stats.kendalltau(a, b).statistic)
            overlap = len({*np.argsort(a)[-3:]} & {*np.argsort(b)[-3:]}) / 3
            assert found.between(one, other, "overlap")[0] == pytest.approx(overlap)
            assert low <= high
    assert found.values[0, 0, 1] < 1


def test_the_range_is_that_of_resampled_persons():
    """Both facts of a person have the same effects, so that resamples of single facts would have shorter ranges."""
    one, other = (average_of(drawn(seed, 6).repeat(2, 1, 1)) for seed in (0, 1))
    found = rank_stability([one, other], resamples=1000, level=0.9)
    rng, values = np.random.default_rng(5), []
    for _ in range(1000):
        rows = [fact for person in rng.integers(6, size=6) for fact in range(12) if fact % 6 == person]
        means = [each.effects[rows].mean(dim=0).flatten().numpy() for each in (one, other)]
        values.append(stats.spearmanr(*means).statistic)
    ends = np.quantile(values, [0.05, 0.95])
    assert found.between("0", "1")[1:] == pytest.approx(tuple(ends), abs=0.03)
    fewer = rank_stability([average_of(drawn(seed), persons=5) for seed in (0, 1)], resamples=50)
    assert fewer.low.isnan().all()
    again = [rank_stability([one, other], resamples=50) for _ in range(2)]
    assert torch.equal(again[0].low, again[1].low)


def test_facts_in_common_are_compared_whatever_their_order():
    effects = drawn(0)
    order = [5, 3, 8, 4, 1, 0]
    some = average_of(effects[order], [f"fact {i}" for i in order])
    found = rank_stability({"all": average_of(effects), "some": some}, resamples=50)
    assert found.record["facts"] == [f"fact {i}" for i in sorted(order)]
    torch.testing.assert_close(found.values, torch.ones_like(found.values))
    torch.testing.assert_close(found.high, torch.ones_like(found.high))


def test_roles_that_no_fact_has_are_no_sites():
    effects = drawn(0)
    effects[:, 2] = torch.nan
    effects[4:, 1] = torch.nan  # of some facts alone
    found = rank_stability([average_of(effects), average_of(effects + 0.1 * drawn(1))], resamples=50)
    assert found.record["sites"] == 8
    assert not found.low.isnan().any()
    flat = rank_stability([average_of(torch.full((12, 3, 4), 0.5)), average_of(drawn(0))], top_k=2, resamples=50)
    assert flat.values.isnan().sum() == 9


def test_sites_without_an_effect_are_not_among_the_first():
    """Each result has one site with an effect, another one."""
    one, other = torch.zeros(2, 12, 3, 4)
    one[:, 2, 0], other[:, 2, 3] = 0.5, 0.4
    averages = [average_of(one), average_of(other)]
    assert rank_stability(averages, top_k=5, resamples=1).values[2].isnan().all()
    assert rank_stability(averages, top_k=1, resamples=1).values[2].tolist() == [[1, 0], [0, 1]]
    assert rank_stability(averages, top_k=12, resamples=1).values[2].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar"], indirect=True)
def test_averages_and_traces_of_a_model_are_compared(tiny, tmp_path):
    facts = load().facts(trained="both", asked="p2d")[3:16:3]
    settings = dict(samples=2, length=SENTENCE_LENGTH, known="all", layers=[0, 1, 3], noise=0.4)
    averages = {f"seed {seed}": average_indirect_effect(tiny, facts, seed=seed, **settings) for seed in (1, 2)}
    found = rank_stability(averages, resamples=50)
    assert found.between("seed 1", "seed 2")[0] > 0.5
    assert found.record["results"]["seed 2"]["seed"] == 2
    loaded = RankStability.load(found.save(tmp_path / "stability.safetensors"))
    assert torch.equal(loaded.values, found.values)
    frame = found.to_dataframe()
    assert frame.statistic.tolist() == ["spearman", "kendall", "overlap"]
    assert frame.value[0] == found.between("seed 1", "seed 2")[0]
    assert found.plot("overlap").get_title().split() == ["How", "alike", "the", "sites", "are", "ranked", "(overlap)"]
    query = facts[0].to_query(tiny, first_tokens=1)
    traces = [causal_trace(tiny, query, noise=0.4, samples=2, seed=seed) for seed in (1, 2)]
    of_traces = rank_stability(traces)
    expected = stats.spearmanr(*(trace.indirect_effect.flatten() for trace in traces)).statistic
    assert of_traces.between("0", "1")[0] == pytest.approx(expected)
    assert of_traces.low.isnan().all()
    with pytest.raises(ValueError, match="'average' is AverageEffect and 'trace' CausalTrace: compare averages with"):
        rank_stability({"average": averages["seed 1"], "trace": traces[0]})


def test_what_cannot_be_compared():
    one = average_of(drawn(0))
    with pytest.raises(ValueError, match="1 results are given"):
        rank_stability([one])
    with pytest.raises(ValueError, match=r"'0' has the layers \[0, 1, 2, 3\] and '1' \[4, 5, 6, 7\]"):
        rank_stability([one, replace(one, layers=[4, 5, 6, 7])])
    with pytest.raises(ValueError, match="no fact in common"):
        rank_stability([one, average_of(drawn(1), [f"other {i}" for i in range(12)])])
    with pytest.raises(ValueError, match="top_k=13, and the results have 12 sites"):
        rank_stability([one, one], top_k=13)
    with pytest.raises(ValueError, match="level=95"):
        rank_stability([one, one], level=95)
    with pytest.raises(ValueError, match="statistic='tau' is unknown"):
        rank_stability([one, one]).plot("tau")
    with pytest.raises(ValueError, match="other='2' is unknown"):
        rank_stability([one, one]).between("0", "2")
