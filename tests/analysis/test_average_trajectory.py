"""Averages by denoising step: by a hand loop over `trace_trajectory`, aligned at their ends, in shards, by rule."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from diffusion_lens.analysis import (
    AverageTrajectoryEffect,
    LoopSettings,
    TrajectoryTrace,
    average_indirect_effect,
    average_trajectory_effect,
    noise_scale,
    recalled_facts,
    trace_trajectory,
)
from diffusion_lens.analysis.over_facts.folder import fact_seed
from diffusion_lens.analysis.over_facts.intervals import mean_interval
from diffusion_lens.data.toy_facts import load
from diffusion_lens.interventions import named

pytestmark = pytest.mark.filterwarnings("ignore:the canvas has 16 positions")
LENGTH = 16  # longer than the model was trained for, so that two answers take different numbers of steps
LOOP = LoopSettings(steps=5)
LAYERS = [0, 3]
QUICK = dict(loop=LOOP, samples=2, length=LENGTH, layers=LAYERS)
FACTS = [load().facts(trained="d2p", asked=asked)[i] for asked, i in (("d2p", 0), ("d2p", 7), ("p2d", 14))]
SHORT = replace(FACTS[0], id="short", answer=FACTS[0].answer.split(" ")[0] + " " + FACTS[0].answer.split(" ")[1])
UNTRUE = replace(FACTS[1], id="untrue", answer=FACTS[0].answer)
ALL = [*FACTS, UNTRUE]


# The bundled models: masked diffusion, a causal one, by blocks, and under uniform noise.
every_kind = pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar", "tiny-block", "tiny-uniform"], indirect=True)


@pytest.fixture(scope="module")
def whole(tiny):
    """All facts in one study, in memory."""
    return average_trajectory_effect(tiny, ALL, **QUICK)


def assert_same(a, b):
    """Two results, bit for bit."""
    for name in ("effects", "clean", "corrupted"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0, equal_nan=True)
    for name in ("ids", "offsets", "roles", "layers", "unknown", "record"):
        assert getattr(a, name) == getattr(b, name), name


def traced_alone(model, fact, noise, **settings):
    """The fact's trajectory and its trace, on their own."""
    prompt, answer = fact.tokenize(model)
    length = len(prompt) + len(answer) if model.cfg.is_autoregressive else LENGTH
    run = model.denoise(torch.tensor([prompt]), length=length, steps=LOOP.steps, seed=[fact_seed(1, fact.id)])
    query = fact.to_query(model, n_masks=None if model.cfg.is_autoregressive else LENGTH - len(prompt))
    seed = fact_seed(1, fact.id)
    return run, trace_trajectory(model, query, trajectory=run, noise=noise, samples=2, seed=seed, **settings)


@every_kind
def test_rows_are_traces_averaged_by_hand(tiny, whole):
    recalled = recalled_facts(tiny, ALL, LOOP, length=LENGTH)
    assert whole.ids == recalled
    assert 0 < len(recalled) < len(ALL)
    queries = [fact.to_query(tiny) for fact in sorted(ALL, key=lambda fact: fact.id)]
    averaged = [fact for fact in ALL if fact.id in recalled]
    assert_rows_are_traces(tiny, whole, averaged, noise_scale(tiny, queries), LAYERS)


@pytest.mark.parametrize("family", ["bd3lm", "udlm", "llada2"])
def test_rows_with_times_or_experts_are_traces_averaged_by_hand(in_words, family):
    model, settings = in_words(family), dict(QUICK, layers=[0, 2])
    result = average_trajectory_effect(model, FACTS[:1], known="all", noise=0.5, **settings)
    assert_rows_are_traces(model, result, FACTS[:1], 0.5, [0, 2])


