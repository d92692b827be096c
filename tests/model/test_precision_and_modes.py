"""Precision, grad modes and edits: what must not silently change a number or a record."""

import copy

import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.records.results import weights_sha256


@pytest.fixture
def tokens(several):
    return several.tokens[:1] % 500


def test_inference_mode_leaves_a_model_that_can_be_trained(several, tokens):
    model = several.tell(copy.deepcopy(several.model))
    model.positions._tables.clear()
    with torch.inference_mode():
        looked = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_pattern", lambda a, hook: None)])
        assert torch.equal(looked, model(tokens))
    # Three rows, so that every expert is chosen.
    model(several.tokens % 500, return_type="loss", generator=torch.Generator().manual_seed(0)).backward()
    assert all(weight.grad is not None for weight in model.blocks.parameters())


@pytest.mark.parametrize("every", ["lit_gpt-mdm", "dream", "llama", "a2d-qwen3"], indirect=True)
def test_float64_is_float64_all_the_way(every):
    tokens = every.tokens[:1]
    model = copy.deepcopy(every.model).double()
    logits, cache = model.run_with_cache(tokens)
    assert {x.dtype for x in cache.cache_dict.values()} == {torch.float64}
    nudged = copy.deepcopy(model)
    with torch.no_grad():
        nudged.blocks[0].mlp.W_out.add_(1e-12)
    # A float32 step anywhere would round a change of this size away or blow it up to 1e-6.
    change = (nudged(tokens) - logits).abs().max().item()
    assert 0 < change < 1e-7


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_a_write_behind_autograds_back_is_felt(several, tokens, write):
    def blind(pattern, hook):
        target = pattern.data if write == "data" else pattern.detach().numpy()
        target[..., 0] = 0

    hooked = several.model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_pattern", blind)])
    assert not torch.allclose(hooked, several.model(tokens))


def test_the_hash_is_of_the_weights_as_they_are(several):
    model = copy.deepcopy(several.model)
    first = weights_sha256(model)
    assert weights_sha256(model) == first == weights_sha256(several.model)
    with torch.no_grad():
        model.blocks[0].mlp.W_out[0] += 1
    edited = weights_sha256(model)
    model.blocks[0].mlp.down.weight.data.add_(1)
    behind = weights_sha256(model)
    cast = weights_sha256(model.to(torch.bfloat16))
    assert len({first, edited, behind, cast}) == 4


def test_models_made_from_one_config_do_not_share_it(several):
    other = HookedDiffusionTransformer(several.model.cfg).to("bfloat16")
    other.set_use_attn_result(True)
    assert other.cfg.dtype == torch.bfloat16
    assert several.model.cfg.dtype == torch.float32
    assert not several.model.cfg.use_attn_result


def test_the_config_flag_alone_switches_head_results_on(several, tokens):
    model = several.tell(copy.deepcopy(several.model))
    model.cfg.use_attn_result = True
    seen = []
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_result", lambda a, hook: seen.append(a.shape))])
    assert seen == [(1, 17, 4, model.cfg.d_model)]


def test_hooks_that_would_never_fire_are_refused(several, tokens):
    for name in ("denoise.hook_logits", lambda name: name.endswith("hook_result")):
        with pytest.raises(ValueError, match="passes only"):
            several.model.run_with_hooks(tokens, fwd_hooks=[(name, lambda a, hook: None)])
    for caching in (several.model.get_caching_hooks, several.model.add_caching_hooks):
        with pytest.raises(KeyError, match="nearest"):
            caching("hook_embd")


def test_a_tuple_of_positions_selects_rows(several, tokens):
    batch = tokens.expand(8, -1)
    whole = several.model(batch)
    torch.testing.assert_close(several.model(batch, logits_at=(4,)), whole[:, [4]], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(several.model(batch, logits_at=(2, 5)), whole[:, [2, 5]], rtol=1e-5, atol=2e-5)
    assert several.model(batch, logits_at=[]).shape == (8, 0, whole.shape[-1])


def test_the_loss_checks_its_mask(several, tokens):
    with pytest.raises(ValueError, match="must match the tokens"):
        several.model(tokens, return_type="loss", attention_mask=torch.ones(3, 5))
