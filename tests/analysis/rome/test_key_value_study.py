"""Keys and values of many facts: those of each fact alone, in shards, stopped and resumed, and both ways paired."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens import Fact, Query, load_pair
from diffusion_lens.analysis import (
    Comparisons,
    KeyValueStudy,
    compare,
    compare_along,
    compute_key,
    key_value_study,
    optimize_value,
)
from diffusion_lens.analysis.over_facts.folder import FactFolder
from diffusion_lens.analysis.rome import FactVectors, ValueSettings, compute_keys, query_with_prefixes
from diffusion_lens.data import toy_facts
from diffusion_lens.records.results import NETWORK

GENTLE = ValueSettings(lr=0.05, steps=3)  # steps small enough that round-off stays small
FACTS = [fact for fact in toy_facts.load().facts() if fact.id.endswith("-held-out-0")]
FEW = FACTS[:3] + FACTS[160:162]
PERSONS = [fact for first in range(0, len(FACTS), 14) for fact in FACTS[first : first + 2]]  # every seventh, both ways
QUICK = dict(layers=[0, 2], search=GENTLE, first_tokens=1, batch_size=2)
STACKED = ("keys", "outputs", "deltas", "before", "after")
# What files hold and which calls are refused does not depend on the model.
on_one_model = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


def assert_same(study, other):
    assert study.ids == other.ids
    for name in STACKED:
        assert torch.equal(getattr(study, name), getattr(other, name))


@pytest.fixture(scope="module")
def whole(tiny):
    return key_value_study(tiny, FEW, **QUICK)


@pytest.fixture(scope="module")
def models():
    """Both bundled models at once."""
    return load_pair("tiny-mdm", device="cpu")


@pytest.fixture(scope="module")
def pair(models):
    """A study of each model, of some persons queried once in either direction."""
    return [key_value_study(model, PERSONS, [0, 1], search=replace(GENTLE, steps=1), length=14) for model in models]


def test_every_fact_has_the_key_and_value_it_has_alone(tiny, whole):
    prefixes = ["Tilda Drusser is the miner. "]
    with_prefixes = key_value_study(tiny, FEW[2:4], prefixes=prefixes, length=24, **QUICK)
    for result, facts, texts, length in ((whole, FEW[1:2], [], None), (with_prefixes, FEW[2:4], prefixes, 24)):
        for fact in facts:
            row = result.ids.index(fact.id)
            request = query_with_prefixes(tiny, fact, texts, length=length, first_tokens=1)
            for column, layer in enumerate(result.layers):
                value = optimize_value(tiny, request, layer, lr=0.05, steps=3)
                key = compute_key(tiny, request, layer).vector
                torch.testing.assert_close(result.keys[row, column], key, rtol=0, atol=1e-5)
                torch.testing.assert_close(result.values[row, column], value.vector, rtol=0, atol=1e-3)
                torch.testing.assert_close(result.outputs[row, column], value.initial, rtol=0, atol=1e-5)
                assert result.after[row, column].item() == pytest.approx(value.probability_after, abs=1e-3)
                assert result.before[row].item() == pytest.approx(value.probability_before, abs=1e-5)
    assert (with_prefixes.keys - whole.keys[2:4]).abs().max() > 1e-3


def test_facts_are_queried_on_canvases_of_the_trained_length(tiny, whole, tmp_path):
    trained = tiny.cfg.trained_length if tiny.cfg.has_mask else None
    assert whole.record["length"] == trained
    assert_same(key_value_study(tiny, FEW, length=trained, **QUICK), whole)
    in_the_trained_direction = next(row for row, fact in enumerate(FEW) if not fact.is_reverse)
    assert whole.before[in_the_trained_direction] > 0.5
    long = replace(FEW[0], id="long", answer=FEW[0].answer * 3)
    with_long = key_value_study(tiny, [long, FEW[0]], out=tmp_path, **QUICK)
    assert ("length=14, on which the model was trained," in with_long.set_aside.get("long", "")) == (
        trained is not None
    )


def test_values_raise_the_answer(tiny):
    """Of facts in their trained direction; the AR baseline cannot be made to write what it never saw."""
    trained = [fact for fact in FACTS if not fact.is_reverse][:12]
    study = key_value_study(tiny, trained, [0], first_tokens=1)
    assert (study.after[:, 0] >= study.before - 1e-6).all()
    assert (study.after >= 0.9).float().mean() >= 0.9


@on_one_model
def test_a_study_that_was_stopped_goes_on(tiny, whole, tmp_path):
    key_value_study(tiny, FEW, out=tmp_path, shard="0/2", **QUICK)
    so_far = KeyValueStudy.load(tmp_path)
    assert so_far.ids == [*whole.ids[:2], *whole.ids[4:]]
    FactFolder.open(tmp_path).file(whole.ids[1]).unlink()  # its batch is then computed in full
    assert_same(key_value_study(tiny, FEW, out=tmp_path, **QUICK), whole)
    with pytest.raises(ValueError, match=r"was made with other settings.* \(first_tokens: 1 there, 2 here\)"):
        key_value_study(tiny, FEW, out=tmp_path, **{**QUICK, "first_tokens": 2})


@on_one_model
def test_shards_in_folders_files_and_memory_are_the_whole(tiny, whole, tmp_path):
    parts = [key_value_study(tiny, FEW, out=tmp_path / str(i), shard=(i, 2), **QUICK) for i in range(2)]
    with pytest.raises(ValueError, match="2 of 5 facts are missing"):
        KeyValueStudy.merge([tmp_path / "0"])
    assert_same(KeyValueStudy.merge([tmp_path / "1", tmp_path / "0"]), whole)
    nothing = key_value_study(tiny, FEW, shard="90/100", **QUICK)
    assert nothing.ids == []
    assert nothing.keys.shape == (0, *whole.keys.shape[1:])
    saved = parts[0].save(tmp_path / "part.safetensors")
    assert_same(KeyValueStudy.merge([nothing, saved, parts[1]]), whole)
    vectors = FactVectors.load(FactFolder.open(tmp_path / "0").file(whole.ids[0]))
    FactFolder.open(tmp_path / "1").save(whole.ids[0], replace(vectors, before=vectors.before + 1e-3))
    with pytest.raises(ValueError, match="has another result in"):
        KeyValueStudy.merge([tmp_path / "0", tmp_path / "1"])


@on_one_model
def test_facts_that_cannot_be_queried_are_set_aside(tiny, tmp_path):
    nobody = replace(FEW[0], id="nobody", subject="Nobody")
    with_nobody = key_value_study(tiny, [nobody, *FEW[:2]], out=tmp_path, **QUICK)
    assert_same(with_nobody, key_value_study(tiny, FEW[:2], **QUICK))
    assert list(with_nobody.set_aside) == ["nobody"]
    assert "'Nobody' is not in the prompt" in with_nobody.set_aside["nobody"]
    assert KeyValueStudy.load(tmp_path).set_aside == with_nobody.set_aside
    with pytest.raises(ValueError, match="can be queried for none of the 1 facts; 'nobody': the subject 'Nobody'"):
        key_value_study(tiny, [nobody], **QUICK)


def test_the_directions_are_paired_person_by_person(pair, tmp_path):
    twice = replace(PERSONS[0], id="again")
    study = pair[0]
    again = replace(
        study,
        **{name: torch.cat([getattr(study, name), getattr(study, name)[:1] + 2]) for name in STACKED},
        ids=[*study.ids, "again"],
        record={**study.record, "facts": {**study.record["facts"], "again": vars(twice)}},
    )
    by_person = again.by_person("keys", PERSONS[0].asked)
    torch.testing.assert_close(by_person[PERSONS[0].person], study.keys[0] + 1)

    persons = [fact.person for fact in PERSONS if fact.asked == "p2d"]
    rows = {way: {f.person: i for i, f in enumerate(PERSONS) if f.asked == way} for way in ("p2d", "d2p")}
    forward, reverse = (torch.stack([study.keys[rows[way][p], 1] for p in persons]) for way in ("p2d", "d2p"))
    trained = [str(fact.trained) for fact in PERSONS if fact.asked == "p2d"]
    assert len(set(trained)) == 3
    alone = compare(forward, reverse, ids=persons, groups=trained, resamples=2)
    torch.testing.assert_close(study.compare("keys", resamples=2).at[1].values, alone.values)
    both = study.compare("keys", "values", resamples=2)
    assert Comparisons.load(both.save(tmp_path / "both.safetensors")).at[0].record == both.at[0].record
    crossed = both.at[0]
    assert crossed.statistics == ["procrustes", "cka"]
    assert crossed.names == ("keys, name to description", "values, description to name")


def test_the_mdm_keys_a_person_alike_both_ways_and_the_ar_model_hardly(models):
    """A step's canvas is a query like any other; the keys of both directions stay alike while the answer appears."""
    trained = [str(fact.trained) for fact in FACTS if fact.asked == "p2d"]
    settings = dict(groups=trained, only=["cka"], resamples=100)
    queried = {way: [fact for fact in FACTS if fact.asked == way] for way in ("p2d", "d2p")}

    def laid_out(model, fact):
        return fact.to_query(model, n_masks=14 - len(fact.tokenize(model)[0]) if model.cfg.has_mask else None)

    def keys_of(model, queries):
        return torch.stack([key.vector for key in compute_keys(model, queries, 1)])

    def at_step_1(model, queries):
        canvases = model.denoise(torch.stack([query.tokens for query in queries]), steps=2).canvases[1]
        return [Query(canvas, query.subject, (), ()) for canvas, query in zip(canvases, queries, strict=True)]

    queries = [[[laid_out(model, fact) for fact in facts] for facts in queried.values()] for model in models]
    sets, of_twin = (tuple(keys_of(model, way) for way in ways) for model, ways in zip(models, queries, strict=True))
    later = tuple(keys_of(models[0], at_step_1(models[0], way)) for way in queries[0])
    mdm, later_mdm = compare_along("step", {0: sets, 1: later}, **settings).table("cka").values()
    twin = compare(*of_twin, **settings).table()["cka"]
    assert mdm["p"] < 0.01
    assert mdm["value"] - mdm["chance"] > 2 * (twin["value"] - twin["chance"])
    assert twin["value"] < 0.025 < mdm["low"]
    assert not torch.allclose(sets[0], later[0])
    assert later_mdm["p"] < 0.05


