"""A recorded canvas is the one that its step read, hooks at `denoise.hook_tokens` included."""

import warnings

import pytest
import torch
from recorded_runs import PROMPT, record, same
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from diffusion_lens.analysis import logit_lens
from diffusion_lens.denoising.samplers import Blocks, ReMDM
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.interventions import named
from diffusion_lens.records.results import RECORD

FORCED, TOKEN = 4, 7  # a position that the run writes, and the token that a hook writes there
N_GIVEN = PROMPT.shape[1]
CLOSE = dict(rtol=0, atol=1e-6)


def edits(model, force_at=2, mask_at=3):
    """A hook that writes a token over one position, and masks two others again: one given, and one written."""
    blank = None if model.cfg.uniform_noise else model.cfg.blank

    def edit(tokens, hook):
        tokens, index = tokens.clone(), hook.step.index
        if index == force_at:
            tokens[:, FORCED] = TOKEN
        if index == mask_at and blank is None:
            tokens[:, 1] = TOKEN
        elif index == mask_at and model.cfg.is_autoregressive:
            tokens[:, N_GIVEN + index - 1] = blank
        elif index == mask_at:
            tokens[:, [1, FORCED + 1]] = blank
        return tokens

    return ("denoise.hook_tokens", named(f"edits at {force_at} and {mask_at}", edit))


def with_canvases(model, run, **more):
    """A run, and the states of its steps as hooks inside the network read them, by step."""
    read = {}

    def look(activation, hook):
        if hook.step.branch == "conditional":
            read[hook.step.index] = hook.step

    return run(fwd_hooks=[edits(model, **more), ("hook_embed", look)]), read


@pytest.fixture(scope="module")
def edited(several):
    """A run under edits, with the states of its steps; guided where the network masks."""
    return with_canvases(several.model, lambda **hooks: record(several, **{k: tuple(v) for k, v in hooks.items()}))


def test_a_recorded_canvas_is_the_one_that_was_read(several, edited):
    run, read = edited
    assert len(read) > 3
    for step, state in read.items():
        assert torch.equal(run.canvases[step], state.tokens)
    assert (run.canvases[2, :, FORCED] == TOKEN).all()
    assert torch.equal(run.canvases[-1], run.tokens)


def test_replays_repeat_a_run_under_edits(several, edited, tmp_path):
    run = Trajectory.load(edited[0].save(tmp_path / "run.safetensors"))
    same(run.replay(several.model), run)
    same(run.replay(several.model, canvas="free", fwd_hooks=[edits(several.model)]), run)
    for step in (2, 3):
        assert_branch_is_repeated(several.model, run.from_step(step), edits(several.model))


def assert_branch_is_repeated(model, branch, hook):
    """By force, and freely under the same hook."""
    same(branch.replay(model), branch)
    again = branch.replay(model, canvas="free", fwd_hooks=[hook])
    assert torch.equal(again.canvases, branch.canvases)
    assert torch.equal(again.revealed_before, branch.revealed_before)
    if branch.uniform_noise:
        assert (again.revealed_at == branch.revealed_at)[(branch.canvases == branch.canvases[0]).all(dim=0)].all()


