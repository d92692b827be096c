"""The probe of the denoising time equals least squares on stacked activations, and finds what was planted."""

import re
from functools import partial

import pytest
import torch
from oracles.memory import peak_of_tensors
from torch.testing import assert_close

from diffusion_lens.analysis import LinearProbe, RidgeSettings, probe, probe_time
from diffusion_lens.data import toy_facts
from diffusion_lens.interventions import named

NAME = "blocks.1.hook_resid_post"
FACTS = toy_facts.load().facts(trained="both", asked="p2d")[::7]
PENALTY = 1e-3
ONE = RidgeSettings(penalties=(PENALTY,), seed=3)


def denoise(model, n=8, **settings):
    """Runs of one batch with their caches."""
    settings = settings if model.cfg.is_autoregressive else {"steps": 5, **settings}
    prompts = [fact.prompt for fact in FACTS[:n]]
    return model.denoise_with_cache(prompts, names_filter=NAME, max_new_tokens=5, **settings)


def by_hand(model, run, cache, ridge, mean, masked=True):
    """R² on the held-out rows of ridge regression, as least squares on stacked states with rows for the penalty."""
    states, times = cache.stack(NAME).double(), torch.tensor(run.record["times"][:-1]).double()
    is_masked = ~run.given if model.cfg.uniform_noise else run.is_masked(run.canvases[:-1])
    chosen = (is_masked & run.real).expand_as(run.canvases[:-1]) if masked else run.real & (run.canvases[:-1] != -1)
    parts, rows = ridge.split(len(run)), {"fitted": ([], []), "held_out": ([], [])}
    for step in range(len(times)):
        for row, part in enumerate(parts):
            own = states[step, row, chosen[step, row]]
            own = own.mean(0, keepdim=True) if mean and len(own) else own
            for x in own:
                xs, ys = rows["held_out" if part == "held_out" else "fitted"]
                xs.append(x)
                ys.append(times[step])
    (x, y), (x_test, y_test) = ((torch.stack(xs), torch.stack(ys)) for xs, ys in rows.values())
    centred, target = x - x.mean(0), y - y.mean()
    penalty = PENALTY * centred.square().sum() / x.shape[1]
    augmented = torch.cat([centred, penalty.sqrt() * torch.eye(x.shape[1], dtype=torch.float64)])
    w = torch.linalg.lstsq(augmented, torch.cat([target, target.new_zeros(x.shape[1])])).solution
    predicted = (x_test - x.mean(0)) @ w + y.mean()
    return w, 1 - (y_test - predicted).square().sum() / (y_test - y_test.mean()).square().sum()


@pytest.mark.parametrize("rows", ["position", "canvas"])
@pytest.mark.parametrize(("small", "guidance"), [("mdm", 0.0), ("mdm", 0.6), ("uniform", 0.0)], indirect=["small"])
def test_probe_is_least_squares_on_stacked_states(small, rows, guidance):
    run, cache = denoise(small, cfg_scale=guidance)
    probe = probe_time(small, run, NAME, rows=rows, ridge=ONE)
    weights, r2 = by_hand(small, run, cache, ONE, mean=rows == "canvas")
    assert_close(probe.weights[NAME].double(), weights, rtol=1e-3, atol=1e-4)
    assert probe.score.item() == pytest.approx(r2.item(), abs=1e-4)


@pytest.mark.parametrize("small", ["ar"], indirect=True)
def test_probe_of_a_text_that_grows(small):
    run, cache = denoise(small)
    assert not run.real.all()
    probe = probe_time(small, run, NAME, positions="all", ridge=ONE)
    assert probe.score.item() == pytest.approx(
        by_hand(small, run, cache, ONE, mean=False, masked=False)[1].item(), abs=1e-4
    )
    with pytest.raises(ValueError, match=r"has no \[MASK\]: 'predicting' selects"):
        probe_time(small, run, NAME)
    with pytest.raises(ValueError, match="texts cannot be masked for it"):
        probe_time(small, ["Gustav is", "Tilda is", "Ada is"], NAME)


