"""Comparisons of two sets of vectors: what they say of sets made alike or unlike, saved, drawn and refused."""

import io
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from diffusion_lens import Fact, plots
from diffusion_lens.analysis.representations import Comparison, Comparisons, compare, compare_along

STATISTICS = ["cosine", "centred_cosine", "retrieval", "subspace", "procrustes", "cka"]
SMALL = dict(rank=2, resamples=20)


def gaussian(n_facts, d, seed=0):
    return torch.from_numpy(np.random.RandomState(seed).randn(n_facts, d))


def related(n_facts=16, d=20, seed=0, noise=0.5):
    x = gaussian(n_facts, d, seed) * torch.arange(1, d + 1) ** -0.5
    return x, x + noise * gaussian(n_facts, d, seed + 1000) * torch.arange(1, d + 1) ** -0.5


@cache
def usual():
    """The comparison of two related sets, which many tests read."""
    return compare(*related(), **SMALL)


def column(comparison, name):
    return {statistic: row[name] for statistic, row in comparison.table().items()}


def same(mine, theirs):
    for name, value in vars(mine).items():
        other = getattr(theirs, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_the_same_set():
    x = gaussian(16, 40)
    comparison = compare(x, x.clone(), **SMALL)
    assert comparison.statistics == STATISTICS
    for row in comparison.table().values():
        assert [row["low"], row["value"], row["high"]] == pytest.approx([1, 1, 1])
        assert row["p"] == pytest.approx(1 / 21)
        assert row["chance_low"] <= row["chance"] <= row["chance_high"] < 1
    torch.testing.assert_close(comparison.coordinates[0], comparison.coordinates[1])


def test_a_rotated_copy():
    x, turn = gaussian(16, 40), torch.linalg.qr(gaussian(40, 40, 1)).Q
    p = column(compare(x, x @ turn, **SMALL), "p")
    assert p["procrustes"] == p["cka"] == pytest.approx(1 / 21)
    assert min(p["cosine"], p["centred_cosine"], p["retrieval"], p["subspace"]) > 0.05


def test_what_all_facts_share_is_no_similarity_beyond_chance():
    common = 20 * gaussian(1, 40, 7)
    table = compare(gaussian(16, 40) + common, gaussian(16, 40, 1) + common, **SMALL).table()
    assert table["cosine"]["value"] > 0.95
    assert table["cosine"]["chance"] > 0.95
    assert table["cosine"]["p"] > 0.05
    assert abs(table["centred_cosine"]["value"]) < 0.15


def test_p_counts_the_true_pairing_in():
    comparison = compare(*related(noise=5.0), **SMALL)
    for statistic, value, null, p in zip(
        STATISTICS, comparison.values.tolist(), comparison.null.T.tolist(), comparison.p.tolist(), strict=True
    ):
        assert p == pytest.approx((1 + sum(by_chance >= value - 1e-10 for by_chance in null)) / 21), statistic
    assert comparison.p.unique().numel() > 2


def test_intervals_cover():
    """Of y = 0.8 x + 0.6 noise the CKA of all facts there could be is 0.8²."""
    covered = []
    for seed in range(30):
        x = gaussian(24, 12, seed)
        y = torch.cat([0.8 * x + 0.6 * gaussian(24, 12, seed + 500), torch.zeros(24, 1)], dim=1)
        low, high = compare(x, y, only=["cka"], rank=2, resamples=60).interval(0.9)
        covered.append(bool(low[0] <= 0.64 <= high[0]))
    assert 0.75 <= np.mean(covered) < 1


def test_intervals_and_chance_are_quantiles_within_possible_values():
    comparison = compare(*related(noise=2.0), **SMALL)
    for level in (0.5, 0.9):
        tails = [(1 - level) / 2, (1 + level) / 2]
        chance = np.quantile(comparison.null.numpy(), tails, axis=0)
        np.testing.assert_allclose(torch.stack(comparison.chance(level)).numpy(), chance)
        ends = comparison.values.numpy() + np.quantile(comparison.deviations.numpy(), tails, axis=0)
        np.testing.assert_allclose(torch.stack(comparison.interval(level)).numpy(), ends.clip(-1, 1))
    far = replace(comparison, deviations=comparison.deviations * 100)
    low, high = far.interval()
    assert dict(zip(STATISTICS, low.tolist(), strict=True)) == {
        name: 0 if name in ("retrieval", "subspace") else -1 for name in STATISTICS
    }
    assert high.tolist() == [1] * 6


def test_more_noise_is_less_alike():
    values = torch.stack([compare(*related(noise=noise), **SMALL).values for noise in (0.1, 5.0)])
    assert (values[0] > values[1] + 0.2).all()


def test_sets_of_other_widths_have_no_axes_in_common():
    x, _ = related()
    comparison = compare(x, x @ gaussian(20, 33), **SMALL, names=("MDM", "AR"))
    assert comparison.statistics == ["procrustes", "cka"]
    assert comparison.coordinates is comparison.explained is None
    assert comparison.record["widths"] == [20, 33]
    with pytest.raises(ValueError, match="have no common axes"):
        comparison.plot()
    assert [line.get_label()[:3] for line in comparison.plot_spectra().lines] == ["MDM", "AR:"]


def test_thousands_of_dimensions_are_what_few_are():
    x, y = related()
    turn = torch.linalg.qr(gaussian(3000, 20, 1)).Q.T
    few, many = usual(), compare(x @ turn, y @ turn, **SMALL)
    for name in ("values", "null", "deviations", "singular_values", "coordinates", "explained"):
        torch.testing.assert_close(getattr(many, name), getattr(few, name), atol=1e-7, rtol=0)


def test_common_components_against_the_singular_value_decomposition():
    x, y = related()
    comparison = usual()
    both = torch.cat([x - x.mean(0), y - y.mean(0)]).numpy()
    _, s, vh = np.linalg.svd(both, full_matrices=False)
    expected = torch.from_numpy(both @ vh[:2].T).abs().unflatten(0, (2, 16))
    torch.testing.assert_close(comparison.coordinates.abs(), expected)
    torch.testing.assert_close(comparison.explained, torch.from_numpy(s[:2] ** 2 / (s**2).sum()))
    turned = compare(x.flip(0), y.flip(0), **SMALL).coordinates.flip(1)
    torch.testing.assert_close(turned, comparison.coordinates)


@pytest.mark.parametrize("d", [4, 20])
def test_spectra(d):
    x, y = related(d=d)
    comparison = compare(x, y, **SMALL)
    expected = np.linalg.svd((y - y.mean(0)).numpy(), compute_uv=False)[:15]
    assert comparison.singular_values.shape == (2, 15)
    torch.testing.assert_close(comparison.singular_values[1, : len(expected)], torch.from_numpy(expected))
    assert not comparison.singular_values[:, d:].any()
    assert all(1 < rank <= min(d, 15) for rank in comparison.effective_ranks)


def test_a_seed_decides():
    x, y = related()
    same(compare(x, y, **SMALL), usual())
    other = compare(x, y, **SMALL, seed=4)
    assert {name: other.record[name] for name in ("rank", "resamples", "seed")} == {**SMALL, "seed": 4}
    assert torch.equal(other.values, usual().values)
    assert not torch.equal(other.null, usual().null)


def test_vectors_as_models_give_them():
    x, y = related()
    vectors = x.float().requires_grad_(), y.bfloat16()
    comparison = compare(*vectors, **SMALL)
    same(comparison, compare(x.float().double(), y.bfloat16().double(), **SMALL))
    assert vectors[0].grad is None
    assert not comparison.values.requires_grad


def layers():
    return {3: related(noise=0.3), 0: related(noise=3.0)}


def test_layers_are_compared_in_order_by_the_same_pairings():
    ids = [f"fact {i}" for i in range(16)]
    series = compare_along("layer", layers(), ids=ids, source={"model": "tiny-mdm"}, **SMALL)
    assert list(series.at) == [0, 3]
    for layer, sets in layers().items():
        same(series.at[layer], compare(*sets, ids=ids, source={"model": "tiny-mdm", "layer": layer}, **SMALL))
    cka = series.table("cka")
    assert cka[3] == series.at[3].table()["cka"]
    assert cka[3]["value"] > cka[0]["value"]
    with pytest.raises(ValueError, match="'CKA' was not computed; the statistics here are cosine"):
        series.table("CKA")


@pytest.mark.parametrize("other", ["same width", "other width"])
def test_saved_and_loaded(tmp_path, other):
    x, y = related()
    y = y if other == "same width" else y[:, :9]
    comparison = compare(x, y, **SMALL, names=("MDM", "AR"), source={"site": "mlp.hook_post"})
    same(Comparison.load(comparison.save(tmp_path / "one.safetensors")), comparison)
    series = compare_along("step", {10: (x, y), 1: (y, x)}, only=["procrustes"], **SMALL)
    loaded = Comparisons.load(series.save(tmp_path / "many.safetensors"))
    assert (loaded.axis, list(loaded.at)) == ("step", [1, 10])
    for step, comparison in series.at.items():
        same(loaded.at[step], comparison)
    with pytest.raises(ValueError, match="is not a saved comparison"):
        Comparison.load(tmp_path / "many.safetensors")


def drawn(ax):
    target = io.BytesIO()
    ax.figure.savefig(target, format="png", dpi=40)
    return target.getvalue()


def test_components_are_drawn_with_a_line_for_each_fact():
    comparison = compare(*related(), **SMALL, source={"model": "tiny-mdm", "layer": 2})
    ax = comparison.plot()
    joined = np.stack([line.get_xydata() for line in ax.lines], axis=1)
    np.testing.assert_allclose(joined, comparison.coordinates.numpy())
    for points, expected in zip(ax.collections, comparison.coordinates, strict=True):
        np.testing.assert_allclose(points.get_offsets(), expected.numpy())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["forward", "reverse"]
    assert ax.get_title() == "tiny-mdm, layer 2, 16 facts"
    assert f"{comparison.explained[0]:.0%}" in ax.get_xlabel()
    assert drawn(ax)


def test_spectra_are_drawn_as_shares():
    comparison = compare(*related(d=5), **SMALL)
    ax = comparison.plot_spectra(title="mine")
    for line, values in zip(ax.lines, comparison.singular_values, strict=True):
        assert line.get_xdata().tolist() == [1, 2, 3, 4, 5]
        np.testing.assert_allclose(line.get_ydata(), values[:5] ** 2 / (values**2).sum())
    assert f"{comparison.effective_ranks[1]:.1f}" in ax.lines[1].get_label()
    assert ax.get_title() == "mine"
    assert drawn(ax)


def test_similarity_is_drawn_with_intervals_chance_and_a_second_model():
    series = compare_along("layer", layers(), only=["procrustes"], **SMALL)
    table = series.table("procrustes", 0.8)
    ax = series.plot("procrustes", level=0.8, label="MDM")
    assert series.plot("procrustes", ax=ax, label="AR") is ax
    value, chance, *_ = ax.lines
    assert value.get_xydata().tolist() == [[layer, row["value"]] for layer, row in table.items()]
    assert chance.get_ydata().tolist() == [row["chance"] for row in table.values()]
    bars = [segment[:, 1].tolist() for segment in ax.collections[0].get_segments()]
    assert bars == [[row["low"], row["high"]] for row in table.values()]
    band = ax.collections[1].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(max(row["chance_high"] for row in table.values()))
    assert [line.get_label() for line in ax.lines] == ["MDM", "MDM, by chance", "AR", "AR, by chance"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "procrustes")
    assert drawn(ax)


def test_pictures_share_a_figure():
    figure, axes = plots.panels(1, 2, 8.0, 3.0)
    comparison = usual()
    assert comparison.plot(ax=axes[0]).figure is comparison.plot_spectra(ax=axes[1]).figure is figure


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_keys_of_a_model_queried_both_ways(tiny):
    """Ada in one sentence and in another; against them, whoever stands first in the other sentence."""
    names = ["Ada", "Ben", "Clara", "Dora", "Emil", "Flora", "Greta", "Hugo", "Ida", "Jonas", "Karin", "Leo"]
    sets = {0: [], 2: []}
    for prompt in ("{} was the", "we know {}, alias the"):
        rows = {layer: [] for layer in sets}
        for name in names:
            query = Fact(prompt.format(name), subject=name, answer=" brave").to_query(tiny)
            sites = [f"blocks.{layer}.mlp.hook_post" for layer in sets]
            _, cache = tiny.run_with_cache(query.tokens[None], names_filter=sites)
            for layer, site in zip(sets, sites, strict=True):
                rows[layer].append(cache[site][0, query.subject[1] - 1])
        for layer in sets:
            sets[layer].append(torch.stack(rows[layer]))
    by_layer = {layer: tuple(both) for layer, both in sets.items()}
    for comparison in compare_along("layer", by_layer, ids=names, only=["retrieval"], **SMALL).at.values():
        assert column(comparison, "p")["retrieval"] == pytest.approx(1 / 21)
        assert column(comparison, "value")["retrieval"] > 0.5


def with_row(row):
    x = gaussian(12, 8)
    x[5] = row
    return x


@pytest.mark.parametrize(
    ("forward", "reverse", "settings", "message"),
    [
        (gaussian(12, 8), gaussian(13, 8), {}, "13 reverse vectors for 12 facts; both sets need one row"),
        (gaussian(12, 8), gaussian(12, 8), {"ids": ["a"]}, "12 forward vectors for 1 facts"),
        (gaussian(12, 8), gaussian(12, 8), {"ids": list("abcdefghijka")}, "two facts have the same id: 'a'"),
        (
            gaussian(12, 8)[0],
            gaussian(12, 8),
            {},
            r"the forward vectors must be a matrix with a row per fact; got \[8\]",
        ),
        (gaussian(12, 8), with_row(math.nan), {"ids": list("abcdefghijkl")}, "the reverse vector of 'f' has NaN"),
        (with_row(math.inf), gaussian(12, 8), {"names": ("MDM", "AR")}, "the MDM vector of '5' has NaN or inf"),
        (with_row(0.0), gaussian(12, 8), {}, "the forward vector of '5' is zero"),
        (gaussian(12, 8), torch.ones(12, 8), {}, "the reverse vectors .* vary in 0 directions, fewer than rank=2"),
        (gaussian(12, 8), gaussian(12, 8)[:, :1], {}, "the reverse vectors .* vary in 1 directions"),
        (gaussian(11, 8), gaussian(11, 8), {}, "11 facts are too few for rank=2: give at least 12$"),
        (gaussian(16, 8), gaussian(16, 8), {"rank": 5}, "16 facts .* rank=5: give at least 21, or use rank=3$"),
        (gaussian(0, 8), gaussian(0, 8), {}, "0 facts are too few"),
        (gaussian(12, 8), gaussian(12, 8), {"rank": 1}, "rank=1; it must be at least 2"),
        (gaussian(12, 8), gaussian(12, 8), {"resamples": 0}, "resamples=0; it must be at least 1"),
    ],
)
def test_what_cannot_be_compared(forward, reverse, settings, message):
    with pytest.raises(ValueError, match=message):
        compare(forward, reverse, **{**SMALL, **settings})
    with pytest.raises(ValueError, match=f"^at layer 4: .*{message}"):
        compare_along("layer", {4: (forward, reverse)}, **{**SMALL, **settings})


def test_facts_that_hardly_differ_are_constant():
    """Float32 cannot hold a difference of 1e-9 beside 1, and what it rounds to is no geometry."""
    with pytest.raises(ValueError, match="in 0 directions"):
        compare(1 + 1e-9 * gaussian(12, 8), gaussian(12, 8), **SMALL)


@pytest.mark.parametrize(
    ("axis", "sets", "message"),
    [
        ("layers", {0: related()}, "axis='layers'; it must be 'layer' or 'step'"),
        ("step", {}, "by step"),
    ],
)
def test_what_cannot_be_compared_along(axis, sets, message):
    with pytest.raises(ValueError, match=message):
        compare_along(axis, sets)


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0])
def test_bad_levels(level):
    with pytest.raises(ValueError, match=f"level={level}; it must be between 0 and 1"):
        usual().table(level)


