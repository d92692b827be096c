"""Families made from Qwen and Llama give the numbers of the authors' code: activations, and canvases of greedy runs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import trace_trajectory
from diffusion_lens.denoising.samplers import dream, fast_dllm_v2, rnd1, sdar
from diffusion_lens.facts.fact import Query
from weight_conversion import export, open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
MASK = 90
CLOSE = dict(rtol=1e-5, atol=3e-5)
NAMES = {
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
    "router_logits": "mlp.hook_router_logits",
}
# What a config does not say of the model that was trained.
OPTIONS = {
    "rnd1": {},
    "sdar_moe": {"block_size": 4, "mask_token_id": MASK},
    "fast_dllm_v2": {"mask_token_id": MASK},
    "stable_diffcoder": {"block_size": 4, "mask_token_id": 5},
    "open_dcoder": {"mode": "bidirectional", "mask_token_id": MASK},
}


def load(name, **how):
    """The golden model; `config` replaces values of its config."""
    config = {**json.loads((GOLDEN / name / "config.json").read_text()), **how.pop("config", {})}
    options = {"config": config, "device": "cpu", **OPTIONS[name], **how}
    return HookedDiffusionTransformer.from_pretrained(GOLDEN / name, **options)


@pytest.mark.parametrize(
    ("name", "how", "prefix", "n_compared"),
    [
        ("rnd1", {}, "", 12),
        ("sdar_moe", {}, "b4.", 10),
        ("sdar_moe", {"block_size": 8}, "b8.", 0),
        ("stable_diffcoder", {}, "b4.", 7),
        ("stable_diffcoder", {"block_size": 8}, "b8.", 0),
        ("fast_dllm_v2", {}, "b8.", 7),
        ("fast_dllm_v2", {"config": {"bd_size": 4}}, "b4.", 0),
        ("open_dcoder", {}, "", 8),
    ],
)
def test_activations(name, how, prefix, n_compared):
    model, golden = load(name, **how), load_file(GOLDEN / name / "golden.safetensors")
    logits, cache = model.run_with_cache(golden["tokens"])
    torch.testing.assert_close(logits, golden[f"{prefix}logits"], **CLOSE)
    for key, expected in golden.items():
        what, _, layer = key.removeprefix(prefix).rpartition(".")
        if key.startswith(prefix) and what in NAMES:
            torch.testing.assert_close(cache[f"blocks.{layer}.{NAMES[what]}"], expected, **CLOSE)
            n_compared -= 1
    assert n_compared == 0


def test_weights_of_experts_are_divided_by_their_sum_if_the_config_says_so():
    golden = load_file(GOLDEN / "sdar_moe" / "golden.safetensors")
    model = load("sdar_moe", config={"norm_topk_prob": False})
    torch.testing.assert_close(model(golden["tokens"]), golden["unnormalised.logits"], **CLOSE)


def test_without_flash_attention_the_authors_code_of_open_dcoder_is_causal():
    golden = load_file(GOLDEN / "open_dcoder" / "golden.safetensors")
    causal = load("open_dcoder", mode="ar", mask_token_id=None)
    torch.testing.assert_close(causal(golden["tokens"]), golden["sdpa.logits"], **CLOSE)
    assert (golden["sdpa.logits"] - golden["logits"]).abs().max() > 1


def runs_of(name):
    """The recorded canvases of each run, and its settings."""
    recorded = load_file(GOLDEN / name / "trajectories.safetensors")
    cases = json.loads((GOLDEN / name / "trajectories.json").read_text())
    return [pytest.param(recorded[f"{case}/x_steps"], cases[case], id=case) for case in cases]


@pytest.mark.parametrize(("canvases", "settings"), runs_of("rnd1"))
def test_every_canvas_of_rnd1(canvases, settings):
    run = load("rnd1").denoise(canvases[:1], steps=settings["num_steps"], sampler=rnd1())
    assert torch.equal(run.canvases[:, 0], canvases)


@pytest.mark.parametrize(("canvases", "settings"), runs_of("open_dcoder"))
def test_every_canvas_of_open_dcoder(canvases, settings):
    """Rows of one batch have different numbers of [MASK], and each its own schedule."""
    sampler = dream(settings["alg"], eps=settings["eps"])
    run = load("open_dcoder").denoise(canvases[0], steps=settings["steps"], sampler=sampler)
    assert torch.equal(run.canvases, canvases)


@pytest.mark.parametrize(("canvases", "settings"), runs_of("sdar_moe"))
def test_every_canvas_of_sdar_moe(canvases, settings):
    block, steps = settings["block_length"], settings["denoising_steps"]
    sampler = sdar(block, steps, settings["remasking_strategy"], threshold=settings.get("confidence_threshold"))
    prompt = canvases[:1, : settings["prompt"]]
    run = load("sdar_moe", block_size=block).denoise(prompt, length=canvases.shape[1], sampler=sampler)
    ours = run.canvases[:, 0].where(run.canvases[:, 0] >= 0, MASK)
    filled = canvases[(canvases[:, : prompt.shape[1]] != MASK).all(dim=1)]
    assert torch.equal(ours.unique_consecutive(dim=0), filled.unique_consecutive(dim=0))


@pytest.mark.parametrize(("canvases", "settings"), runs_of("stable_diffcoder"))
def test_every_canvas_of_stable_diffcoder(canvases, settings):
    """The authors' steps are those of the run; here a block has its own."""
    block = settings["block_length"]
    steps_per_block = settings["steps"] * block // settings["gen_length"]
    strategy = "low_confidence_static" if settings["threshold"] is None else "low_confidence_dynamic"
    sampler = sdar(block, steps_per_block, strategy, threshold=settings["threshold"])
    prompt = canvases[:1, : settings["P"]]
    run = load("stable_diffcoder", block_size=block).denoise(prompt, length=canvases.shape[1], sampler=sampler)
    ours = run.canvases[:, 0].where(run.canvases[:, 0] >= 0, 5)
    assert torch.equal(ours.unique_consecutive(dim=0), canvases)


