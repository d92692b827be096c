"""Analyses of models that attend by blocks: passes that start at a block give what whole passes give."""

import pytest
import torch

from diffusion_lens import Query
from diffusion_lens.analysis import causal_trace, trace_trajectory
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
