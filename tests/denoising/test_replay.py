"""The same steps again: forced, free, or branched off."""

from dataclasses import replace

import pytest
import torch
from recorded_runs import PROMPT, RESID, record, same

from diffusion_lens.denoising.samplers import ReMDM
from diffusion_lens.denoising.trajectory import Trajectory


def flip(activation, hook):
    return activation.flip(-1)


@pytest.fixture(scope="module")
def flipped(several):
    """A recorded run, and its free replay under a hook that changes every activation."""
    run = record(several)
    return run, run.replay(several.model, canvas="free", fwd_hooks=[(RESID, flip)])


@pytest.mark.parametrize("canvas", ["forced", "free"])
def test_without_hooks_a_replay_is_the_run(several, canvas, tmp_path):
    run = record(several)
    loaded = Trajectory.load(run.save(tmp_path / "run.safetensors"))
    same(loaded.replay(several.model, canvas=canvas), run)


@pytest.mark.parametrize(("step", "canvas"), [(0, "free"), (2, "forced"), (3, "free"), (5, "forced")])
def test_a_branch_without_hooks_ends_where_the_run_ended(either, step, canvas):
    run = record(either)
    branch = run.from_step(step)
    assert torch.equal(branch.canvases, run.canvases[step:])
    same(branch.replay(either.model, canvas=canvas), branch)


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_given_logits_belong_to_the_first_step_even_if_it_reveals_nothing(either):
    """With more steps than masked positions, the first step reveals nothing and reads no logits."""
    run = either.model.denoise(PROMPT, max_new_tokens=2, steps=8)
    n_given = PROMPT.shape[1]
    assert torch.equal(run.canvases[1], run.canvases[0])
    other = torch.zeros(len(PROMPT), 2, either.model.cfg.d_vocab_out)
    same(run.replay_from_logits(either.model, other, range(n_given, n_given + 2)), run)
    short = either.model.denoise(PROMPT, max_new_tokens=2, steps=1)
    assert (short.replay_from_logits(either.model, other, range(n_given, n_given + 2)).tokens[:, n_given:] == 0).all()


def test_a_branch_keeps_the_numbers_of_its_steps(several):
    seen = []
    record(several).from_step(2).replay(
        several.model, canvas="free", fwd_hooks=[(RESID, lambda a, hook: seen.append((hook.step.index, hook.step.t)))]
    )
    assert seen[0][0] == 2
    assert seen[0][1] == pytest.approx(record(several).record["times"][2])


def test_a_forced_replay_under_a_hook_moves_confidence_and_no_token(several):
    run = record(several)
    patched = run.replay(several.model, fwd_hooks=[(RESID, flip)])
    assert torch.equal(patched.canvases, run.canvases)
    assert (patched.confidence - run.confidence).abs().max() > 1e-3


def test_a_free_replay_under_a_hook_may_change_the_canvas(flipped):
    run, patched = flipped
    assert not torch.equal(patched.canvases, run.canvases)
    assert (patched.tokens[run.given] == run.tokens[run.given]).all()


def test_the_forced_network_sees_the_recorded_canvas(several):
    run, seen = record(several), {}

    def look(activation, hook):
        seen[hook.step.index] = hook.step.tokens

    run.replay(several.model, fwd_hooks=[("hook_embed", look)])
    assert seen
    for step, tokens in seen.items():
        assert torch.equal(tokens, run.canvases[step])


def test_another_seed_branches_off(several):
    run = record(several, temperature=2.0)
    other = run.from_step(2).replay(several.model, canvas="free", seeds=[100, 101])
    assert torch.equal(other.canvases[0], run.canvases[2])
    assert not torch.equal(other.tokens, run.tokens)


def test_a_remasked_run_is_replayed_too(several):
    if several.model.cfg.opens_blocks or several.model.cfg.uniform_noise:
        return
    run = several.model.denoise(PROMPT, length=12, steps=8, sampler=ReMDM("rescale", eta=0.6), seed=1)
    assert ((run.canvases[1:] == 512) & (run.canvases[:-1] != 512)).any()
    same(run.replay(several.model), run)
    same(run.replay(several.model, canvas="free"), run)


def test_diff(several):
    run = record(several)
    none = run.diff(run)
    assert none.first_step is None
    assert not none.tokens.any()
    hook = (RESID, lambda a, hook: a.flip(-1) if hook.step.index == 3 else None)
    patched = run.replay(several.model, canvas="free", fwd_hooks=[hook])
    parted = run.diff(patched)
    assert parted.first_step in (None, 3, 4, 5, 6, 7)
    assert torch.equal(parted.tokens, run.tokens != patched.tokens)
    assert torch.equal(run.canvases[: parted.first_step + 1], patched.canvases[: parted.first_step + 1])


def test_html_shows_every_step_and_escapes(tiny, tmp_path):
    run = tiny.denoise("Gustav Geisser is the", length=14, steps=8)
    page = run.to_html()
    assert page.count("<tr>") == run.n_steps + 1
    assert page.count('class="new"') == 10
    assert "&lt;eos&gt;" in page
    assert "<eos>" not in page
    assert "http" not in page


def test_refusals(several):
    run = record(several)
    with pytest.raises(ValueError, match="canvas='fixed'"):
        run.replay(several.model, canvas="fixed")
    with pytest.raises(ValueError, match="step 9 is not one of the steps 0 to"):
        run.from_step(9)
    other = Trajectory(**{**vars(run), "record": {**run.record, "model": "another"}})
    with pytest.raises(ValueError, match="written by 'another'"):
        other.replay(several.model)
    if several.kind == "mdm":
        own = Trajectory(**{**vars(run), "record": {**run.record, "sampler": {"name": "mine"}}})
        with pytest.raises(ValueError, match="pass sampler="):
            own.replay(several.model, canvas="free")


def test_nothing_stays_hooked_when_a_replay_fails(several):
    def boom(activation, hook):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record(several).replay(several.model, fwd_hooks=[(RESID, boom)])
    assert not several.model.list_hooks()
    assert all(point.step is None for point in several.model.hook_points())


@pytest.mark.parametrize("several", ["dream"], indirect=True)
def test_a_record_with_an_older_name_of_the_score_is_replayed(several):
    run = several.model.denoise(PROMPT, max_new_tokens=3, steps=3, sampler="dream")
    proposal = run.record["sampler"]["proposal"]
    assert proposal["scored_on"] == "sampled"
    older = replace(
        run, record=run.record | {"sampler": run.record["sampler"] | {"proposal": proposal | {"scored_on": "drawn"}}}
    )
    same(older.replay(several.model), run)
