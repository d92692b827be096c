"""Settings may be given as objects or as keywords, and mean the same."""

import json
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
from jaxtyping import config
from refusals import unrefused

from diffusion_lens.analysis import (
    AverageEffect,
    AverageTrajectoryEffect,
    Corruption,
    LoopSettings,
    Restoration,
    Selection,
    TracedTrajectory,
    average_facts,
    average_indirect_effect,
    causal_trace,
    compute_key,
    key_value_study,
    optimize_value,
    patch_grid,
    restore_in_loop,
    temporal_effect,
    trace_query,
    trace_steps,
    trace_trajectory,
)
from diffusion_lens.analysis.average_effects.known import Known
from diffusion_lens.analysis.average_effects.trace_settings import TraceSettings
from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.rome import ValueSettings
from diffusion_lens.analysis.rome.study import KeyValueSettings
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising import DenoiseSettings
from diffusion_lens.evaluation import RecallSettings, recall_by_steps

FACT = toy_facts.load().facts(trained="p2d", asked="p2d")[0]
MLP = Restoration("mlp", window=2)
NOISE = Corruption("uniform", noise=0.5, samples=2, seed=3)
ANALYSES = [causal_trace, trace_trajectory, temporal_effect]
TRACES = dict(layout=CanvasLayout(), restoration=MLP, corruption=NOISE, measures_noise=False, known=Known("all"))
RECALL = dict(steps=[1, 4], length=20, loop=LoopSettings())

