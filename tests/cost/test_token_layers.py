"""The predicted work of every job is what the engines do: rows times positions, counted in every block that runs."""

import warnings

import pytest
import torch

from diffusion_lens import cost
from diffusion_lens.analysis import (
    Corruption,
    Restoration,
    Selection,
    patch_grid,
    reversal_signatures,
    temporal_effect,
    trace_query,
    trace_steps,
)
from diffusion_lens.analysis.average_effects import AverageEffect
from diffusion_lens.analysis.average_effects.known import Known
from diffusion_lens.analysis.average_effects.study import average_facts
from diffusion_lens.analysis.average_effects.trace_settings import TraceSettings
from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.dictionaries import activations
from diffusion_lens.analysis.loop_settings import LoopSettings
from diffusion_lens.analysis.patching.patch_settings import PatchSettings
from diffusion_lens.analysis.patching.sites import resolve_sites
from diffusion_lens.analysis.rome import KeyValueSettings, ValueSettings, second_moment, study_keys_and_values
from diffusion_lens.analysis.rome.objective import default_essence
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory, loop_prompt
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising import DenoiseSettings, denoise, lay_out
from diffusion_lens.evaluation.recall_by_steps import RecallSettings, recall_facts

FACTS = toy_facts.load().facts(trained="p2d", asked="p2d")
NOISE = Corruption("gaussian", 0.3, samples=3)
SHORT = DenoiseSettings(steps=4)
KINDS = ["tiny-mdm", "tiny-ar", "tiny-block", "tiny-uniform"]
every_kind = pytest.mark.parametrize("tiny", KINDS, indirect=True)


@pytest.fixture
def counted(token_layers):
    """Token-layers of a call, without what layouts and checks run before it."""

    def of(work, *args, **kwargs):
        with token_layers() as total, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            work(*args, **kwargs)
        return total[0]

    return of


def query_of(model, fact=FACTS[0]):
    return fact.to_query(model, n_masks=None if model.cfg.grows else 14 - model.to_tokens(fact.prompt).shape[1])


@every_kind
def test_a_pass_and_a_run_of_the_loop(tiny, counted):
    tokens = torch.full((2, 9), 5)
    assert cost.forward(tiny.cfg, 2, 9).token_layers == counted(tiny.run_layers, tokens, sigma=None)
    for settings in (SHORT, DenoiseSettings(), DenoiseSettings(steps=5, cfg_scale=0.5).fitted_to(tiny.cfg)):
        canvas = lay_out(tiny, tokens[:, :4], 12)
        told = counted(denoise, tiny, canvas, settings)
        # Under uniform noise a step that draws what was there needs no pass: the numbers decide.
        assert cost.denoising(tiny.cfg, 12, 4, settings, rows=2).token_layers == pytest.approx(
            told, rel=0.2 if tiny.cfg.rewrites else 0.0
        )


@every_kind
def test_a_trace_and_traces_along_a_run(tiny, counted):
    query, model = query_of(tiny), tiny
    restoration, chosen = Restoration(), Selection([1, 3, 6], [0, 2])
    for restored, selection in ((restoration, Selection()), (Restoration("mlp", 3), chosen)):
        told = counted(trace_query, model, query, restored, NOISE, selection)
        assert cost.trace(model.cfg, query, restored, NOISE, selection).token_layers == told
    given, length = loop_prompt(model, query)
    settings = SHORT
    canvas = lay_out(model, given[None], length)
    loop = counted(denoise, model, canvas, settings)
    run = TracedTrajectory.of(model, query, denoise(model, canvas, settings))
    told = loop + counted(trace_steps, run, None, "forced", restoration, NOISE)
    steps = range(run.answered_from, run.last_step + 1)
    canvases = len({tuple(run.seen(run.canvas(step)[None])[0].tolist()) for step in steps})
    predicted = cost.trajectory_trace(model.cfg, query, settings, restoration, NOISE, canvases=canvases)
    assert predicted.token_layers >= told
    # By blocks, common beginnings and positions that a canvas has not reached are left out.
    assert predicted.token_layers <= (1.25 if model.cfg.opens_blocks else 1.02) * told


