"""What another thread may do while one runs the model: nothing that would reach into its run."""

import threading
from contextlib import contextmanager

import pytest
import torch

PROMPT = torch.tensor([[5, 6, 7, 8]])


@contextmanager
def held_open(model, run):
    """Another thread inside `run`, stopped before the first norm; what it returned is in the list at the end."""
    inside, go_on, results = threading.Event(), threading.Event(), []
    thread = threading.Thread(target=lambda: results.append(run()))
    norm, stop = model.blocks[0].ln1, [True]
    forward = norm.forward

    def stopping(x):
        if threading.current_thread() is thread and stop:
            stop.clear()
            inside.set()
            assert go_on.wait(20)
        return forward(x)

    norm.forward = stopping
    thread.start()
    try:
        assert inside.wait(20)
        yield results
    finally:
        go_on.set()
        thread.join()
        del norm.forward


def halve(activation, hook):
    return activation / 2


def enter(context):
    with context:
        pass


@pytest.fixture(params=["plain", "denoise"])
def run(request, either):
    model = either.model
    return {"plain": lambda: model(PROMPT), "denoise": lambda: model.denoise(PROMPT, length=8, steps=1).confidence}[
        request.param
    ]


ATTEMPTS = {
    "hooks": lambda m: enter(m.hooks(fwd_hooks=[("hook_embed", halve)])),
    "add_hook": lambda m: m.add_hook("hook_embed", halve),
    "add_hook by predicate": lambda m: m.add_hook(lambda name: True, halve),
    "add_perma_hook": lambda m: m.add_perma_hook("hook_embed", halve),
    "add_caching_hooks": lambda m: m.add_caching_hooks("hook_embed"),
    "a point's own": lambda m: m.hook_embed.add_hook(halve),
    "reset_hooks": lambda m: m.reset_hooks(),
    "run_with_hooks": lambda m: m.run_with_hooks(PROMPT, fwd_hooks=[("hook_embed", halve)]),
    "run_with_cache": lambda m: m.run_with_cache(PROMPT),
    "denoise": lambda m: m.denoise(PROMPT, length=6),
    "a step": lambda m: enter(m.clock.at(None)),
    "setup": lambda m: m.setup(),
}


on_mdm = pytest.mark.parametrize("either", ["mdm"], indirect=True)


@on_mdm
@pytest.mark.parametrize(
    ("run", "attempt"),
    [*(("denoise", attempt) for attempt in ATTEMPTS), *(("plain", attempt) for attempt in list(ATTEMPTS)[::4])],
    indirect=["run"],
)
def test_nothing_reaches_into_a_run_of_another_thread(either, run, attempt):
    expected = run()
    either.model.hook_embed.ctx["kept"] = 1
    with held_open(either.model, run) as results, pytest.raises(RuntimeError, match="thread"):
        ATTEMPTS[attempt](either.model)
    assert either.model.hook_embed.ctx.pop("kept")
    torch.testing.assert_close(results[0], expected, rtol=0, atol=0, equal_nan=True)
    assert not either.model.is_hooked
    ATTEMPTS[attempt](either.model)
    either.model.reset_hooks(including_permanent=True)


def test_a_hook_is_not_removed_under_a_run_of_another_thread(either):
    point, seen = either.model.hook_embed, []
    point.add_hook(lambda activation, hook: seen.append(len(activation)))
    with held_open(either.model, lambda: either.model(PROMPT)), pytest.raises(RuntimeError, match="thread"):
        point.remove_hooks()
    assert point.is_hooked
    point.remove_hooks()
    assert not point.is_hooked
    assert len(seen) == 1


def test_two_threads_may_run_plainly(either, run):
    expected, logits = run(), either.model(PROMPT)
    with held_open(either.model, lambda: either.model(PROMPT)) as results:
        assert torch.equal(either.model(PROMPT), logits)
    assert torch.equal(results[0], logits)
    torch.testing.assert_close(run(), expected, rtol=0, atol=0, equal_nan=True)


def test_a_run_that_fails_lets_the_others_in(either):
    caught = []

    def failing():
        with pytest.raises(ValueError, match="start_at_layer") as error:
            either.model(PROMPT, start_at_layer=0)
        caught.append(error)

    thread = threading.Thread(target=failing)
    thread.start()
    thread.join()
    assert len(caught) == 1
    either.model.run_with_hooks(PROMPT, fwd_hooks=[("hook_embed", halve)])


def test_a_hook_may_hook_and_run_its_own_model(either):
    nested = []

    def look(activation, hook):
        nested.append(len(activation))

    def again(activation, hook):
        if not nested:
            with either.model.hooks(fwd_hooks=[("hook_embed", look)]):
                either.model(PROMPT)

    either.model.run_with_hooks(PROMPT, fwd_hooks=[("blocks.1.hook_resid_pre", again)])
    assert nested == [1]


def test_a_refused_loop_leaves_the_other_threads_step(either):
    refused = []

    def other():
        with pytest.raises(RuntimeError, match="thread") as error:
            either.model.denoise(PROMPT, length=6)
        refused.append(error)

    with either.model.hooks():
        either.model.clock.step = marker = object()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        kept, either.model.clock.step = either.model.clock.step, None
    assert kept is marker
    assert len(refused) == 1
