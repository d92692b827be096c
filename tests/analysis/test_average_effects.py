"""Averages over facts: by hand, in shards, stopped and resumed, and refused where they would mix."""

import signal
from collections import Counter
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from processes import Stuck, forked
from refusals import unrefused

from diffusion_lens import Fact
from diffusion_lens.analysis import (
    AverageEffect,
    CanvasLayout,
    average_indirect_effect,
    causal_trace,
    merge,
    noise_scale,
)
from diffusion_lens.analysis.causal_tracing import CausalTrace, average
from diffusion_lens.analysis.causal_tracing import trace as trace_settings
from diffusion_lens.analysis.over_facts.folder import fact_seed, name_facts, pick_shard
from diffusion_lens.analysis.over_facts.intervals import mean_interval
from diffusion_lens.data.toy_facts import SENTENCE_LENGTH, load
from diffusion_lens.settings import own_seed

QUICK = dict(samples=2, first_tokens=1, length=SENTENCE_LENGTH, layers=[1, 3])
TRAINED = load().facts(trained="both", asked="p2d")[3:16:6] + load().facts(trained="both", asked="d2p")[:10:9]
UNTRUE = replace(TRAINED[0], id="untrue", answer=TRAINED[-1].answer)
FACTS = [*TRAINED[:2], UNTRUE, *TRAINED[2:]]


# What files hold does not depend on the model.
on_one_model = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


