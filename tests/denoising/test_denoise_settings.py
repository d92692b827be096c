"""Settings are checked once, plain inside, and the same as keywords and as one object. Errors name culprit and cure."""

import numpy as np
import pytest
import torch
from jaxtyping import config

from diffusion_lens.denoising import DenoiseSettings
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.denoising.samplers import Confidence, LeftToRight

PROMPT = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        (dict(steps=0), "steps=0"),
        (dict(steps=2.5), "steps=2.5"),
        (dict(cfg_scale=float("nan")), "cfg_scale=nan"),
        (dict(temperature=-1), "temperature=-1.0"),
        (dict(sampler="confidnce"), "nearest: confidence"),
        (dict(sampler=Confidence), "with brackets"),
        (dict(seed="7"), "seed='7'"),
        (dict(seed=[1, 2.5]), r"seed\[1\]=2.5"),
    ],
)
def test_settings_are_refused_where_they_are_made(setting, error, monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # as when users call the library
    with pytest.raises((ValueError, TypeError), match=error):
        DenoiseSettings(**setting)


def test_settings_keep_plain_numbers(monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    given = dict(steps=np.int64(4), cfg_scale=np.float32(0.5), temperature=torch.tensor(1.0), seed=np.array([3, 4]))
    settings = DenoiseSettings(sampler="smdm", **given)
    assert settings == DenoiseSettings(4, Confidence(scope="batch"), 0.5, 1.0, (3, 4))
    assert {type(value) for value in vars(settings).values()} == {int, float, tuple, Confidence}
    assert settings.describe()["seed"] == [3, 4]


def test_settings_fit_the_model(either):
    guided, masked = DenoiseSettings(cfg_scale=0.5), either.kind == "mdm"
    assert guided.fitted_to(either.model.cfg).cfg_scale == (0.5 if masked else 0.0)
    if masked:
        assert guided.on(either.model.cfg, "it").sampler == Confidence()
        return
    assert DenoiseSettings().on(either.model.cfg, "it").sampler == LeftToRight()
    with pytest.raises(ValueError, match=r"'it' has no \[MASK\]"):
        guided.on(either.model.cfg, "it")


def test_the_objects_give_the_run_of_the_keywords(either):
    keywords = either.model.denoise(PROMPT, length=9, steps=3, temperature=0.7, seed=3)
    canvas = lay_out(either.model, PROMPT, length=9)
    objects = denoise(either.model, canvas, DenoiseSettings(steps=3, temperature=0.7, seed=3))
    assert torch.equal(objects.canvases, keywords.canvases)
    differing = {name for name in keywords.record if keywords.record[name] != objects.record[name]}
    assert differing <= {"seconds"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(length=10, steps=-3), "steps=-3"),
        (dict(length=2), "length=2 counts the prompt too"),
        (dict(length=3), "nothing to fill"),
        (dict(length=129), "n_ctx=128"),
        (dict(), "nothing to fill"),
        (dict(length=10, max_new_tokens=3), "not both"),
        (dict(max_new_tokens=-1), "max_new_tokens=-1"),
        (dict(length=10, cfg_scale=-1.0), "cfg_scale=-1.0"),
        (dict(length=10, temperature=-0.5), "temperature=-0.5"),
        (dict(length=10, temperature=float("inf")), "temperature=inf"),
        (dict(length=10, seed=[1, 2]), "2 seeds for 1 rows"),
        (dict(length=10, attention_mask=torch.ones(1, 4)), "must match the tokens"),
    ],
)
def test_what_does_not_fit_prompt_or_model_is_refused(either, options, message):
    with pytest.raises(ValueError, match=message):
        either.model.denoise(PROMPT, **options)


def test_an_unknown_hook_point(either):
    with pytest.raises(KeyError, match="nearest are"):
        either.model.denoise(PROMPT, length=6, fwd_hooks=[("denoise.hook_logit", lambda a, hook: None)])


@pytest.mark.parametrize("either", ["ar"], indirect=True)
def test_a_causal_model_writes_left_to_right_only(either):
    with pytest.raises(ValueError, match=r"that fit: left_to_right$"):
        either.model.denoise(PROMPT, length=6, sampler="confidence")


def test_an_empty_batch(either, tiny):
    with pytest.raises(ValueError, match="needs at least one token"):
        either.model.denoise(torch.zeros(0, 3, dtype=torch.long), length=6)
    with pytest.raises(ValueError, match="the list is empty"):
        tiny.denoise([], length=6)


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_a_prompt_that_is_all_masks(either):
    with pytest.raises(ValueError, match=r"row 1 is all \[MASK\]"):
        either.model.denoise(torch.tensor([[5, 512], [512, 512]]), length=4)


def test_an_unknown_scope():
    with pytest.raises(ValueError, match="scope='rows'"):
        Confidence(scope="rows")
