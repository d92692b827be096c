"""Which facts are averaged: those that the loop writes, those known on one canvas, those chosen by id."""

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from jaxtyping import config
from refusals import unrefused

from diffusion_lens import Query, load_pair
from diffusion_lens.analysis import (
    AverageEffect,
    LoopSettings,
    average_indirect_effect,
    average_trajectory_effect,
    causal_trace,
    merge,
    recalled_facts,
)
from diffusion_lens.analysis.causal_tracing import average as loop_runs
from diffusion_lens.analysis.over_facts.folder import fact_seed
from diffusion_lens.data.toy_facts import load
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.denoising.samplers import Ancestral, Confidence
from diffusion_lens.interventions import at_steps, freeze, named, on_branch, while_masked, zero_ablate
from diffusion_lens.records.identity import name_of

pytestmark = pytest.mark.filterwarnings("ignore:the canvas has 20 positions:UserWarning")
# What a study does with the facts, once a rule has chosen them, does not depend on the model.
on_the_masked_model = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
on_the_causal_model = pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
over_nothing = pytest.mark.filterwarnings("ignore:the average has no facts:UserWarning")
LENGTH = 20  # longer than the model was trained for, so that it recalls some facts and not others
DESCRIPTIONS, PEOPLE = (load().facts(trained="d2p", asked=direction)[:22:7] for direction in ("p2d", "d2p"))
# Each loop below recalls some of them, and not the same ones; two prompts have the same length.
FACTS = [DESCRIPTIONS[1], *PEOPLE[1:]]
UNTRUE = replace(FACTS[0], id="untrue", answer=DESCRIPTIONS[0].answer)
MIXED = [FACTS[0], UNTRUE, FACTS[-1]]
QUICK = dict(samples=1, length=LENGTH, layers=[1], roles=["prompt_last"], first_tokens=None)


@cache
def written_alone(model, fact, seed=1, **settings):
    """Whether `denoise`, given this fact's prompt alone, writes the answer's tokens after it."""
    prompt, answer = fact.tokenize(model)
    run = model.denoise(torch.tensor([prompt]), length=LENGTH, seed=[fact_seed(seed, fact.id)], **settings)
    return run.tokens[0, len(prompt) : len(prompt) + len(answer)].tolist() == answer


@pytest.fixture(scope="module")
def the_pair():
    """Both bundled models at once."""
    return load_pair("tiny-mdm", device="cpu")


@pytest.fixture(scope="module")
def recalled_by_both(the_pair):
    """The ids of the facts that both models recall."""
    return set.intersection(
        *(set(recalled_facts(model, FACTS, LoopSettings(steps=2), length=LENGTH)) for model in the_pair)
    )


LOOPS = {
    "guided": (LoopSettings(steps=3, cfg_scale=0.8), dict(steps=3, cfg_scale=0.8)),
    "ancestral": (LoopSettings(steps=3, sampler=Ancestral(), seed=3), dict(steps=3, sampler=Ancestral(), seed=3)),
    "warm": (LoopSettings(steps=3, temperature=1.0), dict(steps=3, temperature=1.0)),
    "pooled": (LoopSettings(steps=3, sampler="smdm"), dict(steps=3, sampler=Confidence(scope="batch"))),
}


# The twin's loop has neither guidance nor another sampler.
@pytest.mark.parametrize(
    ("tiny", "name"),
    [*(("tiny-mdm", name) for name in LOOPS), ("tiny-ar", "warm")],
    indirect=["tiny"],
)
def test_recalled_is_what_the_loop_writes_fact_by_fact(tiny, name):
    loop, settings = LOOPS[name]
    expected = [fact.id for fact in FACTS if written_alone(tiny, fact, **settings)]
    assert recalled_facts(tiny, FACTS, loop, length=LENGTH) == expected


