"""Hooks of a compiled model act, and are gone when they are removed."""

import pytest
import torch
from small_networks import small_architecture

from diffusion_lens import HookedDiffusionTransformer, Query
from diffusion_lens.analysis import logit_lens
from diffusion_lens.model.config import DiffusionConfig

POINT = "blocks.0.hook_resid_post"


def zeroed(activation, hook):
    return activation * 0


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Dynamo: it says where it breaks the graph
def test_hooks_caches_and_the_loop_are_those_of_a_model_that_is_not_compiled():
    cfg, tokens = DiffusionConfig.from_architecture(small_architecture(n_layers=1)), torch.tensor([[3, 4, 5, 6]])
    plain, model = (HookedDiffusionTransformer(cfg, seed=1) for _ in range(2))
    unhooked, hooked = plain(tokens), plain.run_with_hooks(tokens, fwd_hooks=[(POINT, zeroed)])
    compiled = torch.compile(model, backend="eager")

    # A hook that is there before anything is compiled, and one that comes later.
    model.add_hook(POINT, zeroed)
    assert torch.equal(compiled(tokens), hooked)
    model.reset_hooks()
    for _ in range(2):
        assert torch.equal(compiled(tokens), unhooked)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    with model.hooks(fwd_hooks=[(POINT, zeroed)]):
        assert torch.equal(compiled(tokens), hooked)

    _, cache = compiled.run_with_cache(tokens)
    _, expected = plain.run_with_cache(tokens)
    assert cache.keys() == expected.keys()
    assert all(torch.equal(cache[name], expected[name]) for name in expected)
    call = dict(max_new_tokens=3, steps=3)
    runs = [each.denoise_with_cache(tokens, POINT, fwd_hooks=[(POINT, zeroed)], **call) for each in (compiled, plain)]
    assert torch.equal(runs[0][0].canvases, runs[1][0].canvases)
    assert not runs[0][1][0][POINT].any()

    by_block = HookedDiffusionTransformer(cfg, seed=1)
    for block in by_block.blocks:
        block.compile(backend="eager")
    assert torch.equal(by_block(tokens), unhooked)
    assert by_block.run_with_cache(tokens)[1].keys() == expected.keys()
    assert torch.equal(
        by_block.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_z", zeroed)]),
        plain.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_z", zeroed)]),
    )
    lens = [logit_lens(each, Query(tokens[0], (1, 2), (3,), (9,))) for each in (compiled, plain)]
    assert torch.equal(lens[0].entropy, lens[1].entropy)

    model.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(tokens), unhooked)
        assert torch.equal(model(tokens), unhooked)
        assert not model.clock.hooked  # these passes run compiled code
        with model.hooks(fwd_hooks=[(POINT, zeroed)]):
            assert torch.equal(model(tokens), hooked)
        assert torch.equal(model(tokens), unhooked)
