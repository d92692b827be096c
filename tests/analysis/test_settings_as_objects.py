"""Settings may be given as objects or as keywords, and mean the same."""

import json
from dataclasses import asdict, replace
from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch
from jaxtyping import config
from refusals import unrefused
from typer.main import get_command

from diffusion_lens import analysis
from diffusion_lens.analysis import (
    AverageSettings,
    AverageTrajectorySettings,
    CanvasLayout,
    Known,
    LoopSettings,
    TracedTrajectory,
    TraceSettings,
    average_indirect_effect,
    average_trajectory_effect,
    causal_trace,
    compute_key,
    key_value_study,
    optimize_value,
    patch_grid,
    study_keys_and_values,
    temporal_effect,
    trace_trajectory,
)
from diffusion_lens.analysis.rome import ValueSettings
from diffusion_lens.analysis.rome.key_value_study import KeyValueSettings
from diffusion_lens.cli import app
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising import DenoiseSettings
from diffusion_lens.evaluation import RecallSettings, recall_by_steps, recall_facts
from diffusion_lens.settings import fields_of

FACT = toy_facts.load().facts(trained="p2d", asked="p2d")[0]
NOISE = dict(corruption="uniform", noise=0.5, samples=2, seed=3)
MLP = TraceSettings("mlp", window=2, **NOISE)
ANALYSES = [causal_trace, trace_trajectory, temporal_effect]
TRACES = dict(kind="mlp", window=2, **NOISE, known="all")
RECALL = dict(steps=[1, 4], length=20)