# Settings that every constructor refuses: (class, arguments, message of the error).
OUT_OF_RANGE = [
    (Restoration, dict(kind="residual"), "unknown kind 'residual'"),
    (Restoration, dict(kind="mlp", window=0), "window=0; it must be at least 1"),
    (Restoration, dict(severed="resid"), "severed='resid'"),
    (Restoration, dict(kind="mlp", severed="attn"), "requires kind='resid'"),
    (Corruption, dict(kind="gausian"), "nearest is gaussian"),
    (Corruption, dict(), "needs noise="),
    (Corruption, dict(noise=float("inf")), "noise=inf; it must be a finite number"),
    (Corruption, dict(kind="mask", noise=-1), "noise=-1.0; it must be"),
    (Corruption, dict(noise=1.0, samples=0), "samples=0; it must be at least 1"),
    (Corruption, dict(noise=1.0, seed=-1), "seed=-1; it must be at least 0"),
    (Corruption, dict(kind="swap"), "requires swap="),
    (Corruption, dict(kind="swap", swap=[-1]), "swap=-1"),
    (Corruption, dict(kind="mask", swap=[1]), "no other corruption takes swap="),
    (Selection, dict(positions=(1, 1)), r"positions=\[1, 1\] contains duplicates"),
    (Selection, dict(layers=[]), r"layers=\[\]; give one index or more"),
    (CanvasLayout, dict(length=-4, first_tokens=0), "length=-4; it must be at least 1"),
    (CanvasLayout, dict(first_tokens=0), "first_tokens=0; it must be at least 1"),
    (CanvasLayout, dict(n_masks=0), "n_masks=0; it must be at least 1"),
    (CanvasLayout, dict(occurrence=-1), "occurrence=-1; it must be at least 0"),
    (CanvasLayout, dict(length=9, n_masks=3), "give one of them"),
    (RecallSettings, RECALL | dict(steps=[0, 0]), r"steps=\[0, 0\]; give one or more"),
    (RecallSettings, RECALL | dict(length=-3), "length=-3; it must be at least 1"),
    (RecallSettings, RECALL | dict(loop=LoopSettings(steps=99)), "loop has steps=99"),
    (Known, dict(rule="zzz"), "known='zzz'"),
    (Known, dict(rule="ids"), "or a collection of fact ids"),
    (TraceSettings, TRACES | dict(roles=["nonsense"]), "there is no role 'nonsense'"),
    (TraceSettings, TRACES | dict(roles=["answer_revealed"]), "there is no role 'answer_revealed'"),
    (TraceSettings, TRACES | dict(layers=[1, 1]), r"layers=\[1, 1\] contains duplicates"),
    (TraceSettings, TRACES | dict(canvas="frced"), "canvas='frced'"),
    (KeyValueSettings, dict(layers=[0, 0]), r"layers=\[0, 0\] contains duplicates"),
    (KeyValueSettings, dict(batch_size=0), "batch_size=0; it must be at least 1"),
    (KeyValueSettings, dict(at="subject"), "at='subject' is unknown"),
    (LoopSettings, dict(batch_size=0), "batch_size=0; it must be at least 1"),
    (ValueSettings, dict(steps=0), "steps=0; it must be at least 1"),
    (DenoiseSettings, dict(steps=0), "steps=0; it must be at least 1"),
]
OF_ANOTHER_TYPE = [
    (Restoration, dict(kind="mlp", window=2.5), "window=2.5 is a float"),
    (Restoration, dict(window=True), "window=True is a bool"),
    (Corruption, dict(noise=True), "noise=True is a bool"),
    (Corruption, dict(noise="1"), "noise='1' is a str"),
    (Corruption, dict(noise=1.0, samples=True), "samples=True is a bool"),
    (Corruption, dict(noise=1.0, seed="x"), "seed='x' is a str"),
    (Corruption, dict(kind="swap", swap=[0.5]), "swap=0.5 is a float"),
    (Selection, dict(positions=[0, 0.5]), "positions=0.5 is a float"),
    (Selection, dict(layers=[True]), "layers=True is a bool"),
    (CanvasLayout, dict(length=9.0), "length=9.0 is a float"),
    (RecallSettings, RECALL | dict(steps=[1.5]), "steps=1.5 is a float"),
    (TraceSettings, TRACES | dict(layers=[0.5]), "layers=0.5 is a float"),
    (KeyValueSettings, dict(layers=["0"]), "layers='0' is a str"),
]
# Settings from any numbers and containers, and the same from plain ones.
NORMALISED = [
    (Restoration("mlp", window=np.int64(2)), MLP),
    (Corruption("uniform", np.float32(0.5), np.int32(2), torch.tensor(3)), NOISE),
    (Corruption("swap", swap=[1, 2]), Corruption("swap", swap=(1, 2))),
    (Selection(torch.tensor([0, -1]), np.array([2])), Selection((0, -1), (2,))),
]


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
@pytest.mark.parametrize("analysis", ANALYSES, ids=lambda analysis: analysis.__name__)
def test_objects_and_keywords_give_the_same_result(small, analysis):
    query = FACT.to_query(small)
    where = dict(positions=[2, -3], layers=[0, -1])
    if analysis is not causal_trace:
        where |= dict(steps=[0], trajectory=small.denoise(query.tokens[None], steps=2))
        written = where["trajectory"].tokens[0, list(query.answer_positions)]
        query = replace(query, answer_tokens=tuple(written.tolist()))  # so that the run's end can change
    by_object = analysis(small, query, kind=MLP, corruption=NOISE, **where)
    selection = Selection(where.pop("positions"), where.pop("layers"))
    if analysis is causal_trace:
        of_objects = trace_query(small, query, MLP, NOISE, selection)
    else:
        run = TracedTrajectory.of(small, query, where["trajectory"])
        with_objects = {trace_trajectory: partial(trace_steps, canvas="forced"), temporal_effect: restore_in_loop}
        of_objects = with_objects[analysis](run, [0], restoration=MLP, corruption=NOISE, selection=selection)
    where |= vars(selection)
    by_keyword = analysis(
        small, query, kind="mlp", window=2, corruption="uniform", noise=0.5, samples=2, seed=3, **where
    )
    for result in (by_object, of_objects):
        assert torch.equal(result.scores.nan_to_num(-1), by_keyword.scores.nan_to_num(-1))
        assert {**result.record, "seconds": 0} == {**by_keyword.record, "seconds": 0}


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_an_object_beside_its_own_keywords_is_refused(small):
    cases = [
        (dict(kind=MLP, window=3, corruption=NOISE), "kind= is a Restoration"),
        (dict(kind=MLP, corruption=NOISE, samples=3), "corruption= is a Corruption"),
        (dict(kind=MLP, corruption=NOISE, noise=0.1), "corruption= is a Corruption"),
    ]
    assert unrefused(partial(causal_trace, small, FACT), cases) == []


