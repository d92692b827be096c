"""Settings in numpy's numbers and layers counted from the end are what plain ones are; float64 models are traced."""

import copy
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import unrefused

from diffusion_lens import Query
from diffusion_lens.analysis import causal_trace, key_value_study, patch_grid, temporal_effect, trace_trajectory
from diffusion_lens.analysis.rome import (
    RankOneEdit,
    ValueSettings,
    compute_key,
    optimize_value,
    sample_prefixes,
    second_moment,
)
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import chain_rule_nll
from diffusion_lens.settings import at_least, not_negative

FACTS = toy_facts.load().facts(trained="p2d", asked="p2d")
FACT = FACTS[0]
LAST = 1
TEXTS = toy_facts.load().sentences()[:3]
NUMPY = dict(
    window=np.int64(2),
    noise=np.float32(0.5),
    samples=np.int32(2),
    seed=np.uint8(3),
    positions=np.array([0, -1]),
    layers=[np.int64(-1)],
)
PLAIN = dict(window=2, noise=0.5, samples=2, seed=3, positions=[0, -1], layers=[LAST])


def same(result, plain, tmp_path):
    again = type(result).load(result.save(tmp_path / "result.safetensors"))
    for name, value in vars(plain).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(again, name), value, rtol=1e-4, atol=0, equal_nan=True)
        else:
            assert json.dumps(getattr(again, name)) == json.dumps(value)


SPANS = ("subject", "answer_positions", "answer_tokens")


def unchecked(cls, **fields):
    """As users make it, whose types nobody checks."""
    made = object.__new__(cls)
    vars(made).update(fields)
    made.__post_init__()
    return made


ANALYSES = {
    "causal_trace": lambda model, query, run, n, **more: causal_trace(model, query, "mlp", **more),
    "trace_trajectory": lambda model, query, run, n, **more: trace_trajectory(
        model, query, [n(0)], trajectory=run, kind="mlp", **more
    ),
    "temporal_effect": lambda model, query, run, n, **more: temporal_effect(
        model, query, [n(0)], trajectory=run, kind="mlp", **more
    ),
}


def written_by(run, query):
    """The query whose answer is what a run writes: a random model writes no true one, so each effect would be 0."""
    return replace(query, answer_tokens=tuple(run.tokens[0, list(query.answer_positions)].tolist()))


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
@pytest.mark.parametrize("name", ANALYSES)
def test_a_trace_takes_numpys_numbers(small, name, tmp_path):
    query = FACT.to_query(small)
    run = small.denoise(query.tokens[None], steps=2)
    query = written_by(run, query)
    result, plain = (ANALYSES[name](small, query, run, n, **more) for n, more in ((np.int64, NUMPY), (int, PLAIN)))
    same(result, plain, tmp_path)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_grid_takes_numpys_numbers(small, tmp_path):
    runs = [small.denoise(fact.to_query(small).tokens[None], steps=2) for fact in (FACT, FACT)]

    def grid(n, layer):
        return patch_grid(
            small, *runs, lambda x: x[0, -1, 7], "z", [n(1)], positions=[n(2)], layers=[n(layer)], heads=[n(-1)]
        )

    same(grid(np.int64, -1), grid(int, LAST), tmp_path)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_positions_come_in_any_container(small):
    clean, corrupted = (small.to_tokens(FACT.prompt) for _ in range(2))
    corrupted[0, 1] = 7

    def grid(positions, **more):
        return patch_grid(small, clean, corrupted, lambda x: x[0, -1, 7], "z", positions=positions, layers=[1], **more)

    plain = grid([1, 2])
    for positions in (np.array([1, -2]), torch.tensor([1, 2]), range(1, 3), iter([1, 2])):
        result = grid(positions)
        assert torch.equal(result.scores, plain.scores)
        assert json.dumps(result.coordinates) == json.dumps(plain.coordinates)
    with pytest.raises(TypeError, match=r"positions= is an array \[1, 2\]; it must have one axis"):
        grid(np.array([[1, 2]]))
    with pytest.raises(TypeError, match=r"check=True is a bool; it must be a whole number"):
        grid([1], method="attribution", check=True)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_prefixes_take_numpys_numbers(small):
    options = dict(start="people", seed=3)
    assert sample_prefixes(small, np.array([2, 3]), **options) == sample_prefixes(small, [2, 3], **options)
    with pytest.raises(ValueError, match="lengths is empty"):
        sample_prefixes(small, np.array([], dtype=int), **options)
    with pytest.raises(ValueError, match="lengths=0; it must be at least 1"):
        sample_prefixes(small, [2, 0], **options)


