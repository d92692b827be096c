"""A model whose weights have several places computes what it computes on one device, to the bit."""

import weakref
from dataclasses import replace

import pytest
import torch
from oracles.pretended_devices import PretendedDevices
from torch.nn import functional as F

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import (
    RankOneEdit,
    answer_probability,
    attention_rollout,
    attention_sinks,
    causal_trace,
    compute_key,
    edge_attribution,
    evidence,
    faithfulness,
    gradient_alignment,
    layer_cosines,
    logit_lens,
    optimize_value,
    patch_grid,
    qk_decomposition,
    retrieval_heads,
    state_drift,
    trace_trajectory,
)
from diffusion_lens.data import toy_facts
from diffusion_lens.hooked_diffusion_transformer import load_source
from diffusion_lens.loading.source import Source
from diffusion_lens.model import build, layers
from diffusion_lens.records.identity import identity_of

FACTS = toy_facts.load()
FACT = FACTS.facts(trained="p2d", asked="p2d")[0]
ON_DISK = {"embed": "cpu", "blocks.0": "cpu", "": "disk"}
OFFLOADED = {"blocks.0": 0, "embed.weight": 0, "": "cpu"}
TWO_GPUS = {"embed": 0, "blocks.0": 0, "blocks.1": 1, "ln_final": "cpu", "": 1}
plain = F.linear


def placed(model, device_map):
    """A copy of a model whose weights have other places."""
    tensors = [(name, weight.detach().clone()) for name, weight in model.named_parameters()]
    return HookedDiffusionTransformer(model.cfg, model.tokenizer, tensors=tensors, device_map=device_map)


def traces(model, query):
    yield causal_trace(model, query, noise=0.5, samples=2).scores
    yield causal_trace(model, query, severed="attn", noise=0.5, samples=2).scores
    yield causal_trace(model, query, kind="mlp", window=2, noise=0.5, samples=2).scores
    yield trace_trajectory(model, query, steps=[0], noise=0.5, samples=1).scores


def patched(model, query):
    corrupted = query.tokens.clone()
    corrupted[2] = corrupted[1]
    metric = answer_probability(model, query)
    for method in ("exact", "attribution"):
        yield from (grid.scores for grid in patch_grid(model, query, corrupted, metric, ["z"], method=method).values())
    scores = edge_attribution(model, query, corrupted, metric, ig_steps=1)
    yield scores.scores
    yield faithfulness(model, query, corrupted, metric, scores, [20]).scores


def edited(model, query):
    key, value = compute_key(model, query, 1), optimize_value(model, query, 1, steps=2)
    with RankOneEdit(model, 1, key, value):
        yield model(query.tokens[None])
    yield model(query.tokens[None])


def read(model, query):
    tokens = query.tokens[None]
    yield (
        model.denoise(tokens, steps=2).tokens if model.cfg.has_mask else model.denoise(tokens, max_new_tokens=2).tokens
    )
    yield logit_lens(model, tokens).kl
    yield attention_sinks(model, tokens).received
    yield qk_decomposition(model, tokens).excess
    yield attention_rollout(model, tokens, regions={"first": [0, 1], "second": [2, 3]}).rollout
    yield layer_cosines(model, tokens).cosine
    run = model.denoise(tokens[:, :2], max_new_tokens=2, **({"steps": 2} if model.cfg.has_mask else {}))
    run = replace(run, tokens=run.tokens[:, :2].repeat(1, 2))
    yield retrieval_heads(model, run).attention.nan_to_num()
    yield state_drift(model, run).distances["mlp"].nan_to_num()
    yield model.all_composition_scores("K").scores
    yield model.accumulated_bias(1, mlp_input=True)
    pairs = FACTS.taught_pairs(model)[:3]
    yield evidence(model, pairs)
    yield gradient_alignment(model, pairs).cosines


ANALYSES = {"traces": traces, "patched": patched, "edited": edited, "read": read}


