"""Folded norms: the same function, and TransformerLens's idioms give the model's own numbers."""

import copy
from functools import cache

import pytest
import torch
from transformer_lens import SVDInterpreter

from weight_conversion import export


@cache
def folded_copy(model):
    folded = copy.deepcopy(model)
    folded.enable_compatibility_mode()
    return folded


@pytest.fixture
def folded(every):
    return folded_copy(every.model)


def test_norms_that_the_time_modulates_are_not_folded(specimen, configs):
    model = specimen(configs["sedd"]).model
    with pytest.raises(ValueError, match="cannot be folded: the time scales and shifts"):
        model.enable_compatibility_mode()


# All but those that the time modulates, which are refused.
where_norms_fold = pytest.mark.parametrize(
    "every", ["lit_gpt-mdm", "lit_gpt-ar", "dream", "llama", "qwen2", "a2d-qwen3", "nemotron", "mdlm"], indirect=True
)
# Norms of heads, biases, tied heads and both readouts.
where_weights_differ = pytest.mark.parametrize("every", ["lit_gpt-mdm", "dream", "llama", "a2d-qwen3"], indirect=True)


@where_norms_fold
def test_folding_leaves_the_logits(every, folded):
    before, after = every.model(every.tokens), folded(every.tokens)
    assert (before - after).abs().max() <= 3e-6 * before.abs().max()
    for block in folded.blocks:
        assert torch.equal(block.ln1.w, torch.ones_like(block.ln1.w))
        assert torch.equal(block.ln2.w, torch.ones_like(block.ln2.w))
    assert torch.equal(folded.ln_final.w, torch.ones_like(folded.ln_final.w))


@where_norms_fold
def test_folding_is_exact_in_double_precision(every):
    model = copy.deepcopy(every.model).double()
    before = model(every.tokens)
    model.enable_compatibility_mode()
    torch.testing.assert_close(model(every.tokens), before, rtol=1e-12, atol=1e-12)


@where_weights_differ
def test_folding_leaves_what_passes_the_hook_points(every, folded):
    _, before = every.model.run_with_cache(every.tokens)
    _, after = folded.run_with_cache(every.tokens)
    assert set(before) == set(after)
    for name in before:
        size = before[name].masked_fill(before[name].isinf(), 0).abs().max()
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-5 * float(size), msg=name)


@where_weights_differ
def test_the_normalised_stream_times_W_U_is_the_logit_difference(every, folded):
    """TransformerLens's logit attribution; on the norms as trained it gives other numbers, so the test can fail."""
    tokens = every.tokens[:1]
    differences = []
    for model in (every.model, folded):
        logits, cache = model.run_with_cache(tokens)
        stack = cache.decompose_resid(layer=-1)
        direction = model.W_U[:, 3] - model.W_U[:, 8]
        attributed = (cache.apply_ln_to_stack(stack) @ direction).sum(0)
        differences.append((attributed - (logits[..., 3] - logits[..., 8])).abs().max().item())
    assert differences[1] < 1e-4 < differences[0]


@where_weights_differ
def test_what_reads_the_normalised_stream_is_the_weight_itself(every, folded):
    _, cache = folded.run_with_cache(every.tokens)
    for layer in range(folded.cfg.n_layers):
        gate = cache[f"blocks.{layer}.ln2.hook_normalized"] @ folded.W_gate[layer] + folded.b_gate[layer]
        torch.testing.assert_close(cache["pre", layer], gate, rtol=1e-4, atol=1e-4)
        q = torch.einsum("bpm,hmd->bphd", cache[f"blocks.{layer}.ln1.hook_normalized"], folded.W_Q[layer])
        torch.testing.assert_close(cache["q", layer], q + folded.b_Q[layer], rtol=1e-4, atol=1e-4)


@where_weights_differ
def test_direct_logit_attribution_of_transformer_lens_sums_to_the_logit(every, folded):
    from transformer_lens.tools.analysis.direct_logit_attribution import direct_logit_attribution

    tokens = every.tokens[:1]
    result = direct_logit_attribution(folded, tokens, answer_tokens=torch.tensor([5]), unit="component")
    logits = folded(tokens)
    torch.testing.assert_close(result.attribution.sum(0), logits[:, -1, 5], rtol=1e-4, atol=1e-4)


@where_weights_differ
def test_folding_twice_changes_nothing(every, folded):
    weights = copy.deepcopy(folded.state_dict())
    folded.enable_compatibility_mode()
    assert all(torch.equal(weights[name], weight) for name, weight in folded.state_dict().items())


def test_a_tied_head_becomes_a_matrix_of_its_own(specimen, configs):
    model = specimen(configs["a2d-qwen2"]).model
    embedding = model.W_E.detach().clone()
    assert model.cfg.tied
    model.enable_compatibility_mode()
    assert not model.cfg.tied
    assert torch.equal(model.W_E, embedding)
    assert model.unembed.weight is not model.embed.weight


