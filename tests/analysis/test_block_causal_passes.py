"""Analyses of models that attend by blocks: passes that start at a block give what whole passes give."""

import pytest
import torch

from diffusion_lens import Query
from diffusion_lens.analysis import (
    answer_probability,
    causal_trace,
    logit_lens,
    patch_grid,
    temporal_effect,
    trace_trajectory,
)
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory
from diffusion_lens.denoising.samplers import BlockConfidence


@pytest.fixture
def block_model(configs, specimen):
    return specimen(configs["sdar"]).model


def query_of(model, answer=(9,)):
    tokens = torch.randint(3, 500, (11,), generator=torch.Generator().manual_seed(2))
    tokens[list(answer)] = model.cfg.mask_token_id
    return Query(tokens, (2, 4), answer, tuple(range(40, 40 + len(answer))))


def look(activation, hook):
    return None


@pytest.mark.parametrize("kind", ["resid", "mlp", "attn"])
def test_a_trace_is_that_of_whole_passes(kind, block_model):
    """Under a caller's hook, every pass computes the whole canvas."""
    query = query_of(block_model)
    settings = dict(kind=kind, noise=0.5, samples=2, window=1 if kind == "resid" else 2)
    short = causal_trace(block_model, query, **settings)
    with block_model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", look)]):
        whole = causal_trace(block_model, query, **settings)
    torch.testing.assert_close(short.scores, whole.scores, rtol=1e-4, atol=1e-6)
    # No position of the third block can restore an answer in it but by itself; one of the subject's block can.
    early = causal_trace(block_model, query_of(block_model, (4,)), **settings)
    torch.testing.assert_close(early.scores[8:], torch.full_like(early.scores[8:], early.corrupted))
    assert (early.scores[2:4] - early.corrupted).abs().max() > 1e-6


def test_a_step_of_a_run_is_traced_as_whole_passes_do(block_model):
    query = query_of(block_model, (6, 9))
    run = block_model.denoise(query.tokens[None], sampler=BlockConfidence(2))
    written = Query(query.tokens, query.subject, query.answer_positions, tuple(run.tokens[0, [6, 9]].tolist()))
    short = trace_trajectory(block_model, written, trajectory=run, noise=0.5, samples=2)
    hooks = block_model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", look)])
    with hooks, pytest.warns(UserWarning, match="another network"):
        whole = trace_trajectory(block_model, written, trajectory=run, noise=0.5, samples=2)
    torch.testing.assert_close(short.scores, whole.scores, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.fixture(params=["sdar", "nemotron-block"])
def by_blocks(request, configs, specimen):
    """A block is read in its own rows, or its first token in the row before it."""
    return specimen(configs[request.param]).model


def infilled(model, seed=3):
    """A text with holes: the last block has a given token between positions that are opened late."""
    tokens = torch.randint(3, 500, (13,), generator=torch.Generator().manual_seed(seed))
    tokens[[6, 7, 8, 9, 11, 12]] = model.cfg.mask_token_id
    return tokens


def written_by(run, tokens, answer):
    return Query(tokens, (2, 5), answer, tuple(run.tokens[0, list(answer)].tolist()))


def test_guidance_reads_blocks_that_are_not_open(by_blocks):
    """An answer that crosses a block is read under guidance from the first block on, as whole passes read it."""
    tokens, scale = infilled(by_blocks), 0.7
    run = by_blocks.denoise(tokens[None], cfg_scale=scale)
    query = written_by(run, tokens, (7, 9))
    trace = trace_trajectory(by_blocks, query, [0], trajectory=run, noise=0.5, samples=2, layers=[0], positions=[2])
    state, canvas = run.state_at(0), by_blocks.cfg.readable(run.canvases[0])
    with torch.no_grad(), by_blocks.clock.at(state):
        plain, unprompted = by_blocks(canvas), by_blocks(canvas.masked_fill(run.given, run.blank))
    p = (unprompted + (1 + scale) * (plain - unprompted))[0, [7, 9]].softmax(dim=-1)
    expected = p[range(2), list(query.answer_tokens)]
    torch.testing.assert_close(trace.clean_token_scores[0], expected, rtol=1e-4, atol=1e-7)
    temporal_effect(by_blocks, query, [0], trajectory=run, noise=0.5, samples=2, layers=[0], positions=[2])


@pytest.mark.parametrize("scale", [0.0, 0.7])
def test_a_branch_without_noise_writes_what_the_run_writes(scale, by_blocks):
    tokens = infilled(by_blocks)
    run = by_blocks.denoise(tokens[None], cfg_scale=scale)
    query = written_by(run, tokens, (7, 9, 12))
    effect = temporal_effect(by_blocks, query, trajectory=run, noise=0.0, samples=1, layers=[1], positions=[0])
    assert (effect.scores == 1).all()


def test_a_canvas_ends_with_a_whole_block(by_blocks):
    """A pass on a part of the canvas gives what the whole canvas gives, which a caller's hook sees."""
    tokens = infilled(by_blocks)
    other = tokens.clone()
    other[[2, 4]] = torch.tensor([77, 88])
    runs = [by_blocks.denoise(x[None]) for x in (tokens, other)]
    query = written_by(runs[1], other, (7, 9))

    def results():
        metrics = answer_probability(by_blocks, query), lambda logits: logits[0, 10, 3]
        grids = [
            patch_grid(by_blocks, *runs, metric, "resid_pre", [0], layers=[1], positions=[2, 10]) for metric in metrics
        ]
        return [*(grid.scores for grid in grids), logit_lens(by_blocks, runs[0], steps=[0]).entropy]

    short = results()
    with by_blocks.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", look)]), pytest.warns(UserWarning, match="another"):
        whole = results()
    for one, other in zip(short, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_samples_in_different_blocks_are_refused(configs, specimen):
    model = specimen(configs["nemotron-block"]).model
    tokens = infilled(model)
    run = model.denoise(tokens[None])
    query = written_by(run, tokens, (7, 9))
    traced = TracedTrajectory.of(model, query, run)
    ahead = torch.cat([run.canvases[0], run.canvases[-2]])
    with pytest.raises(ValueError, match=r"different blocks, which begin at the positions \[6, 10\]"):
        traced.reading(0, ahead)
    # The network reads each sample with its own block open.
    assert traced.state(0, ahead).block.start.tolist() == [6, 10]


@pytest.mark.parametrize("settings", [dict(steps=4), dict(sampler=BlockConfidence(2))])
def test_too_few_steps_for_blocks_whose_first_token_is_written_alone(settings, configs, specimen):
    model = specimen(configs["nemotron-block"]).model
    with pytest.raises(ValueError, match=r"a block of 4 positions has 2 steps.*give 4 steps for each block"):
        model.denoise(infilled(model)[None, :6], length=14, **settings)
    assert not (model.denoise(infilled(model)[None, :6], length=14).tokens == model.cfg.mask_token_id).any()