@every_kind
@pytest.mark.parametrize("site", ["resid_pre", "mlp_out"])
def test_a_patch_grid(tiny, site, counted):
    clean, corrupted = torch.tensor([[5, 6, 7, 8, 9, 10, 11]]), torch.tensor([[5, 6, 12, 8, 9, 10, 11]])
    told = counted(patch_grid, tiny, clean, corrupted, lambda logits: logits[0, -1, 3], site, logits_at=[-1])
    settings = PatchSettings(resolve_sites(site), None, list(range(tiny.cfg.n_layers)), None, "exact", 0)
    predicted = cost.patch_grid(tiny.cfg, clean[0], corrupted[0], settings, [-1])
    assert predicted.token_layers == pytest.approx(told, rel=0.02)


def test_an_average_over_facts(tiny, counted, tmp_path):
    length = None if tiny.cfg.grows else 14
    settings = TraceSettings(CanvasLayout(length), Restoration(), NOISE, False, Known.of("all"))
    told = counted(average_facts, AverageEffect, tiny, FACTS[:4], settings, tmp_path)
    queries = [settings.query(tiny, fact) for fact in FACTS[:4]]
    assert cost.average_effect(tiny.cfg, queries, settings).token_layers == told


def test_a_study_of_recall(tiny, counted, tmp_path):
    settings = RecallSettings((1, 4), 14, LoopSettings(cfg_scale=0.8, batch_size=3))
    told = counted(recall_facts, tiny, FACTS[:5], settings, tmp_path)
    prompts = [tiny.to_tokens(fact.prompt).shape[1] for fact in FACTS[:5]]
    assert cost.recall(tiny.cfg, prompts, settings).token_layers == pytest.approx(told, rel=0.02)


def test_keys_and_values(tiny, counted, tmp_path):
    search = ValueSettings(steps=4, stop_below=0.0)
    settings = KeyValueSettings([0, 2], layout=CanvasLayout(None if tiny.cfg.grows else 14), search=search)
    told = counted(study_keys_and_values, tiny, FACTS[:3], settings, tmp_path)
    requests = [settings.request(tiny, fact) for fact in FACTS[:3]]
    essences = [default_essence(tiny, request[0]) for request in requests]
    predicted = cost.keys_and_values(tiny.cfg, requests, [0, 2], search, essences)
    assert predicted.token_layers == pytest.approx(told, rel=0.02)
    assert predicted.backward_passes < predicted.forward_passes


def test_states_up_to_a_layer(tiny, counted, tmp_path):
    texts = [torch.full((length,), 7) for length in (5, 9, 7)]
    predicted = cost.second_moment(tiny.cfg, [5, 9, 7], 1, batch_size=2)
    assert predicted.token_layers == counted(second_moment, tiny, texts, 1, batch_size=2)
    told = counted(activations, tiny, torch.full((3, 8), 7), "blocks.1.hook_mlp_out", out=tmp_path, batch_size=2)
    assert cost.up_to_layer(tiny.cfg, [8] * 3, 1, batch_size=2).token_layers == told


def test_signatures(tiny, counted):
    pairs = toy_facts.load().taught_pairs(tiny, "p2d")[:6]
    positions = len(pairs[0].forward.tokens)
    told = counted(reversal_signatures, tiny, pairs)
    assert cost.signatures(tiny.cfg, len(pairs), positions).token_layers == told


def test_the_temporal_effect_is_at_most_what_it_costs(tiny, counted):
    query = query_of(tiny)
    given, length = loop_prompt(tiny, query)
    run = denoise(tiny, lay_out(tiny, given[None], length), SHORT)
    selection = Selection([1, 3], [0, 2])
    told = counted(temporal_effect, tiny, query, trajectory=run, noise=0.3, samples=3, positions=[1, 3], layers=[0, 2])
    predicted = cost.temporal_effect(tiny.cfg, query, SHORT, Restoration(), NOISE, selection)
    assert told <= predicted.token_layers
