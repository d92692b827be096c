"""Retrieval heads, norms and angles of queries and keys, and the rollout equal slow versions and the authors' code."""

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from oracles.memory import peak_of_tensors
from safetensors.torch import load_file
from torch.testing import assert_close

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import (
    AttentionRollout,
    QKDecomposition,
    RetrievalHeads,
    attention_rollout,
    attention_sinks,
    qk_decomposition,
    retrieval_heads,
)
from diffusion_lens.analysis.engine.inputs import ForwardPass
from diffusion_lens.denoising.samplers import llada

GOLDEN = Path(__file__).parents[2] / "golden"
PROMPTS = ["Gustav Geisser is the", "today Tilda Drusser was the brave"]
REGIONS = {"BOS": [0], "Query": range(1, 4), "Doc1": range(4, 8), "Doc2": range(8, 12), "Answer": range(12, 20)}
POINTS = ("hook_pattern", "hook_rot_q", "hook_rot_k", "hook_attn_scores")


@cache
def authors():
    """The authors' numbers, our model with their weights, and our run of their prompt."""
    theirs = load_file(GOLDEN / "attention_floating" / "llada.safetensors")
    model = HookedDiffusionTransformer.from_pretrained(GOLDEN / "llada" / "mha", device="cpu")
    run = model.denoise(theirs["prompt"], max_new_tokens=8, steps=8, sampler=llada())
    assert torch.equal(run.canvases[:-1, 0], theirs["canvases"])
    assert torch.equal(run.tokens, theirs["tokens"])
    return theirs, model, run


def test_norms_and_angles_of_the_authors():
    theirs, model, run = authors()
    ours = qk_decomposition(model, run)
    root = model.cfg.d_head**0.5
    for mine, key, factor in ((ours.scores, "qk", root), (ours.cosines, "cos", 1), (ours.norms, "norm_product", root)):
        assert_close(mine[:, :, :, 0] * factor, theirs[f"qk/{key}"], rtol=1e-5, atol=1e-5)
    for epsilon in (3.0, 1.5):
        floating = replace(ours, epsilon=epsilon).floating[:, :, :, 0]
        assert torch.equal(floating, theirs[f"qk/floating_{epsilon}"])


def test_the_rollout_of_the_authors():
    theirs, model, run = authors()
    of_regions = attention_rollout(model, run, regions=REGIONS, layers=None)
    assert_close(of_regions.rollout[:, :, 0], theirs["rollout/regions"], rtol=1e-5, atol=1e-5)
    of_positions = attention_rollout(model, run, steps=[0, 3, 7], layers=None)
    assert_close(of_positions.rollout[:, :, 0], theirs["rollout/positions"], rtol=1e-5, atol=1e-5)
    final = attention_rollout(model, run.tokens, regions=REGIONS, layers=None)
    assert_close(final.rollout[:, 0], theirs["rollout/final_canvas"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "source"), [("prompt", None), ("needle_0_6", range(6)), ("needle_6_12", range(6, 12))]
)
def test_retrieval_scores_of_the_authors(name, source):
    theirs, model, run = authors()
    heads = retrieval_heads(model, run, source=source)
    assert_close(heads.needle_score[..., 0], theirs[f"retrieval/{name}"])


def test_sinks_and_absorption_of_the_authors():
    theirs, model, run = authors()
    sinks = attention_sinks(model, run)
    assert_close(sinks.incoming[:, :, :, 0], theirs["sinks/incoming"], rtol=1e-5, atol=1e-5)
    for epsilon in (3.0, 1.0):
        assert torch.equal(replace(sinks, threshold=epsilon).is_sink[:, :, :, 0], theirs[f"sinks/{epsilon}"])
    received = attention_sinks(model, run.tokens, heads="mean").received[:, 0, 0]
    assert_close(100 * received.amax(dim=1) / received.sum(dim=1), theirs["absorption"], rtol=0, atol=1e-3)