# Settings that every constructor refuses: (class, arguments, message of the error).
OUT_OF_RANGE = [
    (TraceSettings, dict(kind="residual"), "kind='residual' is unknown, nearest is resid"),
    (TraceSettings, dict(kind="mlp", window=0), "window=0; it must be at least 1"),
    (TraceSettings, dict(severed="resid"), "severed='resid'"),
    (TraceSettings, dict(kind="mlp", severed="attn"), "requires kind='resid'"),
    (TraceSettings, dict(corruption="gausian"), "nearest is gaussian"),
    (TraceSettings, dict(noise=float("inf")), "noise=inf; it must be a finite number"),
    (TraceSettings, dict(corruption="mask", noise=-1), "noise=-1.0; it must be"),
    (TraceSettings, dict(noise=1.0, samples=0), "samples=0; it must be at least 1"),
    (TraceSettings, dict(noise=1.0, seed=-1), "seed=-1; it must be at least 0"),
    (TraceSettings, dict(noise=1.0, seed=2**64), "seed=18446744073709551616 is too large"),
    (TraceSettings, dict(corruption="swap"), "requires swap="),
    (TraceSettings, dict(corruption="swap", swap=[-1]), "swap=-1"),
    (TraceSettings, dict(corruption="mask", swap=[1]), "no other corruption takes swap="),
    (TraceSettings, dict(positions=(1, 1)), r"positions=\[1, 1\] contains duplicates"),
    (TraceSettings, dict(layers=[]), r"layers=\[\]; give one index or more"),
    (CanvasLayout, dict(length=-4, first_tokens=0), "length=-4; it must be at least 1"),
    (CanvasLayout, dict(first_tokens=0), "first_tokens=0; it must be at least 1"),
    (CanvasLayout, dict(n_masks=0), "n_masks=0; it must be at least 1"),
    (CanvasLayout, dict(occurrence=-1), "occurrence=-1; it must be at least 0"),
    (CanvasLayout, dict(length=9, n_masks=3), "give one of them"),
    (RecallSettings, RECALL | dict(steps=[0, 0]), r"steps=\[0, 0\]; give one or more"),
    (RecallSettings, RECALL | dict(length=-3), "length=-3; it must be at least 1"),
    (RecallSettings, RECALL | dict(batch_size=0), "batch_size=0; it must be at least 1"),
    (Known, dict(rule="zzz"), "known='zzz'"),
    (Known, dict(rule="ids"), "or a collection of fact ids"),
    (AverageSettings, TRACES | dict(roles=["nonsense"]), "there is no role 'nonsense'"),
    (AverageSettings, TRACES | dict(roles=["answer_revealed"]), "there is no role 'answer_revealed'"),
    (AverageSettings, TRACES | dict(layers=[1, 1]), r"layers=\[1, 1\] contains duplicates"),
    (AverageTrajectorySettings, TRACES | dict(canvas="frced"), "canvas='frced'"),
    (AverageSettings, TRACES | dict(positions=[1]), "choose roles= instead"),
    (KeyValueSettings, dict(layers=[0, 0]), r"layers=\[0, 0\] contains duplicates"),
    (KeyValueSettings, dict(batch_size=0), "batch_size=0; it must be at least 1"),
    (KeyValueSettings, dict(at="subject"), "at='subject' is unknown"),
    (LoopSettings, dict(batch_size=0), "batch_size=0; it must be at least 1"),
    (ValueSettings, dict(steps=0), "steps=0; it must be at least 1"),
    (DenoiseSettings, dict(steps=0), "steps=0; it must be at least 1"),
]
OF_ANOTHER_TYPE = [
    (TraceSettings, dict(kind="mlp", window=2.5), "window=2.5 is a float"),
    (TraceSettings, dict(window=True), "window=True is a bool"),
    (TraceSettings, dict(noise=True), "noise=True is a bool"),
    (TraceSettings, dict(noise="1"), "noise='1' is a str"),
    (TraceSettings, dict(noise=1.0, samples=True), "samples=True is a bool"),
    (TraceSettings, dict(noise=1.0, seed="x"), "seed='x' is a str"),
    (TraceSettings, dict(corruption="swap", swap=[0.5]), r"swap=\[0.5\] is a list; it must be a text, a sequence"),
    (TraceSettings, dict(positions=[0, 0.5]), "positions=0.5 is a float"),
    (TraceSettings, dict(layers=[True]), "layers=True is a bool"),
    (CanvasLayout, dict(length=9.0), "length=9.0 is a float"),
    (RecallSettings, RECALL | dict(steps=[1.5]), "steps=1.5 is a float"),
    (AverageSettings, TRACES | dict(layers=[0.5]), "layers=0.5 is a float"),
    (KeyValueSettings, dict(layers=["0"]), "layers='0' is a str"),
]
# Settings from any numbers and containers, and the same from plain ones.
NORMALISED = [
    (dict(kind="mlp", window=np.int64(2)), dict(kind="mlp", window=2)),
    (dict(noise=np.float32(0.5), samples=np.int32(2), seed=torch.tensor(3)), dict(noise=0.5, samples=2, seed=3)),
    (dict(corruption="swap", swap=[1, 2]), dict(corruption="swap", swap=(1, 2))),
    (dict(positions=torch.tensor([0, -1]), layers=np.array([2])), dict(positions=(0, -1), layers=(2,))),
]


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
@pytest.mark.parametrize("analysis", ANALYSES, ids=lambda analysis: analysis.__name__)
def test_an_object_and_keywords_give_the_same_result(small, analysis):
    query = FACT.to_query(small)
    where = {}
    if analysis is not causal_trace:
        where = dict(steps=[0], trajectory=small.denoise(query.tokens[None], steps=2))
        written = where["trajectory"].tokens[0, list(query.answer_positions)]
        query = replace(query, answer_tokens=tuple(written.tolist()))  # so that the run's end can change
    settings = replace(MLP, positions=(2, -3), layers=(0, -1))
    by_object = analysis(small, query, settings=settings, **where)
    keywords = dict(kind="mlp", window=np.int64(2), positions=[2, -3], layers=torch.tensor([0, -1]), **NOISE)
    by_keyword = analysis(small, query, **keywords, **where)
    assert torch.equal(by_object.scores.nan_to_num(-1), by_keyword.scores.nan_to_num(-1))
    assert {**by_object.record, "seconds": 0} == {**by_keyword.record, "seconds": 0}
    with pytest.raises(ValueError, match="settings= has its own samples"):
        analysis(small, query, settings=settings, samples=3, **where)


