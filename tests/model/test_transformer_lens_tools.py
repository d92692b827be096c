"""TransformerLens's own tools run on the model unchanged, and give the model's numbers."""

import pytest
import torch
from parts_by_hand import gate, normed
from transformer_lens import SVDInterpreter, patching


@pytest.fixture
def tokens():
    return torch.randint(500, (3, 17), generator=torch.Generator().manual_seed(0))[:1, :7]


def test_logit_attribution_sums_to_the_logit(summed, tokens):
    logits, cache = summed.model.run_with_cache(tokens)
    stack = cache.decompose_resid(layer=-1)
    attribution = cache.logit_attrs(stack, tokens=torch.tensor([5]))
    constant = constant_of_logit(summed.model, cache, 5)
    torch.testing.assert_close(attribution.sum(0) + constant, logits[..., 5], rtol=1e-4, atol=1e-4)


def constant_of_logit(model, cache, token):
    """What the biases of the final norm and of the head add to a logit, whatever the stream."""
    shift = normed(model, cache, "ln_final", torch.zeros_like(cache["ln_final.hook_normalized"]))
    return shift @ model.W_U[:, token] + model.b_U[token]


def test_a_tokens_direction_reads_its_logit(every, tokens):
    logits, cache = every.model.run_with_cache(tokens)
    direction = every.model.tokens_to_residual_directions(7)
    assert direction.shape == (every.model.cfg.d_model,)
    read = cache["ln_final.hook_normalized"] @ direction + constant_of_logit(every.model, cache, 7)
    if (cap := every.model.cfg.output_logits_soft_cap) is not None:
        read = torch.tanh(read / cap) * cap
    torch.testing.assert_close(read, logits[..., 7], rtol=1e-4, atol=1e-4)
    assert every.model.tokens_to_residual_directions(torch.tensor([7, 8])).shape == (2, every.model.cfg.d_model)
    with pytest.raises(ValueError, match="the head has columns for tokens"):
        every.model.tokens_to_residual_directions(every.model.cfg.d_vocab_out)


def test_the_last_entry_of_the_logit_lens_is_the_model(every, tokens):
    from transformer_lens.tools.analysis.logit_lens import logit_lens

    if every.model.cfg.time_conditioning:  # its last norm needs the modulation, which this lens cannot give it
        with pytest.raises(ValueError, match="needs a modulation"):
            logit_lens(every.model, tokens, positions=None)
        return
    with torch.no_grad():
        lens = logit_lens(every.model, tokens, positions=None)
    assert lens is not None


@pytest.mark.parametrize(
    ("every", "tool"),
    [
        ("lit_gpt-mdm", "get_act_patch_resid_pre"),
        ("lit_gpt-ar", "get_act_patch_resid_pre"),
        ("lit_gpt-mdm", "get_act_patch_attn_out"),
        ("dream", "get_act_patch_mlp_out"),
    ],
    indirect=["every"],
)
def test_patching_everything_clean_at_the_first_layer_is_the_clean_run(every, tokens, tool):
    """At layer 0 resid_pre, the corrupted position restored is the clean run; elsewhere nothing changes."""
    model, corrupted = every.model, tokens.clone()
    corrupted[0, 4] = (corrupted[0, 4] + 7) % 500
    clean_logits, cache = model.run_with_cache(tokens)
    metric = lambda logits: logits[0, -1, 3]  # noqa: E731
    with torch.no_grad():
        grid = getattr(patching, tool)(model, corrupted, cache, metric)
    assert grid.shape == (model.cfg.n_layers, tokens.shape[1])
    if tool == "get_act_patch_resid_pre":
        torch.testing.assert_close(grid[0, 4], clean_logits[0, -1, 3].detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grid[0, 2], model(corrupted)[0, -1, 3].detach(), rtol=1e-4, atol=1e-4)


def test_accumulated_bias_is_what_no_head_and_no_neuron_wrote(summed, tokens):
    model = summed.model
    model.set_use_attn_result(True)
    try:
        _, cache = model.run_with_cache(tokens)
    finally:
        model.set_use_attn_result(False)
    written = cache["hook_embed"]
    for layer in range(model.cfg.n_layers):
        rest = cache["resid_pre", layer] - written
        torch.testing.assert_close(rest, model.accumulated_bias(layer).expand_as(rest), rtol=0, atol=2e-5)
        written = written + cache["result", layer].sum(2)
        rest = cache["resid_mid", layer] - written
        bias = model.accumulated_bias(layer, mlp_input=True)
        torch.testing.assert_close(rest, bias.expand_as(rest), rtol=0, atol=2e-5)
        mlp = model.blocks[layer].mlp
        if layer in summed.dense_layers:
            written = written + cache["post", layer] @ mlp.W_out * gate(model, cache, layer, "mlp")
        else:
            written = written + cache["mlp_out", layer]
        if summed.has_shared_expert and layer not in summed.dense_layers:
            written = written + cache[f"blocks.{layer}.hook_shared_out"]
    assert (bias != 0).any() == (model.cfg.o_bias or model.cfg.mlp_bias)


# Not the diffusion model: TransformerLens takes for granted that every embedded token can be written.
@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_svd_interpreter_finds_the_weights(tiny):
    vectors = SVDInterpreter(tiny).get_singular_vectors("OV", layer_index=1, num_vectors=3, head_index=0)
    assert vectors.shape[-1] == 3


def test_accumulated_bias_counts_layers_as_everywhere(several):
    model = several.model
    last = model.cfg.n_layers - 1
    assert torch.equal(model.accumulated_bias(-1), model.accumulated_bias(last))
    assert torch.equal(model.accumulated_bias(-1, mlp_input=True), model.accumulated_bias(last, mlp_input=True))
    for layer, mlp_input in ((last + 2, False), (-last - 2, False), (last + 1, True)):
        with pytest.raises(ValueError, match=rf"layer={layer} is not one of the layers 0 to {last}"):
            model.accumulated_bias(layer, mlp_input=mlp_input)
