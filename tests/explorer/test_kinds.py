"""The explorer on models that write block after block, and on one under uniform noise with time conditioning."""

import numpy as np
import pytest
import torch
from page_reader import PageFile, as_selected, predicted_at, ran, unpack

from diffusion_lens import Fact
from diffusion_lens.analysis import logit_lens, noise_scale, trace_trajectory
from diffusion_lens.denoising.samplers import fitting_samplers
from diffusion_lens.explorer import Session, explore
from diffusion_lens.explorer.session import model_info
from diffusion_lens.interventions import mean_ablate

PROMPT, ANSWER = "Gustav Geisser is the", " brave drummer"
SETTINGS = dict(length=13, steps=6, seed=4, temperature=0.3)
ASKED = dict(SETTINGS, prompt=PROMPT, answer=ANSWER, subject=[0, 2])


@pytest.fixture(scope="module")
def models(in_words):
    return {"block": in_words("sdar"), "uniform": in_words("udlm")}


@pytest.fixture(params=["block", "uniform"])
def model(models, request):
    return models[request.param]


def test_canvases_and_views_are_those_of_the_library(model):
    session = Session([model])
    run, trajectory = session.run(ASKED), model.denoise(PROMPT, **SETTINGS)
    masked = trajectory.is_masked(trajectory.canvases[:, 0]).tolist()
    shown = [[None if index < 0 else run["words"][index] for index in canvas] for canvas in run["canvases"]]
    assert shown == [
        [None if hidden else word for word, hidden in zip(words, row, strict=True)]
        for words, row in zip(trajectory.str_canvases(), masked, strict=True)
    ]
    assert run["revealed_at"] == trajectory.revealed_at[0].tolist()

    step = run["traces"][0]["steps"][-1]
    _, arrays = unpack(session.chunk(run["id"], f"lens/{step}"))
    lens = logit_lens(model, trajectory, steps=[step])
    np.testing.assert_allclose(arrays["entropy"], lens.entropy[0, :, 0].numpy(), rtol=1e-4)
    pattern = model.denoise_with_cache(PROMPT, "blocks.1.attn.hook_pattern", **SETTINGS)[1][step]["pattern", 1]
    _, arrays = unpack(session.chunk(run["id"], f"attention/1/{step}"))
    np.testing.assert_allclose(arrays["pattern"], pattern[0].numpy(), atol=2e-5)

    fact = Fact(PROMPT, "Gustav Geisser", ANSWER)
    hidden = 13 - len(model.to_tokens(PROMPT)[0])
    query = fact.to_query(model, n_masks=hidden) if model.cfg.has_mask else None
    if query is not None:
        trace = trace_trajectory(
            model, query, steps=[step], kind="mlp", trajectory=trajectory, window=1, noise=noise_scale(model, [query])
        )
        _, arrays = unpack(session.chunk(run["id"], f"trace/mlp/{step}"))
        np.testing.assert_allclose(arrays["scores"], trace.scores[0].numpy(), atol=1e-6)
    assert len(session.chunk(run["id"], f"trace/attn/{step}"))


def test_the_code_of_the_views_repeats_the_run(model):
    session = Session([model])
    given = dict(what="mean", site="mlp", layer=1)
    run = session.run({**ASKED, "interventions": [given]})
    trajectory, cache = model.denoise_with_cache(PROMPT, "blocks.1.hook_mlp_out", **SETTINGS)
    reached = {
        step: {name: x[:, trajectory.canvases[step, 0] >= 0] for name, x in at.items()} for step, at in cache.items()
    }
    changed = model.denoise(PROMPT, **SETTINGS, fwd_hooks=[("blocks.1.hook_mlp_out", mean_ablate(reached))])
    again = ran(as_selected(run["python"]["predictions"], step=1, position=4), model)[0]
    assert torch.equal(again["trajectory"].canvases, changed.canvases)
    assert not torch.equal(changed.canvases, trajectory.canvases)
    arrays = predicted_at(unpack(session.chunk(run["id"], "predictions"))[1], 1)
    np.testing.assert_allclose(arrays["top_probabilities"], again["p"][1, arrays["position"]].numpy(), atol=2e-5)
    assert again["committed"].tolist() == run["predictions"]["committed"]


def test_samplers_that_fit_are_listed_and_write(model):
    session, info = Session([model]), model_info(model)
    assert info["samplers"] == fitting_samplers(model.cfg)
    for name in info["samplers"]:
        assert session.run(dict(SETTINGS, prompt=PROMPT, sampler=name, steps=9))["n_steps"] == 9
    assert model_info(model)["masks"] is model.cfg.has_mask


def test_positions_are_opened_by_blocks_and_masked_again_in_open_ones(models):
    session = Session([models["block"]])
    run = session.run(ASKED)
    assert run["opened_at"] == [0] * 8 + [2] * 4 + [4]
    force = dict(what="force", step=1, token=None)
    with pytest.raises(ValueError, match="position 9 is in a block that is not open at step 1"):
        session.run({**ASKED, "interventions": [dict(force, position=9)]})
    position = next(p for p, at in enumerate(run["revealed_at"]) if at == 0)
    again = session.run({**ASKED, "interventions": [dict(force, position=position)]})
    assert again["canvases"][1][position] == -1
    assert again["revealed_at"][position] >= 1


def test_an_answer_that_is_masked_in_the_end_has_no_traces(models):
    session = Session([models["block"]])
    again = [dict(what="force", step=8, position=position, token=None) for position in range(4, 8)]
    asked = dict(ASKED, steps=9, seed=0, answer=" brave", sampler="first_hitting")
    assert session.run(asked)["traces"]
    run = session.run({**asked, "interventions": again})
    assert run["canvases"][7][4] >= 0 > run["canvases"][-1][4]
    assert not run["traces"]
    assert "trace" in run["missing"]


def test_uniform_noise_may_rewrite_every_position_and_masks_none(models):
    session = Session([models["uniform"]])
    run = session.run(ASKED)
    assert run["opened_at"] is None
    for step in range(6):
        arrays = predicted_at(unpack(session.chunk(run["id"], "predictions"))[1], step)
        assert arrays["position"].tolist() == list(range(4, 13))
    with pytest.raises(ValueError, match="uniform, so nothing is masked: force another token"):
        session.run({**ASKED, "interventions": [dict(what="force", step=1, position=5, token=None)]})
    with pytest.raises(ValueError, match=r"cfg_scale=0\.5 masks the prompt"):
        session.run({**ASKED, "cfg_scale": 0.5})


def test_a_file_of_both_takes_the_samplers_that_fit(models, tmp_path):
    both = [models["block"], models["uniform"]]
    path = explore(
        both, Fact(PROMPT, "Gustav Geisser", ANSWER), tmp_path / "both.html", sampler="udlm", length=13, steps=3
    )
    page = PageFile(path.read_text(encoding="utf-8"))
    assert [run["opened_at"] is None for run in page.manifest["runs"]] == [False, True]
    with pytest.raises(ValueError, match="unknown sampler 'udlmm'"):
        explore(both, PROMPT, tmp_path / "none.html", sampler="udlmm", length=13)
    run = models["uniform"].denoise(PROMPT, **SETTINGS)
    (shown,) = run.explore(lens=logit_lens(models["uniform"], run)).manifest["models"]
    assert (shown["masks"], shown["grows"]) == (False, False)
    run = models["block"].denoise(PROMPT, **SETTINGS)
    assert run.explore(lens=logit_lens(models["block"], run)).manifest["models"][0]["masks"] is True
