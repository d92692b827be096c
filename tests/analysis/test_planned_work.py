"""The work that is planned for a job on the narrow network is that of the real one, counted in every block."""

import warnings
from functools import partial

import pytest
import torch

from diffusion_lens.analysis import (
    average_indirect_effect,
    causal_trace,
    compute_key,
    patch_grid,
    reversal_signatures,
    temporal_effect,
    trace_trajectory,
)
from diffusion_lens.analysis.dictionaries import activations
from diffusion_lens.analysis.engine.trajectory import loop_prompt
from diffusion_lens.analysis.planned_work import counting, narrow_network
from diffusion_lens.analysis.rome import (
    KeyValueSettings,
    ValueSettings,
    key_value_study,
    optimize_values,
    second_moment,
)
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising import DenoiseSettings, denoise, lay_out
from diffusion_lens.evaluation import RecallSettings, recall_by_steps

FACTS = toy_facts.load().facts(trained="p2d", asked="p2d")
NOISE = {"noise": 0.3, "samples": 3}
SHORT = DenoiseSettings(steps=4)
KINDS = ["tiny-mdm", "tiny-ar", "tiny-block", "tiny-uniform"]
every_kind = pytest.mark.parametrize("tiny", KINDS, indirect=True)


@pytest.fixture
def both(tiny, token_layers):
    """Token-layers of a job, a function of a model: as planned, and as counted by patching the class of the blocks."""

    def of(job):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with counting(narrow_network(tiny.cfg, tiny.tokenizer)) as counter:
                job(counter.model)
            with token_layers() as told:
                job(tiny)
        return counter.work.token_layers, told[0]

    return of


def query_of(model, fact=FACTS[0]):
    return fact.to_query(
        model, n_masks=None if model.cfg.is_autoregressive else 14 - model.to_tokens(fact.prompt).shape[1]
    )


def traced(model, **settings):
    return causal_trace(model, query_of(model), **settings, **NOISE)


@every_kind
def test_a_pass_and_a_run_of_the_loop(tiny, both):
    tokens = torch.full((2, 9), 5)
    planned, told = both(lambda model: model(tokens, stop_at_layer=model.cfg.n_layers))
    assert planned == told == 2 * 9 * tiny.cfg.n_layers
    for settings in (SHORT, DenoiseSettings(), DenoiseSettings(steps=5, cfg_scale=0.5).fitted_to(tiny.cfg)):
        planned, told = both(
            lambda model, settings=settings: denoise(model, lay_out(model, tokens[:, :4], 12), settings)
        )
        # Under uniform noise a step that draws what was there needs no pass: the numbers decide.
        assert planned == pytest.approx(told, rel=0.3 if tiny.cfg.uniform_noise else 0.0)


@every_kind
def test_a_trace(tiny, both):
    for chosen in ({}, {"kind": "mlp", "window": 3, "positions": [1, 3, 6], "layers": [0, 2]}):
        planned, told = both(partial(traced, **chosen))
        assert planned == told


@every_kind
def test_traces_along_a_run(tiny, both):
    def job(model, step=None):
        query = query_of(model)
        given, length = loop_prompt(model, query)
        run = denoise(model, lay_out(model, given[None], length), SHORT)
        trace_trajectory(model, query, step, "forced", trajectory=run, **NOISE)

    planned, told = both(lambda model: job(model, [0]))
    assert planned == pytest.approx(told, rel=0.2 if tiny.cfg.uniform_noise else 0.0)
    # The order in which tokens are revealed is that of random weights: it decides how many canvases are read.
    planned, told = both(job)
    assert told / 3 <= planned <= 3 * told


@every_kind
@pytest.mark.parametrize("site", ["resid_pre", "mlp_out", "z"])
def test_a_patch_grid(site, both):
    clean, corrupted = torch.tensor([[5, 6, 7, 8, 9, 10, 11]]), torch.tensor([[5, 6, 12, 8, 9, 10, 11]])

    def job(model):
        patch_grid(model, clean, corrupted, lambda logits: logits[0, -1, 3], site, logits_at=[-1])

    planned, told = both(job)
    assert planned == told


def test_an_average_over_facts(tiny, both):
    settings = {"length": None if tiny.cfg.is_autoregressive else 14, "known": "all", **NOISE}
    planned, told = both(lambda model: average_indirect_effect(model, FACTS[:4], **settings))
    assert planned == told


def test_a_study_of_recall(both):
    settings = RecallSettings((1, 4), 14, cfg_scale=0.8, batch_size=3)
    planned, told = both(lambda model: recall_by_steps(model, FACTS[:5], settings))
    assert planned == pytest.approx(told, rel=0.02)


def test_keys_and_values(tiny, both):
    search = ValueSettings(steps=4, stop_below=0.0)
    settings = KeyValueSettings(layers=[0, 2], length=None if tiny.cfg.is_autoregressive else 14, search=search)
    planned, told = both(lambda model: key_value_study(model, FACTS[:3], settings))
    assert planned == told

    def one_fact(model):
        compute_key(model, [query_of(model)], 1)
        optimize_values(model, [[query_of(model)]], 1, settings=search)

    planned, told = both(one_fact)
    assert planned == told


def test_states_up_to_a_layer(both, tmp_path_factory):
    texts = [torch.full((length,), 7) for length in (5, 9, 7)]
    planned, told = both(lambda model: second_moment(model, texts, 1, batch_size=2))
    assert planned == told
    point, text = "blocks.1.hook_mlp_out", torch.full((3, 8), 7)
    planned, told = both(lambda model: activations(model, text, point, out=tmp_path_factory.mktemp("x"), batch_size=2))
    assert planned == told


def test_signatures(both):
    planned, told = both(lambda model: reversal_signatures(model, toy_facts.load().taught_pairs(model, "p2d")[:6]))
    assert planned == told


def test_the_temporal_effect(tiny, both):
    def job(model):
        query = query_of(model)
        given, length = loop_prompt(model, query)
        run = denoise(model, lay_out(model, given[None], length), SHORT)
        temporal_effect(model, query, trajectory=run, noise=0.3, samples=3, positions=[1, 3], layers=[0, 2])

    planned, told = both(job)
    assert told / 2 <= planned <= 2 * told
