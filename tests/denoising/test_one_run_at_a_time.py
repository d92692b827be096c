"""One run of the loop at a time holds a model: two would mix their steps and hooks."""

import threading

import pytest
import torch

PROMPT = torch.tensor([[5, 6, 7]])


def test_a_second_thread_is_refused_and_the_first_continues(either):
    plain = either.model.denoise(PROMPT, length=8, steps=4)
    inside, refused = threading.Event(), []

    def other_thread():
        with pytest.raises(RuntimeError, match=r"already running.*load the model a second time") as caught:
            either.model.denoise(PROMPT, length=8, steps=4)
        refused.append(caught)

    def meanwhile(activation, hook):
        if not inside.is_set():
            inside.set()
            thread = threading.Thread(target=other_thread)
            thread.start()
            thread.join()

    first = either.model.denoise(PROMPT, length=8, steps=4, fwd_hooks=[("hook_embed", meanwhile)])
    assert len(refused) == 1
    assert torch.equal(first.canvases, plain.canvases)


def test_a_loop_inside_a_hook_of_the_loop_is_refused(either):
    def again(activation, hook):
        either.model.denoise(PROMPT, length=8, steps=4)

    with pytest.raises(RuntimeError, match="in a hook of it"):
        either.model.denoise(PROMPT, length=8, steps=4, fwd_hooks=[("hook_embed", again)])
    assert either.model.denoise(PROMPT, length=8, steps=4).n_steps


def test_every_run_has_an_identity_of_its_own(either):
    seen = []
    hooks = [("hook_embed", lambda a, hook: seen.append(hook.step.run))]
    for _ in range(2):
        run = either.model.denoise(PROMPT, length=8, steps=4, fwd_hooks=hooks)
    run.replay(either.model, fwd_hooks=hooks)
    in_first = seen[: len(seen) // 3]
    assert set(map(id, in_first)) == {id(seen[0])}
    assert len(set(map(id, seen))) == 3


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_both_branches_of_guidance_belong_to_one_run(either):
    seen = []
    look = ("hook_embed", lambda a, hook: seen.append((hook.step.branch, id(hook.step.run))))
    either.model.denoise(PROMPT, length=8, steps=4, cfg_scale=0.5, fwd_hooks=[look])
    assert {branch for branch, _ in seen} == {"conditional", "unconditional"}
    assert len({run for _, run in seen}) == 1
