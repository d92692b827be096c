"""Shares of the total effect, and the controls of averages: by hand, from traces of the same cells."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from diffusion_lens.analysis import (
    AverageEffect,
    CausalTrace,
    LoopSettings,
    average_indirect_effect,
    average_trajectory_effect,
    causal_trace,
    trace_trajectory,
)
from diffusion_lens.analysis.causal_tracing.average import random_subject
from diffusion_lens.analysis.causal_tracing.average_result import random_sites, step_roles, token_roles
from diffusion_lens.analysis.over_facts.folder import fact_seed
from diffusion_lens.analysis.over_facts.intervals import mean_interval
from diffusion_lens.data.toy_facts import SENTENCE_LENGTH, load

BOTH = ["random_site", "random_subject"]
# Names are two or three tokens; the first and the last prompt have room for another span, and one of those between.
FACTS = load().facts(trained="both", asked="p2d")[3:16:6] + load().facts(trained="both", asked="d2p")[:10:9]
QUICK = dict(samples=2, first_tokens=1, length=SENTENCE_LENGTH, layers=[1, 3], noise=0.4, known="all")
every_kind = pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar", "tiny-block", "tiny-uniform"], indirect=True)
on_one_model = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


def query_of(model, fact):
    n_masks = None if model.cfg.is_autoregressive else SENTENCE_LENGTH - len(model.to_tokens(fact.prompt)[0])
    return fact.to_query(model, n_masks=n_masks, first_tokens=1)


@pytest.fixture(scope="module")
def average(tiny):
    return average_indirect_effect(tiny, FACTS, controls=BOTH, **QUICK)


def test_the_share_of_a_trace_is_that_of_its_total_effect(tiny):
    trace = causal_trace(tiny, query_of(tiny, FACTS[0]), noise=0.4, samples=2)
    expected = (trace.scores - trace.corrupted) / (trace.clean - trace.corrupted)
    torch.testing.assert_close(trace.normalized_effect, expected)
    assert replace(trace, corrupted=trace.clean - 0.009).normalized_effect.isnan().all()
    assert replace(trace, corrupted=trace.clean + 0.5).normalized_effect.isnan().all()


def test_the_share_of_a_step_is_that_of_its_own_total_effect(tiny):
    trace = trace_trajectory(tiny, query_of(tiny, FACTS[0]), noise=0.4, samples=2, layers=[0])
    for step in trace.steps:
        torch.testing.assert_close(
            trace.normalized_effect[trace.steps.index(step)], trace.at_step(step).normalized_effect, equal_nan=True
        )


def test_the_share_of_an_average_is_the_ratio_of_means_over_the_same_facts(average):
    for row, role in enumerate(average.roles):
        having = [i for i in range(len(average.ids)) if not average.effects[i, row].isnan().any()]
        totals = average.total_effects[having]
        expected = average.effects[having, row].sum(dim=0) / totals.sum()
        torch.testing.assert_close(average.normalized_effect[row].double(), expected, check_dtype=False, equal_nan=True)
        alone = replace(average, record={**average.record, "facts": {fact_id: {} for fact_id in average.ids}})
        ends = torch.stack([each[row] for each in alone.normalized_interval(0.9)])
        names = [f"fact {average.ids[i]}" for i in having]
        by_hand = mean_interval(average.effects[having, row], names, 0.9, 1, weights=totals)
        torch.testing.assert_close(ends, torch.stack(by_hand), equal_nan=True, msg=role)


@on_one_model
def test_without_a_total_effect_there_is_no_share(tiny):
    none = average_indirect_effect(tiny, FACTS, **{**QUICK, "noise": 0.0})
    assert none.normalized_effect.isnan().all()
    assert torch.stack(none.normalized_interval()).isnan().all()
    assert causal_trace(tiny, query_of(tiny, FACTS[0]), noise=0.0, layers=[0]).normalized_effect.isnan().all()


@every_kind
def test_controls_are_traces_by_hand(tiny, average):
    assert_controls_are_traces(tiny, average, FACTS)


@pytest.mark.parametrize("family", ["bd3lm", "udlm", "llada2", "dream", "llama", "sedd", "nemotron-prompt"])
def test_controls_of_small_networks_of_each_kind_are_traces_by_hand(in_words, family):
    model = in_words(family)
    with model.at_time(0.6) if model.cfg.time_conditioning else nullcontext():
        facts, settings = FACTS[:1], {**QUICK, "layers": [1, 2]}
        assert_controls_are_traces(model, average_indirect_effect(model, facts, controls=BOTH, **settings), facts)


def assert_controls_are_traces(model, average, facts):
    at_sites, at_subjects = average.control("random_site"), average.control("random_subject")
    assert at_sites.ids == average.ids
    torch.testing.assert_close(at_sites.corrupted, average.corrupted)
    close = dict(rtol=0, atol=1e-6, equal_nan=True)
    for i, fact in enumerate(facts):
        query, seed = query_of(model, fact), fact_seed(1, fact.id)
        trace = causal_trace(model, query, noise=0.4, samples=2, seed=seed, layers=average.layers)
        roles = token_roles(query)
        for row, role in enumerate(average.roles):
            sites = random_sites(roles, role, query.subject, seed)
            assert not {role, "answer", "subject_first", "subject_middle", "subject_last"} & {roles[at] for at in sites}
            n_others = sum(other not in (role, "answer") and not other.startswith("subject") for other in roles)
            assert len(set(sites)) == len(sites) == min(roles.count(role), n_others)
            torch.testing.assert_close(at_sites.effects[i, row], trace.indirect_effect[sites].mean(dim=0), **close)
        other = random_subject(model, query, seed)
        assert (other is None) == (fact.id not in at_subjects.ids)
        if other is None:
            continue
        start, stop = other.subject
        assert stop - start == query.subject[1] - query.subject[0]
        assert not set(range(start, stop)) & {*range(*query.subject), *query.answer_positions}
        trace = causal_trace(model, other, noise=0.4, samples=2, seed=seed, layers=average.layers)
        mine = at_subjects.ids.index(fact.id)
        assert at_subjects.total_effects[mine].item() == pytest.approx(trace.total_effect, abs=1e-6)
        last = average.roles.index("subject_last")
        torch.testing.assert_close(at_subjects.effects[mine, last], trace.indirect_effect[stop - 1], **close)


@on_one_model
def test_some_prompts_have_no_room_for_another_subject(average):
    assert 0 < len(average.control("random_subject").ids) < len(FACTS)
    assert not average.control("random_subject").effects.isnan().all(dim=(1, 2)).any()


def test_draws_depend_on_the_seed_and_the_role():
    roles = ["before_subject"] * 20 + ["subject_last"] + ["after_further"] * 20 + ["answer"]
    drawn = {
        (seed, role): random_sites(roles, role, (20, 21), seed)[0] for seed in range(30) for role in set(roles[20:])
    }
    of_last = [drawn[seed, "subject_last"] for seed in range(30)]
    assert len(set(of_last)) > 10
    assert of_last != [drawn[seed, "answer"] for seed in range(30)]
    assert 20 not in drawn.values()
    assert random_sites(["answer", "not_reached"], "answer", (5, 6), 0) == []


@on_one_model
def test_random_sites_of_all_roles_take_no_pass_and_no_controls_leave_no_trace(tiny, average):
    def passes(**more):
        calls = Counter()
        with tiny.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda _, hook: calls.update("x"))]):
            result = average_indirect_effect(tiny, FACTS[:2], **QUICK, **more)
        return calls["x"], result

    without, plain = passes()
    with_sites, _ = passes(controls=["random_site"])
    with_subjects, _ = passes(controls=["random_subject"])
    assert without == with_sites < with_subjects
    assert "controls" not in plain.record
    assert plain.control_effects is None
    with pytest.raises(ValueError, match=r"computed without controls; compute it with controls=\['random_site'\]"):
        plain.control("random_site")
    with pytest.raises(ValueError, match="has the controls random_site, random_subject; compute it with"):
        average.control("random_sites")


@on_one_model
def test_an_unknown_control_is_refused(tiny):
    with pytest.raises(ValueError, match="controls='random_sites' is unknown, nearest is random_site"):
        average_indirect_effect(tiny, FACTS, controls=["random_sites"])
    with pytest.raises(TypeError, match="controls="):
        average_indirect_effect(tiny, FACTS, controls="random_site")


@on_one_model
def test_chosen_roles_have_the_controls_that_all_have(tiny, average):
    chosen = average_indirect_effect(tiny, FACTS, controls=BOTH, roles=["subject_last", "answer"], **QUICK)
    rows = [average.roles.index(role) for role in chosen.roles]
    close = dict(rtol=0, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(chosen.control_effects, average.control_effects[:, :, rows], **close)
    torch.testing.assert_close(chosen.control_corrupted, average.control_corrupted, **close)


@on_one_model
def test_controls_are_saved_resumed_and_merged(tiny, average, tmp_path):
    parts = [average_indirect_effect(tiny, FACTS, controls=BOTH, shard=(i, 2), out=tmp_path, **QUICK) for i in (0, 1)]
    loaded = AverageEffect.load(average.save(tmp_path.parent / "average.safetensors"))
    for other in (AverageEffect.merge(parts), AverageEffect.load(tmp_path), loaded):
        for name in ("control_effects", "control_corrupted"):
            torch.testing.assert_close(getattr(other, name), getattr(average, name), rtol=0, atol=0, equal_nan=True)
    traces = [CausalTrace.load(file) for file in tmp_path.glob("*.safetensors")]
    spans = [tuple(trace.record["random_subject"]["subject"]) for trace in traces if "random_subject" in trace.record]
    assert len(spans) == len(average.control("random_subject").ids)
    frame = average.to_dataframe()
    assert frame.columns[-2:].tolist() == BOTH
    rows = frame[frame.fact == average.ids[0]]
    row = rows[(rows.role == "subject_last") & (rows.layer == 3)].iloc[0]
    assert row.random_site == pytest.approx(
        average.control_effects[0, 0, average.roles.index("subject_last"), 1].item()
    )


@on_one_model
def test_controls_are_drawn(average):
    ax = average.plot()
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert {*BOTH} < lines.keys()
    last = average.control("random_subject").aie[average.roles.index("subject_last")].tolist()
    assert any(
        line.get_linestyle() == "--" and list(line.get_ydata()) == pytest.approx(last) for line in ax.get_lines()
    )


@pytest.mark.filterwarnings("ignore:the canvas has 16 positions")
@every_kind
def test_controls_by_step_are_traces_by_hand(tiny):
    facts = load().facts(trained="d2p", asked="p2d")[12:13]
    loop = LoopSettings(steps=5)
    settings = dict(
        samples=2, layers=[0, 3], noise=0.4, length=16, loop=loop, known="all", roles=["subject_last", "answer"]
    )
    average = average_trajectory_effect(tiny, facts, controls=BOTH, **settings)
    prompt, answer = facts[0].tokenize(tiny)
    length = len(prompt) + len(answer) if tiny.cfg.is_autoregressive else 16
    seed = fact_seed(1, facts[0].id)
    run = tiny.denoise(torch.tensor([prompt]), length=length, steps=5, seed=[seed])
    query = facts[0].to_query(tiny, n_masks=None if tiny.cfg.is_autoregressive else 16 - len(prompt))
    other = random_subject(tiny, query, seed)
    assert other is not None
    trace = trace_trajectory(tiny, other, trajectory=run, noise=0.4, samples=2, seed=seed, layers=[0, 3])
    control, n_steps = average.control("random_subject"), len(trace.steps)
    close = dict(rtol=0, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(
        control.effects[0, -n_steps:, 0], trace.indirect_effect[:, other.subject[1] - 1], **close
    )
    torch.testing.assert_close(control.corrupted[0, -n_steps:].float(), trace.corrupted, **close)
    whole = trace_trajectory(tiny, query, trajectory=run, noise=0.4, samples=2, seed=seed, layers=[0, 3])
    for i, step in enumerate(whole.steps):
        canvas = run.canvases[step, 0]
        roles = step_roles(query, canvas, run.is_open(canvas[None])[0])
        for row, role in enumerate(average.roles):
            sites = random_sites(roles, role, query.subject, seed)
            own = average.control("random_site").effects[0, i - n_steps, row]
            torch.testing.assert_close(own, whole.indirect_effect[i, sites].mean(dim=0), **close)
    torch.testing.assert_close(average.at(0).control("random_subject").effects, control.at(0).effects, **close)
    assert average.normalized_effect.shape == average.aie.shape
    assert average.normalized_interval()[0].shape == average.aie.shape