def test_a_query_takes_numpys_numbers(small):
    query = FACT.to_query(small)
    spans = tuple(getattr(query, name) for name in SPANS)
    again = unchecked(Query, tokens=query.tokens, **dict(zip(SPANS, map(np.array, spans), strict=True)))
    assert tuple(getattr(again, name) for name in SPANS) == spans
    assert {type(number) for name in SPANS for number in getattr(again, name)} == {int}
    with pytest.raises(TypeError, match=r"subject=0\.5 is a float; it must be a whole number"):
        unchecked(Query, tokens=query.tokens, subject=(0.5, 2), answer_positions=(), answer_tokens=())


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_rome_takes_layers_from_the_end_and_numpys_numbers(small, tmp_path):
    query, layer, plain = FACT.to_query(small), np.int64(-2), 0
    same(compute_key(small, query, layer), compute_key(small, query, plain), tmp_path)
    result = optimize_value(small, query, layer, steps=2, kl_factor=0.0)
    same(result, optimize_value(small, query, plain, steps=2, kl_factor=0.0), tmp_path)
    settings = unchecked(
        ValueSettings, **{**vars(ValueSettings()), "steps": np.int64(2), "lr": np.float32(0.5), "kl_factor": 0}
    )
    assert settings == ValueSettings(steps=2, kl_factor=0.0)
    json.dumps(vars(settings))
    moment = second_moment(small, TEXTS, layer, seed=np.int64(1), batch_size=np.int64(2))
    same(moment, second_moment(small, TEXTS, plain, seed=1, batch_size=2), tmp_path)
    key = compute_key(small, query, -2)
    edit = RankOneEdit(small, -2, key, result, moment)
    assert edit.layer == key.layer == result.layer == moment.layer == plain
    torch.testing.assert_close(edit.update(), RankOneEdit(small, plain, key, result, moment).update(), rtol=0, atol=0)
    study = key_value_study(small, [FACT], [np.int64(-2)], search=ValueSettings(steps=1), batch_size=np.int64(2))
    assert study.record["layers"] == [plain]
    json.dumps(study.record)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_numpys_numbers_out_of_range_are_refused(small):
    def call(**settings):
        causal_trace(small, FACT.to_query(small), "mlp", **{"noise": 0.1, **settings})

    cases = [
        (dict(samples=np.int64(0)), "samples=0; it must be at least 1"),
        (dict(noise=np.float32("nan")), "noise=nan; it must be a finite number, 0 or more"),
        (dict(window=np.int64(-1)), "window=-1; it must be at least 1"),
        (dict(layers=[np.int64(-9)]), r"layers=\[-9\]; give numbers from 0 to 1, or negative ones"),
    ]
    assert unrefused(call, cases) == []


def test_bounds_of_a_number():
    assert at_least(1, "samples", torch.tensor(3)) == 3
    with pytest.raises(ValueError, match="samples=0; it must be at least 1"):
        at_least(1, "samples", np.int64(0))
    with pytest.raises(TypeError, match=r"samples=2\.5 is a float"):
        at_least(1, "samples", 2.5)
    assert not_negative("noise", torch.tensor(0.5)) == 0.5
    for given in (float("inf"), -0.1):
        with pytest.raises(ValueError, match=re.escape(f"noise={given}; it must be a finite number, 0 or more")):
            not_negative("noise", given)