def test_two_models_are_compared_without_shared_axes(pair):
    mdm, twin = pair
    compared = mdm.compare_with(twin, "keys", "p2d", resamples=2)
    assert list(compared.at) == [0, 1]
    assert compared.at[0].names == ("tiny-mdm", "tiny-ar")
    assert compared.at[0].statistics == ["procrustes", "cka"]
    itself = mdm.compare_with(mdm, only=["cka"], resamples=2).table("cka")
    assert all(row["value"] == pytest.approx(1) for row in itself.values())
    a, b = (torch.stack(list(study.by_person("keys", "p2d").values()))[:, 1] for study in pair)
    trained = [str(fact.trained) for fact in PERSONS if fact.asked == "p2d"]
    alone = compare(a, b, groups=trained, shared_axes=False, resamples=2)
    torch.testing.assert_close(compared.at[1].values, alone.values)
    with pytest.raises(ValueError, match="tiny-ar has"):
        mdm.compare_with(replace(twin, layers=[2, 3]))
    strangers = {fact_id: {**fact, "person": f"not {fact['person']}"} for fact_id, fact in twin.record["facts"].items()}
    with pytest.raises(ValueError, match="no person in common"):
        mdm.compare_with(replace(twin, record={**twin.record, "facts": strangers}))


def test_a_comparison_records_the_network_of_each_set(pair):
    """Two studies of one model under other hooks or weights have one name."""
    hooked = replace(pair[0], record={**pair[0].record, "hooks": {"hook_embed": ["forward: half"]}})
    networks = [{name: study.record[name] for name in NETWORK} for study in (pair[0], hooked)]
    assert networks[0]["hooks"] == {}
    settings = dict(only=["cka"], resamples=2)
    for compared, expected in (
        (pair[0].compare_with(hooked, **settings), networks),
        (hooked.compare(**settings), networks[1:] * 2),
    ):
        assert [compared.at[layer].record["source"]["networks"] for layer in (0, 1)] == [expected] * 2


