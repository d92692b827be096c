"""A cache of some places is the whole cache, sliced by hand: at every hook point."""

import pytest
import torch

CHOSEN = {
    "a slice": (slice(2, 5), [2, 3, 4]),
    "an index": (7, [7]),
    "from the end": (-2, [-2]),
    "indices": ([11, 3], [11, 3]),
    "a pair": ((1, 4), [1, 2, 3]),
}


def by_hand(name, activation, chosen):
    """TransformerLens's words: places are the second axis, queries the last but one of scores and patterns."""
    axis = 2 if name.endswith(("hook_attn_scores", "hook_pattern")) else 1
    return activation.index_select(axis, torch.tensor(chosen) % activation.shape[axis])


@pytest.fixture
def whole(every):
    every.model.set_use_attn_result(True)
    yield every.model.run_with_cache(every.tokens[:1])[1]
    every.model.set_use_attn_result(False)


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
@pytest.mark.parametrize("every", ["lit_gpt-mdm", "qwen3"], indirect=True)
def test_pos_slice_slices_every_hook_point(every, whole, chosen):
    pos_slice, kept = chosen
    _, cache = every.model.run_with_cache(every.tokens[:1], pos_slice=pos_slice)
    assert set(cache.keys()) == set(whole.keys())
    wrong = [name for name in whole if not torch.equal(cache[name], by_hand(name, whole[name], kept))]
    assert wrong == []


@pytest.mark.parametrize("every", ["lit_gpt-mdm", "qwen3"], indirect=True)
def test_pos_slice_works_without_the_batch_axis(every, whole):
    _, cache = every.model.run_with_cache(every.tokens[:1], pos_slice=slice(2, 5), remove_batch_dim=True)
    wrong = [name for name in whole if not torch.equal(cache[name], by_hand(name, whole[name], [2, 3, 4])[0])]
    assert wrong == []


def test_hooks_that_cache_slice_activations_and_gradients(either):
    model, tokens = either.model, either.tokens[:2]
    name = "blocks.1.attn.hook_rot_k"
    gradients = []
    hooks = [(name, lambda gradient, hook: gradients.append(gradient.clone()))]
    with model.hooks(bwd_hooks=hooks):
        model(tokens)[:, -1].sum().backward()
    cache, forward, backward = model.get_caching_hooks(name, incl_bwd=True, pos_slice=slice(2))
    with model.hooks(fwd_hooks=forward, bwd_hooks=backward):
        model(tokens)[:, -1].sum().backward()
    model.zero_grad()
    assert cache[name].shape == (2, 2, model.cfg.n_key_value_heads, model.cfg.d_head)
    torch.testing.assert_close(cache[f"{name}_grad"], gradients[0][:, :2])


def test_pos_slice_works_in_the_cache_of_the_loop(either):
    model = either.model
    names = [f"blocks.1.attn.hook_{point}" for point in ("rot_q", "pattern")] + ["denoise.hook_tokens"]
    options = dict(length=9, steps=2, steps_filter=[0])
    _, whole = model.denoise_with_cache(torch.tensor([[5, 6, 7]]), names, **options)
    for pos_slice, kept in CHOSEN.values():
        if max(kept) >= 9:
            continue
        _, cache = model.denoise_with_cache(torch.tensor([[5, 6, 7]]), names, pos_slice=pos_slice, **options)
        for name in names:
            assert torch.equal(cache[0, name], by_hand(name, whole[0, name], kept))


def test_a_position_out_of_range_is_named_in_the_error(either):
    with pytest.raises(IndexError, match=r"pos_slice=\[20\] reaches outside the 17 positions of 'hook_embed'"):
        either.model.run_with_cache(either.tokens, pos_slice=20)


@pytest.mark.parametrize("chosen", [slice(20, 30), (17, 18), slice(3, 3)])
def test_an_empty_slice_is_refused(either, chosen):
    with pytest.raises(
        IndexError, match=r"pos_slice=slice\(\d+, \d+, None\) selects none of the 17 positions of 'hook_embed'"
    ):
        either.model.run_with_cache(either.tokens, pos_slice=chosen)
    with pytest.raises(IndexError, match="selects none of the 6 positions of the canvas"):
        either.model.denoise_with_cache(torch.tensor([[5, 6]]), "hook_embed", pos_slice=(8, 9), length=6, steps=2)
