"""A run that diverges stops, says so, and leaves the last good checkpoint."""

import math

import pytest
import torch

from diffusion_lens.training import TrainingConfig, finetune, masked_diffusion_loss, train
from diffusion_lens.training.trainer import RunFolder

CONFIG = TrainingConfig(steps=6, batch_size=16, warmup=2)


def diverging(at, what="loss"):
    """SMDM's loss, until step `at` makes its value or its gradient NaN."""
    calls = []

    def objective(model, tokens, generator):
        calls.append(None)
        loss = masked_diffusion_loss(model, tokens, generator=generator)
        if len(calls) - 1 != at:
            return loss
        if what == "loss":
            return loss * math.nan
        weight = model.blocks[0].mlp.W_out
        return loss + 0 * (weight - weight).pow(2).sum().sqrt()  # 0 · sqrt'(0): a gradient of NaN under a sound loss

    return objective


def finite(model):
    return all(bool(weight.isfinite().all()) for weight in model.parameters())


@pytest.mark.parametrize(("at", "what"), [(0, "gradient"), (3, "loss"), (5, "gradient")])
def test_the_last_good_checkpoint_stays(new_model, tokens, tmp_path, at, what):
    model = new_model()
    with pytest.raises(FloatingPointError, match=rf"{what} is nan in step {at} of 6: the training has diverged.*lr"):
        train(
            model,
            tokens,
            CONFIG,
            objective=diverging(at, what),
            folder=tmp_path,
            checkpoint_every=2,
            progress=False,
        )
    assert finite(model)
    good = {0: 0, 3: 2, 5: 4}[at]
    assert RunFolder(tmp_path).checkpoint.exists() == (good > 0)
    if good:
        whole = train(new_model(), tokens, CONFIG, objective=diverging(-1), progress=False)
        again = train(new_model(), tokens, CONFIG, objective=diverging(-1), folder=tmp_path, progress=False)
        assert again.record["starts"][-1]["step"] == good
        assert torch.equal(again.losses, whole.losses)


def test_the_error_names_the_checkpoint(new_model, tokens, tmp_path):
    with pytest.raises(FloatingPointError, match=r"checkpoint.safetensors contains the last good one, after 2 steps"):
        train(new_model(), tokens, CONFIG, objective=diverging(3), folder=tmp_path, checkpoint_every=2, progress=False)
    with pytest.raises(FloatingPointError, match="no checkpoint was saved before"):
        train(new_model(), tokens, CONFIG, objective=diverging(3), progress=False)


@pytest.mark.parametrize("kind", ["mdm", "ar"])
def test_a_learning_rate_beyond_all_bounds_exports_nothing(kind, new_model, toy, tmp_path):
    config = TrainingConfig(steps=6, batch_size=16, warmup=0, lr=1e37)
    with pytest.raises(FloatingPointError, match="the training has diverged"):
        finetune(new_model(kind), toy.facts()[:30], config, tmp_path / "out", checkpoint_every=1, progress=False)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "training" / "record.safetensors").exists()


def test_a_damaged_model_is_refused_in_the_first_step(new_model, tokens):
    model = new_model()
    with torch.no_grad():
        model.blocks[0].mlp.W_out[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="the loss is nan in step 0"):
        train(model, tokens, CONFIG, progress=False)


def test_weights_that_overflow_in_the_last_step_are_not_returned(new_model, tokens):
    """The loss of that step is still sound; without a look at the weights the run would count as complete."""
    config = TrainingConfig(steps=1, batch_size=16, warmup=0, lr=3e37, weight_decay=11.0, decay_norms=True)
    with pytest.raises(FloatingPointError, match=r"the largest entry of .* is (nan|inf) in step 0 of 1"):
        train(new_model(), tokens, config, progress=False)