def test_what_groups_differ_in_is_no_similarity_of_their_members():
    """Two sets that share nothing but which group a fact is of."""
    draw = torch.Generator().manual_seed(3)
    groups = ["p2d"] * 20 + ["d2p"] * 20
    apart = torch.tensor([[0.0], [6.0]]).repeat_interleave(20, dim=0)
    x, y = (torch.randn(40, 12, generator=draw) + apart for _ in range(2))
    centred = ["centred_cosine", "procrustes", "cka"]
    mixed, within = (compare(x, y, groups=labels, only=centred, rank=2, resamples=100) for labels in (None, groups))
    assert mixed.table()["cka"]["value"] > 0.5
    assert mixed.table()["cka"]["p"] < 0.01
    for row in within.table().values():
        assert row["p"] > 0.05
        assert abs(row["value"]) < 0.2
    assert within.record["groups"] == groups
    assert (within.singular_values > 1e-6 * within.singular_values.max()).sum(dim=1).tolist() == [12, 12]
    wide = compare(
        torch.randn(40, 90, generator=draw), torch.randn(40, 90, generator=draw), groups=groups, rank=2, resamples=1
    )
    assert wide.singular_values.shape == (2, 38)  # each group's mean is gone
    assert wide.singular_values.min() > 0.1


def test_one_group_is_none():
    x, y = related()
    alone, grouped = usual(), compare(x, y, groups=["a"] * len(x), **SMALL)
    assert torch.equal(alone.null, grouped.null)
    assert torch.equal(alone.values, grouped.values)
    with pytest.raises(ValueError, match="2 groups for"):
        compare(x, y, groups=["a", "b"], **SMALL)


def test_only_the_selected_statistics_are_computed():
    x, y = related()
    every, some = usual(), compare(x, y, **SMALL, only=["cka", "cosine"])
    assert some.statistics == ["cosine", "cka"]
    assert some.table() == {name: row for name, row in every.table().items() if name in some.statistics}
    for wrong in (["ckaa"], []):
        with pytest.raises(ValueError, match="the statistics of these two sets are cosine, "):
            compare(x, y, **SMALL, only=wrong)
