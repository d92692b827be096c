"""Each job takes at most a tenth more token-layers than it must."""

import pytest
import torch
from oracles import least_work
from oracles.distinct_branches import continued_positions
from oracles.traced_shapes import NOISE, SUBJECT, Shape

from diffusion_lens import Query
from diffusion_lens.analysis import (
    answer_probability,
    causal_trace,
    patch_grid,
    second_moment,
    temporal_effect,
    trace_trajectory,
)

LAYERS, SAMPLES, N_POS, ANSWER = 6, 5, 12, 3
SETTINGS = {"noise": NOISE, "samples": SAMPLES}
ONE_TRACE = least_work.trace(LAYERS, SAMPLES, N_POS)


class Case:
    """A small model with a query whose answer its run does not write."""

    def __init__(self, variant):
        shape = Shape(variant, LAYERS, d_model=32, d_mlp=48, n_heads=2, d_vocab=60, n_pos=N_POS, samples=SAMPLES)
        with torch.no_grad():
            self.model = shape.build()
        self.masked, prompt = shape.masked, N_POS - ANSWER
        tokens = torch.randint(59, (N_POS,), generator=torch.Generator().manual_seed(0))
        canvas = torch.where(torch.arange(N_POS) < prompt, tokens, 59) if self.masked else tokens[:-1]
        self.query = Query(canvas, SUBJECT, tuple(range(prompt, N_POS)), tuple(tokens[prompt:].tolist()))
        given = canvas if self.masked else tokens[:prompt]
        self.run = self.model.denoise(given[None], length=N_POS, **({"steps": 3} if self.masked else {}))
        self.revealing = len(self.run.revealed_at[self.run.revealed_at >= 0].unique())


@pytest.fixture(scope="module", params=["masked", "causal"])
def case(request):
    return Case(request.param)


def assert_least(token_layers, job, least):
    with token_layers() as counted:
        job()
    assert least <= counted[0] <= 1.1 * least


def test_of_a_denoising_run(case, token_layers):
    given = case.query.tokens[None, : N_POS - ANSWER]
    options = {"steps": 8, "cfg_scale": 0.5} if case.masked else {}
    run = case.model.denoise(given, length=N_POS, **options)
    n_steps = len(run.revealed_at[run.revealed_at >= 0].unique())
    least = least_work.denoising(LAYERS, N_POS, n_steps, 2) if case.masked else least_work.growing(LAYERS, N_POS)
    assert_least(token_layers, lambda: case.model.denoise(given, length=N_POS, **options), least)


def test_of_a_trace(case, token_layers):
    least = ONE_TRACE if case.masked else least_work.trace(LAYERS, SAMPLES, N_POS - 1, SUBJECT[0])
    assert_least(token_layers, lambda: causal_trace(case.model, case.query, **SETTINGS), least)


def test_of_traces_along_a_run(case, token_layers):
    along = least_work.traces_along_a_text(LAYERS, SAMPLES, N_POS - ANSWER, SUBJECT[0], ANSWER)
    least, steps = case.revealing * ONE_TRACE if case.masked else along, range(case.run.n_steps)
    assert_least(
        token_layers,
        lambda: trace_trajectory(case.model, case.query, steps, trajectory=case.run, **SETTINGS),
        least,
    )


def test_of_effects_of_single_steps(case, token_layers):
    last = least_work.trace(LAYERS, SAMPLES, N_POS - 1, SUBJECT[0])
    traces, looped = (case.revealing * ONE_TRACE, case.revealing * N_POS) if case.masked else (last, N_POS - 1)
    continued = continued_positions(case.model, case.query, case.run, not case.masked, SETTINGS)
    assert_least(
        token_layers,
        lambda: temporal_effect(case.model, case.query, trajectory=case.run, **SETTINGS),
        least_work.temporal(traces, LAYERS, SAMPLES, looped, continued),
    )


@pytest.mark.parametrize("case", ["masked"], indirect=True)
@pytest.mark.parametrize("site", ["resid_pre", "mlp_out"])
def test_of_a_patch_grid(case, site, token_layers):
    other, metric = case.query.tokens.clone(), answer_probability(case.model, case.query)
    other[slice(*SUBJECT)] += 1
    differs = [SUBJECT[1] - SUBJECT[0] if site == "resid_pre" else N_POS, *[N_POS] * (LAYERS - 1)]
    assert_least(
        token_layers,
        lambda: patch_grid(case.model, case.query.tokens[None], other[None], metric, site),
        least_work.patching(LAYERS, N_POS, differs, after=site == "mlp_out"),
    )


def test_of_a_second_moment(case, token_layers):
    corpus = case.query.tokens.clamp(max=50).repeat(3, 1)
    least = least_work.second_moment(1, corpus.numel())
    assert_least(token_layers, lambda: second_moment(case.model, corpus, 1), least)
