"""`DenoiseSettings`: checked once, plain inside, and the same run as the keywords give."""

import numpy as np
import pytest
import torch
from jaxtyping import config

from diffusion_lens.denoising import DenoiseSettings
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.prepare import denoise
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
