"""After Ctrl-C at any point, and after a fork, a model is as it was."""

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from diffusion_lens import Query
from diffusion_lens.analysis import RankOneEdit, causal_trace, compute_key, optimize_value

TOKENS = torch.tensor([[5, 6, 7, 8]])
ROOT = Path(__file__).parents[1]


@pytest.fixture
def query(either):
    tokens = TOKENS[0] if either.model.cfg.is_autoregressive else torch.tensor([5, 6, 7, 8, either.model.cfg.blank])
    return Query(tokens, (1, 3), (4,), (9,))


@pytest.fixture
def edit(either, query):
    model = either.model
    return RankOneEdit(model, 1, compute_key(model, query, 1), optimize_value(model, query, 1, steps=1, kl_factor=0.0))


def test_signals_at_random_moments_leave_no_trace():
    script = [sys.executable, str(ROOT / "tests/interrupted.py"), "2"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    table = json.loads(done.stdout)
    assert len(table) == 8
    assert {name: row["faults"] for name, row in table.items()} == {name: {} for name in table}, done.stderr


def test_the_callers_handler_is_put_back(either):
    before = signal.getsignal(signal.SIGINT)
    with either.model.hooks(fwd_hooks=[("hook_embed", lambda a, hook: None)]):
        inside = signal.getsignal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert inside is not before


def test_a_signal_in_the_body_is_handled_at_once(either):
    after = []
    with pytest.raises(KeyboardInterrupt), either.model.hooks():
        after.append(signal.raise_signal(signal.SIGINT))
    assert not after


def test_a_handler_that_returns_lets_the_context_begin(either):
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        name = ("hook_embed", lambda a, hook: None)

        def selects(point):  # is called as the hooks are attached
            signal.raise_signal(signal.SIGINT)
            return point == "hook_embed"

        with either.model.hooks(fwd_hooks=[(selects, name[1])]):
            assert set(either.model.list_hooks()) == {"hook_embed"}
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(heard) == {signal.SIGINT}


def test_a_signal_while_hooks_are_attached_detaches_them(either):
    attached = []

    def selects(point):
        signal.raise_signal(signal.SIGINT)
        attached.append(point)
        return point == "hook_embed"

    with pytest.raises(KeyboardInterrupt), either.model.hooks(fwd_hooks=[(selects, lambda a, hook: None)]):
        pytest.fail("the block began")
    assert attached
    assert not either.model.list_hooks()


def test_weights_return_if_their_comparison_is_cut_off(either, edit, monkeypatch):
    before = edit.weight_of(1).clone()

    def cut_off(*given):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), edit:
        monkeypatch.setattr(torch, "equal", cut_off)
    monkeypatch.undo()
    assert torch.equal(edit.weight_of(1), before)
    assert not edit.is_applied


@pytest.mark.parametrize("cure", ["restore_edits", "the next with"])
def test_an_edit_that_cannot_be_taken_out_is_known(either, query, edit, monkeypatch, cure):
    before = edit.weight_of(1).clone()

    def broken(*given):
        raise RuntimeError("the device is gone")

    edit.apply()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", broken)
        with pytest.raises(RuntimeError, match="the device is gone"):
            edit.revert()
    with pytest.raises(RuntimeError, match=r"RankOneEdit of blocks \[1\].*call model.restore_edits"):
        causal_trace(either.model, query, noise=0.5, samples=1)
    if cure == "restore_edits":
        either.model.restore_edits()
    else:
        with edit:
            assert not torch.equal(edit.weight_of(1), before)
    assert torch.equal(edit.weight_of(1), before)
    causal_trace(either.model, query, noise=0.5, samples=1)


def test_no_other_thread_reads_edited_weights(either, edit):
    """Nor is a weight edited under the forward pass of another thread."""
    model, refused = either.model, []

    def read():
        try:
            model(TOKENS)
        except RuntimeError as error:
            refused.append(str(error))

    with edit:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert "another thread is running" in refused[0]
    read()
    assert len(refused) == 1
    inside, go_on = threading.Event(), threading.Event()

    def pause(module, given):
        inside.set()
        assert go_on.wait(20)

    handle = model.blocks[0].ln1.register_forward_pre_hook(pause)
    thread = threading.Thread(target=read)
    thread.start()
    assert inside.wait(20)
    handle.remove()
    try:
        for attempt in (edit.apply, edit.__enter__):
            with pytest.raises(RuntimeError, match="another thread is running a forward pass"):
                attempt()
    finally:
        go_on.set()
        thread.join()
    assert not edit.is_applied
    with edit:
        assert edit.is_applied
    assert model.clock.holder is None


