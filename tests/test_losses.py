"""The losses against the authors' numbers, and the noise against its distribution."""

import pytest
import torch
from small_networks import small_architecture

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.model.loss import autoregressive_loss, hide, masked_diffusion_loss, own_loss


def small(attention_dir="bidirectional", readout="in_place"):
    masked = attention_dir == "bidirectional"
    words = dict(d_vocab=11 + masked, d_vocab_out=11, n_ctx=16, mask_token_id=11 if masked else None)
    architecture = small_architecture(attention_dir=attention_dir, readout=readout, **words)
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"), seed=3)


def total_gradient_norm(model):
    return torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()


def test_losses_and_gradients_are_the_authors(golden):
    expected = golden.tensors("likelihood")
    if golden.kind == "mdm":
        noise = {name: expected[f"sft.{name}"] for name in ("noisy", "p_mask")}
        loss = masked_diffusion_loss(golden.model, expected["sft.tokens"], **noise)
    else:
        loss = autoregressive_loss(golden.model, expected["sft.tokens"])
    loss.backward()
    torch.testing.assert_close(loss, expected["sft.loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(total_gradient_norm(golden.model), expected["sft.grad_norm_total"], rtol=1e-4, atol=0)
    golden.model.zero_grad()


@pytest.mark.parametrize("readout", ["in_place", "shifted"])
def test_each_masked_token_is_read_where_the_model_predicts_it(readout):
    model = small(readout=readout)
    tokens = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(0))
    hidden = torch.tensor([[1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0]]).bool()
    noisy, p_mask = tokens.masked_fill(hidden, 11), torch.linspace(0.1, 1, 21).view(3, 7)
    logits = model(noisy)
    if readout == "shifted":
        logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
    log_p = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    expected = -(log_p / p_mask)[hidden].sum() / 21
    torch.testing.assert_close(masked_diffusion_loss(model, tokens, noisy, p_mask), expected)


def test_nothing_masked_is_no_loss_and_no_gradient():
    model = small()
    tokens = torch.arange(8)[None]
    loss = masked_diffusion_loss(model, tokens, tokens, torch.ones(1, 8))
    loss.backward()
    assert loss == 0
    assert total_gradient_norm(model) == 0


def test_the_generator_decides_the_noise():
    model = small()
    tokens = torch.arange(8).repeat(4, 1)
    first, again, other = (
        masked_diffusion_loss(model, tokens, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


def test_noise_masks_with_its_probability_and_covers_the_unit_interval():
    n_batch, n_pos = 64, 400
    tokens = torch.randint(11, (n_batch, n_pos), generator=torch.Generator().manual_seed(1))
    noisy, p_mask = hide(tokens, 11, generator=torch.Generator().manual_seed(2))
    hidden = noisy == 11
    assert torch.equal(noisy[~hidden], tokens[~hidden])
    p = p_mask[:, 0]
    assert torch.equal(p_mask, p[:, None].expand(n_batch, n_pos))
    # Stratified: one row in each of 64 equal parts of [0, 1).
    assert ((p - 1e-3) / (1 - 1e-3) * n_batch).floor().sort().values.unique().numel() >= n_batch - 1
    assert (hidden.float().mean(dim=1) - p).abs().max() < 0.1
    assert p.min() >= 1e-3


def test_masking_with_a_generator_leaves_the_global_one_unchanged():
    before = torch.get_rng_state()
    hide(torch.zeros(2, 3, dtype=torch.long), 11, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_objective_follows_the_attention_direction():
    tokens = torch.arange(8).repeat(2, 1)
    causal, masked = small("causal", "shifted"), small()
    generator = torch.Generator().manual_seed(0)
    assert own_loss(causal, tokens, generator) == autoregressive_loss(causal, tokens)
    expected = masked_diffusion_loss(masked, tokens, generator=torch.Generator().manual_seed(0))
    assert own_loss(masked, tokens, generator) == expected


def test_errors_name_the_culprit():
    tokens = torch.arange(8)[None]
    with pytest.raises(ValueError, match=r"'small' has no \[MASK\].*autoregressive_loss"):
        masked_diffusion_loss(small("causal", "shifted"), tokens)
    with pytest.raises(ValueError, match="noisy and p_mask go together"):
        masked_diffusion_loss(small(), tokens, tokens)


def test_the_model_gives_its_own_loss(either):
    tokens = either.tensors("likelihood")["sft.tokens"]
    generators = [torch.Generator().manual_seed(3) for _ in range(3)]
    loss = either.model(tokens, return_type="loss", generator=generators[0])
    logits, again = either.model(tokens, return_type="both", generator=generators[1])
    assert logits.shape == (*tokens.shape, either.model.cfg.d_vocab_out)
    torch.testing.assert_close(loss, again)
    torch.testing.assert_close(loss, own_loss(either.model, tokens, generators[2]))


def test_padding_does_not_enter_the_next_token_loss():
    model = small("causal", "shifted")
    tokens = torch.arange(12)[None] % 11
    real = torch.ones_like(tokens)
    real[:, :4] = 0
    padded = model(tokens, return_type="loss", attention_mask=real)
    torch.testing.assert_close(padded, model(tokens[:, 4:], return_type="loss"))


def test_masks_in_the_text_of_a_loss_are_refused():
    with pytest.raises(ValueError, match="unmasked text"):
        small()(torch.tensor([[1, 11, 2]]), return_type="loss")


def test_a_loss_does_not_go_with_a_partial_run(either):
    with pytest.raises(ValueError, match="stop_at_layer"):
        either.model(torch.arange(4)[None], return_type="loss", stop_at_layer=1)


def test_one_token_has_no_next_token_loss():
    with pytest.raises(ValueError, match="at least two tokens"):
        autoregressive_loss(small("causal", "shifted"), torch.tensor([[5]]))
