"""The drift of states between steps and the cosines of layers equal those of cached states; blocks can be skipped."""

import re
from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from oracles.memory import peak_of_tensors
from torch.testing import assert_close

from diffusion_lens.analysis import LayerCosines, StateDrift, cache_drift, layer_cosines, state_drift
from diffusion_lens.analysis.engine import batching
from diffusion_lens.analysis.state_drift import STATES
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.samplers import ReMDM, threshold
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.hooks.names import resid_post, resid_pre
from diffusion_lens.interventions import skip_layers

PROMPTS = ["Gustav Geisser is the", "today Tilda Drusser was the brave"]
POINTS = (*STATES.values(), "hook_resid_pre", "hook_resid_mid", "hook_resid_post")


def run_and_cache(every, names=POINTS):
    cfg, tokens = every.model.cfg, every.tokens[:2, :6] % 400 + 3
    steps = (
        {"steps": 8 if cfg.time_conditioning or cfg.self_conditioning else None} if cfg.opens_blocks else {"steps": 5}
    )
    return every.model.denoise_with_cache(
        tokens,
        names_filter=lambda name: name.endswith(names),
        length=12,
        **({} if cfg.is_autoregressive else steps),
    )


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1, eps=0).float()


def states_of(every, cache, layer):
    """The states that are compared. What the MLP adds is the stream's difference, unless a factor follows."""
    states = {kind: cache[f"blocks.{layer}.{point}"].flatten(2) for kind, point in STATES.items()}
    if not hasattr(every.model.blocks[layer], "scale_open"):
        states["mlp"] = cache[resid_post(layer)] - cache[f"blocks.{layer}.hook_resid_mid"]
    return states