def in_another_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_an_edit_that_another_thread_ends_is_taken_out(either, edit):
    before = edit.weight_of(1).clone()
    edit.__enter__()
    in_another_thread(lambda: edit.__exit__(None, None, None))
    assert torch.equal(edit.weight_of(1), before)
    assert either.model.clock.holder is None


def test_an_edit_of_a_thread_that_has_ended_is_known(either, edit, query):
    before = edit.weight_of(1).clone()
    in_another_thread(edit.__enter__)
    with pytest.raises(RuntimeError, match=r"call model.restore_edits"):
        causal_trace(either.model, query, noise=0.5, samples=1)
    either.model.restore_edits()
    assert torch.equal(edit.weight_of(1), before)
    with edit:
        assert edit.is_applied
    causal_trace(either.model, query, noise=0.5, samples=1)


def test_an_edit_begun_again_inside_holds_the_model(either, edit):
    with edit:
        edit.revert()
        with edit:
            pass
        with pytest.raises(RuntimeError, match="another thread is running"):
            in_another_thread(lambda: either.model(TOKENS))
    in_another_thread(lambda: either.model(TOKENS))


def test_a_copy_made_inside_an_edit_is_held_by_nobody(either, edit):
    plain = either.model(TOKENS)
    with edit:
        copied = copy.deepcopy(either.model)
    in_another_thread(lambda: copied(TOKENS))
    copied.restore_edits()
    assert torch.equal(copied(TOKENS), plain)


def test_a_weight_of_another_shape_is_put_back(either, edit):
    before = edit.weight_of(1).clone()
    with pytest.raises(ValueError, match="the weight of layer 1 was changed inside"), edit:
        edit.weight_of(1).data = torch.zeros(2, 3)
    assert torch.equal(edit.weight_of(1), before)
    assert not either.model._edits


def test_a_copy_made_inside_a_context_of_hooks_has_none(either, query):
    plain = either.model(TOKENS)
    with either.model.hooks(fwd_hooks=[("hook_embed", lambda a, hook: a * 0)]):
        copied = copy.deepcopy(either.model)
        again, traced = copy.deepcopy(either.model), copy.deepcopy(either.model)
    assert torch.equal(copied(TOKENS), plain)
    assert not copied.list_hooks()
    assert torch.equal(
        again.denoise(TOKENS, length=6, steps=1).tokens, either.model.denoise(TOKENS, length=6, steps=1).tokens
    )
    assert not again.list_hooks()
    traces = [causal_trace(model, query, noise=0.5, samples=1) for model in (traced, either.model)]
    torch.testing.assert_close(traces[0].scores, traces[1].scores)


def test_restored_edits_leave_the_weights_of_the_file(either, edit):
    before = edit.weight_of(1).clone()
    with edit:
        either.model.restore_edits()
        assert torch.equal(edit.weight_of(1), before)
    assert torch.equal(edit.weight_of(1), before)


def test_a_hook_that_is_half_attached_is_removed(either, monkeypatch):
    def cut_off(*given, **others):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformer_lens.hook_points.LensHandle", cut_off)  # made after torch's hook is attached
    with pytest.raises(KeyboardInterrupt):
        either.model.hook_embed.add_hook(lambda a, hook: a * 0)
    assert not either.model.hook_embed._forward_hooks


def test_the_next_pass_drops_hooks_whose_removal_was_cut_off(either, monkeypatch):
    model, plain = either.model, either.model(TOKENS)

    def cut_off(*given, **others):
        raise TimeoutError

    with pytest.raises(TimeoutError), model.hooks(fwd_hooks=[("hook_embed", lambda a, hook: a * 0)]):
        monkeypatch.setattr(type(model), "remove_all_hook_fns", cut_off)
    monkeypatch.undo()
    assert model.list_hooks()
    assert torch.equal(model(TOKENS), plain)
    assert not model.list_hooks()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_during_a_pass_of_another_thread_is_free(either):
    model, inside, go_on = either.model, threading.Event(), threading.Event()
    norm = model.blocks[0].ln1
    forward = norm.forward

    def stopping(x):
        inside.set()
        assert go_on.wait(20)
        return forward(x)

    norm.forward = stopping
    thread = threading.Thread(target=lambda: model(TOKENS))
    thread.start()
    try:
        assert inside.wait(20)
        del norm.forward
        if not (child := os.fork()):
            code = 1
            try:
                with model.hooks(fwd_hooks=[("hook_embed", lambda a, hook: None)]):
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(RuntimeError, match="another thread is running a forward pass"), model.hooks():
            pass
    finally:
        go_on.set()
        thread.join()
