"""TransformerLens's own tools run on the model unchanged, and give the model's numbers."""

import pytest
import torch
from transformer_lens import SVDInterpreter, patching
from transformer_lens.tools.analysis.logit_lens import logit_lens


@pytest.fixture
def tokens(either):
    return either.tensors("causal_trace")["case0.tokens"]


def test_logit_attribution_sums_to_the_logit(either, tokens):
    logits, cache = either.model.run_with_cache(tokens)
    stack = cache.decompose_resid(layer=-1)
    attribution = cache.logit_attrs(stack, tokens=torch.tensor([5]))
    torch.testing.assert_close(attribution.sum(0), logits[..., 5], rtol=1e-4, atol=1e-4)


def test_a_tokens_direction_reads_its_logit(either, tokens):
    logits, cache = either.model.run_with_cache(tokens)
    direction = either.model.tokens_to_residual_directions(7)
    assert direction.shape == (either.model.cfg.d_model,)
    torch.testing.assert_close(cache["ln_final.hook_normalized"] @ direction, logits[..., 7], rtol=1e-4, atol=1e-4)
    assert either.model.tokens_to_residual_directions(torch.tensor([7, 8])).shape == (2, either.model.cfg.d_model)
    with pytest.raises(ValueError, match="can be written"):
        either.model.tokens_to_residual_directions(512)


def test_the_last_entry_of_the_logit_lens_is_the_model(either, tokens):
    with torch.no_grad():
        lens = logit_lens(either.model, tokens, positions=None)
    assert lens is not None


@pytest.mark.parametrize("tool", ["get_act_patch_resid_pre", "get_act_patch_attn_out", "get_act_patch_mlp_out"])
def test_patching_everything_clean_at_the_first_layer_is_the_clean_run(either, tokens, tool):
    """At layer 0 resid_pre, the corrupted place restored is the clean run; elsewhere nothing changes."""
    model, corrupted = either.model, tokens.clone()
    corrupted[0, 5] = (corrupted[0, 5] + 7) % 500
    clean_logits, cache = model.run_with_cache(tokens)
    metric = lambda logits: logits[0, -1, 3]  # noqa: E731
    with torch.no_grad():
        grid = getattr(patching, tool)(model, corrupted, cache, metric)
    assert grid.shape == (model.cfg.n_layers, tokens.shape[1])
    if tool == "get_act_patch_resid_pre":
        torch.testing.assert_close(grid[0, 5], clean_logits[0, -1, 3].detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grid[0, 2], model(corrupted)[0, -1, 3].detach(), rtol=1e-4, atol=1e-4)


def test_accumulated_bias_is_zero_without_biases(either):
    model = either.model
    for layer in range(model.cfg.n_layers):
        for mlp_input in (False, True):
            assert not model.accumulated_bias(layer, mlp_input=mlp_input).any()


def test_svd_interpreter_finds_the_weights(tiny):
    if tiny.cfg.model_name == "tiny-mdm":  # TransformerLens takes for granted that every embedded token can be written
        return
    vectors = SVDInterpreter(tiny).get_singular_vectors("OV", layer_index=1, num_vectors=3, head_index=0)
    assert vectors.shape[-1] == 3
