"""Hooks that act only at some steps, places, or branches."""

import pytest
import torch

from diffusion_lens.denoising.step_hooks import at_steps, on_branch, while_masked

RESID = "blocks.1.hook_resid_post"
PROMPT = torch.tensor([[5, 6, 7, 8]])


def run(either, hook_fn, name=RESID):
    options = dict(length=12, steps=4, cfg_scale=0.8) if either.kind == "mdm" else dict(length=8)
    return either.model.denoise(PROMPT, fwd_hooks=[(name, hook_fn)], **options)


@pytest.mark.parametrize(("steps", "acts_at"), [(1, {1}), ([0, 2], {0, 2}), (-1, {3}), (range(2), {0, 1})])
def test_at_steps(either, steps, acts_at):
    seen = []
    run(either, at_steps(lambda a, hook: seen.append(hook.step.index), steps))
    assert set(seen) == acts_at


def test_on_branch(either):
    seen = []
    run(either, on_branch(lambda a, hook: seen.append(hook.step.branch), "unconditional"))
    assert seen == ["unconditional"] * (4 if either.kind == "mdm" else 0)


def test_while_masked_acts_on_masked_positions_only(either):
    before, after = [], []
    fwd_hooks = [
        (RESID, lambda a, hook: before.append((a, hook.step.masked))),
        (RESID, while_masked(lambda a, hook: torch.zeros_like(a))),
        (RESID, lambda a, hook: after.append(a)),
    ]
    options = dict(length=12, steps=4) if either.kind == "mdm" else dict(length=8)
    either.model.denoise(PROMPT, fwd_hooks=fwd_hooks, **options)
    for (was, masked), now in zip(before, after, strict=True):
        assert not now[masked].any()
        assert torch.equal(now[~masked], was[~masked])
        assert masked.any()


def test_while_masked_in_place_and_in_the_loop(either):
    def write(candidates, hook):
        candidates[:] = 42

    run_ = run(either, while_masked(write), "denoise.hook_candidates")
    assert (run_.tokens[0, 4:] == 42).all()
    assert torch.equal(run_.tokens[:, :4], PROMPT)


def test_they_compose_and_stay_plain_hooks(either):
    seen = []
    run(either, on_branch(at_steps(lambda a, hook: seen.append(hook.step.index), [1, 2]), "conditional"))
    assert seen == [1, 2]


def test_outside_the_loop_wrapped_hooks_do_nothing(either):
    for wrap in (lambda fn: at_steps(fn, 0), while_masked, lambda fn: on_branch(fn, "conditional")):
        hooked = either.model.run_with_hooks(PROMPT, fwd_hooks=[(RESID, wrap(lambda a, hook: a * 0))])
        assert torch.equal(hooked, either.model(PROMPT))


def test_refusals(either):
    with pytest.raises(ValueError, match="branch='both'"):
        on_branch(print, "both")
    with pytest.raises(ValueError, match="steps is empty"):
        at_steps(print, [])
    with pytest.raises(ValueError, match="head query key"):
        run(either, while_masked(lambda a, hook: a), "blocks.0.attn.hook_pattern")