def test_what_is_recalled_is_averaged_and_named(tiny):
    loop = LoopSettings(steps=2, batch_size=3)
    result = average_indirect_effect(tiny, [*FACTS, UNTRUE], loop=loop, **QUICK)
    expected = [fact.id for fact in FACTS if written_alone(tiny, fact, steps=2)]
    assert result.ids == expected
    assert 0 < len(expected) < len(FACTS)
    assert result.record["known"] == "recalled"
    on_twin = not tiny.cfg.has_mask
    assert result.record["loop"]["steps"] == (None if on_twin else 2)
    assert result.record["loop"]["sampler"]["name"] == ("left_to_right" if on_twin else "confidence")
    rule = "recalled" if on_twin else "recalled in 2 steps"
    assert result.rule == f"{len(expected)} of {len(FACTS) + 1} facts, {rule}"
    assert result.rule in result.plot().get_title()


def test_the_rules_pick_different_facts(tiny):
    averaged = {
        rule: set(average_indirect_effect(tiny, FACTS, known=rule, **QUICK).ids) for rule in ("one_canvas", "all")
    }
    argmax = {fact.id for fact in FACTS if all_likeliest(tiny, laid_out(tiny, fact))}
    assert averaged["one_canvas"] == argmax
    assert averaged["all"] == {fact.id for fact in FACTS}
    assert set(recalled_facts(tiny, FACTS, LoopSettings(steps=1), length=LENGTH)) == argmax
    if tiny.cfg.has_mask:
        assert set(recalled_facts(tiny, FACTS, LoopSettings(steps=2), length=LENGTH)) != argmax


def laid_out(model, fact):
    return fact.to_query(model, n_masks=LENGTH - len(fact.tokenize(model)[0]))


def all_likeliest(model, query):
    rows = [position - model.cfg.is_autoregressive for position in query.answer_positions]
    return model(query.tokens[None])[0, rows].argmax(-1).tolist() == list(query.answer_tokens)


@on_the_masked_model
def test_on_one_canvas_of_a_guided_run_the_guided_prediction_decides(tiny):
    """Guidance, written out, changes which of these facts are known."""
    known, facts = {"plain": set(), "guided": set()}, load().facts(trained="d2p", asked="d2p")[2:4]
    for fact in facts:
        query = laid_out(tiny, fact)
        canvas = query.tokens[None]
        with_prompt, without = tiny(canvas), tiny(torch.full_like(canvas, tiny.cfg.mask_token_id))
        for rule, logits in {"plain": with_prompt, "guided": without + 5.0 * (with_prompt - without)}.items():
            if logits[0, list(query.answer_positions)].argmax(-1).tolist() == list(query.answer_tokens):
                known[rule].add(fact.id)
    assert known["guided"] < known["plain"]
    loop = LoopSettings(steps=2, cfg_scale=4.0)
    averaged = average_trajectory_effect(tiny, facts, known="one_canvas", loop=loop, **QUICK)
    assert set(averaged.ids) == known["guided"]


@on_the_causal_model
@over_nothing
def test_a_first_token_alone_is_read_from_one_canvas_by_default(tiny):
    one_fact, short_loop = MIXED[:1], LoopSettings(steps=2)
    first = average_indirect_effect(tiny, one_fact, **{**QUICK, "first_tokens": 1})
    assert first.record["known"] == "one_canvas"
    assert "loop" not in first.record
    recalled = average_indirect_effect(
        tiny, one_fact, known="recalled", loop=short_loop, **{**QUICK, "first_tokens": 1}
    )
    assert recalled.record["known"] == "recalled"
    assert average_indirect_effect(tiny, one_fact, **QUICK).record["known"] == "recalled"


@on_the_masked_model
def test_ids_choose_the_facts_of_both_models(tiny, recalled_by_both):
    both = recalled_by_both
    assert 0 < len(both) < len(FACTS)
    result = average_indirect_effect(tiny, FACTS, known=both, **QUICK)
    assert set(result.ids) == both
    assert set(result.unknown) == {fact.id for fact in FACTS} - both
    assert result.record["known_ids"] == sorted(both)
    assert result.rule == f"{len(both)} of {len(FACTS)} facts, chosen by id"