@pytest.fixture(scope="module")
def doubled(small):
    """A model in float64, and the same in float32."""
    return copy.deepcopy(small).to("float64"), small


def on_a_short_run(analysis, model, **settings):
    """The analysis of the first of two answer tokens' steps."""
    query = FACT.to_query(model, first_tokens=2)
    if model.cfg.has_mask:
        run = model.denoise(query.tokens[None], steps=2)
    else:
        run = model.denoise(query.tokens[None, : query.answer_positions[0]], max_new_tokens=2)
        query = replace(query, tokens=run.tokens[0, :-1])
    query = written_by(run, query)
    return analysis(model, query, [0], trajectory=run, **settings)


@pytest.mark.parametrize(("small", "canvas"), [("mdm", "free"), ("ar", "forced")], indirect=["small"])
def test_a_float64_model_is_traced_over_its_steps(doubled, canvas, tmp_path):
    settings = dict(noise=0.3, samples=1, layers=[1], positions=[1, 3])
    wide, narrow = (on_a_short_run(trace_trajectory, model, canvas=canvas, **settings) for model in doubled)
    assert wide.scores.dtype == torch.float64
    torch.testing.assert_close(wide.scores.float(), narrow.scores, rtol=1e-3, atol=0, equal_nan=True)
    torch.testing.assert_close(wide.clean.float(), narrow.clean, rtol=1e-3, atol=0)
    same(wide, wide, tmp_path)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_no_score_of_a_float64_model_is_rounded(doubled):
    model = doubled[0]
    clean, corrupted = (model.to_tokens(FACT.prompt) for _ in range(2))
    corrupted[0, 1] = 7
    metric = lambda logits: logits[0, -1, 5]  # noqa: E731
    for method in ("exact", "attribution"):
        grid = patch_grid(model, clean, corrupted, metric, "resid_pre", layers=[0], method=method)
        assert grid.clean.item() == metric(model(clean)).item()
        assert grid.corrupted.item() == metric(model(corrupted)).item()
        assert grid.scores.dtype == torch.float64
    grid = patch_grid(model, clean, corrupted, metric, "resid_pre", layers=[0], positions="all")
    assert grid.scores[0].item() == pytest.approx(metric(model(clean)).item(), abs=1e-13)
    fact_tokens = model.to_tokens(FACT.prompt)[0], model.to_tokens(" brave")[0]
    nll = chain_rule_nll(model, *fact_tokens)
    query = torch.cat([*fact_tokens[:1], torch.full((1,), model.cfg.mask_token_id or 0)])[None]
    row = len(fact_tokens[0]) - model.cfg.is_autoregressive
    by_hand = -model(query)[0, row].log_softmax(-1)[fact_tokens[1][0]]
    assert nll.dtype == torch.float64
    assert nll.item() == pytest.approx(by_hand.item(), abs=1e-12)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_other_analyses_of_a_float64_model(doubled):
    for settings in (dict(method="exact"), dict(method="attribution", check=3)):
        grids = []
        for model in doubled:
            clean, corrupted = (model.to_tokens(fact.prompt) for fact in FACTS[:2])
            n = min(clean.shape[1], corrupted.shape[1])
            metric = lambda logits: logits[0, -1, 5]  # noqa: E731
            inputs = clean[:, :n], corrupted[:, :n]
            grids.append(patch_grid(model, *inputs, metric, "mlp_out", layers=[1], positions=[0, 1], **settings).scores)
        torch.testing.assert_close(grids[0].float(), grids[1].float(), rtol=1e-3, atol=1e-3)
    settings = dict(noise=0.0, samples=1, layers=[0], positions=[1])
    wide, narrow = (on_a_short_run(temporal_effect, model, **settings) for model in doubled)
    torch.testing.assert_close(wide.scores.float(), narrow.scores, rtol=0, atol=0, equal_nan=True)
