"""With a key/value cache each position is run once, and the logits stay what they were."""

import pytest
import torch
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from diffusion_lens.model.attention import KeyValueCache

causal = pytest.mark.parametrize("every", ["lit_gpt-ar", "llama", "qwen3"], indirect=True)


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_a_bidirectional_model_takes_no_cache(either):
    cfg = either.model.cfg
    for cache in (KeyValueCache(cfg.n_layers), TransformerLensKeyValueCache.init_cache(cfg, "cpu")):
        with pytest.raises(ValueError, match="bidirectional"):
            either.model(either.tokens, past_kv_cache=cache)


@causal
@pytest.mark.parametrize("cuts", [[1, 2, 3], [4, 9, 10], [16]])
def test_pieces_give_the_logits_of_the_whole(every, cuts):
    tokens = every.tokens
    cache = KeyValueCache(every.model.cfg.n_layers)
    pieces = [every.model(piece, past_kv_cache=cache) for piece in tokens.tensor_split(cuts, dim=1)]
    assert cache.n_pos == tokens.shape[1]
    torch.testing.assert_close(torch.cat(pieces, dim=1), every.model(tokens), rtol=1e-5, atol=5e-5)


@causal
def test_the_loop_uses_it_only_where_nothing_is_hooked(every):
    prompt, lengths = torch.tensor([[5, 6, 7]]), []
    plain = every.model.denoise(prompt, length=8)
    hook = ("hook_embed", lambda a, hook: lengths.append(a.shape[1]))
    hooked = every.model.denoise(prompt, length=8, fwd_hooks=[hook])
    assert torch.equal(plain.canvases, hooked.canvases)
    assert lengths == [8] * 5


@causal
def test_a_partial_run_takes_up_its_own_layers_past(every):
    """Places 6 on, from layer 1 on, given what the places before them left in those layers."""
    model, tokens, cache = every.model, every.tokens, KeyValueCache(every.model.cfg.n_layers)
    resid = model(tokens, stop_at_layer=1)
    model(resid[:, :6], start_at_layer=1, past_kv_cache=cache)
    later = model(resid[:, 6:], start_at_layer=1, past_kv_cache=cache, logits_at=[0, 4])
    torch.testing.assert_close(later, model(tokens)[:, [6, 10]], rtol=1e-5, atol=5e-5)
    with pytest.raises(ValueError, match=r"has \[0, 17\] positions in different layers"):
        model(tokens, past_kv_cache=cache)


@causal
def test_a_past_does_not_go_with_padding_or_beyond_the_context(every):
    padded, tokens = torch.tensor([[0, 1, 1]]), torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="cannot be used with padding"):
        every.model(tokens, past_kv_cache=KeyValueCache(every.model.cfg.n_layers), attention_mask=padded)
    full = KeyValueCache(every.model.cfg.n_layers)
    every.model(torch.zeros(1, 120, dtype=torch.long), past_kv_cache=full)
    with pytest.raises(ValueError, match="n_ctx=128"):
        every.model(torch.zeros(1, 9, dtype=torch.long), past_kv_cache=full)


@causal
def test_a_cache_of_transformer_lens_is_filled_unless_it_is_frozen(every):
    model, tokens = every.model, every.tokens
    theirs = TransformerLensKeyValueCache.init_cache(model.cfg, model.device, len(tokens))
    first = model(tokens[:, :4], past_kv_cache=theirs)
    theirs.freeze()
    rest = [model(tokens[:, 4:], past_kv_cache=theirs) for _ in range(2)]
    assert torch.equal(*rest)
    torch.testing.assert_close(torch.cat([first, rest[0]], dim=1), model(tokens), rtol=1e-5, atol=5e-5)
    assert theirs.previous_attention_mask.shape == (len(tokens), 4)
    assert {entry.past_keys.shape[1] for entry in theirs.entries} == {4}
    with pytest.raises(ValueError, match=f"past_kv_cache has {len(tokens)} rows, and the input 1; pass the same rows"):
        model(tokens[:1, 4:], past_kv_cache=theirs)
