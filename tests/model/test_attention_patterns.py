"""Who sees whom: attention by blocks, of which causal and bidirectional attention are the two ends."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.evaluation import chain_rule_nll, monte_carlo_nll
from diffusion_lens.model.attention_patterns import AttentionPattern
from weight_conversion import Architecture

N_POS, SIZE = 11, 4


@pytest.fixture
def network():
    architecture = Architecture(
        family="lit_gpt", name="small", n_layers=1, d_model=16, n_heads=4, n_key_value_heads=2, d_head=4, d_mlp=24,
        d_vocab=31, d_vocab_out=30, n_ctx=32, attention_dir="bidirectional", readout="in_place", mask_token_id=30,
    )  # fmt: skip
    model = HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"), seed=0)

    def logits(block_size, tokens, real=None):
        model._pattern = AttentionPattern(block_size)
        with torch.no_grad():
            return model(tokens, attention_mask=real)

    return logits


@pytest.fixture
def tokens():
    return torch.randint(30, (2, N_POS), generator=torch.Generator().manual_seed(0))


def padded_on_the_left(tokens, n):
    real = torch.ones(len(tokens), tokens.shape[1] + n, dtype=torch.bool)
    real[:, :n] = False
    return torch.cat([torch.full((len(tokens), n), 7), tokens], dim=1), real


def test_a_block_of_one_is_causal_and_a_block_of_the_text_is_bidirectional():
    causal = torch.ones(N_POS, N_POS, dtype=torch.bool).tril()
    for size, expected in ((1, causal), (N_POS, torch.ones_like(causal)), (None, torch.ones_like(causal))):
        pattern = AttentionPattern(size).visibility(N_POS, torch.device("cpu"), None)
        assert pattern.allowed is None, "the fused kernel needs no mask"
        assert torch.equal(pattern.dense(N_POS, N_POS, torch.device("cpu"))[0, 0], expected)
        padded = AttentionPattern(size).visibility(N_POS, torch.device("cpu"), torch.ones(1, N_POS, dtype=torch.bool))
        assert torch.equal(padded.allowed[0, 0], expected)


def test_the_row_of_a_position_depends_on_its_own_block_and_earlier_ones(network, tokens):
    before = network(SIZE, tokens)
    for changed in range(N_POS):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % 30
        moved = (network(SIZE, other) != before).any(dim=-1)[0].tolist()
        assert moved == [changed // SIZE <= row // SIZE for row in range(N_POS)]


@pytest.mark.parametrize("size", [1, 3, SIZE, None])
def test_padding_on_the_left_shifts_no_block(network, tokens, size):
    padded, real = padded_on_the_left(tokens, 2)
    torch.testing.assert_close(network(size, padded, real)[:, 2:], network(size, tokens), rtol=1e-5, atol=1e-6)


def test_a_bidirectional_model_without_mask_has_uniform_noise_and_no_blank(either):
    architecture = replace(either.model.cfg.architecture, attention_dir="bidirectional", mask_token_id=None)
    model = HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"))
    cfg = model.cfg
    assert (cfg.noise, cfg.has_mask, cfg.is_causal, cfg.grows) == ("uniform", False, False, False)
    for call in (
        lambda: model.denoise(either.tokens[:1], max_new_tokens=2),
        lambda: chain_rule_nll(model, either.tokens[0, :3], either.tokens[0, 3:5]),
        lambda: monte_carlo_nll(model, either.tokens[0, :3], either.tokens[0, 3:5]),
    ):
        with pytest.raises(ValueError, match=r"bidirectional and has no \[MASK\].*mask_token_id="):
            call()
    with pytest.raises(ValueError, match=r"has no \[MASK\]"):
        model(either.tokens, return_type="loss")