@on_the_masked_model
def test_shards_and_resumed_studies_denoise_only_batches_they_need(tiny, monkeypatch, tmp_path):
    batches = []

    def counted(model, canvas, settings):
        batches.append(len(canvas.tokens))
        return denoise(model, canvas, settings)

    monkeypatch.setattr(loop_runs, "denoise", counted)
    settings = dict(loop=LoopSettings(steps=2, batch_size=2), **QUICK)
    whole = average_indirect_effect(tiny, MIXED, out=tmp_path, **settings)
    assert sorted(batches) == [1, 2]
    batches.clear()
    again = average_indirect_effect(tiny, MIXED, out=tmp_path, **settings)
    assert not batches
    assert again.ids == whole.ids
    average_indirect_effect(tiny, MIXED, shard=(0, len(MIXED)), **settings)
    assert len(batches) == 1
    parts = [average_indirect_effect(tiny, MIXED, shard=(i, 2), **settings) for i in range(2)]
    joined = merge(parts)
    assert joined.ids == whole.ids
    assert torch.equal(joined.effects.nan_to_num(7), whole.effects.nan_to_num(7))


@over_nothing
def test_another_rule_is_another_study(tiny, tmp_path):
    base = dict(loop=LoopSettings(steps=2), out=tmp_path, **QUICK)
    average_indirect_effect(tiny, MIXED[:2], **base)

    def call(**change):
        average_indirect_effect(tiny, MIXED[:2], **{**base, "loop": None, **change})

    cases = [
        (dict(known="all"), "known: 'recalled' there, 'all' here"),
        (dict(known=["untrue"]), "known: 'recalled' there, 'ids' here"),
        (dict(loop=LoopSettings(steps=2, seed=2)), "loop.seed: 1 there, 2 here"),
    ]
    if tiny.cfg.has_mask:
        cases.append((dict(loop=LoopSettings(steps=3)), r"loop.steps: 2 there, 3 here"))
    assert unrefused(call, cases) == []


@on_the_masked_model
def test_bad_rules_leave_nothing_behind(tiny, tmp_path):
    def call(**options):
        average_indirect_effect(tiny, MIXED, out=tmp_path, **QUICK, **options)

    cases = [
        (dict(known="recaled"), "known='recaled', nearest is 'recalled'|known='recaled', nearest is recalled"),
        (dict(known=["untru"]), "1 ids that no fact has: 'untru', nearest is"),
        (dict(known="all", loop=LoopSettings()), "loop= requires known='recalled'"),
    ]
    assert unrefused(call, cases) == []
    assert not list(tmp_path.iterdir())
    bad_loops = [
        (dict(batch_size=0), "batch_size=0"),
        (dict(steps=0), "steps=0"),
        (dict(sampler="greedy"), "unknown sampler 'greedy'"),
    ]
    assert unrefused(LoopSettings, bad_loops) == []


def test_mask_is_no_likeliest_token(specimen, configs):
    """On a head with a column for [MASK] the loop takes the best of the others; so does `known`."""
    model = deepcopy(specimen(configs["dream"]).model)
    mask = model.cfg.mask_token_id
    tokens = torch.tensor([5, 6, 7, mask, mask])
    with torch.no_grad():
        final = model.run_with_cache(tokens[None])[1]["ln_final.hook_normalized"][0]
        model.unembed.weight[mask] = 100 * final[model.readout.rows(torch.tensor([3]))][0]
        assert int(model(tokens[None], logits_at=model.readout.rows(torch.tensor([3]))).argmax()) == mask
    written = int(model.denoise(tokens[None], steps=1).tokens[0, 3])
    assert written != mask
    query = Query(tokens, (1, 2), (3,), (written,))
    assert causal_trace(model, query, noise=0.1, samples=1, positions=[1], layers=[0]).known


UNUSABLE = {
    "empty": (dict(answer=""), "has no answer"),
    "merged": (dict(prompt="today Ada is th", subject="Ada", answer="e brave pilot."), "merges the answer"),
    "absent": (dict(subject="Nobody"), "'Nobody' is not in the prompt"),
    "too long": (dict(answer=FACTS[0].answer * 9), "length=20 counts the prompt too"),
}