@pytest.mark.parametrize("several", ["bd3lm"], indirect=True)
@pytest.mark.parametrize("position", [4, 5, 6, 7])
def test_the_state_of_an_edited_step_names_the_block_of_the_loop(several, position):
    """Also where a position of a block that is filled is masked again later."""
    model, states = several.model, {}

    def look(tokens, hook):
        tokens = tokens.clone()
        if hook.step.index == 9:
            tokens[:, position] = model.cfg.blank
        states[hook.step.index] = hook.step
        return tokens

    run = model.denoise(
        PROMPT, length=12, steps=12, seed=3, temperature=1.0, fwd_hooks=[("denoise.hook_tokens", named("mask", look))]
    )
    for step in set(states) - {9}:  # In step 9, hooks see the canvas before it is edited.
        for part in (run, run.from_step(step), run.from_step(step // 2).from_step(step)):
            block = part.state_at(step).block
            for name in ("index", "start", "stop", "step", "order"):
                assert torch.equal(getattr(block, name), getattr(states[step].block, name)), (step, name)


@pytest.mark.parametrize("several", ["bd3lm"], indirect=True)
def test_a_file_that_lacks_them_gets_the_steps_before_and_the_prompt(several, tmp_path):
    """As those of earlier versions; the first canvas has what was given where hooks wrote over it later."""
    run, path = record(several, fwd_hooks=(edits(several.model, 2, 3),)), tmp_path / "run.safetensors"
    run.save(path)
    with safe_open(path, "pt") as file:
        metadata = {RECORD: file.metadata()[RECORD]}
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if k not in ("prompt", "revealed_before")}, path, metadata)
    assert run.is_masked(run.canvases[3])[:, 1].all()
    same(Trajectory.load(path), run)
    assert torch.equal(Trajectory.load(path).prompt, run.prompt)
    assert torch.equal(Trajectory.load(path).revealed_before, run.revealed_before)
    assert run.diff(Trajectory.load(path)).first_step is None


@pytest.mark.parametrize("force_at", [0, 5])
def test_edits_before_the_first_and_the_last_step_are_replayed(several, force_at):
    hook = edits(several.model, force_at, 0)
    run = record(several, fwd_hooks=(hook,))
    assert (run.canvases[force_at, :, FORCED] == TOKEN).all()
    same(run.replay(several.model), run)
    same(run.replay(several.model, canvas="free", fwd_hooks=[hook]), run)


