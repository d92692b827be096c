"""The attention that positions receive equals sums over cached patterns, and sinks follow the paper's inequality."""

import re
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from oracles.memory import peak_of_tensors
from torch.testing import assert_close

from diffusion_lens.analysis import AttentionSinks, SinkSpan, attention_sinks
from diffusion_lens.interventions import named

PROMPTS = ["Gustav Geisser is the", "today Tilda Drusser was the brave"]


def patterns(name):
    return name.endswith("hook_pattern")


def by_hand(pattern, tokens, real):
    """Column sums [head batch pos] over queries with a token, NaN where there is none, position by position."""
    batch, n_heads, n_pos, _ = pattern.shape
    received = torch.full((n_heads, batch, n_pos), torch.nan)
    for row in range(batch):
        inside = [i for i in range(n_pos) if real[row, i] and tokens[row, i] != -1]
        for key in inside:
            received[:, row, key] = sum(pattern[row, :, query, key] for query in inside)
    return received


def assert_equal_attention_is_right(sinks, size, real):
    for step in range(len(sinks.canvases)):
        for row in range(real.shape[0]):
            inside = (real[row] & (sinks.canvases[step, row] != -1)).nonzero().flatten().tolist()
            for order, position in enumerate(inside):
                block = size or len(inside)
                readers = range(order // block * block, len(inside))
                shares = [1 / min(len(inside), (i // block + 1) * block) for i in readers]
                assert sinks.even[step, row, position].item() == pytest.approx(sum(shares), rel=1e-5)
                assert sinks.n_queries[step, row, position] == len(readers)
            outside = [i for i in range(real.shape[1]) if i not in inside]
            assert sinks.n_queries[step, row, outside].sum() == 0


def test_attention_received_is_that_of_cached_patterns_at_every_step(several):
    model, tokens = several.model, several.tokens[:2, :6] % 400 + 3
    settings = {} if model.cfg.is_autoregressive else {"steps": 3}
    run, cache = model.denoise_with_cache(tokens, names_filter=patterns, max_new_tokens=3, **settings)
    sinks = attention_sinks(model, run)
    for step in range(3):
        for layer in range(model.cfg.n_layers):
            pattern = cache[step][f"blocks.{layer}.attn.hook_pattern"]
            expected = by_hand(pattern, run.canvases[step], run.real)
            assert_close(sinks.received[step, layer], expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    queries = sinks.present.sum(dim=-1)[:, None, None].expand(3, model.cfg.n_layers, model.cfg.n_heads, 2)
    assert_close(sinks.received.nansum(dim=-1), queries.float(), rtol=1e-4, atol=1e-4)
    assert_equal_attention_is_right(sinks, model.cfg.block_size, run.real)
    averaged = attention_sinks(model, run, heads="mean", layers=[-1], steps=[1])
    assert_close(averaged.received[0, 0, 0], sinks.received[1, -1].mean(dim=0), equal_nan=True)
    assert (averaged.layers, averaged.steps) == ((model.cfg.n_layers - 1,), (1,))


@pytest.mark.parametrize("context", [True, False])
def test_equal_attention_is_that_of_the_open_block_of_each_step(configs, specimen, context):
    model = specimen({**configs["nemotron-block"], "causal_context": context}).model
    run, cache = model.denoise_with_cache(torch.arange(10).reshape(2, 5), names_filter=patterns, max_new_tokens=8)
    sinks = attention_sinks(model, run)
    for step in range(len(sinks.canvases)):
        real = run.canvases[step] != -1
        seen = cache[step]["blocks.0.attn.hook_pattern"][:, 0].gt(0) & real[:, :, None] & real[:, None, :]
        shares = seen / seen.sum(dim=2, keepdim=True).clamp(min=1)
        assert_close(sinks.even[step], shares.sum(dim=1))
        assert_close(sinks.n_queries[step], seen.sum(dim=1), check_dtype=False)


@pytest.mark.parametrize(("small", "guidance"), [("mdm", 0.0), ("mdm", 0.8), ("ar", 0.0)], indirect=["small"])
def test_padding_guidance_and_the_callers_hooks(small, guidance):
    settings = {"steps": 4, "cfg_scale": guidance} if small.cfg.has_mask else {}
    sharpen = named("sharper at every step", lambda scores, hook: scores * (1 + hook.step.index))
    with small.hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", sharpen)]):
        run, cache = small.denoise_with_cache(PROMPTS, names_filter=patterns, max_new_tokens=4, **settings)
        sinks = attention_sinks(small, run)
    assert not run.real.all()
    for step in range(4):
        pattern = cache[step]["blocks.1.attn.hook_pattern"]
        expected = by_hand(pattern, run.canvases[step], run.real)
        assert_close(sinks.received[step, 1], expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert_equal_attention_is_right(sinks, small.cfg.block_size, run.real)
    assert sinks.record["hooks"] == {"blocks.0.attn.hook_attn_scores": ["forward: sharper at every step"]}
    assert torch.equal(sinks.given, run.given)
    if small.cfg.has_mask:
        assert torch.equal(sinks.masked, run.is_masked(run.canvases[:-1]) & run.real)
    else:
        assert not sinks.masked.any()


def test_folded_norms_and_half_precision_change_no_attention(small):
    run = small.denoise(PROMPTS, max_new_tokens=4, **({"steps": 4} if small.cfg.has_mask else {}))
    sinks, folded, half = attention_sinks(small, run), deepcopy(small), deepcopy(small).to(torch.bfloat16)
    folded.enable_compatibility_mode()
    with pytest.warns(UserWarning, match="written by another network"):
        of_folded = attention_sinks(folded, run)
    assert_close(of_folded.received, sinks.received, rtol=1e-3, atol=1e-4, equal_nan=True)
    with pytest.warns(UserWarning, match="written by another network"):
        of_half = attention_sinks(half, run)
    queries = of_half.present.sum(dim=-1)[:, None, None].expand(of_half.received.shape[:-1])
    assert_close(of_half.received.nansum(dim=-1), queries.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_a_single_pass_has_no_steps(small):
    tokens, real = small.tokenize(PROMPTS)
    _, cache = small.run_with_cache(PROMPTS, names_filter=patterns)
    for inputs in (PROMPTS, PROMPTS[1]):
        sinks = attention_sinks(small, inputs)
        rows = slice(None) if inputs is PROMPTS else slice(1, 2)
        expected = by_hand(cache["blocks.0.attn.hook_pattern"][rows], tokens[rows], real[rows])
        assert_close(sinks.received[0], expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert sinks.steps is None
        assert sinks.plot().images
    for name in ("persistence", "overlap"):
        with pytest.raises(ValueError, match="a single pass has no steps"):
            getattr(sinks, name)
    query = torch.tensor([5, 6, 7])
    assert attention_sinks(small, query).received.shape == (2, 4, 1, 3)


def test_a_sink_exceeds_the_mean_of_all_others_by_the_threshold(small):
    run = small.denoise(PROMPTS, max_new_tokens=4, **({"steps": 4} if small.cfg.has_mask else {}))
    sinks = attention_sinks(small, run, threshold=0.3)
    assert sinks.is_sink.any()
    assert not sinks.is_sink.all()
    n_steps, n_layers, n_heads, batch, n_pos = sinks.received.shape
    for step in range(n_steps):
        for row in range(batch):
            inside = sinks.present[step, row].nonzero().flatten().tolist()
            beyond = sinks.received[step, :, :, row] - sinks.even[step, row]
            for j in range(n_pos):
                others = [k for k in inside if k != j]
                expected = torch.zeros(n_layers, n_heads, dtype=torch.bool)
                if j in inside and others:
                    expected = beyond[..., j] > beyond[..., others].mean(dim=-1) + 0.3
                assert torch.equal(sinks.is_sink[step, :, :, row, j], expected)
    assert replace(sinks, threshold=100.0).is_sink.sum() == 0


def by_positions(sink_at):
    """One layer, one head and one row of four positions: each step's sinks receive all attention in equal parts."""
    received = torch.tensor([[0.0 if i not in at else 4 / len(at) for i in range(4)] for at in sink_at])
    n_steps = len(sink_at)
    shape, no = (n_steps, 1, 4), torch.zeros(n_steps, 1, 4, dtype=torch.bool)
    masked, special = no.clone(), no.clone()
    masked[:2, :, 3], special[..., 0] = True, True
    return AttentionSinks(
        received=received[:, None, None, None],
        even=torch.ones(shape),
        n_queries=torch.full(shape, 4),
        canvases=torch.tensor([7, 8, 9, 10]).expand(shape),
        masked=masked,
        special=special,
        given=torch.tensor([[True, True, False, False]]),
        final=torch.tensor([[7, 8, 9, 10]]),
        threshold=1.0,
        words={7: "a", 8: "b", 9: "c", 10: "d"},
        record={"steps": list(range(2, 2 + n_steps)), "n_steps": 9, "layers": [5], "heads": "each"},
    )


def test_persistence_overlap_and_lifetimes_by_hand():
    sinks = by_positions([{0}, {0, 3}, {3}, {0}])
    assert sinks.is_sink[:, 0, 0, 0].int().tolist() == [[1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 1], [1, 0, 0, 0]]
    assert sinks.persistence.flatten().tolist() == [0.75, 0, 0, 0.5]
    assert sinks.overlap.flatten().tolist() == [0.5, 0.5, 0]
    assert sinks.spans() == [
        SinkSpan(5, 0, 0, 0, first_step=2, n_steps=2),
        SinkSpan(5, 0, 0, 3, first_step=3, n_steps=2),
        SinkSpan(5, 0, 0, 0, first_step=5, n_steps=1),
    ]
    assert sinks.kinds() == {
        "masked": (1 / 5, 2 / 16),
        "special": (3 / 5, 4 / 16),
        "prompt": (0.0, 4 / 16),
        "written": (1 / 5, 6 / 16),
    }
    assert sinks.tokens() == [("a", 0.6), ("d", 0.4)]
    assert sinks.tokens(1) == [("a", 0.6)]
    none = replace(sinks, threshold=9.0)
    assert none.overlap.isnan().all()
    assert none.kinds()["prompt"][0] != none.kinds()["prompt"][0]
    with pytest.raises(ValueError, match="lifetimes need consecutive steps"):
        replace(sinks, record={**sinks.record, "steps": [0, 2, 3, 4]}).spans()


def test_saved_sinks_are_read_back(small, tmp_path):
    run = small.denoise(PROMPTS, max_new_tokens=4, **({"steps": 4} if small.cfg.has_mask else {}))
    sinks = attention_sinks(small, run, threshold=1.0)
    loaded = AttentionSinks.load(sinks.save(tmp_path / "sinks.safetensors"))
    assert torch.equal(loaded.is_sink, sinks.is_sink)
    assert torch.equal(loaded.final, run.tokens)
    assert (loaded.record, loaded.words, loaded.threshold) == (sinks.record, sinks.words, sinks.threshold)
    assert repr(loaded) == repr(sinks)
    axes = loaded.plot(layer=0, row=1)
    assert axes.images[0].get_array().shape == (run.tokens.shape[1], 4)


def test_what_does_not_fit_is_refused(small):
    run = small.denoise(PROMPTS, max_new_tokens=2, **({"steps": 2} if small.cfg.has_mask else {}))
    for inputs, settings, message in (
        (run, {"heads": "all"}, "heads='all' is unknown; it must be one of each, mean"),
        (run, {"threshold": -1}, "threshold=-1"),
        (run, {"layers": [7]}, "layers="),
        (run, {"steps": [5]}, r"steps=\[5\]; give numbers from 0 to 1"),
        (PROMPTS, {"steps": [0]}, "steps= requires a trajectory"),
        (run, {"max_bytes": 100}, "the attention received takes"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_sinks(small, inputs, **settings)
    with pytest.raises(ValueError, match="is not part of a trajectory that begins at step 1"):
        attention_sinks(small, run.from_step(1), steps=[0])


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
@pytest.mark.parametrize("heads", ["each", "mean"])
def test_tensors_of_a_call_take_at_most_the_budget(small, heads):
    run = small.denoise(PROMPTS[0], max_new_tokens=4, steps=200)
    sinks = partial(attention_sinks, small, run, heads=heads)
    with pytest.raises(ValueError, match="the attention received takes") as refused:
        sinks(max_bytes=1)
    least = int(re.findall(r"takes ([\d,]+)", str(refused.value))[0].replace(",", ""))
    assert 0.6 * least < peak_of_tensors(partial(sinks, max_bytes=least)) <= least