def assert_rows_are_traces(model, result, facts, noise, layers):
    longest = 0
    for row, fact in enumerate(facts):
        run, trace = traced_alone(model, fact, noise, layers=layers)
        n_prompt, n_answer = len(fact.tokenize(model)[0]), len(fact.tokenize(model)[1])
        answer = range(n_prompt, n_prompt + n_answer)
        revealed_at = run.revealed_at[0, list(answer)].tolist()
        # Under uniform noise every step writes the whole answer.
        first, last = (0, run.n_steps - 1) if run.uniform_noise else (min(revealed_at), max(revealed_at))
        longest = max(longest, last - first + 1)
        assert trace.steps == list(range(first, last + 1))
        for offset, values in zip(result.offsets, result.effects[row], strict=True):
            step = last + offset
            if step < first:
                assert values.isnan().all()
                assert result.clean[row, result.offsets.index(offset)].isnan()
                continue
            scores = trace.scores[step - first] - trace.corrupted[step - first]
            on_canvas = (
                [] if model.cfg.is_autoregressive else (run.canvases[step, 0] != -1).nonzero().flatten().tolist()
            )
            shown = [p for p, at in zip(answer, revealed_at, strict=True) if at < step and not run.uniform_noise]
            positions = {
                "answer_revealed": shown,
                "answer": [position for position in answer if position not in shown and position in on_canvas],
                "other_masks": [position for position in range(answer[-1] + 1, LENGTH) if position in on_canvas],
                "subject_last": [trace.subject[1] - 1],
            }
            for role, own in positions.items():
                expected = (
                    np.mean([scores[position].numpy() for position in own], axis=0) if own else np.full(2, np.nan)
                )
                np.testing.assert_allclose(values[result.roles.index(role)].numpy(), expected, rtol=0, atol=2e-6)
            column = result.offsets.index(offset)
            assert result.clean[row, column].item() == pytest.approx(trace.clean[step - first].item(), abs=1e-6)
            assert result.corrupted[row, column].item() == pytest.approx(trace.corrupted[step - first].item(), abs=1e-6)
    assert result.offsets == list(range(1 - longest, 1))
    assert longest > 1


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
@pytest.mark.parametrize(
    "chosen", [dict(severed="attn", noise=0.5), dict(corruption="swap", swap="Anton Trondall")], ids=["severed", "swap"]
)
def test_every_setting_of_a_trace_holds_at_the_steps_too(tiny, chosen):
    shared = dict(layers=LAYERS, samples=2, **chosen)
    named = average_trajectory_effect(
        tiny, FACTS, loop=LOOP, length=LENGTH, known="all", roles=["subject_last"], **shared
    )
    kept = [fact for fact in FACTS if fact.id in named.ids]
    assert kept
    for fact, effects in zip(kept, named.effects, strict=True):
        prompt, _ = fact.tokenize(tiny)
        query = fact.to_query(tiny, n_masks=LENGTH - len(prompt))
        run = tiny.denoise(torch.tensor([prompt]), length=LENGTH, steps=LOOP.steps, seed=[fact_seed(1, fact.id)])
        last = [query.subject[1] - 1]
        seed = fact_seed(1, fact.id)
        trace = trace_trajectory(tiny, query, trajectory=run, seed=seed, positions=last, **shared)
        expected = trace.indirect_effect[:, 0]
        torch.testing.assert_close(effects[-len(expected) :, 0], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar", "tiny-block"], indirect=True)
def test_steps_are_averaged_over_the_facts_that_have_them(tiny):
    # The twin takes a step a token, so a shorter answer has fewer of them; here the diffusion model does too.
    result = average_trajectory_effect(tiny, [FACTS[0], SHORT], known="all", **{**QUICK, "layers": [1]})
    spans = (~result.clean.isnan()).sum(dim=1).tolist()
    assert result.n_facts == [sum(span > -offset for span in spans) for offset in result.offsets]
    column = result.offsets.index(-max(spans) + 1)
    row = spans.index(max(spans))
    assert result.n_facts[column] == 1
    torch.testing.assert_close(result.aie[column], result.effects[row, column], equal_nan=True)
    torch.testing.assert_close(result.ate[column], result.clean[row, column] - result.corrupted[row, column])
    assert result.at(result.offsets[column]).ids == [result.ids[row]]
    assert result.ate_interval()[0][column].isnan()
    last = result.offsets.index(0)
    torch.testing.assert_close(result.ate[last], (result.clean - result.corrupted)[:, last].mean())
    low, _ = result.ate_interval(0.9)
    assert low.shape == result.ate.shape
    assert low[last].isnan()  # of two facts
    twelve = replace(
        result,
        **{name: getattr(result, name).repeat_interleave(6, dim=0) for name in ("effects", "clean", "corrupted")},
        ids=list("abcdefghijkl"),
    )
    people = {name: {"person": name} for name in twelve.ids}
    twelve = replace(twelve, record={**result.record, "facts": people})
    total, role = twelve.total_effects[:, last], twelve.roles.index("subject_last")
    ends = mean_interval(total, twelve.ids, 0.9, result.record["seed"], within=(-1.0, 1.0))
    assert [end[last].item() for end in twelve.ate_interval(0.9)] == pytest.approx([end.item() for end in ends])
    assert ends[0] < ends[1]
    ends = mean_interval(twelve.effects[:, last, role], twelve.ids, 0.9, result.record["seed"], within=(-1.0, 1.0))
    for of_result, end in zip(twelve.aie_interval(0.9), ends, strict=True):
        torch.testing.assert_close(of_result[last, role], end, equal_nan=True)
    with pytest.raises(ValueError, match="offset=1; the steps of this average are"):
        result.at(1)


def test_one_step_is_the_average_over_one_canvas(tiny):
    """A loop of one step sees the canvas before anything is written; so does the twin that writes one token."""
    settings = {**QUICK, "loop": LoopSettings(steps=1), "first_tokens": 1}
    by_step = average_trajectory_effect(tiny, FACTS[:2], roles=["subject_last", "prompt_last"], **settings)
    del settings["loop"]
    plain = average_indirect_effect(tiny, FACTS[:2], roles=["subject_last", "prompt_last"], **settings)
    assert by_step.offsets == [0]
    torch.testing.assert_close(by_step.at(0).effects, plain.effects, rtol=0, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(by_step.at(0).clean, plain.clean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_shards_and_folders_merge_to_one_result(tiny, whole, tmp_path):
    parts = [average_trajectory_effect(tiny, ALL, shard=(i, 3), out=tmp_path / str(i % 2), **QUICK) for i in range(3)]
    assert_same(AverageTrajectoryEffect.merge(parts), whole)
    assert_same(AverageTrajectoryEffect.merge([tmp_path / "1", tmp_path / "0"]), whole)
    saved = parts[0].save(tmp_path / "a.safetensors")
    assert_same(AverageTrajectoryEffect.merge([parts[2], saved, parts[1]]), whole)
    assert_same(AverageTrajectoryEffect.load(saved), parts[0])
    file = next(path for path in (tmp_path / "0").glob("*.safetensors"))
    assert TrajectoryTrace.load(file).record["fact"] in [fact.id for fact in ALL]
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "0").glob("*.safetensors")}
    assert_same(average_trajectory_effect(tiny, ALL, out=tmp_path / "0", **QUICK), whole)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    with pytest.raises(ValueError, match="canvas: 'forced' there, 'free' here"):
        average_trajectory_effect(tiny, ALL, canvas="free", out=tmp_path / "0", **QUICK)
    with pytest.raises(ValueError, match="facts are missing"):
        AverageTrajectoryEffect.merge(parts[:2])


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_rules_and_facts_that_cannot_be_queried(tiny):
    nobody = replace(FACTS[0], id="nobody", subject="Nobody")
    quick = {**QUICK, "roles": ["subject_last"], "layers": [1]}
    chosen = average_trajectory_effect(tiny, [*ALL, nobody], known=["untrue"], **quick)
    assert chosen.ids == ["untrue"]
    assert list(chosen.set_aside) == ["nobody"]
    assert chosen.clean[0, -1] < 1e-6  # another token stands where the answer's should, or the last is improbable
    assert chosen.rule == f"1 of {len(ALL)} facts, chosen by id (1 set aside)"
    assert set(chosen.unknown) == {fact.id for fact in FACTS}
    on_canvas = average_trajectory_effect(tiny, [FACTS[0], UNTRUE], known="one_canvas", **quick)
    plain = average_indirect_effect(
        tiny,
        [FACTS[0], UNTRUE],
        known="one_canvas",
        first_tokens=None,
        **{key: quick[key] for key in quick if key != "loop"},
    )
    assert on_canvas.ids == plain.ids
    assert on_canvas.unknown["untrue"] == pytest.approx(plain.unknown["untrue"], abs=1e-6)
    with pytest.raises(ValueError, match="canvas='frced'"):
        average_trajectory_effect(tiny, FACTS, canvas="frced", **quick)
    with pytest.raises(ValueError, match="no role 'answer_reveal', nearest is answer_revealed"):
        average_trajectory_effect(tiny, FACTS, **{**quick, "roles": ["answer_reveal"]})


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_pictures_say_how_many_facts_and_by_which_rule(tiny, whole):
    ax = whole.plot()
    assert whole.rule in ax.get_title()
    assert "subject_last" in ax.get_title()
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[-1] == f"last token revealed, n = {len(whole.ids)}"
    assert labels[0].startswith(f"{-whole.offsets[0]} step")
    last = whole.roles.index("subject_last")
    np.testing.assert_array_equal(ax.images[0].get_array(), whole.aie[:, last].numpy())
    curves = whole.at(-1).plot()
    drawn = {line.get_label(): line for line in curves.get_lines()}
    column = whole.offsets.index(-1)
    np.testing.assert_allclose(drawn["subject_last"].get_ydata(), whole.aie[column, last])
    with pytest.raises(ValueError, match="there is no role 'subject'"):
        whole.plot("subject")
    with pytest.warns(UserWarning, match="has no facts: 0 of 1 facts, recalled"):
        nobody = average_trajectory_effect(tiny, [UNTRUE], **QUICK)
    assert nobody.offsets == [0]
    with pytest.raises(ValueError, match="no average to plot"):
        nobody.plot()


@every_kind
def test_steps_whose_canvas_has_no_position_of_a_role_have_no_effect(tiny):
    """On a causal model the first canvas has no position of the answer; the other roles' numbers do not change."""
    causal, one_fact = tiny.cfg.is_autoregressive, dict(QUICK, layers=[1])
    roles = ["subject_last", "answer", "answer_revealed"]
    among = average_trajectory_effect(tiny, FACTS[:1], known="all", **one_fact, roles=roles)
    for role in roles[1:]:
        alone = average_trajectory_effect(tiny, FACTS[:1], known="all", **one_fact, roles=[role])
        effects = among.effects[:, :, [among.roles.index(role)]]
        torch.testing.assert_close(alone.effects, effects, rtol=0, atol=1e-6, equal_nan=True)
        assert not alone.clean.isnan().any()
        assert bool(alone.effects[0, 0].isnan().all()) == (causal or role == "answer_revealed")
        # Masked positions of the answer are not on a causal canvas at all; under uniform noise none is revealed.
        if not alone.effects.isnan().all():
            assert alone.plot().get_title().startswith(f"{tiny.cfg.model_name}, {role}")
    step = trace_trajectory(tiny, FACTS[0], steps=[0], noise=0.1, samples=1, positions=[-1], layers=[0])
    assert bool(step.scores[0].isnan().all()) == (causal or tiny.cfg.opens_blocks)


@every_kind
def test_a_role_that_no_fact_has_is_not_drawn(tiny):
    nobody = average_trajectory_effect(tiny, FACTS[:1], known="all", **QUICK, roles=["answer_revealed"], first_tokens=1)
    assert nobody.effects.isnan().all()
    with pytest.raises(ValueError, match="no map to draw: the effect is NaN in every role of answer_revealed"):
        nobody.plot()


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_facts_whose_runs_leave_the_answer_masked_are_not_averaged(tiny):
    def reveal_few(reveal, hook):
        """All of the answer, or of another fact no position."""
        return reveal & (hook.step.tokens[:, 1:2] == tiny.to_tokens(FACTS[0].prompt)[0, 1])

    hook = ("denoise.hook_reveal", named("one fact only", reveal_few))
    with tiny.hooks(fwd_hooks=[hook]):
        average = average_trajectory_effect(tiny, FACTS[:2], known="all", **QUICK)
    assert average.ids == [FACTS[0].id]
    assert list(average.unknown) == [FACTS[1].id]