@pytest.mark.filterwarnings("ignore:.*will be removed:DeprecationWarning")
@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_the_objects_of_the_last_version_mean_the_same(small):
    query = FACT.to_query(small)
    run = TracedTrajectory.of(small, query, small.denoise(query.tokens[None], steps=2))
    parts = (
        analysis.Restoration("mlp", 2),
        analysis.Corruption("uniform", 0.5, 2, 3),
        analysis.Selection([2], [0]),
    )
    settings = replace(MLP, positions=(2,), layers=(0,))
    pairs = [
        (analysis.trace_query(small, query, *parts), causal_trace(small, query, settings)),
        (
            analysis.trace_steps(run, [0], "forced", *parts),
            trace_trajectory(small, query, [0], trajectory=run.trajectory, settings=settings),
        ),
        (
            analysis.restore_in_loop(run, [0], *parts),
            temporal_effect(small, query, [0], trajectory=run.trajectory, settings=settings),
        ),
    ]
    assert [torch.equal(old.scores, new.scores) for old, new in pairs] == [True] * 3


def test_a_name_of_the_last_version_says_what_to_use():
    with pytest.warns(DeprecationWarning, match="Corruption will be removed; use TraceSettings"):
        assert analysis.Corruption("mask").corruption == "mask"
    with pytest.raises(AttributeError, match="no attribute 'Corruptions'"):
        _ = analysis.Corruptions


IN_USE = [TraceSettings(noise=0.5, severed="mlp"), TraceSettings("mlp", 3, corruption="swap", swap=(1, 2))]


@pytest.mark.parametrize("name", fields_of(TraceSettings))
def test_a_setting_of_a_trace_is_everywhere(name):
    """A keyword of each call with its help, an option of each command, and an entry of the record."""
    calls = (*ANALYSES, average_indirect_effect, average_trajectory_effect)
    kinds = (TraceSettings, TraceSettings, TraceSettings, AverageSettings, AverageTrajectorySettings)
    for call, kind in zip(calls, kinds, strict=True):
        field = fields_of(kind)[name]
        assert signature(call).parameters[name].default == field.default
        assert f"\n        {name}: {field.metadata['help'][:30]}" in call.__doc__
    for command, kind in (("trace", TraceSettings), ("aie", AverageTrajectorySettings)):
        (option,) = [each for each in get_command(app).commands[command].params if each.name == name]
        assert option.opts[0] == f"--{name}"
        assert option.help.replace('"', "").startswith(fields_of(kind)[name].metadata["help"].replace('"', ""))
    recorded = [settings.describe(positions=[0], layers=[1])[name] for settings in IN_USE]
    assert any(value is not None for value in recorded)
    json.dumps(recorded)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_settings_of_another_call_are_refused(small):
    with pytest.raises(
        TypeError, match="settings= is an AverageTrajectorySettings; average_indirect_effect takes Aver"
    ):
        average_indirect_effect(small, [FACT], settings=AverageTrajectorySettings(noise=0.1))
    with pytest.raises(TypeError, match="settings= is an AverageSettings; causal_trace takes TraceSettings"):
        causal_trace(small, FACT, AverageSettings(noise=0.1))