def test_loop_lens_and_forced_replay_give_one_probability(several):
    settings = {"cfg_scale": 0.0, "fwd_hooks": (edits(several.model),)}
    run = record(several, **settings)
    forced = run.replay(several.model)
    torch.testing.assert_close(forced.confidence, run.confidence, **CLOSE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # No network differs: the canvases contain what the hook did.
        lens = logit_lens(several.model, run, layers=[-1])
    compared = 0
    for step in range(run.n_steps):
        read = run.revealed_at == step
        if run.uniform_noise:
            read = ~run.given if step == run.n_steps - 1 else torch.zeros_like(read)
        # Without the token that the hook wrote, which has no probability.
        read &= run.is_open(run.canvases[step]) & (run.uniform_noise | (torch.arange(10) != FORCED))
        compared += int(read.sum())
        of_lens = torch.full_like(run.confidence, torch.nan)
        of_lens[:, lens.positions] = lens.at_step(step).target_probabilities[0, :, :, 0].float()
        torch.testing.assert_close(of_lens[read], run.confidence[read], **CLOSE)
    assert compared > 6


def test_what_a_hook_writes_is_certain(several):
    """It has the step of the hook in place of a mask; over a token, that of the token which was revealed there."""
    plain = record(several)
    for step in (1, 5):
        run = record(several, fwd_hooks=(edits(several.model, step, 9),))
        if run.uniform_noise:  # Every step may write the position again, and tells its probability.
            assert (run.revealed_at[:, FORCED] >= step).all()
            continue
        assert (run.tokens[:, FORCED] == TOKEN).all()
        was_masked = run.is_masked(run.canvases[step - 1])[:, FORCED]
        expected = torch.where(was_masked, step, plain.revealed_at[:, FORCED])
        assert torch.equal(run.revealed_at[:, FORCED], expected)
        assert (run.confidence[:, FORCED] == 1).all()


def test_what_a_hook_masks_is_revealed_by_a_later_step(several, edited):
    run, _ = edited
    masked = run.is_masked(run.canvases)
    unwritten = run.is_masked(run.tokens)
    assert (run.confidence[unwritten] == 0).all()
    assert (run.revealed_at[unwritten] == -1).all()
    # Wherever a step is named, its canvas is masked there, except for the token that a hook wrote.
    for row, pos in (run.revealed_at >= 0).nonzero().tolist():
        step = int(run.revealed_at[row, pos])
        assert run.uniform_noise or masked[step, row, pos] or (step, pos) == (2, FORCED)
    if not several.model.cfg.opens_blocks and not run.uniform_noise:
        assert (run.revealed_at[:, [1, FORCED + 1]] >= 3).all()
        assert run.given[:, 1].all()


def test_a_run_is_compared_with_one_edited_from_the_start(several):
    plain, edited = record(several), record(several, fwd_hooks=(edits(several.model, 0, 9),))
    assert plain.diff(edited).first_step == -1
    later = record(several, fwd_hooks=(edits(several.model, 2, 9),))
    assert plain.diff(later).first_step in (1, 2, 3)


def test_a_prompt_is_what_was_given_whatever_hooks_write_over_it(several, tmp_path):
    plain = record(several)
    for step in (0, 3):

        def edit(tokens, hook, step=step):
            tokens = tokens.clone()
            tokens[:, 1] = TOKEN if hook.step.index >= step else tokens[:, 1]
            return tokens

        hook = ("denoise.hook_tokens", named(f"another token from {step} on", edit))
        run = record(several, fwd_hooks=(hook,))
        assert (run.tokens[:, 1] == TOKEN).all()
        loaded = Trajectory.load(run.save(tmp_path / "run.safetensors"))
        rows = run.row(1).repeat(2)
        for part, given in [(p, PROMPT) for p in (loaded, run.from_step(4), run.replay(several.model))] + [
            (rows, PROMPT[[1, 1]])
        ]:
            assert torch.equal(part.prompt[:, :N_GIVEN], given)
            assert (part.prompt[:, N_GIVEN:] == run.blank).all()
        assert plain.diff(run).first_step == step - 1


@pytest.mark.parametrize("several", ["dream"], indirect=True)
def test_a_forced_replay_masks_under_its_own_hook(several):
    """A hook of the replay changes the canvas of its step only, and the recording says so."""
    run = record(several)
    forced = run.replay(several.model, fwd_hooks=[edits(several.model, 9, 5)])
    assert torch.equal(forced.canvases[:5], run.canvases[:5])
    assert forced.is_masked(forced.canvases[5])[:, 1].all()
    assert torch.equal(forced.tokens, run.tokens)
    assert (forced.revealed_at[:, 1] == 5).all()
    assert (forced.confidence[:, 1] < 1).all()


@pytest.mark.parametrize("several", ["dream"], indirect=True)
@pytest.mark.parametrize("sampler", [ReMDM("rescale", eta=0.6), ReMDM("conf", eta=0.6), Blocks(3)])
def test_samplers_take_edits_for_revealed_positions(several, sampler):
    model = several.model
    run, read = with_canvases(
        model, lambda fwd_hooks: model.denoise(PROMPT, length=10, steps=6, sampler=sampler, fwd_hooks=fwd_hooks)
    )
    for step, state in read.items():
        assert torch.equal(run.canvases[step], state.tokens)
    same(run.replay(model), run)
    same(run.replay(model, canvas="free", fwd_hooks=[edits(model)]), run)
    if isinstance(sampler, Blocks):
        # What a hook writes belongs to its block, so the first block is not filled up from the second one.
        assert (run.revealed_at[:, 7:] >= 3).all()
        branch = run.from_step(3)
        assert torch.equal(branch.replay(model, canvas="free", fwd_hooks=[edits(model)]).canvases, branch.canvases)


def test_random_edits_are_replayed_from_every_step(several):
    model, generator = several.model, torch.Generator().manual_seed(0)
    blank = TOKEN if model.cfg.uniform_noise else model.cfg.blank
    steps, positions, kinds = (torch.randint(n, (9,), generator=generator).tolist() for n in (5, 10, 4))
    written = [blank if kind < 2 else kind for kind in kinds]

    def edit(tokens, hook):
        tokens = tokens.clone()
        for step, position, token in zip(steps, positions, written, strict=True):
            if step == hook.step.index:
                tokens[:, position] = token
        return tokens

    hook = ("denoise.hook_tokens", named("random edits", edit))
    run = record(several, fwd_hooks=(hook,))
    for step in range(run.n_steps):
        assert_branch_is_repeated(model, run.from_step(step), hook)
