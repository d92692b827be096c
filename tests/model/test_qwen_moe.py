"""RND1 and SDAR-MoE give the numbers of the authors' code: activations, routers, and every canvas of greedy runs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.denoising.samplers import rnd1, sdar
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


def load(name, **how):
    return HookedDiffusionTransformer.from_pretrained(GOLDEN / name, device="cpu", **how)


@pytest.mark.parametrize(
    ("name", "how", "prefix"),
    [
        ("rnd1", {}, ""),
        ("sdar_moe", dict(block_size=4, mask_token_id=MASK), "b4."),
        ("sdar_moe", dict(block_size=8, mask_token_id=MASK), "b8."),
    ],
)
def test_activations(name, how, prefix):
    model, golden = load(name, **how), load_file(GOLDEN / name / "golden.safetensors")
    logits, cache = model.run_with_cache(golden["tokens"])
    torch.testing.assert_close(logits, golden[f"{prefix}logits"], **CLOSE)
    compared = 0
    for key, expected in golden.items():
        what, _, layer = key.removeprefix(prefix).rpartition(".")
        if key.startswith(prefix) and what in NAMES:
            torch.testing.assert_close(cache[f"blocks.{layer}.{NAMES[what]}"], expected, **CLOSE)
            compared += 1
    assert compared == {"": 12, "b4.": 10, "b8.": 0}[prefix]


def test_weights_of_experts_are_divided_by_their_sum_if_the_config_says_so():
    golden = load_file(GOLDEN / "sdar_moe" / "golden.safetensors")
    config = {**json.loads((GOLDEN / "sdar_moe" / "config.json").read_text()), "norm_topk_prob": False}
    model = load("sdar_moe", config=config, block_size=4, mask_token_id=MASK)
    torch.testing.assert_close(model(golden["tokens"]), golden["unnormalised.logits"], **CLOSE)


def runs_of(name):
    cases = json.loads((GOLDEN / name / "trajectories.json").read_text())
    return load_file(GOLDEN / name / "trajectories.safetensors"), cases


@pytest.mark.parametrize("case", runs_of("rnd1")[1])
def test_every_canvas_of_rnd1(case):
    recorded, cases = runs_of("rnd1")
    canvases, settings = recorded[f"{case}/x_steps"], cases[case]
    run = load("rnd1").denoise(canvases[:1], steps=settings["num_steps"], sampler=rnd1())
    assert torch.equal(run.canvases[:, 0], canvases)


@pytest.mark.parametrize("case", runs_of("sdar_moe")[1])
def test_every_canvas_of_sdar_moe(case):
    recorded, cases = runs_of("sdar_moe")
    canvases, settings = recorded[f"{case}/x_steps"].unique_consecutive(dim=0), cases[case]
    block, steps = settings["block_length"], settings["denoising_steps"]
    strategy = settings["remasking_strategy"]
    sampler = sdar(block, steps, strategy, threshold=settings.get("confidence_threshold"))
    model = load("sdar_moe", block_size=block, mask_token_id=MASK)
    prompt = canvases[:1, : settings["prompt"]]
    run = model.denoise(prompt, length=canvases.shape[1], sampler=sampler)
    ours = run.canvases[:, 0]
    ours = ours.masked_fill(ours < 0, MASK).unique_consecutive(dim=0)
    assert torch.equal(ours, canvases[(canvases[:, : prompt.shape[1]] != MASK).all(dim=1)])


@pytest.mark.parametrize(("name", "options"), [("rnd1", {}), ("sdar_moe", {"block_size": 4, "mask_token_id": MASK})])
def test_checkpoints_there_and_back(name, options, tmp_path):
    first = open_checkpoint(GOLDEN / name, options=options)
    again = export(dict(first.tensors()), first.architecture, tmp_path / "model.safetensors")
    ours, theirs = load_file(again), load_file(GOLDEN / name / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert open_checkpoint(again).architecture == first.architecture
