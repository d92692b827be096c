"""Block diffusion on finished text that is causal: who sees whom, and the authors' canvases block by block."""

import json
from pathlib import Path

import pytest
import torch
from authors_networks import distinct
from safetensors.torch import load_file

from diffusion_lens import HookedDiffusionTransformer, load_pair
from diffusion_lens.analysis import logit_lens, trace_trajectory
from diffusion_lens.denoising.samplers import nemotron
from diffusion_lens.facts.fact import Query
from diffusion_lens.model.attention import KeyValueCache
from diffusion_lens.model.loss import autoregressive_loss, masked_diffusion_loss

GOLDEN = Path(__file__).parents[1] / "golden" / "nemotron"
CASES = json.loads((GOLDEN / "trajectories.json").read_text())
RECORDED = load_file(GOLDEN / "trajectories.safetensors")
MASK = 100
RUNS = [name for name, case in CASES.items() if "causal_context" in case]


def load(block_size, causal_context=True):
    config = {**json.loads((GOLDEN / "config.json").read_text()), "causal_context": causal_context}
    return HookedDiffusionTransformer.from_pretrained(
        GOLDEN / "model.safetensors", config=config, mode="block", block_size=block_size, device="cpu"
    )


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_every_canvas_of_every_recorded_run(name, hooked):
    """The authors' code records no canvas between the first token of a block and the next step."""
    case, prompt = CASES[name], RECORDED["prompt"]
    model = load(case["block_length"], case["causal_context"])
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
        seeds = (n_written % case["block_length"] == 1) & case["causal_context"]
        theirs = distinct(RECORDED[f"{name}/x_steps"][:, row])
        assert torch.equal(distinct(ours[~seeds])[1:], theirs)


def test_finished_tokens_are_causal_and_the_open_block_sees_all_of_itself():
    model = load(4)
    causal = HookedDiffusionTransformer.from_pretrained(GOLDEN, mode="ar", device="cpu")
    tokens = torch.randint(99, (2, 14), generator=torch.Generator().manual_seed(0))
    finished = tokens.clone()
    torch.testing.assert_close(model(tokens), causal(tokens), rtol=1e-5, atol=1e-5)  # nothing is open
    tokens[:, 10:] = MASK
    logits = model(tokens)
    torch.testing.assert_close(logits[:, :10], causal(tokens)[:, :10], rtol=1e-5, atol=1e-5)
    finished[:, -1] += 1
    finished[:, 10] = MASK
    with model.at_block(10):
        assert torch.equal(model(tokens), logits)
        filled = model(finished)
    assert torch.equal(filled[:, :10], logits[:, :10])
    assert not torch.allclose(filled[:, 10], logits[:, 10], atol=1e-3)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    torch.testing.assert_close(model(padded, attention_mask=mask)[:, 3:], logits, rtol=1e-5, atol=1e-5)


def slow_pattern(canvas, real, size, causal_context):
    """Who sees whom on one row, pair by pair: Bool[query key]."""
    places = [i for i in range(len(canvas)) if real[i]]
    prompt = next((n for n, i in enumerate(places) if canvas[i] == MASK), len(places))
    seen = torch.eye(len(canvas), dtype=torch.bool)
    for n, query in enumerate(places):
        for m, key in enumerate(places):
            if n >= prompt:
                seen[query, key] = m < prompt or (m - prompt) // size <= (n - prompt) // size
            else:
                seen[query, key] = m <= n if causal_context else m < prompt
    return seen


@pytest.mark.parametrize("causal_context", [True, False])
def test_outside_the_loop_the_first_mask_ends_the_prompt(causal_context):
    """As a slow version says it, and in the first step of the loop."""
    model = load(4, causal_context)
    tokens = torch.randint(99, (4, 13), generator=torch.Generator().manual_seed(1))
    tokens[0, 6:], tokens[1, 3:9], tokens[2, 12] = MASK, MASK, MASK  # nothing is open in the last row
    for n_left, n_right in ((0, 0), (2, 0), (0, 3)):
        real = torch.ones_like(tokens, dtype=torch.bool)
        real[:, :n_left] = False
        real[:, tokens.shape[1] - n_right :] = False
        _, cache = model.run_with_cache(tokens, attention_mask=real, names_filter="blocks.0.attn.hook_pattern")
        slow = torch.stack([slow_pattern(*row, 4, causal_context) for row in zip(tokens, real, strict=True)])
        seen = cache["blocks.0.attn.hook_pattern"].gt(0).transpose(1, 2)
        assert torch.equal(seen[real], slow[:, :, None].expand(-1, -1, 4, -1)[real])
    steps = []
    prompt = RECORDED["prompt"]
    query = torch.cat([prompt, torch.full((2, 4), MASK)], dim=1)
    look = [("blocks.2.hook_resid_post", lambda resid, hook: steps.append(resid))]
    model.denoise(query, fwd_hooks=look)
    _, cache = model.run_with_cache(query)
    torch.testing.assert_close(cache["blocks.2.hook_resid_post"], steps[0], rtol=0, atol=0)


def test_a_residual_stream_needs_to_know_the_open_block():
    model = load(4)
    query = torch.cat([RECORDED["prompt"], torch.full((2, 4), MASK)], dim=1)
    logits, cache = model.run_with_cache(query)
    stream = cache["blocks.0.hook_resid_post"]
    with pytest.raises(ValueError, match=r"a residual stream does not say .* `with model.at_block\(start\):`"):
        model(stream, start_at_layer=1)
    with model.at_block([6, 6]):
        torch.testing.assert_close(model(stream, start_at_layer=1), logits)
    with model.at_block(7):
        assert not torch.allclose(model(stream, start_at_layer=1), logits)
        assert logit_lens(model, query).record["blocks_from"] == [7]
    with pytest.raises(ValueError, match="0 or more"), model.at_block(-1):
        pass
    with (
        pytest.raises(ValueError, match="at_block was given 3 positions, and the batch has 2"),
        model.at_block([1] * 3),
    ):
        model(query)
    other = HookedDiffusionTransformer.from_pretrained(GOLDEN, mode="ar", device="cpu")
    with pytest.raises(ValueError, match="counts no blocks from the end of a prompt"), other.at_block(3):
        pass


def test_the_noisy_half_of_a_training_pass_is_a_step_of_the_loop():
    """The published loss reads each block on the clean blocks before it, as one step of the loop does."""
    golden = load_file(GOLDEN / "golden.safetensors")
    clean, noisy = golden["train.x0"], golden["train.x0"].masked_fill(golden["train.masked"], MASK)
    for size in (4, 8):
        model = load(size)
        for start in range(0, clean.shape[1], size):
            canvas = torch.cat([clean[:, :start], noisy[:, start : start + size]], dim=1)
            expected = golden[f"block_diff.b{size}.logits"][:, start : start + size]
            with model.at_block(start):
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