def test_a_planted_signal_is_found_and_a_shuffled_one_is_not(small):
    direction = torch.randn(small.cfg.d_model, generator=torch.Generator().manual_seed(0))
    plant = named("plants the time", lambda x, hook: x + 20 * hook.step.t * direction)
    with small.hooks(fwd_hooks=[("blocks.0.hook_resid_post", plant)]):
        run, _ = denoise(small, 12)
        probe = probe_time(small, run, ["hook_embed", "blocks.0.hook_resid_post"], positions="predicting")
    before, after = probe.score.tolist()
    assert after > 0.999
    assert before < 0.9
    assert (probe.score_control < 0.1).all()
    cosine = torch.cosine_similarity(probe.weights["blocks.0.hook_resid_post"], direction, dim=0)
    assert cosine.abs() > 0.3


def test_a_planted_label_of_the_runs_is_found_and_a_shuffled_one_is_not(small):
    direction = torch.randn(small.cfg.d_model, generator=torch.Generator().manual_seed(0))
    labels = torch.linspace(-1, 1, 20)
    plant = named("plants the label", lambda x, hook: x + 5 * labels.to(x)[:, None, None] * direction)
    with small.hooks(fwd_hooks=[("blocks.0.hook_resid_post", plant)]):
        run = denoise(small, 20)[0]
        found = probe(small, run, labels.tolist(), "blocks.0.hook_resid_post", positions="predicting")
        with pytest.raises(ValueError, match="3 labels for 20 texts or rows of trajectories"):
            probe(small, run, [0, 1, 0])
    assert found.score.item() > 0.9 > 0.1 > found.score_control.item()
    assert found.record["label"] == "label"
    assert found.plot().get_title() == "Linear probe of the label"


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_the_mask_embedding_has_no_time_and_the_mean_of_the_canvas_has(small):
    run = small.denoise([fact.prompt for fact in FACTS[:60]], length=12, steps=5)
    point = "blocks.0.hook_resid_pre"
    assert probe_time(small, run, point).score.item() <= 1e-6
    assert probe_time(small, run, point, positions="all", rows="canvas").score.item() > 0.6


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_the_position_alone_is_a_control(small):
    run, _ = denoise(small)
    probe = probe_time(small, run, NAME, ridge=ONE)
    masked, times = run.is_masked(run.canvases[:-1]) & run.real, run.record["times"][:-1]
    parts = ONE.split(len(run))
    rows = [(position, times[step], parts[row] == "held_out") for step, row, position in masked.nonzero().tolist()]
    fitted = [(position, t) for position, t, held_out in rows if not held_out]

    def mean(of_position):
        own = [t for position, t in fitted if position == of_position] or [t for _, t in fitted]
        return sum(own) / len(own)

    tested = torch.tensor([[t, mean(position)] for position, t, held_out in rows if held_out])
    residual = (tested[:, 0] - tested[:, 1]).square().sum() / (tested[:, 0] - tested[:, 0].mean()).square().sum()
    assert probe.score_position == pytest.approx(1 - residual.item(), abs=1e-5)
    assert probe.record["n_rows"] == {
        part: int(masked[:, [own == part for own in parts]].sum()) for part in ("train", "validation", "held_out")
    }


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_texts_are_masked_at_random(tiny):
    texts = [fact.prompt + fact.answer for fact in FACTS[:40]]
    probe = probe_time(tiny, texts, samples=4, ridge=RidgeSettings(seed=1))
    assert len(probe.names) == tiny.cfg.n_layers + 1
    assert -0.1 < probe.score[0] <= 1e-6
    assert probe.score[2] > 0.2
    assert probe.score_control.max() < 0.1
    assert probe.score_position < 0.1
    first, again, other = (
        probe_time(tiny, texts[:6], NAME, samples=2, ridge=RidgeSettings(seed=seed)).score for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_penalty_is_chosen_on_the_validation_part(small):
    run, _ = denoise(small)
    settings = RidgeSettings(penalties=(1e-5, 10.0))
    probe = probe_time(small, run, NAME, positions="predicting", ridge=settings)
    alone = [
        probe_time(small, run, NAME, positions="predicting", ridge=RidgeSettings(penalties=(penalty,)))
        for penalty in settings.penalties
    ]
    chosen = alone[settings.penalties.index(probe.penalty.item())]
    assert torch.equal(chosen.score, probe.score)
    assert alone[0].score_fitted >= alone[1].score_fitted


def test_saved_probes_are_read_back_and_predict(small, tmp_path):
    run, cache = denoise(small)
    names = [NAME, "blocks.0.attn.hook_z"]
    probe = probe_time(small, run, names, positions="predicting")
    loaded = LinearProbe.load(probe.save(tmp_path / "probe.safetensors"))
    assert loaded.record == probe.record
    assert repr(loaded) == repr(probe)
    assert torch.equal(loaded.score_control, probe.score_control)
    assert probe.plot().lines
    states = cache.stack(NAME)
    expected = states @ probe.weights[NAME] + probe.bias[probe.names.index(NAME)]
    assert_close(loaded.predict(NAME, states), expected)
    heads = torch.randn(2, 5, small.cfg.n_heads, small.cfg.d_head)
    assert loaded.predict(names[1], heads).shape == (2, 5)
    with pytest.raises(KeyError, match="no probe of"):
        loaded.predict("blocks.1.hook_resid_pre", states)
    with pytest.raises(ValueError, match="the activations are"):
        loaded.predict(NAME, states[..., :3])


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_what_does_not_fit_is_refused(small):
    run, _ = denoise(small, 2)
    texts = ["Gustav is", "Tilda is", "Ada is"]
    for inputs, settings, message in (
        (run, {}, "there are 2 texts .* at least 3"),
        (texts, {"rows": "mean"}, "rows='mean' is unknown; it must be one of position, canvas"),
        (texts, {"max_bytes": 1000}, r"the sums of 3 hook points take \d+,\d+ bytes"),
        (["Gustav [MASK]"] * 3, {}, r"text 0 contains \[MASK\]"),
        (texts, {"samples": 0}, "samples=0"),
        (texts, {"positions": "answer"}, "needs queries"),
    ):
        with pytest.raises(ValueError, match=message):
            probe_time(small, inputs, **settings)
    for settings, message in (
        ({"penalties": ()}, "at least one"),
        ({"penalties": (0.0,)}, "above 0"),
        ({"held_out": 0.9}, "sum below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            RidgeSettings(**settings)


def test_every_unit_is_in_one_part():
    for n_units in (3, 4, 5, 10, 101):
        parts = RidgeSettings(seed=n_units).split(n_units)
        assert len(parts) == n_units
        assert set(parts) == {"train", "validation", "held_out"}
    assert parts.count("held_out") == 20


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_tensors_of_a_call_take_at_most_the_budget(tiny):
    texts = [" ".join(["Gustav is the brave"] * 8)] * 3
    probe, results = partial(probe_time, tiny, texts, "blocks.0.hook_resid_pre", positions="all", samples=24), []
    with pytest.raises(ValueError, match="the sums of 1 hook points take") as refused:
        probe(max_bytes=1)
    budget = 2 * int(re.findall(r"take ([\d,]+)", str(refused.value))[0].replace(",", ""))
    assert 0.2 * budget < peak_of_tensors(lambda: results.append(probe(max_bytes=budget))) <= budget
    assert_close(results[0].score_fitted, probe().score_fitted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_penalty_that_cannot_be_chosen_is_refused(small):
    texts = ["Gustav Geisser is the brave", "Tilda Drusser was the young", "Ada is the brave"]
    with pytest.raises(
        ValueError, match=r"validation part is not defined, .* all have the same time or label. Give more texts"
    ):
        probe_time(small, texts, NAME, samples=1, positions="all")