@pytest.fixture(scope="module")
def spoilt():
    """Two facts that can be queried among those that cannot."""
    return [FACTS[0], *(replace(FACTS[0], id=name, **change) for name, (change, _) in UNUSABLE.items()), FACTS[-1]]


@on_the_causal_model
def test_facts_that_cannot_be_queried_are_set_aside(tiny, spoilt, tmp_path):
    result = average_indirect_effect(tiny, spoilt, known="all", out=tmp_path / "run", **QUICK)
    assert result.ids == [FACTS[0].id, FACTS[-1].id]
    assert set(result.set_aside) == set(UNUSABLE)
    for name, (_, reason) in UNUSABLE.items():
        assert reason in result.set_aside[name]
    alone = average_indirect_effect(tiny, [FACTS[0], FACTS[-1]], known="all", **QUICK)
    assert torch.equal(result.effects.nan_to_num(7), alone.effects.nan_to_num(7))
    assert "2 of 2 facts, known or not (4 set aside)" in result.plot().get_title()
    assert AverageEffect.load(result.save(tmp_path / "a.safetensors")).set_aside == result.set_aside
    assert merge(tmp_path / "run").set_aside == result.set_aside
    shard = average_indirect_effect(tiny, spoilt, known=["empty", FACTS[-1].id], shard=(1, 2), **QUICK)
    assert shard.ids == [FACTS[-1].id]
    assert recalled_facts(tiny, spoilt, LoopSettings(steps=2), length=LENGTH) == [
        fact.id for fact in (FACTS[0], FACTS[-1]) if written_alone(tiny, fact, steps=2)
    ]


@pytest.mark.parametrize(
    ("tiny", "rule"),
    [
        ("tiny-mdm", {}),
        ("tiny-mdm", dict(first_tokens=1, known="recalled")),
        ("tiny-ar", dict(first_tokens=1)),
    ],
    indirect=["tiny"],
)
def test_the_default_canvas_is_as_long_as_those_of_the_training(tiny, rule, tmp_path):
    trained = dict(length=14) if tiny.cfg.has_mask else dict(length=None)
    settings = dict(samples=1, layers=[1], roles=["prompt_last"])
    default = average_indirect_effect(tiny, FACTS[3:], out=tmp_path, **settings, **rule)
    explicit = average_indirect_effect(tiny, FACTS[3:], **trained, **settings, **rule)
    assert default.record == explicit.record
    assert default.record["length"] == trained["length"]
    assert json.loads((tmp_path / "run.json").read_text())["length"] == trained["length"]
    assert torch.equal(default.effects.nan_to_num(7), explicit.effects.nan_to_num(7))


@on_the_masked_model
def test_n_masks_replace_a_length(tiny):
    settings = dict(samples=1, layers=[1], roles=["prompt_last"], known="all")
    short = average_indirect_effect(tiny, FACTS[:1], n_masks=6, **settings)
    assert (short.record["length"], short.record["n_masks"]) == (None, 6)


def test_on_the_default_canvas_recalled_facts_are_what_denoise_writes(tiny):
    facts = load().facts(trained="both", asked="d2p")[:30:15]
    written = []
    for fact in facts:
        prompt, answer = fact.tokenize(tiny)
        length = {} if tiny.cfg.trained_length else dict(length=len(prompt) + len(answer))
        run = tiny.denoise(fact.prompt, **length)
        written += [fact.id] * (run.tokens[0, len(prompt) : len(prompt) + len(answer)].tolist() == answer)
    assert len(written) > 1
    assert recalled_facts(tiny, facts) == written
    quick = dict(samples=1, layers=[1], roles=["prompt_last"])
    assert average_indirect_effect(tiny, facts[:1], **quick).ids == [facts[0].id]
    assert average_trajectory_effect(tiny, facts[:1], **quick).ids == [facts[0].id]


