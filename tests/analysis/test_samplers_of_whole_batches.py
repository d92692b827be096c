"""Samplers by which the rows of a batch depend on one another: corrupted samples are denoised as if each ran alone."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens import Query
from diffusion_lens.analysis import temporal_effect, trace_trajectory
from diffusion_lens.denoising.samplers import smdm, udlm

SETTINGS = dict(noise=2.0, samples=4, seed=1, layers=[1], positions=[1, 2])


def written(given, sampler, **more):
    """A run of one row, and the query whose answer is what it wrote at two positions."""
    model, tokens = given.model, given.tokens[0, :12].clone()
    if model.cfg.has_mask:
        tokens[6:] = model.cfg.mask_token_id
    prompt = tokens[None] if model.cfg.has_mask else tokens[None, :6]
    run = model.denoise(prompt, length=12, sampler=sampler, steps=6, seed=3, **more)
    return run, Query(tokens, (1, 3), (6, 9), tuple(run.tokens[0, [6, 9]].tolist()))


@pytest.mark.parametrize("every", ["llada_moe"], indirect=True)
def test_corrupted_samples_are_not_ranked_as_one_pool(every):
    """A run of one row is the same with each row ranked by itself, and so are its corrupted runs."""
    (run, query), (by_row, _) = (written(every, sampler) for sampler in (smdm(), replace(smdm(), scope="row")))
    assert torch.equal(run.canvases, by_row.canvases)
    traces = [
        trace_trajectory(every.model, query, canvas="free", trajectory=each, **SETTINGS) for each in (run, by_row)
    ]
    torch.testing.assert_close(traces[0].token_scores, traces[1].token_scores, rtol=0, atol=0, equal_nan=True)
    effects = [temporal_effect(every.model, query, [1], trajectory=each, **SETTINGS) for each in (run, by_row)]
    assert torch.equal(effects[0].token_scores, effects[1].token_scores)
    assert effects[0].corrupted == effects[1].corrupted < 1


@pytest.mark.parametrize("every", ["udlm"], indirect=True)
def test_samples_are_not_told_one_time_for_all(every):
    run, query = written(every, udlm(), temperature=1.0)
    message = "the time of the last step that changed any row of a batch.*keeps_prediction=False"
    with pytest.raises(ValueError, match=message):
        temporal_effect(every.model, query, trajectory=run, **SETTINGS)
    with pytest.raises(ValueError, match=message):
        trace_trajectory(every.model, query, canvas="free", trajectory=run, **SETTINGS)
    run, query = written(every, udlm(use_cache=False), temperature=1.0)
    effect = temporal_effect(every.model, query, [1], trajectory=run, **SETTINGS)
    assert effect.token_scores.isfinite().all()