def assert_same(a, b):
    """Two results, bit for bit."""
    assert vars(a).keys() == vars(b).keys()
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype
            torch.testing.assert_close(value, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert value == other, name
    assert list(a.unknown) == list(b.unknown)


def count_traces(monkeypatch, stop_at=None):
    """Grids computed from here on; the one numbered `stop_at` is interrupted."""
    calls = Counter()

    def counted(*args, **kwargs):
        calls["traces"] += 1
        if calls["traces"] == stop_at:
            raise KeyboardInterrupt
        return causal_trace(*args, **kwargs)

    monkeypatch.setattr(average, "causal_trace", counted)
    return calls


@pytest.fixture(scope="module")
def whole(tiny):
    """All facts in one run, in memory."""
    return average_indirect_effect(tiny, FACTS, **QUICK)


KINDS = [("tiny-mdm", "mlp"), ("tiny-ar", "resid"), ("tiny-block", "attn"), ("tiny-uniform", "resid")]


@pytest.mark.parametrize(("tiny", "kind"), KINDS, indirect=["tiny"])
def test_a_row_is_a_trace_averaged_by_hand(tiny, kind):
    assert_a_row_is_a_trace(tiny, kind, [1, 3])


@pytest.mark.parametrize(
    "chosen",
    [dict(severed="mlp"), dict(severed="attn", corruption="replace"), dict(corruption="swap", swap="Anton Trondall")],
    ids=["severed", "severed-replace", "swap"],
)
@pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar"], indirect=True)
def test_an_average_takes_every_setting_of_a_trace(tiny, chosen):
    """The average over facts is the mean of their traces with the same settings, each with its own seed."""
    shared = dict(samples=2, layers=[0, -1], **({} if "swap" in chosen else dict(noise=0.4)), **chosen)
    layout = dict(length=SENTENCE_LENGTH, first_tokens=1)
    result = average_indirect_effect(tiny, FACTS, **shared, **layout, known="all", roles=["subject_last"])
    effects = []
    for fact in FACTS:
        query = CanvasLayout(**layout).query(tiny, fact)
        if fact.id in result.set_aside:
            assert query.subject[1] - query.subject[0] != len(tiny.to_tokens("Anton Trondall", prepend_bos=False)[0])
            continue
        last = query.subject[1] - 1
        trace = causal_trace(tiny, query, seed=fact_seed(1, fact.id), positions=[last], **shared)
        effects.append(trace.indirect_effect[0])
    assert len(effects) >= 2
    torch.testing.assert_close(result.aie[0], torch.stack(effects).mean(0), rtol=0, atol=1e-6)


@on_one_model
def test_a_fact_is_not_swapped_with_itself(tiny):
    subject = TRAINED[0].subject
    result = average_indirect_effect(tiny, TRAINED, corruption="swap", swap=subject, known="all", **QUICK)
    assert result.set_aside[TRAINED[0].id] == "swap= is the subject of this fact itself"


@on_one_model
def test_positions_are_refused_in_an_average(tiny):
    with pytest.raises(ValueError, match="facts differ in length: choose roles= instead"):
        average_indirect_effect(tiny, TRAINED, positions=[0], **QUICK)


@pytest.mark.parametrize("family", ["bd3lm", "udlm", "llada2"])
def test_a_row_with_a_time_or_experts_is_a_trace_averaged_by_hand(in_words, family):
    model = in_words(family)
    with model.at_time(0.6) if model.cfg.time_conditioning else nullcontext():
        assert_a_row_is_a_trace(model, "resid", [0, 2], known="all")


def assert_a_row_is_a_trace(model, kind, layers, **more):
    quick = {**QUICK, "layers": layers, **more}
    fact = Fact("people say Gustav Geisser, alias the", "Gustav Geisser", " brave drummer of Rolsen.", id="gustav")
    result = average_indirect_effect(model, [TRAINED[0], fact], kind, window=2, noise=0.4, seed=7, **quick)
    query = fact.to_query(model, n_masks=7, first_tokens=1)
    trace = causal_trace(model, query, kind, window=2, noise=0.4, samples=2, seed=fact_seed(7, "gustav"))
    positions = dict(before_subject=[0, 1], subject_first=[2], subject_last=[3], after_first=[4])
    positions |= dict(after_further=[5], prompt_last=[6])
    if not model.cfg.is_autoregressive:
        positions |= dict(answer=[7], other_masks=list(range(8, 14)))
    for role, row in zip(result.roles, result.effects[1], strict=True):
        if role in positions:
            by_position = [trace.scores[position, layers].numpy() - trace.corrupted for position in positions[role]]
            expected = np.mean(by_position, axis=0)
            np.testing.assert_allclose(row.numpy(), expected, rtol=0, atol=1e-6)
        else:
            assert row.isnan().all()
    assert result.clean[1] - result.corrupted[1] == result.total_effects[1] == trace.total_effect


def test_averages_leave_out_facts_without_such_a_token(whole):
    assert whole.ate == pytest.approx(
        np.mean([float(c - d) for c, d in zip(whole.clean, whole.corrupted, strict=True)])
    )
    middle = whole.roles.index("subject_middle")
    having = [i for i, fact_id in enumerate(whole.ids) if "d2p" in fact_id]
    assert 0 < len(having) < len(whole.ids)
    torch.testing.assert_close(whole.aie[middle], whole.effects[having, middle].mean(dim=0))
    low, high = whole.aie_interval(0.9)
    assert low[middle].isnan().all()  # of two facts
    assert len({fact.person for fact in TRAINED}) < 4
    assert np.isnan(whole.ate_interval()).all()
    # As if each fact were about another person
    facts = {fact_id: {**fact, "person": ""} for fact_id, fact in whole.record["facts"].items()}
    whole = replace(whole, record={**whole.record, "facts": facts})
    last = whole.roles.index("subject_last")
    low, high = whole.aie_interval(0.9)
    expected = mean_interval(whole.effects[:, last], whole.ids, 0.9, 1, within=(-1.0, 1.0))
    torch.testing.assert_close(torch.stack([low[last], high[last]]), torch.stack(expected), equal_nan=True)
    ends = whole.ate_interval()
    assert ends[0] < whole.ate < ends[1]
    assert ends == whole.ate_interval()


def test_what_the_model_does_not_know_is_set_aside_before_it_is_traced(tiny, whole, monkeypatch, tmp_path):
    assert list(whole.unknown) == ["untrue"]
    assert whole.ids == [fact.id for fact in TRAINED]
    query = UNTRUE.to_query(tiny, n_masks=SENTENCE_LENGTH - len(tiny.to_tokens(UNTRUE.prompt)[0]), first_tokens=1)
    row = query.answer_positions[0] - tiny.cfg.is_autoregressive
    probability = tiny(query.tokens[None])[0, row].softmax(-1)[query.answer_tokens[0]].item()
    assert whole.unknown["untrue"] == pytest.approx(probability, rel=1e-4)
    calls = count_traces(monkeypatch)
    with pytest.warns(UserWarning, match="has no facts: 0 of 1 facts, known on one canvas"):
        none_known = average_indirect_effect(tiny, [UNTRUE], **QUICK, out=tmp_path)
    assert not calls
    with pytest.raises(ValueError, match="knows none of the 1 facts"):
        none_known.plot()
    (file,) = tmp_path.glob("untrue.*.safetensors")
    set_aside = CausalTrace.load(file)
    assert {"kind", "weights_sha256", "model", "fact"} <= set(set_aside.record)
    with pytest.raises(ValueError, match="left out of an average as one that the model does not know"):
        set_aside.plot()
    assert none_known.effects.shape == (0, 9, 2)
    assert np.isnan(none_known.ate)
    assert none_known.aie_interval()[0].isnan().all()


@pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar", "tiny-block", "tiny-uniform"], indirect=True)
def test_without_noise_there_is_no_effect(tiny):
    result = average_indirect_effect(tiny, TRAINED[:2], noise=0.0, **QUICK)
    assert abs(result.ate) < 1e-6
    assert result.effects.nan_to_num().abs().max() < 1e-6


@on_one_model
def test_seeds_belong_to_facts_so_order_only_permutes_rows(tiny, whole):
    order = [4, 2, 0, 1, 5, 3]
    other = average_indirect_effect(tiny, [FACTS[i] for i in order], **QUICK)
    rows = [whole.ids.index(fact_id) for fact_id in other.ids]
    assert rows != sorted(rows)
    torch.testing.assert_close(other.effects, whole.effects[rows], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(other.corrupted, whole.corrupted[rows])
    assert other.record["noise"] == whole.record["noise"]


@on_one_model
def test_the_noise_scale_is_measured_in_an_order_of_its_own(tiny, monkeypatch):
    """Sums of other devices depend on the order of what is summed; this stand-in shows any order."""

    def in_order(model, queries):
        return 0.01 * sum(i * query.tokens.sum().item() for i, query in enumerate(queries))

    monkeypatch.setattr(trace_settings, "noise_scale", in_order)
    results = [average_indirect_effect(tiny, facts, shard=(3, 4), **QUICK) for facts in (TRAINED[:3], TRAINED[2::-1])]
    assert results[0].record["noise"] == results[1].record["noise"]


@on_one_model
def test_shards_share_the_noise_of_all_facts_and_merge_to_one_result(tiny, whole, tmp_path):
    parts = [average_indirect_effect(tiny, FACTS, shard=(i, 3), **QUICK) for i in range(3)]
    assert [part.ids for part in parts] == [[f.id for f in FACTS[i::3] if f.id != "untrue"] for i in range(3)]
    queries = [fact.to_query(tiny) for fact in FACTS]
    assert parts[1].record["noise"] == pytest.approx(noise_scale(tiny, queries), rel=1e-6)
    assert_same(merge(parts), whole)
    none_left = average_indirect_effect(tiny, FACTS, shard=(9, 10), **QUICK)
    assert not none_left.ids
    assert_same(merge([none_left, *parts]), whole)
    saved = [part.save(tmp_path / f"{i}.safetensors") for i, part in enumerate(parts)]
    assert_same(merge([saved[2], parts[0], saved[1]]), whole)
    merged, low = merge(parts), whole.aie_interval()[0]
    torch.testing.assert_close(merged.aie_interval()[0], low, rtol=0, atol=0, equal_nan=True)


@on_one_model
def test_folders_of_shards_merge_to_one_result(tiny, whole, tmp_path):
    for i in range(2):
        average_indirect_effect(tiny, FACTS, shard=f"{i}/2", out=tmp_path / str(i), **QUICK)
    average_indirect_effect(tiny, FACTS, shard=(0, 2), out=tmp_path / "1", **QUICK)  # twice is as good as once
    assert_same(merge([tmp_path / "0", tmp_path / "1"]), whole)
    assert_same(merge(tmp_path / "1"), whole)
    assert_same(merge(str(tmp_path / "1")), average_indirect_effect(tiny, FACTS, out=tmp_path / "1", **QUICK))


@on_one_model
def test_an_interrupted_study_goes_on(tiny, whole, tmp_path, monkeypatch):
    calls = count_traces(monkeypatch, stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        average_indirect_effect(tiny, FACTS, out=tmp_path, **QUICK)
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    assert len(kept) == 3  # two traces, and the fact that is not known
    assert_same(average_indirect_effect(tiny, FACTS, out=tmp_path, **QUICK), whole)
    assert calls["traces"] == len(TRAINED) + 1
    assert {file: file.stat().st_mtime_ns for file in kept} == kept


@on_one_model
def test_two_processes_fill_one_folder_and_one_is_killed(tiny, whole, tmp_path, monkeypatch):
    stuck, done = Stuck(), []

    def stuck_at_the_second(*args, **kwargs):
        if len(done) == 1:
            stuck.wait_forever()
        done.append(causal_trace(*args, **kwargs))
        return done[-1]

    def other_half():
        monkeypatch.setattr(average, "causal_trace", stuck_at_the_second)
        average_indirect_effect(tiny, FACTS, shard=(1, 2), out=tmp_path, **QUICK)

    with forked(other_half) as child:
        average_indirect_effect(tiny, FACTS, shard=(0, 2), out=tmp_path, **QUICK)
        assert stuck.reached()
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(ValueError, match="2 of 6 facts are missing"):
        merge(tmp_path)
    average_indirect_effect(tiny, FACTS, shard=(1, 2), out=tmp_path, **QUICK)
    assert_same(merge(tmp_path), whole)


def test_chosen_layers_and_roles(tiny, whole):
    settings = {**QUICK, "noise": whole.record["noise"]}
    chosen = average_indirect_effect(
        tiny, TRAINED[-2:], **{**settings, "layers": [-1, 0]}, roles=["prompt_last", "subject_middle"]
    )
    assert (chosen.roles, chosen.layers) == (["subject_middle", "prompt_last"], [3, 0])
    rows = [whole.roles.index(role) for role in chosen.roles]
    close = dict(rtol=0, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(chosen.effects[:, :, 0], whole.effects[-2:, rows, 1], **close)
    no_such_token = average_indirect_effect(tiny, TRAINED[:1], roles=["subject_middle"], **settings)
    assert no_such_token.effects.isnan().all()
    torch.testing.assert_close(no_such_token.total_effects, whole.total_effects[:1], **close)


@on_one_model
def test_files_are_causal_traces_named_after_facts(tiny, tmp_path):
    odd = replace(TRAINED[0], id="../ä b/" + "x" * 300)
    average_indirect_effect(
        tiny, [odd, replace(TRAINED[1], id="a_b"), replace(TRAINED[2], id="a b")], out=tmp_path, **QUICK
    )
    assert len(list(tmp_path.iterdir())) == 4
    traces = {trace.record["fact"]: trace for trace in map(CausalTrace.load, tmp_path.glob("*.safetensors"))}
    assert set(traces) == {odd.id, "a_b", "a b"}
    assert len(traces["a b"].record["roles"]) == len(traces["a b"].str_tokens)
    assert merge(tmp_path).ids == [odd.id, "a_b", "a b"]


CHANGES = [
    (dict(noise=0.3), "noise: 0.2 there, 0.3 here"),
    (dict(seed=2), "seed: 1 there, 2 here"),
    (dict(samples=3, layers=[0]), r"samples: 2 there, 3 here; layers: \[1, 3\] there, \[0\] here"),
    (dict(facts=[TRAINED[0], replace(TRAINED[1], answer=" the.")]), rf"facts: 1 differ \('{TRAINED[1].id}'\)"),
    (dict(facts=[*TRAINED, UNTRUE]), r"facts: 4 differ \('.*', '.*', '.*', \.\.\.\)"),
]


@on_one_model
def test_a_folder_of_another_study_is_refused(tiny, tmp_path):
    settings = {**QUICK, "noise": 0.2, "facts": TRAINED[:2]}

    def call(**change):
        average_indirect_effect(tiny, out=tmp_path, **{**settings, **change})

    call()
    before = sorted(tmp_path.iterdir())
    assert unrefused(call, CHANGES) == []
    assert sorted(tmp_path.iterdir()) == before


@on_one_model
def test_a_folder_of_other_weights_is_refused(tiny, tmp_path):
    average_indirect_effect(tiny, TRAINED[:1], out=tmp_path, **QUICK)
    edited = deepcopy(tiny)
    with torch.no_grad():
        edited.unembed.weight[0, 0] += 0.5
    with pytest.raises(ValueError, match=r"weights_sha256: '[0-9a-f]{64}' there, '[0-9a-f]{64}' here"):
        average_indirect_effect(edited, TRAINED[:1], out=tmp_path, **QUICK)


@on_one_model
def test_less_memory_is_not_another_study(tiny, tmp_path):
    with pytest.raises(ValueError, match="max_bytes=1 is too small"):
        average_indirect_effect(tiny, TRAINED[:1], max_bytes=1, out=tmp_path, **QUICK)
    assert average_indirect_effect(tiny, TRAINED[:1], out=tmp_path, **QUICK).ids == [TRAINED[0].id]


@on_one_model
def test_what_does_not_merge(tiny, tmp_path):
    parts = [average_indirect_effect(tiny, TRAINED[:4], shard=(i, 2), noise=0.2, **QUICK) for i in range(2)]
    with pytest.raises(ValueError, match=f"2 of 4 facts are missing: {TRAINED[1].id}, {TRAINED[3].id}"):
        merge(parts[0])
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([])
    with pytest.raises(
        ValueError, match=r"one of the results was made with other settings.* \(noise: 0.2 there, 0.3 here"
    ):
        merge([parts[0], average_indirect_effect(tiny, TRAINED[:4], shard=(1, 2), noise=0.3, **QUICK)])
    other = replace(parts[0], effects=parts[0].effects + 1e-7)
    with pytest.raises(ValueError, match=f"'{TRAINED[0].id}' has another result in one of the results"):
        merge([*parts, other])
    fallen = replace(parts[0], corrupted=parts[0].corrupted + 1e-9)
    with pytest.raises(ValueError, match="has another result in"):
        merge([*parts, fallen])
    with pytest.raises(FileNotFoundError, match="contains no study"):
        merge(tmp_path / "absent")


BAD_SETTINGS = [
    (dict(facts=[]), "no facts were given"),
    (
        dict(facts=[TRAINED[0], TRAINED[1], replace(TRAINED[2], id=TRAINED[0].id)]),
        f"two facts are called '{TRAINED[0].id}'",
    ),
    (dict(shard=(2, 2)), r"shard=\(2, 2\) is not a shard; of 4 shards"),
    (dict(shard="1-2"), "shard='1-2' is not a shard; of 4 shards"),
    (dict(shard="0/0"), "shard='0/0'"),
    (dict(roles=["subject"]), "no role 'subject'"),
    (dict(layers=[4]), r"layers=\[4\]"),
    (dict(kind="residual"), "kind='residual' is unknown"),
    (dict(noise=-1.0), "noise=-1.0"),
    (dict(corruption="swap"), "requires swap="),
    (dict(n_masks=7), "length=14 and n_masks=7; give one"),
    (dict(first_tokens=9), "first_tokens=9"),
]


@on_one_model
def test_bad_settings_leave_nothing_behind(tiny, tmp_path):
    def call(**options):
        average_indirect_effect(tiny, out=tmp_path, **{**QUICK, "facts": TRAINED[:3], **options})

    assert unrefused(call, BAD_SETTINGS) == []
    assert not list(tmp_path.iterdir())


def test_masked_subjects_need_no_noise(tiny, tmp_path):
    if not tiny.cfg.has_mask:
        with pytest.raises(ValueError, match=r"no \[MASK\]"):
            average_indirect_effect(tiny, TRAINED[:1], corruption="mask", out=tmp_path, **QUICK)
        assert not list(tmp_path.iterdir())
        return
    result = average_indirect_effect(tiny, TRAINED[:1], corruption="mask", **QUICK)
    assert result.ate > 0.2
    assert result.record["noise"] is None


def test_facts_without_ids_are_named_after_their_content():
    fact = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")
    (name, named), *_ = name_facts([fact, replace(fact, answer=" brave")]).items()
    assert name == named.id == next(iter(name_facts([fact])))
    assert len(name_facts([fact, replace(fact, answer=" brave")])) == 2
    with pytest.raises(ValueError, match="two facts are called 'fact-"):
        name_facts([fact, fact])


def test_seeds_and_shards_are_the_same_everywhere():
    assert own_seed(1, 0) == 8825681408997789
    assert len({own_seed(seed, row) for seed in range(100) for row in range(100)}) == 10_000
    assert fact_seed(1, "toy1-000-p2d-held-out-0") == 3440583315
    assert len({fact_seed(seed, name) for seed in range(5) for name in ("a", "b", "")}) == 15
    assert pick_shard(list("abcdefg"), " 1/3 ") == pick_shard(list("abcdefg"), (1, 3)) == ["b", "e"]
    assert pick_shard(["a"], (2, 3)) == []


def test_save_load_and_plot(whole, tmp_path):
    again = AverageEffect.load(whole.save(tmp_path / "aie.safetensors"))
    assert_same(again, whole)
    assert {"seed", "samples", "noise", "facts", "model", "weights_sha256", "versions"} <= set(again.record)
    ax = again.plot()
    drawn = {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}
    assert list(drawn) == [role for role, row in zip(whole.roles, whole.aie, strict=True) if not row.isnan().all()]
    last = whole.roles.index("subject_last")
    np.testing.assert_allclose(drawn["subject_last"].get_ydata(), whole.aie[last])
    assert f"{len(TRAINED)} of {len(FACTS)} facts, known on one canvas" in ax.get_title()
