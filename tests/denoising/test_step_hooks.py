"""Inside the loop a hook knows where it is, and what it returns is what the loop uses. Wrapped hooks act at times."""

from functools import partial, wraps

import pytest
import torch

from diffusion_lens.denoising.step_hooks import at_steps, on_branch, while_masked
from diffusion_lens.interventions import acts_by_step, freeze, named, steer, zero_ablate

RESID = "blocks.1.hook_resid_post"
PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def run(several):
    """Denoise a prompt of 8 tokens up to 14 in 4 steps; a causal model takes a step for each of 4 tokens."""
    prompt = several.tokens[:1, :8]
    by_kind = {"mdm": dict(length=14, steps=4, cfg_scale=0.8), "uniform": dict(length=12, steps=4)}
    options = by_kind.get(several.kind, dict(length=12))
    return lambda *fwd_hooks, **more: several.model.denoise(prompt, fwd_hooks=list(fwd_hooks), **options | more)


def test_a_hook_knows_its_step(several, run):
    steps = []
    trajectory = run((RESID, lambda a, hook: steps.append(hook.step)))
    branches = 2 if several.kind == "mdm" else 1
    assert [step.index for step in steps] == [i for i in range(4) for _ in range(branches)]
    assert [step.t for step in steps] == sorted((step.t for step in steps), reverse=True)
    assert steps[0].t == 1.0
    assert all(0 < step.s < step.t <= 1 and step.n_steps == 4 for step in steps)
    for step in steps:
        assert torch.equal(step.tokens, trajectory.canvases[step.index])
        is_open = step.tokens != -1 if several.kind == "mdm" else torch.ones_like(step.masked)
        to_write = ~trajectory.given if several.kind == "uniform" else trajectory.revealed_at >= step.index
        assert torch.equal(step.masked, to_write & is_open)
        assert torch.equal(step.given, trajectory.given)
    assert {step.branch for step in steps} == ({"conditional", "unconditional"} if branches == 2 else {"conditional"})


def test_a_backward_hook_around_the_loop_is_warned_of(several, run):
    attached = several.model.hooks(bwd_hooks=[(RESID, lambda gradient, hook: None)])
    with attached, pytest.warns(UserWarning, match=f"no gradients, so the backward hook at '{RESID}' never acts"):
        run()


def test_the_error_of_a_reversed_pair_says_so(several, run):
    with pytest.raises(TypeError, match=f"'{RESID}' comes second: exchange the two"):
        run((zero_ablate(), RESID))


@pytest.mark.parametrize("point", ["hook_embed", RESID, "denoise.hook_logits", "denoise.hook_confidence"])
@pytest.mark.parametrize("every", ["lit_gpt-mdm", "lit_gpt-ar", "bd3lm", "diffusion_gemma"], indirect=True)
def test_what_a_hook_writes_into_its_step_changes_no_run(every, point):
    def overwrite(activation, hook):
        step = hook.step
        step.tokens[:, 2] = 7
        step.masked.fill_(False)
        step.given.fill_(True)
        if step.block is not None:
            step.block.origin.fill_(0)
        if step.handed is not None:
            step.handed.expected.fill_(3)

    options = {"max_new_tokens": 6} | ({} if every.model.cfg.is_autoregressive else {"steps": 4})
    plain, written = (
        every.model.denoise(every.tokens[:1, :4], fwd_hooks=[(point, hook)], **options)
        for hook in (lambda activation, hook: None, overwrite)
    )
    for name in ("canvases", "given", "revealed_at", "confidence"):
        torch.testing.assert_close(
            getattr(written, name), getattr(plain, name), rtol=0, atol=0, equal_nan=True, msg=name
        )


def test_a_hook_sees_one_branch_at_a_time_and_the_whole_canvas(several, run):
    shapes = []
    run((RESID, lambda a, hook: shapes.append((hook.step.branch, tuple(a.shape[:2])))))
    if several.kind == "mdm":
        assert shapes == [("conditional", (1, 14)), ("unconditional", (1, 14))] * 4
    else:
        assert shapes == [("conditional", (1, 12))] * 4


def test_the_clock_stops_after_the_run_and_after_an_exception(several, run):
    def boom(activation, hook):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run((RESID, boom))
    assert all(point.step is None for point in several.model.hook_points())
    assert not several.model.list_hooks()


def test_hooks_attached_beforehand_work_too(several, run):
    double = (RESID, lambda a, hook: 2 * a)
    with several.model.hooks(fwd_hooks=[double]):
        outer = run()
    assert torch.equal(outer.canvases, run(double).canvases)


def test_a_hook_at_step_k_leaves_the_steps_before_as_they_were(several, run):
    plain = run()
    for k in (1, 3):
        patched = run((RESID, lambda a, hook, k=k: a.flip(-1) if hook.step.index == k else None))
        assert torch.equal(patched.canvases[: k + 1], plain.canvases[: k + 1])


def test_logits_decide_the_tokens(several, run):
    def only_42(logits, hook):
        return torch.nn.functional.one_hot(torch.full(logits.shape[:-1], 42), logits.shape[-1]) * 50.0

    forced = run(("denoise.hook_logits", only_42))
    assert (forced.tokens[0, 8:] == 42).all()
    assert (forced.confidence[0, 8:] > 0.99).all()


def test_candidates_force_a_token(several, run):
    forced = run(("denoise.hook_candidates", lambda a, hook: torch.where(hook.step.masked, 7, a)))
    assert (forced.tokens[0, 8:] == 7).all()