@pytest.mark.parametrize(("cases", "error"), [(OUT_OF_RANGE, ValueError), (OF_ANOTHER_TYPE, TypeError)])
def test_every_constructor_refuses_wrong_settings(cases, error, monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # as when users call the library
    offenders = [
        f"{cls.__name__}: {offender}"
        for cls, arguments, message in cases
        for offender in unrefused(cls, [(arguments, message)], error)
    ]
    assert offenders == []


def test_settings_are_normalised_hashable_and_plain(monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    with_lists = TraceSettings(**TRACES, roles=["answer", "prompt_last"], layers=[np.int64(1)])
    recall = RecallSettings([1, 4], np.int64(20), LoopSettings(seed=np.uint8(3)))
    study = KeyValueSettings(layers=[np.int64(1)], prefixes=["a "])
    pairs = [
        *NORMALISED,
        (CanvasLayout(np.int64(9)), CanvasLayout(9)),
        (with_lists, TraceSettings(**TRACES, roles=("prompt_last", "answer"), layers=(1,))),
        (recall, RecallSettings((1, 4), 20, LoopSettings(seed=3))),
        (study, KeyValueSettings((1,), ("a ",))),
        (Known("ids", ["a"]), Known.of({"a"})),
    ]
    assert [given for given, plain in pairs if given != plain or hash(given) != hash(plain)] == []
    plain_json = [json.dumps(restored.describe()) for restored in (MLP, NOISE)]
    assert [json.dumps(given.describe()) for given, _ in NORMALISED[:2]] == plain_json
    json.dumps([with_lists.describe(None), recall.describe(None), study.describe(None)])


def test_settings_of_the_loop_are_made_once():
    loop = LoopSettings(steps=3, seed=5)
    assert loop.denoise is loop.denoise
    assert loop.denoise == DenoiseSettings(steps=3, seed=5)
    assert replace(loop, steps=4).denoise.steps == 4


def test_a_selection_counts_from_the_end_and_is_checked_against_the_model():
    assert Selection([0, -1], torch.tensor([-2])).within(5, 4) == ([0, 4], [2])
    assert Selection().within(2, 3) == ([0, 1], [0, 1, 2])
    with pytest.raises(ValueError, match=r"layers=\[4\]"):
        Selection(layers=[4]).within(5, 4)
    with pytest.raises(ValueError, match="contains duplicates"):
        Selection(positions=[0, -5]).within(5, 4)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_misspelt_keyword_is_refused_with_the_nearest(small):
    query = FACT.to_query(small)
    calls = [
        (partial(causal_trace, small, query), "widow", "causal_trace.*'window'"),
        (partial(patch_grid, small, query, query, lambda logits: logits.sum(), "z"), "max_byte", "'max_bytes'"),
        (partial(average_indirect_effect, small, [FACT]), "lenght", "'length'"),
        (partial(recall_by_steps, small, [FACT]), "temprature", "recall_by_steps.*'temperature'"),
        (partial(key_value_study, small, [FACT]), "prefixs", "'prefixes'"),
        (partial(compute_key, small, query, 0), "pos", "it takes model, queries, layer"),
        (partial(optimize_value, small, query, 0), "kl_facter", "optimize_value.*'kl_factor'"),
    ]
    offenders = [unrefused(call, [({misspelt: 1}, message)], TypeError) for call, misspelt, message in calls]
    assert offenders == [[]] * len(calls)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_study_takes_its_settings_as_one_object(small):
    settings = TraceSettings(**TRACES, roles=["subject_last"], layers=[1])
    by_object = average_facts(AverageEffect, small, [FACT], settings)
    by_keyword = average_indirect_effect(
        small, [FACT], MLP, corruption=NOISE, known="all", roles=["subject_last"], layers=[1]
    )
    assert torch.equal(by_object.effects, by_keyword.effects)
    assert {**by_object.record, "seconds": 0} == {**by_keyword.record, "seconds": 0}
    with pytest.raises(ValueError, match="AverageTrajectoryEffect needs a canvas"):
        average_facts(AverageTrajectoryEffect, small, [FACT], settings)


def test_two_layouts_of_a_study_never_share_a_record():
    layouts = [CanvasLayout(n_masks=6), CanvasLayout(n_masks=9), CanvasLayout(length=9), CanvasLayout()]
    records = [json.dumps(KeyValueSettings(layout=layout).describe(None)) for layout in layouts]
    assert len(set(records)) == len(layouts)


def test_settings_of_the_loop_are_made_again_from_their_fields():
    settings = LoopSettings(steps=4, seed=3)
    assert LoopSettings(**asdict(settings)) == settings


def test_one_number_is_no_sequence_of_indices(monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    with pytest.raises(TypeError, match=r"layers=1 is one number; give a sequence, layers=\[1\]"):
        Selection(layers=1)
