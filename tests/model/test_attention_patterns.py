"""Who sees whom: attention by blocks, of which causal and bidirectional attention are the two ends."""

import json
from dataclasses import replace

import pytest
import torch

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer, Query
from diffusion_lens.analysis import causal_trace
from diffusion_lens.evaluation import chain_rule_nll
from diffusion_lens.model.attention import AttentionPattern
from weight_conversion import Architecture, export

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

    logits.model = model
    return logits


@pytest.fixture
def tokens():
    return torch.randint(30, (2, N_POS), generator=torch.Generator().manual_seed(0))


def padded_on_the_left(tokens, n):
    real = torch.ones(len(tokens), tokens.shape[1] + n, dtype=torch.bool)
    real[:, :n] = False
    return torch.cat([torch.full((len(tokens), n), 7), tokens], dim=1), real


def test_a_block_of_one_is_causal_and_one_of_all_is_bidirectional():
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


@pytest.fixture
def first_alone(network):
    architecture = replace(network.model.cfg.architecture, causal_first=True)
    model = HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"), seed=0)
    model.load_state_dict(network.model.state_dict())
    return model


def test_a_first_token_that_is_alone_sees_what_that_of_a_causal_model_sees(network, first_alone, tokens):
    """And the others see everything: the scores of a bidirectional model, hidden by a hook, are the slow version."""

    def hide(scores, hook):
        scores[:, :, 0, 1:] = -torch.inf
        return scores

    bidirectional = network.model
    network(None, tokens)
    hooked = bidirectional.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_attn_scores", hide)])
    ours = first_alone(tokens)
    torch.testing.assert_close(ours, hooked, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[:, 0], network(1, tokens)[:, 0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours, network(None, tokens), atol=1e-3)
    pattern = first_alone.run_with_cache(tokens)[1]["pattern", 0]
    assert (pattern == 0).sum(dim=(-1, -2)).eq(N_POS - 1).all()
    padded, real = padded_on_the_left(tokens, 2)
    torch.testing.assert_close(first_alone(padded, attention_mask=real)[:, 2:], ours, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first_alone(tokens, logits_at=[0, 3]), ours[:, [0, 3]], rtol=1e-5, atol=1e-6)
    for changed in range(N_POS):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % 30
        moved = (first_alone(other) != ours).any(dim=-1)[0].tolist()
        assert moved == [changed == 0, *[True] * (N_POS - 1)]


def test_a_first_token_is_alone_in_bidirectional_attention_only(network):
    with pytest.raises(ValueError, match="causal_first=True needs attention_dir='bidirectional', and it is 'causal'"):
        replace(network.model.cfg.architecture, attention_dir="causal", causal_first=True)


# Variants of one size differ in nothing else.
one_size = pytest.mark.parametrize("either", ["mdm"], indirect=True)


def variant(model, **changes):
    """A random model of the same size with another attention direction, readout or [MASK]."""
    architecture = replace(model.cfg.architecture, **changes)
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"), seed=0)


@one_size
def test_a_bidirectional_model_without_mask_has_uniform_noise(either):
    model = variant(either.model, attention_dir="bidirectional", mask_token_id=None)
    cfg = model.cfg
    assert (cfg.noise, cfg.has_mask, cfg.is_causal, cfg.is_autoregressive) == ("uniform", False, False, False)
    with pytest.raises(ValueError, match=r"the noise of .* is uniform"):
        chain_rule_nll(model, either.tokens[0, :3], either.tokens[0, 3:5])
    with pytest.raises(ValueError, match=r"bidirectional and has no \[MASK\].*add its id to the config as"):
        _ = cfg.blank
    assert model.denoise(either.tokens[:1], max_new_tokens=2, steps=2).tokens.min() >= 0
    assert model(either.tokens % 500, return_type="loss").isfinite()


@one_size
def test_the_config_may_be_passed_with_the_id_of_mask(either, tmp_path):
    """As the refusal of a bidirectional model without [MASK] says: our own config, and one in Hugging Face's format."""
    ours = variant(either.model, attention_dir="bidirectional", readout="in_place", mask_token_id=None)
    ours.save_pretrained(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    configs = {"ours": {**config, "architecture": {**config["architecture"], "mask_token_id": 7}}}

    theirs = replace(ours.cfg.architecture, rotary_dtype="float32", rotation="activation", qkv_bias=True)
    theirs = replace(theirs, family="qwen2", d_vocab_out=theirs.d_vocab, mask_token_id=7)
    network = HookedDiffusionTransformer(DiffusionConfig.from_architecture(theirs, device="cpu"), seed=0)
    export(network.state_dict(), theirs, tmp_path / "theirs" / "model.safetensors")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (config["model_type"], config.pop("mask_token_id")) == ("a2d-qwen2", 7)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="pass the config with that id as a mapping"):
        HookedDiffusionTransformer.from_pretrained(tmp_path / "theirs", device="cpu")
    configs["theirs"] = {**config, "mask_token_id": 7}

    for folder, config in configs.items():
        loaded = HookedDiffusionTransformer.from_pretrained(tmp_path / folder, config=config, device="cpu")
        assert loaded.cfg.blank == 7
        assert (loaded.denoise(either.tokens[:1], max_new_tokens=2).tokens != 7).all()


@one_size
@pytest.mark.parametrize("readout", ["in_place", "shifted"])
def test_a_causal_model_with_mask_reveals_in_any_order(either, readout):
    """Its attention is causal, and its text does not grow: canvas, sampler and loss are those of a masked model."""
    mask = either.model.cfg.d_vocab - 1
    model = variant(either.model, attention_dir="causal", mask_token_id=mask, readout=readout)
    cfg = model.cfg
    assert (cfg.noise, cfg.has_mask, cfg.is_causal, cfg.is_autoregressive) == ("absorbing", True, True, False)

    prompt = torch.tensor([[3, 5, 8], [4, 6, 9]])
    run = model.denoise(prompt, max_new_tokens=5, steps=3)
    assert run.record["sampler"]["name"] == "confidence"
    assert run.n_steps == run.forward_passes == 3
    assert (run.canvases[0, :, 3:] == mask).all()
    assert (run.tokens != mask).all()
    assert cfg.writable(run.tokens).all()
    assert torch.equal(run.replay(model).canvases, run.canvases)
    for settings in (dict(sampler="ancestral"), dict(sampler="left_to_right"), dict(cfg_scale=0.5)):
        assert (model.denoise(prompt, max_new_tokens=5, steps=3, **settings).tokens != mask).all()

    # Padding on the right is no gap before its blanks, which are read in their own rows if need be.
    real = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert (model.denoise(prompt, attention_mask=real, max_new_tokens=5).tokens[:, 3:] != mask).all()

    assert model(prompt, return_type="loss", samples=8).isfinite()
    answer = Query(torch.tensor([mask, 4, mask]), (1, 2), (0, 2), (3, 5))
    assert 0 < causal_trace(model, answer, corruption="mask").clean < 1
