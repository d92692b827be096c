"""Recipes against the authors' numbers."""

import math

import jaxtyping
import pytest
import torch

from diffusion_lens.training import TrainingConfig, smdm_reverse, train


def their_rate(it, warmup_iters, max_iters, learning_rate=2e-4, min_lr=2e-5):
    """`get_lr` as ML-GSAI/SMDM's scripts describe it: up from 0, then half a cosine down to a tenth."""
    if it < warmup_iters:
        return learning_rate * it / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@pytest.mark.parametrize(("batch_size", "steps"), [(64, 562), (32, 1125)])
def test_the_reversal_recipe_has_the_authors_learning_rate(batch_size, steps):
    config = smdm_reverse(batch_size=batch_size)
    assert config.steps == steps
    for step in range(steps):
        assert config.lr_at(step) == pytest.approx(their_rate(step, 200, steps), rel=1e-12, abs=0)
    assert [config.lr_at(step) for step in (0, 1, 100, 200)] == pytest.approx([0, 1e-6, 1e-4, 2e-4])
    assert config.lr_at(steps - 1) == pytest.approx(2e-5, rel=1e-3)


def test_the_reversal_recipe_has_the_authors_settings():
    config = smdm_reverse(n_rows=100, epochs=3, batch_size=20)
    assert config.steps == 15
    assert (config.betas, config.weight_decay, config.decay_norms, config.clip) == ((0.9, 0.95), 0.1, True, 1.0)
    assert config.mixed_precision == "bf16"


def test_the_default_learning_rate_is_torchs_schedule():
    config = TrainingConfig(steps=1100, lr=1.0, warmup=100)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=99)
    down = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    for step in range(1100):
        assert config.lr_at(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        if step != 99:  # the first step of the cosine is its top
            (warm if step < 99 else down).step()
    assert config.lr_at(1100) == pytest.approx(0)


def test_passes_are_counted_in_whole_batches():
    assert smdm_reverse(10, 2, 8).steps == 2
    assert smdm_reverse(16, 1.5, 8).steps == 3
    with pytest.raises(ValueError, match="1 passes over 3 rows do not fill one batch of batch_size=4 rows"):
        smdm_reverse(3, 1, 4)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_norms_decay_if_requested(new_model, tokens):
    def indifferent(model, batch, generator):
        return 0 * model(batch).sum()

    for decay_norms in (False, True):
        model = new_model()
        config = TrainingConfig(steps=2, batch_size=4, warmup=0, lr=0.1, weight_decay=0.5, decay_norms=decay_norms)
        train(model, tokens, config, objective=indifferent, progress=False)
        expected = (1 - 0.1 * 0.5) * (1 - 0.05 * 0.5) if decay_norms else 1.0
        torch.testing.assert_close(model.ln_final.w, torch.full((16,), expected))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0; it must be at least 1"),
        ({"warmup": -1}, "warmup=-1"),
        ({"lr_end": -1e-5}, "lr_end=-1e-05"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"clip": 0.0}, r"clip=0\.0"),
        ({"clip": float("nan")}, "clip=nan; it must be above 0"),
        ({"warmup_from": 2}, "warmup_from is 2; it must be 0 or 1"),
        ({"mixed_precision": "half"}, "'half' is unknown; it must be one of no, bf16, fp16"),
        ({"batch_size": 4, "accumulate": 5}, "4 rows cannot be divided into accumulate=5 parts"),
    ],
)
def test_impossible_recipes_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**{"steps": 1, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 2.5}, r"steps=2.5 is a float; it must be a whole number"),
        ({"batch_size": True}, "batch_size=True is a bool"),
        ({"seed": "7"}, "seed='7' is a str"),
        ({"lr": "1e-3"}, "lr='1e-3' is a str; it must be a number"),
    ],
)
def test_recipes_of_the_wrong_kind_are_refused(settings, message):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(TypeError, match=message):
            TrainingConfig(**{"steps": 10, **settings})
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