def test_a_fact_beyond_the_trained_length_is_set_aside_with_its_length(the_pair):
    model = the_pair[0]
    long = replace(FACTS[0], id="long", prompt="today " * 9 + FACTS[0].prompt)
    n_positions = sum(map(len, long.tokenize(model)))
    result = average_indirect_effect(model, [FACTS[0], long], known="all", **{**QUICK, "length": None})
    assert "length=14, on which the model was trained," in result.set_aside["long"]
    assert f"give length={n_positions} or more" in result.set_aside["long"]


@on_the_causal_model
def test_an_average_over_nothing_warns_of_it(tiny, tmp_path):
    untrue = [UNTRUE, replace(UNTRUE, id="also", answer=FACTS[-1].answer)]
    two_steps = LoopSettings(steps=2)
    with pytest.warns(UserWarning, match=r"has no facts: 0 of 2 facts, recalled.*length=.*known='one_canvas'"):
        assert not average_indirect_effect(tiny, untrue, out=tmp_path, loop=two_steps, **QUICK).ids
    with pytest.warns(UserWarning, match="has no facts: 0 of 2 facts, recalled"):
        merge(tmp_path)
    with pytest.warns(UserWarning, match=r"0 of 2 facts, known on one canvas.*known='recalled'"):
        average_indirect_effect(tiny, untrue, known="one_canvas", **QUICK)
    with pytest.warns(UserWarning, match=r"0 of 2 facts, chosen by id.*known="):
        average_indirect_effect(tiny, untrue, known=[], **QUICK)
    with pytest.warns(UserWarning, match="has no facts: 0 of 2 facts, recalled"):
        average_trajectory_effect(tiny, untrue, loop=two_steps, **QUICK)
    assert not average_indirect_effect(tiny, untrue, shard=(0, 2), loop=two_steps, **QUICK).ids


