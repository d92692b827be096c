"""Which words come first: against SciPy and pandas, in orders that are known."""

import pytest
import torch
from scipy.stats import spearmanr

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import reveal_order
from diffusion_lens.data import site_facts
from diffusion_lens.denoising.samplers import llada


def kind(word):
    """A tagger of two classes, which leaves other words without one."""
    return "mark" if word in (".", ",", "<eos>") else "the" if word == "the" else None


@pytest.fixture(scope="module")
def model():
    return HookedDiffusionTransformer.from_pretrained("site-mdm")


@pytest.fixture(scope="module")
def runs(model):
    facts = site_facts.load().facts("description", trained="p2d", asked="p2d")[:12]
    return [model.denoise(fact.prompt, max_new_tokens=8, steps=6, predictions=1) for fact in facts]


def test_ranks_and_correlations_are_those_of_scipy(runs):
    frequencies = {token: float(token % 7) for run in runs for token in run.tokens.unique().tolist()}
    found = reveal_order(runs, frequencies=frequencies)
    for row, run in enumerate(runs):
        positions = (run.revealed_at[0] >= 0).nonzero()[:, 0]
        steps, tokens = run.revealed_at[0, positions], run.tokens[0, positions]
        below = (steps[:, None] > steps).sum(dim=1) + ((steps[:, None] == steps).sum(dim=1) - 1) / 2
        torch.testing.assert_close(found.rank[row, positions], (below + 0.5) / len(positions))
        assert float(found.left_to_right[row]) == pytest.approx(spearmanr(positions, steps).statistic, abs=1e-6)
        of_tokens = [frequencies[token] for token in tokens.tolist()]
        assert float(found.by_frequency[row]) == pytest.approx(spearmanr(of_tokens, steps).statistic, abs=1e-6)
    assert float(found.rank.nanmean()) == pytest.approx(0.5)
    dense = torch.zeros(model_size(runs)).index_add(
        0, torch.tensor(list(frequencies)), torch.tensor(list(frequencies.values()))
    )
    assert torch.equal(reveal_order(runs, frequencies=dense).by_frequency, found.by_frequency)


def model_size(runs):
    return max(int(run.tokens.max()) for run in runs) + 1


def test_the_mean_of_a_class_is_that_of_the_table(runs):
    found = reveal_order(runs, tagger=kind)
    frame = found.to_dataframe()
    for i, name in enumerate(found.classes):
        own = frame[frame["class"] == name]
        assert float(found.mean[i]) == pytest.approx(own["rank"].mean(), abs=1e-6)
        assert int(found.n[i]) == len(own)
        assert float(found.low[i]) <= float(found.mean[i]) <= float(found.high[i])
    assert set(frame["class"]) == {"mark", "the", ""}


@pytest.mark.parametrize("order", [1, -1])
def test_left_to_right_and_right_to_left(model, order):
    """Runs that are made to reveal one position after the other."""

    def next_one(reveal, hook):
        wanted = torch.zeros_like(reveal)
        wanted[:, 3 + (hook.step.index if order == 1 else 5 - hook.step.index)] = True
        return wanted

    hooks = [("denoise.hook_reveal", next_one)]
    run = model.denoise("Plerrick Baupling is", max_new_tokens=6, steps=6, predictions=1, fwd_hooks=hooks)
    found = reveal_order(run, tagger=[[None] * 3 + ["a", "a", None, None, None, "b"]])
    assert found.left_to_right.tolist() == pytest.approx([order])
    assert found.mean.tolist() == pytest.approx([1 / 6, 11 / 12] if order == 1 else [5 / 6, 1 / 12])
    assert found.later_than_in_text.tolist() == pytest.approx([0, 0] if order == 1 else [4 / 6, -10 / 12], abs=1e-6)


def test_a_text_that_grows_is_left_to_right(several):
    steps = 11 if several.model.cfg.opens_blocks else 6
    run = several.model.denoise(several.tokens[:, :5] % 500, length=11, steps=steps, predictions=1)
    found = reveal_order(run)
    if several.model.cfg.is_autoregressive:
        assert found.left_to_right.tolist() == pytest.approx([1, 1, 1])
    assert found.rank.nanmean(dim=1).tolist() == pytest.approx([0.5] * 3)


def test_a_random_order_has_no_class_that_comes_first(model):
    """Laws of many runs in random order: means near 1/2, and p values that are not small."""
    prompts = ["Plerrick Baupling is"] * 200
    run = model.denoise(prompts, max_new_tokens=8, steps=8, sampler=llada(remasking="random"), seed=0, predictions=1)
    labels = [[None] * 3 + ["a", "a", "b", "b", "b", "b", "a", "a"]] * 200
    found = reveal_order(run, tagger=labels, permutations=300)
    assert ((found.mean - 0.5).abs() < 0.05).all()
    assert (found.p_random > 0.01).all()
    assert ((found.low < 0.5) & (found.high > 0.5)).all()
    assert abs(float(found.left_to_right.nanmean())) < 0.1


def test_the_p_value_is_the_share_of_all_orders(model):
    """One row of five tokens: its 120 orders, counted, against many random ones."""
    from itertools import permutations

    run = model.denoise("Plerrick Baupling is", max_new_tokens=5, steps=5, predictions=1)
    found = reveal_order(run, tagger=[[None] * 3 + ["a", "a", "b", "b", "b"]], permutations=20_000)
    ranks = found.rank[0, 3:].tolist()
    means = [sum(ranks[i] for i in order[:2]) / 2 for order in permutations(range(5))]
    distance = abs(sum(ranks[:2]) / 2 - 0.5)
    share = sum(abs(mean - 0.5) >= distance - 1e-6 for mean in means) / len(means)
    assert float(found.p_random[0]) == pytest.approx(share, abs=0.02)


def test_clusters_are_the_units(runs):
    """Copies of a run in one cluster are as wide as the runs themselves, and have no p value of independent rows."""
    alone = reveal_order(runs, tagger=kind)
    names = [str(i) for i in range(len(runs)) for _ in range(3)]
    copied = reveal_order([run.repeat(3) for run in runs], tagger=kind, clusters=names)
    torch.testing.assert_close(copied.mean, alone.mean)
    torch.testing.assert_close(copied.high - copied.low, alone.high - alone.low, rtol=0.02, atol=1e-6)
    assert alone.p_random.isfinite().all()
    assert copied.p_random.isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tagger": lambda word: None}, "no written token has a class"),
        ({"tagger": lambda word: ""}, "give a name, or None for no class"),
        ({"tagger": [["a"]] * 12}, r"tagger\[0\]\[0\] is 'a', but the run did not write this position: it was given"),
        ({"tagger": [[None] * 99]}, r"tagger\[0\] has 99 labels"),
        ({"tagger": [[None] * 6 + ["a"]]}, "tagger has labels of 1 rows, and the runs have 12"),
        ({"clusters": ["a"]}, "clusters has 1 names, and the runs have 12 rows"),
        ({"frequencies": torch.ones(2)}, r"frequencies is of shape \[2\]"),
        ({"permutations": 0}, "permutations=0"),
        ({"level": 2.0, "tagger": kind}, "level=2.0"),
    ],
)
def test_bad_labels_are_named(runs, options, message):
    with pytest.raises(ValueError, match=message):
        reveal_order(runs, **options)


def test_the_pictures(runs):
    ax = reveal_order(runs, tagger=kind).plot()
    assert len(ax.get_yticklabels()) == 2
    assert reveal_order(runs).plot().get_xlabel() == "position"