@pytest.mark.parametrize(("canvases", "settings"), runs_of("fast_dllm_v2"))
def test_every_canvas_of_fast_dllm_v2(canvases, settings):
    block = settings["block_size"]
    sampler = fast_dllm_v2(float(settings["threshold"]), settings["small_block_size"], block)
    prompt = canvases[:1, : settings["P"]]
    run = load("fast_dllm_v2", config={"bd_size": block}).denoise(prompt, length=canvases.shape[1], sampler=sampler)
    ours = run.canvases[:, 0].where(run.canvases[:, 0] >= 0, MASK)
    assert torch.equal(ours.unique_consecutive(dim=0), canvases.unique_consecutive(dim=0))


def test_the_first_token_of_a_block_is_written_alone_and_traced_where_the_loop_reads_it():
    model = load("fast_dllm_v2")
    prompt = load_file(GOLDEN / "fast_dllm_v2" / "trajectories.safetensors")["one_a_step/x_steps"][:1, :10]
    run = model.denoise(prompt, length=20, sampler=fast_dllm_v2(0.0, None))
    assert run.revealed_at[0, 10:].tolist() == [0] * 6 + [1] + [2] * 3
    hooked = model.denoise(
        prompt, length=20, sampler=fast_dllm_v2(0.0, None), fwd_hooks=[("hook_embed", lambda *_, **__: None)]
    )
    assert torch.equal(hooked.canvases, run.canvases)
    canvas = torch.cat([prompt[0], torch.full((10,), MASK)])
    for position in (10, 16, 18):
        query = Query(canvas, (1, 3), (position,), (int(run.tokens[0, position]),))
        trace = trace_trajectory(model, query, trajectory=run, noise=1.0, samples=2, layers=[1], positions=[2])
        torch.testing.assert_close(trace.clean[-1], run.confidence[0, position], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_checkpoints_there_and_back(name, tmp_path):
    first = open_checkpoint(GOLDEN / name, options=OPTIONS[name])
    again = export(dict(first.tensors()), first.architecture, tmp_path / "model.safetensors")
    ours, theirs = load_file(again), load_file(GOLDEN / name / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert open_checkpoint(again).architecture == first.architecture