def run_and_cache(every, names=POINTS):
    cfg = every.model.cfg
    steps = {} if cfg.opens_blocks or cfg.is_autoregressive else {"steps": 3}
    if cfg.opens_blocks and (cfg.time_conditioning or cfg.self_conditioning):
        steps = {"steps": 8}
    prompt = every.tokens[:2, :6] % 400 + 3
    return every.model.denoise_with_cache(prompt, names_filter=lambda name: name.endswith(names), length=12, **steps)


def present_of(run, step):
    return (run.canvases[step] != -1) & run.real


def test_each_mean_over_queries_equals_a_loop(every):
    run, cache_of = run_and_cache(every)
    steps = sorted({0, run.n_steps // 2, run.n_steps - 1})
    ours = qk_decomposition(every.model, run, steps=steps)
    for i, step in enumerate(steps):
        present = present_of(run, step)
        for layer in range(every.model.cfg.n_layers):
            q, k, scores, pattern = (
                cache_of[step][f"blocks.{layer}.attn.{name}"].double()
                for name in ("hook_rot_q", "hook_rot_k", "hook_attn_scores", "hook_pattern")
            )
            divisor, group = every.model.blocks[layer].attn.divisor, q.shape[2] // k.shape[2]
            for row, head in ((0, 0), (1, q.shape[2] - 1)):
                inside = present[row].nonzero().flatten().tolist()
                seen = {j: [i for i in inside if scores[row, head, i, j] > -torch.inf] for j in inside}
                shares = {i: 1 / sum(i in seen[j] for j in inside) for i in inside}
                for key in inside:
                    own, queries = k[row, key, head // group], q[row, seen[key], head]
                    products = torch.stack([query @ own for query in queries])
                    lengths = torch.stack([query.norm() * own.norm() for query in queries])
                    expected = {
                        "scores": products.mean() / divisor,
                        "cosines": (products / lengths).mean(),
                        "norms": lengths.mean() / divisor,
                        "excess": pattern[row, head, seen[key], key].sum() - sum(shares[i] for i in seen[key]),
                    }
                    for name, value in expected.items():
                        mine = getattr(ours, name)[i, layer, head, row, key]
                        assert_close(mine, value.float(), rtol=1e-3, atol=1e-4)
                outside = (~present[row]).nonzero().flatten()
                assert ours.scores[i, layer, head, row, outside].isnan().all()


def test_the_rollout_equals_a_product_of_cached_patterns(several):
    run, cache_of = run_and_cache(several, "hook_pattern")
    n_layers = several.model.cfg.n_layers
    halves = {"first": range(4), "second": range(5, 12)}
    ours, pooled = (attention_rollout(several.model, run, layers=None, regions=r) for r in (None, halves))
    for step in range(run.n_steps):
        present = present_of(run, step)
        for row in range(len(run)):
            inside = present[row].nonzero().flatten()
            product, mixed = torch.eye(len(inside), dtype=torch.double), torch.eye(2, dtype=torch.double)
            for layer in range(n_layers):
                mean = cache_of[step][f"blocks.{layer}.attn.hook_pattern"][row].double().mean(dim=0)
                product = 0.5 * mean[inside][:, inside] @ product + 0.5 * product
                found = ours.rollout[step, layer, row][inside][:, inside]
                assert_close(found, product.float(), rtol=1e-3, atol=1e-5)
                places = [[j for j in span if present[row, j]] for span in halves.values()]
                if all(places):
                    sums = torch.stack([torch.stack([mean[a][:, b].sum() for b in places]) for a in places])
                    mixed = 0.5 * (sums / sums.sum(dim=1, keepdim=True)).nan_to_num(0) @ mixed + 0.5 * mixed
                    mixed = mixed / mixed.sum(dim=1, keepdim=True)
                    assert_close(pooled.rollout[step, layer, row], mixed.float(), rtol=1e-3, atol=1e-5)
            assert_close(product.sum(dim=1), torch.ones(len(inside), dtype=torch.double))


def test_retrieval_equals_a_loop_over_written_tokens(several):
    run, cache_of = run_and_cache(several, "hook_pattern")
    run = replace(run, tokens=run.tokens[:, :6].repeat(1, 2))  # as if it had written its prompt again
    heads = retrieval_heads(several.model, run)
    n_seen = 0
    for row in range(len(run)):
        for pos in range(run.tokens.shape[1]):
            step, token = int(run.revealed_at[row, pos]), run.tokens[row, pos]
            places = [j for j in range(6) if step >= 0 and run.tokens[row, j] == token]
            assert heads.n_places[row, pos] == len(places)
            if not places:
                assert not heads.retrieved[..., row, pos].any()
                assert heads.attention[..., row, pos].isnan().all()
                continue
            n_seen += 1
            state = run.state_at(step)
            query = int(several.model.readout.rows(torch.tensor(pos)))
            if state.block is not None:
                query = int(state.block.rows(torch.tensor([query]), torch.tensor([pos]), torch.tensor([row]))[0])
            for layer in range(several.model.cfg.n_layers):
                for head in range(several.model.cfg.n_heads):
                    attention = cache_of[step][f"blocks.{layer}.attn.hook_pattern"][row, head, query]
                    assert heads.retrieved[layer, head, row, pos] == (int(attention.argmax()) in places)
                    expected = sum(attention[j] for j in places)
                    assert_close(heads.attention[layer, head, row, pos], expected, rtol=1e-3, atol=1e-5)
    assert n_seen == int(heads.retrievable.sum()) > 0
    # From everywhere: from written tokens too, but not from the position itself.
    heads = retrieval_heads(several.model, run, source=torch.ones_like(run.given))
    for row, pos in (run.revealed_at >= 0).nonzero().tolist():
        canvas = run.canvases[run.revealed_at[row, pos], row]
        assert heads.n_places[row, pos] == sum(canvas[j] == run.tokens[row, pos] for j in range(12) if j != pos)
    assert_close(heads.score, heads.retrieved.sum(dim=(2, 3)) / n_seen)


@pytest.mark.filterwarnings("ignore:the trajectory was written by another network")
def test_a_head_that_copies_has_a_score_of_one(small):
    """Where a hook sends all attention to the copy, the head retrieves every token, and steps add up."""
    settings = {"steps": 4} if small.cfg.has_mask else {}
    run = small.denoise(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=4, **settings)
    run = replace(run, tokens=run.tokens[:, :4].repeat(1, 2))  # as if it had written its prompt again

    def copy(pattern, hook):
        canvas, sent = hook.step.tokens[0], pattern.clone()
        sent[:, 2] = 0
        for query in range(pattern.shape[2]):
            written = query if small.cfg.readout == "in_place" else query + 1
            token = run.tokens[0, written] if written < run.tokens.shape[1] else -2
            places = [j for j in range(4) if canvas[j] == token]
            sent[:, 2, query, places[-1] if places else 0] = 1
        return sent

    with small.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", copy)]):
        heads = retrieval_heads(small, run)
    assert heads.score[1, 2] == 1
    assert heads.top(1) == [(1, 2, 1.0)]
    with pytest.raises(ValueError, match="most=0; it must be at least 1"):
        heads.top(0)
    n_of_steps = torch.stack([(heads.retrievable & (heads.revealed_at == step)).sum() for step in heads.steps])
    summed = (heads.by_step.nan_to_num() * n_of_steps[:, None, None]).sum(dim=0)
    assert_close(summed, heads.retrieved.sum(dim=(2, 3)).float())
    assert len(heads.to_dataframe()) == heads.retrieved[..., 0, 0].numel() * int(heads.retrievable.sum())


@pytest.mark.filterwarnings("ignore:the trajectory was written by another network")
def test_attention_to_itself_leaves_states_unmixed(small):
    run = small.denoise(PROMPTS, max_new_tokens=3, **({"steps": 3} if small.cfg.has_mask else {}))
    diagonal = [(lambda name: name.endswith("hook_pattern"), lambda p, hook: torch.eye(p.shape[-1]).expand_as(p))]
    with small.hooks(fwd_hooks=diagonal):
        rollout = attention_rollout(small, run, steps=[-1]).rollout[0, 0]
    for row, mixture in enumerate(rollout):
        inside = present_of(run, run.n_steps - 1)[row]
        assert torch.equal(mixture[inside][:, inside], torch.eye(int(inside.sum())))
        assert mixture[~inside].isnan().all()


def test_floating_positions_and_their_advantage_by_hand(small):
    ours = qk_decomposition(small, torch.tensor([[3, 4, 5, 6, 7]]))
    shape, excess = ours.scores.shape, torch.tensor([4.0, -1, -1, -1, -1])
    made = replace(
        ours,
        excess=excess.expand(shape),
        scores=torch.tensor([2.0, 0, 0, 0, 0]).expand(shape),
        cosines=torch.tensor([0.0, 1, 1, 1, 1]).expand(shape),
        norms=torch.ones(shape),
        epsilon=1.0,
    )
    assert made.floating[0, 0, 0].tolist() == [True, False, False, False, False]
    assert torch.equal(replace(made, epsilon=9.0).floating, made.floating)  # none is above, so the largest
    assert_close(made.advantage["scores"][0, 0, 0], torch.tensor(2.5))
    assert_close(made.advantage["cosines"][0, 0, 0], torch.tensor(-2.5))
    assert made.advantage["norms"].isnan().all()


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_steps_that_write_nothing_take_no_pass(small, monkeypatch):
    run, n_passes, run_pass = small.denoise(PROMPTS[:1], max_new_tokens=3, steps=40), [0], ForwardPass.run

    def counted(self, *args):
        n_passes[0] += 1
        return run_pass(self, *args)

    monkeypatch.setattr(ForwardPass, "run", counted)
    run = replace(run, tokens=run.tokens[:, :4].repeat(1, 2)[:, : run.tokens.shape[1]])
    heads = retrieval_heads(small, run)
    assert heads.steps == tuple(sorted(set(run.revealed_at[run.revealed_at >= 0].tolist())))
    assert n_passes[0] == len(heads.steps) == len(heads.by_step) <= 3


@pytest.mark.parametrize("every", ["lit_gpt-mdm", "lit_gpt-ar", "dream", "llada2", "bd3lm"], indirect=True)
@pytest.mark.filterwarnings("ignore:the trajectory was written by another network")
def test_a_token_that_a_hook_writes_is_not_retrieved(every):
    """All tokens repeat the prompt's; the first one that step 1 could write is there before."""

    def write(tokens, hook):
        first = hook.step.masked & (hook.step.masked.cumsum(dim=1) == 1)
        return torch.where(first, tokens[:, :1], tokens) if hook.step.index == 1 else tokens

    def repeat(tokens, hook):
        return torch.where(hook.step.masked, hook.step.tokens[:, :1], tokens)

    hooks = [("denoise.hook_tokens", write), ("denoise.hook_candidates", repeat)]
    run = every.model.denoise(every.tokens[:1, :6], length=12, fwd_hooks=hooks)
    by_hook = (run.revealed_at == 1) & (run.canvases[1] == run.tokens)
    assert by_hook.any()
    assert torch.equal(retrieval_heads(every.model, run).retrievable, (run.revealed_at >= 0) & ~by_hook)


def test_plots_take_layers_and_steps_that_were_read(small):
    run = small.denoise(PROMPTS, max_new_tokens=3, **({"steps": 3} if small.cfg.has_mask else {}))
    rollout, sinks = (analyse(small, run, steps=[1, 2], layers=[1]) for analyse in (attention_rollout, attention_sinks))
    assert rollout.plot(layer=1, step=2).get_title() == rollout.plot().get_title()
    assert rollout.plot(layer=1, step=1).get_title() == rollout.plot(layer=-1, step=-2).get_title()
    assert sinks.plot(layer=1).get_title() == sinks.plot().get_title()
    for result, options, message in (
        (rollout, {"layer": 0}, r"layer=0 was not read; give one of \[1\], or negative ones"),
        (rollout, {"step": 0}, r"step=0 was not read; give one of \[1, 2\]"),
        (rollout, {"step": -3}, "step=-3 was not read"),
        (sinks, {"layer": 0}, "layer=0 was not read"),
    ):
        with pytest.raises(ValueError, match=message):
            result.plot(**options)


def test_rounding_noise_is_no_advantage(small):
    """The norms of one token at all positions are equal in the first layer, whose cosines depend on the distance."""
    advantage = qk_decomposition(small, torch.full((1, 12), 7)).advantage
    assert advantage["norms"][0].isnan().all()
    assert advantage["cosines"][0].isfinite().all()


@pytest.mark.parametrize("analyse", [qk_decomposition, attention_rollout, retrieval_heads])
def test_results_are_read_back_and_drawn(small, analyse, tmp_path):
    run = small.denoise(PROMPTS, max_new_tokens=4, **({"steps": 4} if small.cfg.has_mask else {}))
    options = {"source": torch.ones_like(run.given)} if analyse is retrieval_heads else {}
    result = analyse(small, run, **options)
    assert type(result) in (QKDecomposition, AttentionRollout, RetrievalHeads)
    loaded = type(result).load(result.save(tmp_path / "result.safetensors"))
    assert repr(loaded) == repr(result)
    assert loaded.to_dataframe().equals(result.to_dataframe())
    assert loaded.plot().has_data()


def test_what_does_not_fit_is_refused(small):
    run = small.denoise(PROMPTS, max_new_tokens=3, **({"steps": 3} if small.cfg.has_mask else {}))
    mask = torch.ones(1, 3, dtype=torch.bool)
    for analyse, options, message in (
        (qk_decomposition, {"epsilon": -1.0}, "epsilon=-1.0"),
        (qk_decomposition, {"layers": [9]}, "layers="),
        (qk_decomposition, {"max_bytes": 100}, "the decomposition takes"),
        (attention_rollout, {"steps": [9]}, "steps="),
        (attention_rollout, {"regions": {}}, "regions is empty"),
        (attention_rollout, {"regions": {"a": mask}}, r"regions\['a'\] is Bool\[1, 3\]; the canvases are"),
        (attention_rollout, {"regions": {"a": [0, 1], "b": [1]}}, "position 1 of row 0 is in two regions"),
        (attention_rollout, {"max_bytes": 100}, "the rollout takes"),
        (retrieval_heads, {"source": [99]}, "source="),
        (attention_rollout, {"regions": {"a": ~run.real & run.real}}, r"regions\['a'\] is false everywhere"),
        (retrieval_heads, {"source": torch.zeros_like(run.given)}, "source is false everywhere"),
        (retrieval_heads, {"source": [0]}, "no token that the run wrote occurs in the source"),
        (retrieval_heads, {"max_bytes": 100}, "the retrieval heads take"),
    ):
        with pytest.raises(ValueError, match=message):
            analyse(small, run, **options)
    with pytest.raises(ValueError, match="the run wrote no token in the steps"):
        retrieval_heads(small, replace(run, revealed_at=torch.full_like(run.revealed_at, -1)))


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
@pytest.mark.parametrize(
    ("analyse", "name"), [(qk_decomposition, "decomposition takes"), (attention_rollout, "rollout takes")]
)
def test_tensors_of_a_call_take_at_most_the_budget(small, analyse, name):
    call = partial(analyse, small, small.denoise(PROMPTS[0], max_new_tokens=4, steps=200))
    with pytest.raises(ValueError, match=name) as refused:
        call(max_bytes=1)
    least = int(re.findall(r"takes? ([\d,]+)", str(refused.value))[0].replace(",", ""))
    assert peak_of_tensors(partial(call, max_bytes=least)) <= least