def test_confidence_changes_the_order(several, run):
    """Later positions of a block first; a causal model has one position to choose from."""
    backwards = run(("denoise.hook_confidence", lambda a, hook: torch.arange(a.shape[1], dtype=a.dtype)[None]))
    size = several.model.cfg.block_size or backwards.tokens.shape[1]
    order = backwards.revealed_at[0, 8:].tolist()
    blocks = [order[start : start + size] for start in range(0, len(order), size)]
    assert order == [step for block in sorted(blocks) for step in sorted(block, reverse=True)]


def test_hook_reveal_can_keep_a_position_masked(several, run):
    position = 10

    def hold_back(reveal, hook):
        changed = reveal.clone()
        changed[:, position] &= hook.step.index == hook.step.n_steps - 1
        return changed

    delayed = run(("denoise.hook_reveal", hold_back))
    if several.kind == "uniform":  # the noise with which the run began stays there until the last step
        assert (delayed.canvases[:-1, 0, position] == delayed.canvases[0, 0, position]).all()
        assert (delayed.canvases[:-1, 0, 8:] != delayed.canvases[0, 0, 8:]).any()
    elif not several.model.cfg.opens_blocks:
        assert delayed.revealed_at[0, position] == 3
        assert (delayed.tokens[0] < 512).all()
    elif several.kind == "mdm":
        # The next block is not opened before this one is filled, in the last step.
        assert (delayed.canvases[:-1, 0, 12:] == -1).all()
        assert delayed.is_masked(delayed.tokens)[0].nonzero().flatten().tolist() == [12, 13]
    else:
        # The next position cannot be filled before this one: the run ends with positions not reached.
        assert delayed.tokens[0, position:].tolist() == [delayed.tokens[0, position].item(), -1]


def test_tokens_change_the_canvas_going_in(several, run):
    def swap(tokens, hook):
        changed = tokens.clone()
        changed[:, 0] = 3
        return changed if hook.step.index == 1 else None

    swapped = run(("denoise.hook_tokens", swap))
    assert swapped.canvases[0, 0, 0] != 3
    assert (swapped.canvases[1:, 0, 0] == 3).all()


def test_the_mask_is_never_written_unless_a_hook_insists(several, run):
    if not several.model.cfg.has_mask:
        return
    mask = several.model.cfg.mask_token_id
    insisted = run(("denoise.hook_candidates", lambda a, hook: torch.where(hook.step.masked, mask, a)))
    assert insisted.is_masked(insisted.tokens)[0, 8:].all()
    assert (insisted.tokens == mask).any()
    assert (insisted.confidence[0, 8:] == 0).all()


def test_hooks_that_need_the_step_are_recognised():
    def scaled(activation, hook, by, inner=None):
        return by * activation if inner is None else inner(activation, hook)

    made = [
        at_steps(zero_ablate(), 0),
        on_branch(zero_ablate(), "conditional"),
        while_masked(zero_ablate()),
        freeze(),
        freeze(0, heads=[0]),
        at_steps(freeze(), 0),
    ]

    def around(hook_fn):
        return wraps(hook_fn)(lambda activation, hook: hook_fn(activation, hook))

    for hook in made:
        scaled_twice = partial(scaled, by=2, inner=named("inner", hook))
        for needs in (
            hook,
            named("a name", hook),
            at_steps(named("a", hook), 1),
            partial(hook),
            around(hook),
            scaled_twice,
        ):
            assert acts_by_step(needs)
            assert acts_by_step(named("a name", partial(needs)))
    plain = [zero_ablate(), steer(torch.ones(3)), partial(scaled, by=2), torch.nn.Identity(), around(scaled)]
    for hook in plain:
        assert not acts_by_step(hook)
        assert not acts_by_step(named("a name", hook))


def run_under(either, hook_fn, name=RESID):
    options = dict(length=12, steps=4, cfg_scale=0.8) if either.kind == "mdm" else dict(length=8)
    return either.model.denoise(PROMPT, fwd_hooks=[(name, hook_fn)], **options)


@pytest.mark.parametrize(("steps", "acts_at"), [(1, {1}), ([0, 2], {0, 2}), (-1, {3}), (range(2), {0, 1})])
def test_at_steps(either, steps, acts_at):
    seen = []
    run_under(either, at_steps(lambda a, hook: seen.append(hook.step.index), steps))
    assert set(seen) == acts_at


def test_on_branch(either):
    seen = []
    run_under(either, on_branch(lambda a, hook: seen.append(hook.step.branch), "unconditional"))
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

    written = run_under(either, while_masked(write), "denoise.hook_candidates")
    assert (written.tokens[0, 4:] == 42).all()
    assert torch.equal(written.tokens[:, :4], PROMPT)


def test_they_compose_and_stay_plain_hooks(either):
    seen = []
    run_under(either, on_branch(at_steps(lambda a, hook: seen.append(hook.step.index), [1, 2]), "conditional"))
    assert seen == [1, 2]


def test_outside_the_loop_wrapped_hooks_do_nothing(either):
    for wrap in (lambda fn: at_steps(fn, 0), while_masked, lambda fn: on_branch(fn, "conditional")):
        hooked = either.model.run_with_hooks(PROMPT, fwd_hooks=[(RESID, wrap(lambda a, hook: a * 0))])
        assert torch.equal(hooked, either.model(PROMPT))


def test_wrappers_refuse_what_they_cannot_wrap(either):
    with pytest.raises(ValueError, match="branch='both'"):
        on_branch(print, "both")
    with pytest.raises(ValueError, match="steps is empty"):
        at_steps(print, [])
    with pytest.raises(ValueError, match="head query key"):
        run_under(either, while_masked(lambda a, hook: a), "blocks.0.attn.hook_pattern")
