"""Modules that are put in where a hook point stood, and what is refused until `setup` knows them."""

import copy

import pytest
import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

SETTINGS = dict(length=6, steps=1, cfg_scale=0.8)
PROMPT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


pytestmark = pytest.mark.parametrize("either", ["mdm"], indirect=True)


@pytest.fixture
def model(either):
    """A model of the test's own."""
    return copy.deepcopy(either.model)


POINTS = [
    "hook_embed",
    "blocks.1.hook_resid_post",
    "blocks.1.attn.hook_attn_scores",
    "blocks.2.attn.hook_pattern",
    "ln_final.hook_scale",
]


def put(model, name, module):
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)
    return module


@pytest.mark.parametrize("name", POINTS)
def test_a_plain_hook_point_runs_before_setup(either, model, name):
    expected = either.model.denoise(PROMPT, **SETTINGS)
    put(model, name, HookPoint())
    run = model.denoise(PROMPT, **SETTINGS)
    assert torch.equal(run.canvases, expected.canvases)
    assert torch.equal(model(PROMPT), either.model(PROMPT))


@pytest.mark.parametrize("name", ["blocks.1.attn.hook_attn_scores", "blocks.2.attn.hook_pattern"])
def test_another_module_may_replace_the_points_of_scores_and_patterns(either, model, name):
    class Halved(nn.Module):
        def forward(self, x):
            return x / 2

    halved = model.run_with_hooks(PROMPT, fwd_hooks=[(name, lambda activation, hook: activation / 2)])
    put(model, name, Halved())
    model.setup()
    assert torch.equal(model(PROMPT), halved)


@pytest.mark.parametrize(
    ("name", "picked"),
    [*((name, lambda name: name) for name in POINTS), ("blocks.1.hook_resid_post", lambda name: lambda other: True)],
    ids=[*POINTS, "all"],
)
def test_hooks_at_a_replaced_hook_point_require_setup(either, model, name, picked):
    put(model, name, HookPoint())
    for attempt in (
        lambda: model.run_with_hooks(PROMPT, fwd_hooks=[(picked(name), lambda activation, hook: None)]),
        lambda: model.add_hook(picked(name), lambda activation, hook: None),
        lambda: model.run_with_cache(PROMPT, names_filter=picked(name)),
        lambda: model.denoise_with_cache(PROMPT, picked(name), **SETTINGS),
        lambda: model.add_caching_hooks(picked(name)),
    ):
        with pytest.raises(RuntimeError, match=rf"'{name}'.*model\.setup\(\)"):
            attempt()
    model.setup()
    assert name in model.run_with_cache(PROMPT)[1]


def test_the_loop_requires_setup_where_a_hook_cannot_read_the_step(model):
    put(model, "blocks.1.hook_resid_post", HookPoint()).add_hook(lambda activation, hook: None)
    with pytest.raises(RuntimeError, match=r"'blocks.1.hook_resid_post'.*model\.setup\(\)"):
        model.denoise(PROMPT, **SETTINGS)
    model.setup()
    model.denoise(PROMPT, **SETTINGS)
