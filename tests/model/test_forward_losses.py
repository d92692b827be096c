"""The loss that a model gives of itself: which noise it is taken under, and how it splits into places."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.model.loss import autoregressive_loss, hide, masked_batch, masked_diffusion_loss

DREAM = Path(__file__).parents[1] / "golden" / "dream"
on_mdm = pytest.mark.parametrize("either", ["mdm"], indirect=True)


@pytest.fixture
def tokens(either):
    return either.tensors("likelihood")["sft.tokens"]


def surprise(logits, targets):
    return -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def test_the_loss_in_eval_mode_is_the_same_at_every_call(either, tokens):
    first = either.model(tokens, return_type="loss")
    torch.rand(7)
    assert either.model(tokens, return_type="loss") == first
    assert either.model(tokens, return_type="both")[1].item() == pytest.approx(first.item(), rel=1e-5)


def test_the_noise_of_eval_mode_touches_no_global_random_numbers(either, tokens):
    before = torch.get_rng_state()
    either.model(tokens, return_type="loss")
    assert torch.equal(torch.get_rng_state(), before)


def test_an_ablated_run_is_taken_under_the_same_noise(either, tokens):
    """Nothing ablated, nothing changed: the two losses compare."""
    nothing = [("blocks.0.hook_attn_out", lambda a, hook: a)]
    hooked = either.model.run_with_hooks(tokens, return_type="loss", fwd_hooks=nothing)
    assert hooked == either.model(tokens, return_type="loss")


@on_mdm
def test_noise_is_drawn_in_train_mode_and_from_a_generator(either, tokens):
    model = either.model.train()
    try:
        assert len({model(tokens, return_type="loss").item() for _ in range(4)}) > 1
    finally:
        model.eval()
    generator = torch.Generator().manual_seed(5)
    drawn = [model(tokens, return_type="loss", generator=generator).item() for _ in range(4)]
    assert len(set(drawn)) == 4
    again = masked_diffusion_loss(model, tokens, generator=torch.Generator().manual_seed(5))
    assert drawn[0] == pytest.approx(again.item(), rel=1e-5)


def test_samples_are_a_mean_over_noises_whose_times_are_spread(either, tokens):
    """Against one batch of copies under the same noise, and the loss by position against its sum by hand."""
    model, n = either.model, 6
    loss = model(tokens, return_type="loss", samples=n)
    if either.kind == "ar":
        torch.testing.assert_close(loss, autoregressive_loss(model, tokens))
        return
    copies = tokens.repeat(n, 1)
    noisy, p = hide(copies, model.cfg.mask_token_id, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loss, masked_diffusion_loss(model, copies, noisy, p), rtol=1e-5, atol=1e-6)
    by_position = model(tokens, return_type="loss", samples=n, loss_per_token=True)
    expected = (surprise(model(noisy), copies) / p * (noisy != copies)).unflatten(0, (n, -1)).mean(0)
    torch.testing.assert_close(by_position, expected, rtol=1e-4, atol=1e-5)


@on_mdm
def test_more_samples_come_closer_to_one_another(either, tokens):
    few, many = (
        torch.stack(
            [
                either.model(tokens, return_type="loss", samples=n, generator=torch.Generator().manual_seed(seed))
                for seed in range(6)
            ]
        ).std()
        for n in (1, 8)
    )
    assert many < few


def test_loss_is_the_mean_of_the_losses_per_position(either, tokens):
    by_position = either.model(tokens, return_type="loss", loss_per_token=True)
    n_pos = tokens.shape[1] - (either.kind == "ar")  # of the first token an autoregressive model has no prediction
    assert by_position.shape == (tokens.shape[0], n_pos)
    torch.testing.assert_close(by_position.mean(), either.model(tokens, return_type="loss"))
    if either.kind == "ar":
        expected = F.cross_entropy(
            either.model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        torch.testing.assert_close(by_position.flatten(), expected, rtol=1e-4, atol=1e-5)


def test_padding_contributes_no_loss(either, tokens):
    real = torch.ones_like(tokens)
    real[0, -5:] = 0
    by_position = either.model(tokens, return_type="loss", loss_per_token=True, attention_mask=real)
    assert not by_position[0, -5:].any()
    counted = int(real.sum()) - (len(tokens) if either.kind == "ar" else 0)
    loss = either.model(tokens, return_type="loss", attention_mask=real)
    torch.testing.assert_close(by_position.sum() / counted, loss)


def test_loss_fn_scores_the_logits_of_a_run(either, tokens):
    model = either.model
    if either.kind == "ar":
        logits, loss = model(tokens, return_type="both")
        torch.testing.assert_close(model.loss_fn(logits, tokens), loss)
        real = torch.ones_like(tokens)
        real[1, -4:] = 0
        by_position = model.loss_fn(logits, tokens, real, per_token=True)
        assert by_position.shape == (tokens.shape[0], tokens.shape[1] - 1)
        assert not by_position[1, -4:].any()
        return
    noisy, p = model.hide(tokens)
    logits, loss = model(tokens, return_type="both")
    torch.testing.assert_close(logits, model(noisy), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.loss_fn(logits, tokens, noisy=noisy, p_mask=p), loss)
    by_position = model.loss_fn(logits, tokens, per_token=True, noisy=noisy, p_mask=p)
    torch.testing.assert_close(
        by_position, model(tokens, return_type="loss", loss_per_token=True), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match=r"noisy, p_mask = model.hide\(tokens\)"):
        model.loss_fn(model(tokens), tokens)


def test_the_hidden_canvas_keeps_padding_and_the_noise_is_its_generators(either, tokens):
    model = either.model
    if either.kind == "ar":
        with pytest.raises(ValueError, match=r"no \[MASK\]"):
            model.hide(tokens)
        return
    real = torch.ones_like(tokens)
    real[:, -3:] = 0
    noisy, p = model.hide(tokens, real, generator=torch.Generator().manual_seed(2))
    expected, chance = hide(tokens, model.cfg.mask_token_id, generator=torch.Generator().manual_seed(2))
    assert torch.equal(noisy[:, :-3], expected[:, :-3])
    assert torch.equal(noisy[:, -3:], tokens[:, -3:])
    assert torch.equal(p, chance)


@on_mdm
def test_a_text_that_the_fixed_noise_does_not_touch_is_no_loss_of_zero(either):
    short = torch.tensor([[7]])
    noisy, _ = hide(short, either.model.cfg.mask_token_id, generator=torch.Generator().manual_seed(0))
    assert torch.equal(noisy, short)
    with pytest.raises(ValueError, match=r"masks none of the 1 tokens.*samples=32"):
        either.model(short, return_type="loss")
    assert either.model(short, return_type="loss", samples=32) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(return_type="loss", samples=0), "samples=0"),
        (dict(return_type="both", samples=2), "samples=2 with return_type='both'"),
        (dict(samples=2), "require return_type='loss'"),
        (dict(loss_per_token=True), "require return_type='loss'"),
    ],
)
def test_bad_settings(either, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        either.model(tokens, **options)


def test_logits_of_another_run_are_refused(either, tokens):
    with pytest.raises(ValueError, match=r"the logits have shape \[1, 3, 4\]"):
        either.model.loss_fn(torch.zeros(1, 3, 4), tokens)


@on_mdm
def test_the_error_about_masks_names_only_what_can_be_passed(either, tokens):
    masked = tokens.clone()
    masked[0, 0] = either.model.cfg.mask_token_id
    with pytest.raises(ValueError, match=r"masked_diffusion_loss\(model, tokens, noisy, p_mask\)"):
        either.model(masked, return_type="loss")


def test_samples_is_a_whole_number_of_any_kind_but_no_bool(either):
    tokens = torch.arange(5, 25)[None]
    for samples in (np.int64(2), torch.tensor(2)):
        assert either.model(tokens, return_type="loss", samples=samples) == either.model(
            tokens, return_type="loss", samples=2
        )
    for wrong, error, message in (
        (True, TypeError, "samples=True is a bool"),
        (0, ValueError, "samples=0; it must be at least 1"),
    ):
        with pytest.raises(error, match=message):
            either.model(tokens, return_type="loss", samples=wrong)
    with pytest.raises(ValueError, match=r"samples=2 with return_type='both'.*use samples=1 there"):
        either.model(tokens, return_type="both", samples=2)


def test_the_error_of_a_misspelt_argument_names_the_nearest(tiny):
    with pytest.raises(TypeError, match=r"argument 'stop_at_layr'; the nearest is 'stop_at_layer'"):
        tiny(torch.tensor([[1, 2]]), stop_at_layr=1)
    with pytest.raises(TypeError, match=r"argument 'atention_mask'; the nearest is 'attention_mask'"):
        tiny.run_with_hooks(torch.tensor([[1, 2]]), return_type="loss", atention_mask=None, fwd_hooks=[])
    with pytest.raises(TypeError, match=r"run_with_cache\(\) .* argument 'names_filtr'; the nearest is 'names_filter'"):
        tiny.run_with_cache(torch.tensor([[1, 2]]), names_filtr="hook_embed")
    with pytest.raises(TypeError, match=r"run_with_cache\(\) .* argument 'stop_at'; the nearest is 'stop_at_layer'"):
        tiny.run_with_cache(torch.tensor([[1, 2]]), stop_at=1)
    with pytest.raises(TypeError, match=r"argument 'max_new_token'; the nearest is 'max_new_tokens'"):
        tiny.generate("Gustav", max_new_token=3)
    with pytest.raises(TypeError, match=r"argument 'step_filter'; the nearest is 'steps_filter'"):
        tiny.denoise_with_cache("Gustav", "hook_embed", step_filter=3)
    with pytest.raises(TypeError, match=r"from_pretrained\(\) .* argument 'fold_layer_norm'; the nearest is 'fold_ln'"):
        type(tiny).from_pretrained("tiny-mdm", fold_layer_norm=True)
    with pytest.raises(TypeError, match=r"argument 'foo'; it takes input, return_type, .*generator"):
        tiny(torch.tensor([[1, 2]]), foo=1)


def test_the_signature_that_users_see_names_every_argument():
    parameters = inspect.signature(HookedDiffusionTransformer.forward).parameters
    assert not [name for name, each in parameters.items() if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    lens = {"input", "return_type", "loss_per_token", "prepend_bos", "start_at_layer", "attention_mask"}
    assert lens | {"stop_at_layer", "past_kv_cache", "logits_at", "samples", "generator"} <= set(parameters)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_a_forward_with_its_own_keywords_takes_them_from_run_with_hooks(tiny, monkeypatch):
    tokens, forward, given = torch.tensor([[1, 2]]), tiny.forward, []

    def own(*args, flavour=None, **kwargs):
        given.append(flavour)
        return forward(*args, **kwargs)

    monkeypatch.setattr(tiny, "forward", own)
    tiny.run_with_hooks(tokens, flavour="a", fwd_hooks=[])
    tiny.run_with_cache(tokens, flavour="b", names_filter="hook_embed")
    assert given == ["a", "b"]


def test_a_masked_first_position_is_not_read_in_padding():
    """Where the network predicts each position in the row before it."""
    model = HookedDiffusionTransformer.from_pretrained(DREAM, device="cpu")
    mask = model.cfg.mask_token_id
    tokens = torch.tensor([[3, 40, 5, 60, 7]])
    noisy = torch.tensor([[mask, 40, mask, 60, mask]])
    p_mask = torch.full((1, 5), 0.6)
    batch = masked_batch(model, tokens, noisy, p_mask)
    alone = batch.loss(model(batch.tokens, logits_at=batch.rows))

    padding = torch.full((1, 2), 9)
    real = torch.tensor([[False, False, True, True, True, True, True]])
    longer, longer_noisy = (torch.cat([padding, x], dim=1) for x in (tokens, noisy))
    padded = masked_batch(model, longer, longer_noisy, torch.full((1, 7), 0.6), real=real)
    beside = padded.loss(model(padded.tokens, attention_mask=real, logits_at=padded.rows))
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=1e-5)