def test_a_keyword_may_come_by_position_only_where_the_signature_says():
    assert list(signature(causal_trace).parameters)[:3] == ["model", "query", "kind"]
    assert signature(causal_trace).parameters["kind"].kind.name == "POSITIONAL_OR_KEYWORD"
    assert signature(causal_trace).parameters["window"].kind.name == "KEYWORD_ONLY"
    assert signature(trace_trajectory).parameters["kind"].kind.name == "KEYWORD_ONLY"


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
    with_lists = AverageSettings(**TRACES, roles=["answer", "prompt_last"], layers=[np.int64(1)])
    recall = RecallSettings([1, 4], np.int64(20), seed=np.uint8(3))
    study = KeyValueSettings(layers=[np.int64(1)], prefixes=["a "])
    pairs = [
        *((TraceSettings(**given), TraceSettings(**plain)) for given, plain in NORMALISED),
        (CanvasLayout(np.int64(9)), CanvasLayout(9)),
        (with_lists, AverageSettings(**TRACES, roles=("prompt_last", "answer"), layers=(1,))),
        (recall, RecallSettings((1, 4), 20, seed=3)),
        (study, KeyValueSettings(layers=(1,), prefixes=("a ",))),
        (Known("ids", ["a"]), Known.of({"a"})),
    ]
    assert [given for given, plain in pairs if given != plain or hash(given) != hash(plain)] == []
    described = [[json.dumps(TraceSettings(**each).describe()) for each in pair] for pair in NORMALISED]
    assert [given for given, plain in described if given != plain] == []
    json.dumps([with_lists.describe_on(None), recall.describe_on(None), study.describe_on(None)])


def test_settings_of_the_loop_are_made_once():
    loop = LoopSettings(steps=3, seed=5)
    assert loop.denoise is loop.denoise
    assert loop.denoise == DenoiseSettings(steps=3, seed=5)
    assert replace(loop, steps=4).denoise.steps == 4


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_selection_counts_from_the_end_and_is_checked_against_the_model(small):
    query, noise = FACT.to_query(small), dict(noise=1.0, samples=1)
    last, n_pos = small.cfg.n_layers - 1, len(query.tokens)
    traced = causal_trace(small, query, positions=[0, -1], layers=[-1], **noise)
    assert (traced.positions, traced.layers) == ([0, n_pos - 1], [last])
    with pytest.raises(ValueError, match=rf"layers=\[{last + 1}\]"):
        causal_trace(small, query, layers=[last + 1], **noise)
    with pytest.raises(ValueError, match="contains duplicates"):
        causal_trace(small, query, positions=[0, -n_pos], **noise)


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
    settings = AverageSettings(**TRACES, roles=["subject_last"], layers=[1])
    by_object = average_indirect_effect(small, [FACT], settings=settings)
    by_keyword = average_indirect_effect(
        small, [FACT], "mlp", window=2, **NOISE, known="all", roles=["subject_last"], layers=[1]
    )
    assert torch.equal(by_object.effects, by_keyword.effects)
    assert {**by_object.record, "seconds": 0} == {**by_keyword.record, "seconds": 0}


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_the_doors_of_the_last_version_for_objects_still_open(small):
    recall = RecallSettings([1], length=14)
    with pytest.warns(DeprecationWarning, match="recall_facts will be removed"):
        written = recall_facts(small, [FACT], recall).written
    assert written == recall_by_steps(small, [FACT], [1], length=14).written
    vectors = KeyValueSettings(layers=[0], search=ValueSettings(steps=1, kl_factor=0.0))
    with pytest.warns(DeprecationWarning, match="study_keys_and_values will be removed"):
        old = study_keys_and_values(small, [FACT], vectors)
    assert torch.equal(old.values, key_value_study(small, [FACT], settings=vectors).values)


def test_two_layouts_of_a_study_never_share_a_record():
    layouts = [dict(n_masks=6), dict(n_masks=9), dict(length=9), {}]
    records = [json.dumps(KeyValueSettings(**layout).describe_on(None)) for layout in layouts]
    assert len(set(records)) == len(layouts)


def test_settings_of_the_loop_are_made_again_from_their_fields():
    settings = LoopSettings(steps=4, seed=3)
    assert LoopSettings(**asdict(settings)) == settings


def test_one_number_is_no_sequence_of_indices(monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    with pytest.raises(TypeError, match=r"layers=1 is one number; give a sequence, layers=\[1\]"):
        TraceSettings(layers=1)
