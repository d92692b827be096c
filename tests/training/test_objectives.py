"""The losses against the authors' numbers, and the noise against its distribution."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.training.objectives import OBJECTIVES, autoregressive_loss, hide, masked_diffusion_loss
from weight_conversion import Architecture, open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "lit_gpt"


def golden(variant, kind):
    folder = GOLDEN / variant / kind
    checkpoint = open_checkpoint(folder / "model.safetensors", folder / "lit_config.json")
    cfg = DiffusionConfig.from_architecture(checkpoint.architecture, device="cpu")
    return DiffusionTransformer(cfg, tensors=checkpoint.tensors()), load_file(folder / "likelihood.safetensors")


def small(attention_dir="bidirectional", readout="in_place"):
    masked = attention_dir == "bidirectional"
    architecture = Architecture(
        family="diffusion_lens",
        name="small",
        n_layers=2,
        d_model=16,
        n_heads=2,
        n_key_value_heads=2,
        d_head=8,
        d_mlp=24,
        d_vocab=11 + masked,
        d_vocab_out=11,
        n_ctx=16,
        attention_dir=attention_dir,
        readout=readout,
        mask_token_id=11 if masked else None,
    )
    return DiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"), seed=3)


def total_gradient_norm(model):
    return torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()


@pytest.mark.parametrize("variant", ["gqa", "mha"])
def test_masked_diffusion_loss_is_the_authors(variant):
    model, expected = golden(variant, "mdm")
    tokens, noisy, p_mask = (expected[f"sft.{name}"] for name in ("tokens", "noisy", "p_mask"))
    loss = masked_diffusion_loss(model, tokens, noisy, p_mask)
    loss.backward()
    torch.testing.assert_close(loss, expected["sft.loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(total_gradient_norm(model), expected["sft.grad_norm_total"], rtol=1e-4, atol=0)


@pytest.mark.parametrize("variant", ["gqa", "mha"])
def test_autoregressive_loss_is_the_authors(variant):
    model, expected = golden(variant, "ar")
    loss = autoregressive_loss(model, expected["sft.tokens"])
    loss.backward()
    torch.testing.assert_close(loss, expected["sft.loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(total_gradient_norm(model), expected["sft.grad_norm_total"], rtol=1e-4, atol=0)


@pytest.mark.parametrize("readout", ["in_place", "shifted"])
def test_each_hidden_token_is_read_where_the_model_predicts_it(readout):
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


def test_nothing_hidden_is_no_loss_and_no_gradient():
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


def test_noise_hides_with_its_probability_and_covers_the_unit_interval():
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


def test_hiding_leaves_the_global_random_numbers_alone_when_given_a_generator():
    before = torch.get_rng_state()
    hide(torch.zeros(2, 3, dtype=torch.long), 11, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_objective_follows_the_attention_direction():
    tokens = torch.arange(8).repeat(2, 1)
    causal, masked = small("causal", "shifted"), small()
    generator = torch.Generator().manual_seed(0)
    assert OBJECTIVES["causal"](causal, tokens, generator) == autoregressive_loss(causal, tokens)
    expected = masked_diffusion_loss(masked, tokens, generator=torch.Generator().manual_seed(0))
    assert OBJECTIVES["bidirectional"](masked, tokens, generator) == expected


def test_errors_name_the_culprit():
    tokens = torch.arange(8)[None]
    with pytest.raises(ValueError, match=r"'small' has no \[MASK\].*autoregressive_loss"):
        masked_diffusion_loss(small("causal", "shifted"), tokens)
    with pytest.raises(ValueError, match="noisy and p_mask belong together"):
        masked_diffusion_loss(small(), tokens, tokens)