def test_drift_equals_that_of_cached_states(every):
    run, cache_of = run_and_cache(every)
    steps = sorted({0, run.n_steps // 2, run.n_steps - 1})
    ours = state_drift(every.model, run, steps=steps)
    assert ours.steps == tuple(steps)
    for i, (before, after) in enumerate(pairwise(steps)):
        both = (run.canvases[before] != -1) & (run.canvases[after] != -1) & run.real
        for layer in range(every.model.cfg.n_layers):
            states = [states_of(every, cache_of[step], layer) for step in (before, after)]
            for kind in STATES:
                was, now = (each[kind] for each in states)
                distance = (was - now).norm(dim=-1) / now.norm(dim=-1)
                assert_close(ours.cosines[kind][i, layer][both], cosine(was, now)[both], rtol=1e-4, atol=1e-4)
                assert_close(ours.distances[kind][i, layer][both], distance[both], rtol=1e-3, atol=1e-4)
                assert ours.cosines[kind][i, layer][~both].isnan().all()


def test_every_position_of_both_canvases_is_in_one_group(several):
    run, _ = run_and_cache(several, "hook_embed")
    drift = state_drift(several.model, run, layers=[0])
    before, after = run.canvases[:-2], run.canvases[1:-1]
    both = (before != -1) & (after != -1) & run.real
    groups = drift.groups
    assert torch.equal(sum(where.int() for where in groups.values()), both.int())
    assert torch.equal(groups["just written"], both & (before != after))
    if several.model.cfg.has_mask:
        assert torch.equal(groups["masked"], both & (after == several.model.cfg.blank))
    assert torch.equal(groups["prompt"], both & run.given & (before == after))
    per_group = torch.stack([drift.mean("keys", group).nan_to_num()[:, 0] * n for group, n in sizes(groups)])
    total = both.flatten(1).sum(dim=1)
    assert_close(per_group.sum(dim=0) / total, drift.mean("keys")[:, 0], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("every", ["dream"], indirect=True)
def test_positions_that_are_masked_again_are_not_just_written(every):
    run = every.model.denoise(every.tokens[:, :5], length=14, steps=12, sampler=ReMDM(eta=1.0))
    groups, masked = state_drift(every.model, run, layers=[0]).groups, run.canvases[:-1] == every.model.cfg.blank
    assert groups["masked again"].any()
    assert torch.equal(groups["masked again"], ~masked[:-1] & masked[1:])
    assert torch.equal(groups["just written"], masked[:-1] & ~masked[1:])
    assert torch.equal(sum(where.int() for where in groups.values()), torch.ones_like(masked[1:]).int())


def sizes(groups):
    return [(group, where.flatten(1).sum(dim=1)) for group, where in groups.items()]


def test_the_first_layer_changes_only_where_the_token_does(small):
    run = small.denoise(PROMPTS, max_new_tokens=4, **({"steps": 4} if small.cfg.has_mask else {}))
    drift = state_drift(small, run)
    for kind in ("keys", "values"):
        kept = drift.distances[kind][:, 0][~drift.groups["just written"]]
        assert kept[~kept.isnan()].max() < 1e-5
        if small.cfg.has_mask:
            assert (drift.distances[kind][:, 0][drift.groups["just written"]] > 0.01).all()
    if not small.cfg.has_mask:  # no position sees a later one
        assert all(values.nan_to_num().max() < 1e-5 for values in drift.distances.values())


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_cache_that_holds_one_step_has_the_drift_of_that_step(small):
    """A cache that the first step fills is held over the next: its drift is that of the positions that it holds."""
    run = small.denoise(PROMPTS[:1], max_new_tokens=6, sampler=threshold(0.99, None, 3, approximate_cache="dual"))
    held = cache_drift(small, run)
    with pytest.warns(UserWarning, match="approximate"):
        drift = state_drift(small, run)
    step = next(index for index, step in enumerate(held.steps) if step and float(held.keys[index, 1]) > 0)
    assert held.steps[step] == 1
    outside = drift.groups["prompt"][0] | (torch.arange(run.tokens.shape[1]) >= int(run.given.sum()) + 3)
    assert int(outside.sum()) == int(held.n_held[step])
    per_position = drift.distances["keys"][0, 0][outside]
    assert_close(per_position, torch.zeros_like(per_position), atol=1e-6, rtol=0)
    low, high = drift.distances["keys"][0, 1][outside].min(), drift.distances["keys"][0, 1][outside].max()
    assert low <= held.keys[step, 1] <= high


def test_layer_cosines_equal_those_of_cached_streams(several):
    run, cache_of = run_and_cache(several)
    ours = layer_cosines(several.model, run)
    for step in range(run.n_steps):
        present = (run.canvases[step] != -1) & run.real
        for layer in range(several.model.cfg.n_layers):
            expected = cosine(cache_of[step][resid_pre(layer)], cache_of[step][resid_post(layer)])
            assert_close(ours.cosine[step, layer][present], expected[present], rtol=1e-4, atol=1e-4)
            assert ours.cosine[step, layer][~present].isnan().all()
    if several.model.cfg.has_mask:
        masked = run.canvases[:-1] == several.model.cfg.blank
        own = [ours.cosine[0, layer][masked[0]].mean() for layer in range(several.model.cfg.n_layers)]
        if masked[0].any():
            assert_close(ours.mean("masked")[0], torch.stack(own))


@pytest.mark.parametrize("every", ["dream", "llama", "bd3lm", "llada2", "uniform", "lit_gpt-mdm"], indirect=True)
def test_a_skipped_block_leaves_the_stream_as_it_is(every):
    model, last = every.model, every.model.cfg.n_layers - 1
    hooks = skip_layers(model, [1, -1])
    steps = {"steps": 8} if model.cfg.time_conditioning else {}
    run = model.denoise(every.tokens[:, :6], length=12, fwd_hooks=hooks, **steps)
    assert run.record["hooks"]
    with model.hooks(fwd_hooks=hooks):
        cosines = layer_cosines(model, run)
        logits, cache = model.run_with_cache(every.tokens)
    for layer in (1, last):
        assert torch.equal(cache[resid_post(layer)], cache[resid_pre(layer)])
        assert_close(cosines.mean()[:, layer], torch.ones(run.n_steps), rtol=1e-5, atol=1e-5)
    if not model.cfg.time_conditioning:
        assert_close(model(cache[resid_pre(last)], start_at_layer=last + 1), logits)
    assert not model.is_hooked


@pytest.mark.parametrize("every", ["diffusion_gemma"], indirect=True)
def test_blocks_that_scale_the_stream_cannot_be_skipped(every):
    with pytest.raises(ValueError, match=r"scale the stream.*zero_ablate"):
        skip_layers(every.model, 0)


def test_recall_without_a_layer(tiny):
    facts, length = toy_facts.load().facts(trained="p2d", asked="p2d")[:4], toy_facts.SENTENCE_LENGTH
    whole = recall_by_steps(tiny, facts, (4,), length=length)
    with tiny.hooks(fwd_hooks=skip_layers(tiny, range(tiny.cfg.n_layers))):
        without = recall_by_steps(tiny, facts, (4,), length=length)
    (whole_share,), (share,) = (list(recall.table()[("p2d", "p2d")].values()) for recall in (whole, without))
    assert whole_share.mean == 1
    assert share.mean == 0


def test_results_are_read_back_and_drawn(small, tmp_path):
    run = small.denoise(PROMPTS, max_new_tokens=4, **({"steps": 4} if small.cfg.has_mask else {}))
    for kind, result in ((StateDrift, state_drift(small, run)), (LayerCosines, layer_cosines(small, run))):
        loaded = kind.load(result.save(tmp_path / "result.safetensors"))
        assert repr(loaded) == repr(result)
        assert loaded.to_dataframe().equals(result.to_dataframe())
        assert loaded.plot().has_data()
    once = layer_cosines(small, PROMPTS)
    assert once.steps is None
    assert once.plot().has_data()
    assert_close(once.mean(), layer_cosines(small, PROMPTS, layers=[0, 1]).mean())


def test_what_does_not_fit_is_refused(small):
    run = small.denoise(PROMPTS, max_new_tokens=3, **({"steps": 3} if small.cfg.has_mask else {}))
    for call, message in (
        (partial(state_drift, steps=[1]), r"steps=\[1\] has nothing to compare: give two steps or more"),
        (partial(state_drift, steps=[0, 7]), "steps="),
        (partial(state_drift, layers=[9]), "layers="),
        (partial(state_drift, max_bytes=100), "the drift takes"),
        (partial(layer_cosines, max_bytes=100), "the cosines take"),
    ):
        with pytest.raises(ValueError, match=message):
            call(small, run)
    drift = state_drift(small, run)
    for options, message in (({"what": "queries"}, "what='queries'"), ({"group": "all"}, "group='all'")):
        with pytest.raises(ValueError, match=message):
            drift.mean(**options)
    with pytest.raises(ValueError, match="layers="):
        skip_layers(small, 9)


def least_bytes(call):
    with pytest.raises(ValueError, match="max_bytes is 1:") as refused:
        call(max_bytes=1)
    return int(re.findall(r"takes? ([\d,]+)", str(refused.value))[0].replace(",", ""))


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
@pytest.mark.parametrize("analyse", [state_drift, layer_cosines])
def test_tensors_of_a_call_take_at_most_the_budget(small, analyse):
    call = partial(analyse, small, small.denoise(PROMPTS[0], max_new_tokens=4, steps=60))
    least = least_bytes(call)
    assert peak_of_tensors(partial(call, max_bytes=least)) <= least


@pytest.mark.parametrize("every", ["nemotron-prompt", "llada_moe-options", "bd3lm"], indirect=True)
@pytest.mark.parametrize("analyse", [partial(state_drift, steps=[0, 1]), layer_cosines])
def test_the_budget_contains_states_in_float64(every, analyse, monkeypatch):
    monkeypatch.setattr(batching, "RESERVE_ON_CPU", 1.0)
    half = deepcopy(every.model).to(torch.bfloat16)
    steps = {"steps": 8} if half.cfg.time_conditioning else {}
    run = half.denoise(every.tokens[:, :6] % 400 + 3, length=12, **steps)
    call = partial(analyse, half, run, layers=[-1])
    least = least_bytes(call)
    assert peak_of_tensors(partial(call, max_bytes=least)) <= least


@pytest.mark.parametrize("every", ["diffusion_gemma"], indirect=True)
def test_the_budget_contains_the_wider_keys_of_a_global_layer(every):
    run, cache_of = run_and_cache(every)
    needed = [least_bytes(partial(state_drift, every.model, run, layers=[layer])) for layer in (1, 2)]
    names = ("attn.hook_rot_k", "attn.hook_v")
    states = [sum(cache_of[0][f"blocks.{layer}.{name}"].nbytes for name in names) for layer in (1, 2)]
    assert states[0] < states[1]
    assert needed[1] - needed[0] >= states[1] - states[0]
