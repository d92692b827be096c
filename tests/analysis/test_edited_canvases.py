"""Analyses of a run whose canvases hooks at `denoise.hook_tokens` edited read what its loop read."""

import pytest
import torch

from diffusion_lens.analysis import attention_sinks, temporal_effect, trace_trajectory
from diffusion_lens.data import toy_facts
from diffusion_lens.interventions import at_steps, named

FACT = toy_facts.load().facts(trained="p2d", asked="p2d")[1]
EDITED = 3  # the step that reads a token fewer, or another one, in the answer
LOGITS = "denoise.hook_logits"


@pytest.fixture(scope="module")
def edited(tiny):
    """A query, its run, the cached logits of the loop, and the hook that edits."""
    if tiny.cfg.is_autoregressive:
        query, settings = FACT.to_query(tiny, first_tokens=4), dict(max_new_tokens=4)
    else:
        query = FACT.to_query(tiny, n_masks=14 - tiny.to_tokens(FACT.prompt).shape[1])
        settings = dict(length=14, steps=5, cfg_scale=0.7)
    first = query.answer_positions[0]
    blank = tiny.cfg.blank

    def edit(tokens, hook):
        # The first token of the answer is another one; of a model that masks, what was written last is masked again.
        tokens = tokens.clone()
        tokens[:, first] = query.answer_tokens[-1]
        if not tiny.cfg.is_autoregressive:
            tokens[:, first + 2 :] = blank
        return tokens

    hook = ("denoise.hook_tokens", named("edit", at_steps(edit, [EDITED])))
    run, cache = tiny.denoise_with_cache(query.tokens[None, :first], LOGITS, **settings, fwd_hooks=[hook])
    return query, run, cache, hook


def test_a_trace_starts_from_the_probabilities_of_the_loop(tiny, edited):
    query, run, cache, _ = edited
    positions, tokens = list(query.answer_positions), torch.tensor(query.answer_tokens)
    steps = [step for step in range(EDITED, run.n_steps) if step <= int(run.revealed_at[0, positions].max())]
    trace = trace_trajectory(tiny, query, trajectory=run, steps=steps, noise=0.0, samples=2, layers=[0], positions=[1])
    assert trace.str_canvases == [run.str_canvases()[step] for step in steps]
    for index, step in enumerate(steps):
        canvas = run.canvases[step, 0, positions]
        p = cache[step, LOGITS][0, positions].double().softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        of_loop = torch.where(run.is_masked(canvas), p, (canvas == tokens).double())
        written = ~run.is_masked(canvas) | (run.revealed_at[0, positions] == step)
        torch.testing.assert_close(
            trace.clean_token_scores[index][written].double(), of_loop[written], rtol=0, atol=1e-6
        )


def test_sinks_are_those_of_the_canvases_that_were_read(tiny, edited):
    _, run, _, _ = edited
    assert torch.equal(attention_sinks(tiny, run).canvases, run.canvases[:-1])


def test_without_noise_every_branch_ends_as_the_edited_run(tiny, edited):
    query, run, _, hook = edited
    with tiny.hooks(fwd_hooks=[hook]):
        effect = temporal_effect(tiny, query, trajectory=run, noise=0.0, samples=2, layers=[0], positions=[1])
    expected = (run.tokens[0, list(query.answer_positions)] == torch.tensor(query.answer_tokens)).float()
    tokens = effect.token_scores
    assert torch.equal(tokens, expected.expand_as(tokens))
