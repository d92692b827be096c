"""Modules that hooks call, with hook points of their own."""

import pytest
import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from diffusion_lens import HookedDiffusionTransformer

RESID, INNER = "blocks.1.hook_resid_post", "sae.hook_sae"
BRANCHES = ["conditional", "unconditional"]


class Identity(nn.Module):
    """A module that loses nothing, with a plain hook point inside."""

    def __init__(self):
        super().__init__()
        self.hook_sae = HookPoint()

    def forward(self, x):
        return self.hook_sae(x * 2) / 2


def fresh():
    return HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")


@pytest.fixture(scope="module")
def model():
    model = fresh()
    model.sae = Identity()
    model.setup()
    return model


@pytest.fixture(params=[1, 2])
def prompt(request):
    return torch.arange(5, 5 + 4 * request.param).view(-1, 4)


def splice(model):
    return (RESID, lambda activation, hook: model.sae(activation))


SETTINGS = dict(length=8, steps=2, cfg_scale=0.8)


def test_a_hook_point_inside_a_hook_is_passed_once_a_branch(model, prompt):
    seen = []

    def watch(activation, hook):
        seen.append((hook.name, hook.step.index, hook.step.branch, len(activation)))

    plain = fresh().denoise(prompt, **SETTINGS)
    # The second hook at the outer point runs after the splice.
    run = model.denoise(prompt, fwd_hooks=[splice(model), (RESID, watch), (INNER, watch)], **SETTINGS)
    assert torch.equal(run.canvases, plain.canvases)
    torch.testing.assert_close(run.confidence, plain.confidence, equal_nan=True)
    assert seen == [
        (name, step, branch, len(prompt)) for step in range(2) for branch in BRANCHES for name in (INNER, RESID)
    ]


def test_what_passes_inside_a_hook_is_cached_as_what_passes_around_it(model, prompt):
    _, cache = model.denoise_with_cache(prompt, [RESID, INNER], fwd_hooks=[splice(model)], **SETTINGS)
    torch.testing.assert_close(cache.stack(INNER), 2 * cache.stack(RESID))


def test_a_hook_inside_a_hook_changes_its_own_branch_alone(model, prompt):
    def halve_unprompted(activation, hook):
        return activation / 2 if hook.step.branch == "unconditional" else None

    inside = model.denoise(prompt, fwd_hooks=[splice(model), (INNER, halve_unprompted)], **SETTINGS)
    around = fresh().denoise(prompt, fwd_hooks=[(RESID, halve_unprompted)], **SETTINGS)
    torch.testing.assert_close(inside.confidence, around.confidence, equal_nan=True)


def test_an_error_inside_a_hook_leaves_the_step_as_it_was(model):
    clock, steps = model.clock, []

    def fail(activation, hook):
        steps.append((hook.step, clock.branches))
        raise ZeroDivisionError

    def around(activation, hook):
        before = clock.step, clock.branches
        with pytest.raises(ZeroDivisionError):
            model.sae(activation)
        assert (clock.step, clock.branches) == before

    model.denoise(torch.tensor([[5, 6]]), fwd_hooks=[(RESID, around), (INNER, fail)], **SETTINGS)
    assert [step.branch for step, _ in steps] == BRANCHES * 2
    assert {branches for _, branches in steps} == {None}
    assert clock.step is None
    assert clock.branches is None
