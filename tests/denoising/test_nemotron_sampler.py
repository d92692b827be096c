"""Block diffusion on finished text that is causal: who sees whom, and the authors' canvases block by block."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diffusion_lens import HookedDiffusionTransformer, load_pair
from diffusion_lens.analysis import trace_trajectory
from diffusion_lens.denoising.samplers import nemotron
from diffusion_lens.facts import Query
from diffusion_lens.losses import autoregressive_loss, masked_diffusion_loss
from diffusion_lens.model.kv_cache import KeyValueCache

GOLDEN = Path(__file__).parents[1] / "golden" / "nemotron"
CASES = json.loads((GOLDEN / "trajectories.json").read_text())
RECORDED = load_file(GOLDEN / "trajectories.safetensors")
MASK = 100
CAUSAL_CONTEXT = [name for name, case in CASES.items() if case.get("causal_context")]


def load(block_size):
    return HookedDiffusionTransformer.from_pretrained(GOLDEN, mode="block", block_size=block_size, device="cpu")


def distinct(canvases):
    """The canvases of one row without repetitions, of equal length: what is not reached yet counts as masked."""
    kept = [canvases[0]]
    for canvas in canvases[1:]:
        if not torch.equal(canvas, kept[-1]):
            kept.append(canvas)
    return torch.stack(kept)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", CAUSAL_CONTEXT)
def test_every_canvas_of_every_recorded_run(name, hooked):
    """The authors' code records no canvas between the first token of a block and the next step."""
    case, prompt = CASES[name], RECORDED["prompt"]
    model = load(case["block_length"])
    seen = []
    look = [("hook_embed", lambda embed, hook: seen.append(hook.step.block.start))] if hooked else []
    run = model.denoise(
        prompt,
        max_new_tokens=case["max_new_tokens"],
        sampler=nemotron(case["threshold"], case["block_length"]),
        fwd_hooks=look,
    )
    assert bool(seen) == hooked
    assert torch.equal(run.tokens, RECORDED[f"{name}/x_final"])
    length = prompt.shape[1]
    for row in range(len(prompt)):
        ours = run.canvases[:, row].masked_fill(run.canvases[:, row] < 0, MASK)
        n_written = (ours[:, length:] != MASK).sum(dim=1)
        # After the first token of a block, one position of the block more than whole blocks is written.
        seeds = n_written % case["block_length"] == 1
        theirs = distinct(RECORDED[f"{name}/x_steps"][:, row])
        assert torch.equal(distinct(ours[~seeds])[1:], theirs)


def test_finished_tokens_are_causal_and_the_open_block_sees_all_of_itself():
    model = load(4)
    causal = HookedDiffusionTransformer.from_pretrained(GOLDEN, mode="ar", device="cpu")
    tokens = torch.randint(99, (2, 14), generator=torch.Generator().manual_seed(0))
    finished = tokens.clone()
    logits = model(tokens)
    torch.testing.assert_close(logits[:, :10], causal(tokens)[:, :10], rtol=1e-5, atol=1e-5)
    finished[:, -1] += 1
    assert torch.equal(model(finished)[:, :10], logits[:, :10])
    assert not torch.allclose(model(finished)[:, 10], logits[:, 10], atol=1e-3)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    torch.testing.assert_close(model(padded, attention_mask=mask)[:, 3:], logits, rtol=1e-5, atol=1e-5)


def test_the_noisy_half_of_a_training_pass_is_a_step_of_the_loop():
    """The published loss reads each block on the clean blocks before it, as one step of the loop does."""
    golden = load_file(GOLDEN / "golden.safetensors")
    clean, noisy = golden["train.x0"], golden["train.x0"].masked_fill(golden["train.masked"], MASK)
    for size in (4, 8):
        model = load(size)
        for start in range(0, clean.shape[1], size):
            canvas = torch.cat([clean[:, :start], noisy[:, start : start + size]], dim=1)
            expected = golden[f"block_diff.b{size}.logits"][:, start : start + size]
            torch.testing.assert_close(model(canvas)[:, start:], expected, rtol=1e-5, atol=3e-5)


def test_rows_of_a_ragged_batch_are_what_they_are_alone():
    model = load(4)
    prompt = RECORDED["prompt"]
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.long), prompt], dim=1)
    padded[1, :2] = torch.tensor([3, 7])
    mask = torch.ones_like(padded)
    mask[0, :2] = 0
    both = model.denoise(padded, attention_mask=mask, max_new_tokens=8, sampler=nemotron())
    first = model.denoise(prompt[:1], max_new_tokens=8, sampler=nemotron())
    second = model.denoise(padded[1:], max_new_tokens=8, sampler=nemotron())
    assert torch.equal(both.tokens[0, 2:], first.tokens[0])
    assert torch.equal(both.tokens[1], second.tokens[0])


def test_a_trace_along_a_run_reads_each_token_where_the_loop_does():
    model = load(4)
    prompt = RECORDED["prompt"][:1]
    run = model.denoise(prompt, max_new_tokens=8, sampler=nemotron())
    again = run.replay(model)
    torch.testing.assert_close(again.confidence, run.confidence, rtol=1e-5, atol=1e-6, equal_nan=True)
    canvas = torch.cat([prompt[0], torch.full((8,), MASK)])
    for position in (6, 8, 10, 13):  # the first token of both blocks, and a later one of each
        query = Query(canvas, (1, 3), (position,), (int(run.tokens[0, position]),))
        trace = trace_trajectory(model, query, trajectory=run, noise=1.0, samples=2, layers=[1], positions=[2])
        torch.testing.assert_close(trace.clean[-1], run.confidence[0, position], rtol=1e-4, atol=1e-6)


def test_a_cache_outside_the_loop_is_refused():
    model = load(4)
    cache = KeyValueCache(model.cfg.n_layers)
    tokens = RECORDED["prompt"]
    with pytest.raises(ValueError, match="computes an open block again when it is finished"):
        model(tokens, past_kv_cache=cache)


def test_losses_of_both_modes_are_the_authors():
    """Theirs are sums over positions, ours means."""
    golden = load_file(GOLDEN / "golden.safetensors")
    causal, diffusion = load_pair(GOLDEN, device="cpu")[::-1]
    torch.testing.assert_close(autoregressive_loss(causal, golden["tokens"]), golden["autoregressive.loss"][0])
    clean, masked = golden["train.x0"], golden["train.masked"]
    loss = masked_diffusion_loss(diffusion, clean, clean.masked_fill(masked, MASK), golden["train.p_mask"])
    torch.testing.assert_close(loss * clean.numel(), golden["bidirectional.train.loss"][0], rtol=1e-5, atol=1e-5)