@pytest.mark.parametrize(
    ("small", "analysis"), list(zip(["ar", "mdm", "mdm", "ar"], ANALYSES, strict=True)), indirect=["small"]
)
def test_analyses_of_an_offloaded_model_have_the_same_bits(small, analysis):
    query, compute = FACT.to_query(small), ANALYSES[analysis]
    expected = list(compute(small, query))
    same = list(compute(placed(small, ON_DISK), query))
    with PretendedDevices() as devices:
        places = pytest.MonkeyPatch()
        places.setattr(build, "as_device", torch.device)
        one_gpu = list(compute(placed(small, OFFLOADED), query))
        two_gpus = list(compute(placed(small, TWO_GPUS), query))
        places.undo()
    assert {str(device) for device in devices.used} >= {"cuda:0", "cuda:1"}
    for ours, *offloaded, theirs in zip(same, one_gpu, two_gpus, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        for each in offloaded:  # a copy may have other strides, by which sums round
            torch.testing.assert_close(each, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_every_kind_of_network_runs_on_two_gpus_and_the_cpu(several, monkeypatch):
    model, tokens, seen = several.model, several.tokens[:, :6], {}
    flags = dict(use_attn_result=True, use_split_qkv_input=True)
    expected, last = model(tokens), f"blocks.{model.cfg.n_layers - 1}"
    with model.optional_hooks(**flags):
        expected_in_parts = model(tokens, logits_at=[1])
    monkeypatch.setattr(build, "as_device", torch.device)
    with PretendedDevices():
        several_places = placed(model, {"embed": 0, last: 1, f"{last}.mlp": "cpu", "": "cpu", "unembed": 1})
        several_places.clock.time = model.clock.time
        hooks = [(lambda name: name.endswith("hook_resid_post"), lambda x, hook: seen.update({hook.name: x.device}))]
        ours = several_places.run_with_hooks(tokens, fwd_hooks=hooks)
        assert seen["blocks.0.hook_resid_post"] == ours.device == torch.device("cuda:0")
        assert seen[f"{last}.hook_resid_post"] == torch.device("cuda:1")
        with several_places.optional_hooks(**flags):
            in_parts = several_places(tokens, logits_at=[1])
    assert torch.equal(ours, expected)
    assert torch.equal(in_parts, expected_in_parts)


def test_the_backward_pass_copies_a_weight_again(monkeypatch):
    x, weight, bias = torch.randn(3, 4, 8), torch.randn(16, 8), torch.randn(16)
    grads, copies = [], []
    for is_elsewhere, linear in enumerate((layers.linear, layers.linear_with_copy)):
        monkeypatch.setattr(F, "linear", lambda *args: copies.append(weakref.ref(args[1])) or plain(*args))
        leaf, matrix = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = linear(leaf, matrix, bias)
        grads.append([out, *torch.autograd.grad(out.pow(2).sum(), [leaf, matrix], retain_graph=True)])
        assert (copies[-1]() is None) == is_elsewhere
    assert all(map(torch.equal, *grads))
    with torch.no_grad():
        matrix.mul_(2)
    with pytest.raises(RuntimeError, match="changed between the forward pass and the backward pass"):
        out.sum().backward()


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_map_is_read_as_accelerate_reads_it(small, tmp_path):
    folder = small.save_pretrained(tmp_path)
    model = HookedDiffusionTransformer.from_pretrained(folder, device_map=ON_DISK)
    assert model.cfg.device == "cpu"
    assert identity_of(model) == identity_of(small)
    again = HookedDiffusionTransformer.from_pretrained(model.save_pretrained(tmp_path / "again"), device_map="auto")
    assert identity_of(again) == identity_of(small)
    assert again.to("cpu").placement is None
    with pytest.raises(ValueError, match="load it again with another device_map="):
        model.to(torch.bfloat16)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"blocks.0": "cpu"}, r'no place for embed.weight, .* with the key ""'),
        ({"block.0": "cpu", "": "disk"}, r"places 'block.0', .* nearest are \['blocks.0'"),
        ("fast", "device 'fast' is unknown; .* 'sequential'"),
        ({"": 99}, "device 'cuda:99' is not available"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(small, device_map, message):
    with pytest.raises(ValueError, match=message):
        placed(small, device_map)


def test_device_and_device_map_exclude_each_other():
    with pytest.raises(ValueError, match="both say where the weights are: give one of them"):
        load_source(Source("tiny-mdm", device_map="auto"), "cpu")