def test_a_folded_model_is_saved_and_loaded_as_it_is(tmp_path, specimen, configs):
    from diffusion_lens import HookedDiffusionTransformer

    tied = specimen(configs["a2d-qwen2"])
    tied.model.enable_compatibility_mode()
    again = HookedDiffusionTransformer.from_pretrained(tied.model.save_pretrained(tmp_path / "folded"), device="cpu")
    assert torch.equal(again(tied.tokens), tied.model(tied.tokens))
    assert (again.cfg.layer_norm_folding, again.cfg.normalization_type) == (True, "RMSPre")


def test_a_folder_says_that_a_model_is_folded_only_while_it_is(tmp_path, specimen, configs):
    """Neither a model trained after folding, nor other weights under a folder's config, nor another family's export."""
    from diffusion_lens import HookedDiffusionTransformer

    def folded(folder):
        return HookedDiffusionTransformer.from_pretrained(folder, device="cpu").cfg.layer_norm_folding

    model = specimen(configs["llama"]).model
    assert not folded(model.save_pretrained(tmp_path / "plain"))
    plain = (tmp_path / "plain" / "model.safetensors").read_bytes()
    model.enable_compatibility_mode()
    saved = model.save_pretrained(tmp_path / "folded")
    assert folded(saved)
    export(model.state_dict(), model.cfg.architecture, tmp_path / "exported" / "model.safetensors")
    assert "layer_norm_folding" not in (tmp_path / "exported" / "config.json").read_text()
    assert not folded(tmp_path / "exported")
    (saved / "model.safetensors").write_bytes(plain)
    assert not folded(saved)
    with torch.no_grad():
        model.ln_final.weight[0] = 2.0
    assert not folded(model.save_pretrained(tmp_path / "trained"))
    assert "layer_norm_folding" not in (tmp_path / "trained" / "config.json").read_text()
    config = saved / "config.json"
    config.write_text(config.read_text().replace('"layer_norm_folding": true', '"layer_norm_folding": "yes"'))
    with pytest.raises(ValueError, match=r"layer_norm_folding is 'yes' in .*config.json; it must be true or false"):
        folded(saved)


@pytest.mark.parametrize("name", ["tiny-mdm", "tiny-ar"])
def test_from_pretrained_folds_on_request(name):
    from diffusion_lens import HookedDiffusionTransformer

    plain = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
    folded = HookedDiffusionTransformer.from_pretrained(name, device="cpu", fold_ln=True)
    tokens, _ = plain.canvas("today Ada is the brave pilot.")
    before, after = plain(tokens), folded(tokens)
    assert (before - after).abs().max() <= 3e-6 * before.abs().max()
    assert (folded.ln_final.w == 1).all()
    assert not (plain.ln_final.w == 1).all()


def test_folding_in_bfloat16_is_refused_and_nothing_is_half_folded(specimen, configs):
    model = specimen(configs["llada"]).model.to(torch.bfloat16)
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"cannot be folded in torch.bfloat16.*dtype=torch.float32"):
        model.enable_compatibility_mode()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


def test_processing_that_changes_the_logits_is_refused_with_its_reason(specimen, configs):
    model = specimen(configs["llama"]).model
    with pytest.raises(ValueError, match="center_writing_weights=True would change the logits: RMSNorm"):
        model.enable_compatibility_mode(center_writing_weights=True)
    with pytest.raises(ValueError, match="center_unembed=True would shift"):
        model.enable_compatibility_mode(center_unembed=True)
    assert not (model.ln_final.w == 1).all()
    model.enable_compatibility_mode(no_processing=True)
    assert not (model.ln_final.w == 1).all()


@pytest.mark.parametrize("every", ["llama", "qwen3"], indirect=True)
@pytest.mark.parametrize("fold", [False, True])
def test_the_svd_interpreter_sees_what_the_network_applies(every, fold):
    """Its `w_in` reads the stream before the norm's weight, its OV the key/value head that the query head uses."""
    model = copy.deepcopy(every.model)
    if fold:
        model.enable_compatibility_mode()
    svd, original = SVDInterpreter(model), every.model
    applied = original.blocks[1].mlp.W_in * original.blocks[1].ln2.w[:, None]
    torch.testing.assert_close(svd._get_w_in_matrix(1), applied.T, rtol=1e-5, atol=1e-6)
    shared_by = model.cfg.n_heads // (model.cfg.n_key_value_heads or model.cfg.n_heads)
    for head in range(model.cfg.n_heads):
        value_head = model.blocks[1].attn.W_V[head // shared_by]
        torch.testing.assert_close(svd._get_OV_matrix(1, head).AB, value_head @ model.blocks[1].attn.W_O[head])