def test_loop_settings_must_be_numbers(monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # as when users call the library
    wrong = [dict(cfg_scale="1"), dict(temperature="2"), dict(seed="7"), dict(batch_size=2.5), dict(steps=4.5)]
    cases = [(setting, f"{name}=.* it must be a") for setting in wrong for name in setting]
    assert unrefused(LoopSettings, cases, TypeError) == []


@on_the_masked_model
def test_loop_settings_keep_plain_numbers(tiny, monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    given = dict(steps=np.int64(2), cfg_scale=np.float32(0.5), temperature=1, seed=np.uint8(7), batch_size=np.int32(3))
    plain = LoopSettings(**given)
    assert plain == LoopSettings(steps=2, cfg_scale=0.5, temperature=1.0, seed=7, batch_size=3)
    assert {type(value) for value in plain.describe_on(tiny.cfg).values()} <= {dict, int, float, type(None)}


@pytest.mark.parametrize("steps", [None, 8])
@pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar", "tiny-block", "tiny-uniform"], indirect=True)
def test_the_sampler_of_the_record_is_that_of_the_runs(tiny, steps):
    loop = LoopSettings(steps=steps)
    run = tiny.denoise(FACTS[0].prompt, length=14, steps=loop.steps)
    assert loop.describe_on(tiny.cfg)["sampler"] == run.record["sampler"]


@on_the_causal_model
def test_without_a_fact_that_can_be_queried_there_is_no_study(tiny, spoilt, tmp_path):
    with pytest.raises(ValueError, match=r"can be queried for none of the 4 facts; 'empty': .*has no answer.*; \.\.\."):
        average_indirect_effect(tiny, spoilt[1:-1], out=tmp_path, **QUICK)
    with pytest.raises(ValueError, match="'Ada' is not in"):
        recalled_facts(tiny, [replace(FACTS[0], subject="Ada")])
    assert not list(tmp_path.iterdir())


STEP_AWARE = {
    "at_steps": at_steps(zero_ablate(), 0),
    "on_branch": on_branch(zero_ablate(), "conditional"),
    "while_masked": while_masked(zero_ablate()),
    "named": named("early", at_steps(zero_ablate(), 0)),
    "partial": partial(on_branch(zero_ablate(), "conditional")),
    "freeze": freeze(),
    "early freeze": named("first value", freeze()),
}
POINT = "blocks.0.hook_attn_out"


@on_the_causal_model
def test_a_hook_of_some_steps_does_not_decide_what_is_traced_without_it(tiny):
    passes, accepted = [], []
    cures = ("average_trajectory_effect", "attach a hook that acts outside the loop too", "known=")
    with tiny.hooks(fwd_hooks=[("hook_embed", lambda activation, hook: passes.append(hook.name))]):
        for name, hook in STEP_AWARE.items():
            with tiny.hooks(fwd_hooks=[(POINT, hook)]):
                try:
                    average_indirect_effect(tiny, FACTS, **QUICK)
                except ValueError as refusal:
                    words = (f"{name_of(hook)} at '{POINT}'", *cures)
                    if all(word in str(refusal) for word in words):
                        continue
            accepted.append(name)
    assert accepted == []
    assert passes == []


@on_the_masked_model
@over_nothing
def test_a_hook_that_acts_everywhere_or_decides_nothing_is_accepted(tiny):
    at_step = (POINT, at_steps(zero_ablate(), 0))
    facts, loop = FACTS[:2], LoopSettings(steps=2)
    plain = average_indirect_effect(tiny, facts, known="all", **QUICK)
    for known in ("all", "one_canvas", [facts[0].id]):
        with tiny.hooks(fwd_hooks=[at_step]):
            result = average_indirect_effect(tiny, facts, known=known, **QUICK)
        rows = [plain.ids.index(fact_id) for fact_id in result.ids]
        torch.testing.assert_close(result.effects, plain.effects[rows], equal_nan=True)
    with tiny.hooks(fwd_hooks=[(POINT, scale_by_1)]):
        result = average_indirect_effect(tiny, facts, loop=loop, **QUICK)
        assert result.ids == recalled_facts(tiny, facts, loop, length=LENGTH)
    with tiny.hooks(fwd_hooks=[at_step]):
        result = average_trajectory_effect(tiny, facts[:1], loop=loop, noise=0.1, **QUICK)
    assert [*result.ids, *result.unknown] == [facts[0].id]


@over_nothing
@pytest.mark.parametrize(("tiny", "cfg_scale"), [("tiny-mdm", 0.8), ("tiny-ar", 0.0)], indirect=["tiny"])
def test_one_canvas_is_read_under_the_hooks_of_the_traced_steps(tiny, cfg_scale):
    settings = dict(QUICK, known="one_canvas", loop=LoopSettings(steps=2, cfg_scale=cfg_scale), noise=0.1)
    one_fact = MIXED[-1:]
    plain = average_trajectory_effect(tiny, one_fact, **settings)
    everywhere = [(f"blocks.{block}.hook_attn_out", zero_ablate()) for block in range(tiny.cfg.n_layers)]
    in_the_loop = [(point, on_branch(hook, "conditional")) for point, hook in everywhere]
    with tiny.hooks(fwd_hooks=everywhere):
        ablated = average_trajectory_effect(tiny, one_fact, **settings)
    with tiny.hooks(fwd_hooks=in_the_loop):
        by_step = average_trajectory_effect(tiny, one_fact, **settings)
    assert by_step.ids == ablated.ids != plain.ids
    with tiny.hooks(fwd_hooks=[(POINT, while_masked(scale_by_1))]):
        assert average_trajectory_effect(tiny, one_fact, **settings).ids == plain.ids


@on_the_masked_model
@over_nothing
def test_hooks_on_the_loop_alone_decide_what_is_known_as_its_settings_do(tiny):
    """They never pass in a trace, at whatever steps they act."""
    nothing = at_steps(lambda reveal, hook: torch.zeros_like(reveal), [0, 1])
    with tiny.hooks(fwd_hooks=[("denoise.hook_reveal", nothing)]):
        assert average_indirect_effect(tiny, MIXED, loop=LoopSettings(steps=2), **QUICK).ids == []


def scale_by_1(activation, hook):
    return activation * 1