def test_the_picture(pair):
    ax = pair[0].plot()
    assert {line.get_label() for line in ax.get_lines()} >= {"name to description", "description to name"}
    assert ax.get_ylim()[1] > 1


@on_one_model
def test_what_does_not_fit(tiny, whole):
    for wrong, message in (
        (dict(at="object"), "at='object' is unknown"),
        (dict(layers=[9]), "9"),
        (dict(batch_size=0), "batch_size=0"),
        (dict(shard="3/2"), "of 4 shards"),
    ):
        with pytest.raises(ValueError, match=message):
            key_value_study(tiny, FEW, **{**QUICK, **wrong})
    with pytest.raises(ValueError, match="two facts are called"):
        key_value_study(tiny, [FEW[0], FEW[0]], **QUICK)
    with pytest.raises(
        ValueError, match="vectors='value' is unknown, nearest is values; it must be one of keys, values, outputs"
    ):
        whole.by_person("value", "p2d")
    with pytest.raises(ValueError, match="asked='forwards'"):
        whole.by_person("values", "forwards")
    nameless = key_value_study(tiny, [replace(FEW[0], person="")], **QUICK)
    with pytest.raises(ValueError, match="does not name its person"):
        nameless.compare()
    one_way = key_value_study(tiny, [fact for fact in FEW if fact.asked == "p2d"][:1], **QUICK)
    with pytest.raises(ValueError, match="no person was queried in both directions"):
        one_way.compare()
    plain = key_value_study(tiny, [Fact("Gustav Geisser is the", "Gustav Geisser", " brave")], **QUICK)
    assert plain.plot().get_lines()[0].get_label() == "all facts"
