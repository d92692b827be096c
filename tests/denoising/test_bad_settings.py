"""Bad settings get an error that names the culprit and the cure, and leave nothing behind."""

import pytest
import torch

PROMPT = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(length=10, steps=0), "steps=0"),
        (dict(length=10, steps=-3), "steps=-3"),
        (dict(length=2), "length=2 counts the prompt too"),
        (dict(length=3), "nothing to fill"),
        (dict(length=129), "n_ctx=128"),
        (dict(), "nothing to fill"),
        (dict(length=10, max_new_tokens=3), "not both"),
        (dict(max_new_tokens=-1), "max_new_tokens=-1"),
        (dict(length=10, cfg_scale=float("nan")), "cfg_scale=nan"),
        (dict(length=10, cfg_scale=-1.0), "cfg_scale=-1.0"),
        (dict(length=10, temperature=-0.5), "temperature=-0.5"),
        (dict(length=10, temperature=float("inf")), "temperature=inf"),
        (dict(length=10, sampler="confidnce"), "nearest: confidence"),
        (dict(length=10, seed=[1, 2]), "2 seeds for 1 rows"),
        (dict(length=10, attention_mask=torch.ones(1, 4)), "must match the tokens"),
    ],
)
def test_settings(either, options, message):
    with pytest.raises(ValueError, match=message):
        either.model.denoise(PROMPT, **options)


def test_an_unknown_hook_point(either):
    with pytest.raises(KeyError, match="nearest are"):
        either.model.denoise(PROMPT, length=6, fwd_hooks=[("denoise.hook_logit", lambda a, hook: None)])


def test_a_causal_model_writes_left_to_right_only(either):
    if either.kind == "mdm":
        return
    with pytest.raises(ValueError, match="use 'left_to_right'"):
        either.model.denoise(PROMPT, length=6, sampler="confidence")


def test_an_empty_batch(either, tiny):
    with pytest.raises(ValueError, match="needs at least one token"):
        either.model.denoise(torch.zeros(0, 3, dtype=torch.long), length=6)
    with pytest.raises(ValueError, match="the list is empty"):
        tiny.denoise([], length=6)


def test_a_prompt_that_is_all_masks(either):
    if either.kind == "ar":
        return
    with pytest.raises(ValueError, match=r"row 1 is all \[MASK\]"):
        either.model.denoise(torch.tensor([[5, 512], [512, 512]]), length=4)


def test_an_unknown_scope():
    from diffusion_lens.denoising.samplers import Confidence

    with pytest.raises(ValueError, match="scope='rows'"):
        Confidence(scope="rows")
