"""A state restored at one step only, and what is written in the end."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from diffusion_lens.analysis import TemporalEffect, noise_scale, temporal_effect
from diffusion_lens.analysis.engine.trajectory import loop_prompt
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.samplers import Blocks, ReMDM
from diffusion_lens.hooks.names import resid_post
from diffusion_lens.interventions import at_steps, named, on_branch

FACT = toy_facts.load().facts(trained="p2d", asked="p2d")[1]


# The bundled models: masked diffusion, a causal one, by blocks, and under uniform noise.
every_kind = pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar", "tiny-block", "tiny-uniform"], indirect=True)


@pytest.fixture(scope="module")
def query(tiny):
    return lay_out(tiny)


def lay_out(model):
    if model.cfg.is_autoregressive:
        return FACT.to_query(model, first_tokens=3)
    return FACT.to_query(model, n_masks=14 - model.to_tokens(FACT.prompt).shape[1])


@pytest.fixture(scope="module")
def run(tiny, query):
    return denoised(tiny, query)


def denoised(model, query, **options):
    """Three steps or, by blocks, two a block, and under uniform noise, which takes more to find the answer, eight."""
    given = query.tokens[None, : query.answer_positions[0]]
    if model.cfg.is_autoregressive:
        return model.denoise(given, max_new_tokens=len(query.answer_tokens))
    steps = 8 if model.cfg.uniform_noise else 6 if model.cfg.opens_blocks else 3
    return model.denoise(given, length=14, steps=steps, **options)


@pytest.fixture
def by_row(request, tiny):
    """A caller's hook that treats every second row in another way, if the parameter is true."""

    def disturb(activation, hook):
        changed = activation.clone()
        changed[1::2] += 8 * changed[1::2].roll(1, dims=1)
        return changed

    with tiny.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", named("disturb", disturb))] if request.param else []):
        yield request.param


@pytest.mark.parametrize(
    ("tiny", "cfg_scale", "by_row"),
    [
        *[("tiny-mdm", 1.5, False), ("tiny-mdm", 4.0, True), ("tiny-ar", 0.0, False)],
        *[("tiny-block", 0.0, False), ("tiny-uniform", 0.0, False)],
    ],
    indirect=["tiny", "by_row"],
)
def test_each_cell_is_a_free_branch_by_ordinary_hooks(tiny, query, run, cfg_scale, by_row):
    """Sample by sample and cell by cell: the whole loop under noise, one state put back at one step."""
    if cfg_scale:
        run = denoised(tiny, query, cfg_scale=cfg_scale)
    effect = assert_cells_are_branches(tiny, query, run)
    assert by_row or effect.clean == 1
    assert 0 <= effect.corrupted < 1


@pytest.mark.parametrize("family", ["bd3lm", "udlm", "llada2"])
def test_each_cell_of_a_network_with_times_or_experts_is_a_free_branch(in_words, family):
    model = in_words(family)
    query = lay_out(model)
    run = denoised(model, query)
    query = replace(query, answer_tokens=tuple(run.tokens[0, list(query.answer_positions)].tolist()))
    effect = assert_cells_are_branches(model, query, run)
    assert effect.clean == 1
    assert effect.token_scores.nan_to_num(nan=1.0).min() < 1


@pytest.mark.parametrize(
    ("tiny", "by_row", "severed"),
    [
        *[("tiny-mdm", False, "mlp"), ("tiny-mdm", True, "mlp"), ("tiny-mdm", True, "attn"), ("tiny-ar", False, "mlp")],
        *[("tiny-ar", False, "attn"), ("tiny-block", False, "attn"), ("tiny-uniform", False, "mlp")],
    ],
    indirect=["tiny", "by_row"],
)
def test_severed_outputs_keep_their_corrupted_values(tiny, query, run, by_row, severed):
    """By ordinary hooks too: above the restored state, in its position and its step only."""
    run = denoised(tiny, query, cfg_scale=4.0) if by_row else run
    assert_cells_are_branches(tiny, query, run, severed)


def assert_cells_are_branches(model, query, run, severed=None):
    noise, (start, stop), layer = noise_scale(model, [query]), query.subject, 0
    drawn = noise * np.random.RandomState(5).randn(2, stop - start, model.cfg.d_model)
    positions = [start, query.answer_positions[0]]
    effect = temporal_effect(
        model,
        query,
        trajectory=run,
        noise=noise,
        samples=2,
        seed=5,
        steps=[1, 2],
        positions=positions,
        layers=[layer],
        severed=severed,
    )
    free = None if severed is None else corrupted_samples(model, run, corrupt_by(drawn, start, stop))
    expected = torch.full((2, 2, len(query.answer_tokens), 2), torch.nan)
    runs = run.repeat(2)  # a row for each sample

    corrupt = corrupt_by(drawn, start, stop)
    for i_step, step in enumerate((1, 2)):
        with model.clock.at(run.state_at(step)):
            _, clean = model.run_with_cache(run.canvases[step].clamp(min=0))
        for i, position in enumerate(positions):
            if run.canvases[step, 0, position] == -1:
                continue

            def put_back(resid, hook, clean=clean, position=position):
                resid = resid.clone()
                resid[:, position] = clean[hook.name][:, position]
                return resid

            hooks = [("hook_embed", corrupt), (resid_post(layer), at_steps(put_back, step))]
            if severed is not None:
                hooks += keep_corrupted(model, free, step, position, severed, layer, corrupt)
            hooks = [(name, on_branch(hook, "conditional")) for name, hook in hooks]
            ended = runs.replay(model, canvas="free", fwd_hooks=hooks).tokens[:, list(query.answer_positions)]
            expected[i_step, i] = (ended == torch.tensor(query.answer_tokens)).float().T
    torch.testing.assert_close(effect.token_scores[:, :, 0], expected.mean(3), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(effect.scores[:, :, 0], expected.prod(2).mean(2), rtol=0, atol=0, equal_nan=True)
    return effect


def corrupt_by(drawn, start, stop):
    def corrupt(embedding, hook):
        embedding = embedding.clone()
        embedding[:, start:stop] += torch.from_numpy(drawn).float()
        return embedding

    return corrupt


def corrupted_samples(model, run, corrupt):
    """The free runs under noise, one row for each sample."""
    return run.repeat(2).replay(model, canvas="free", fwd_hooks=[("hook_embed", on_branch(corrupt, "conditional"))])


def keep_corrupted(model, free, step, position, severed, layer, corrupt):
    """Hooks that hold the outputs of one position above a layer at those of the corrupted samples at a step."""
    with model.clock.at(free.state_at(step)), model.hooks(fwd_hooks=[("hook_embed", corrupt)]):
        _, kept = model.run_with_cache(free.canvases[step].clamp(min=0))

    def hold(output, hook):
        output = output.clone()
        output[:, position] = kept[hook.name][:, position]
        return output

    names = [f"blocks.{block}.hook_{severed}_out" for block in range(layer + 1, model.cfg.n_layers)]
    return [(name, at_steps(hold, step)) for name in names]


@every_kind
def test_without_noise_every_branch_ends_with_the_answer(tiny, query, run):
    effect = temporal_effect(tiny, query, trajectory=run, noise=0.0, samples=1, layers=[1], positions=[1, 3], steps=[0])
    assert effect.corrupted == 1
    assert set(effect.scores.nan_to_num(nan=1.0).flatten().tolist()) == {1.0}


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_with_one_step_all_that_is_read_restored_is_the_clean_text(tiny, query):
    """With one step a branch is the whole run: restoring the row that is read after the last block gives its token."""
    run, position = tiny.denoise(query.tokens[None], steps=1), query.answer_positions[2]
    effect = temporal_effect(
        tiny, query, trajectory=run, noise=noise_scale(tiny, [query]), samples=5, positions=[position], layers=[-1]
    )
    assert effect.token_scores[0, 0, 0, 2] == 1
    assert effect.token_scores[0, 0, 0].min() < 1


def test_budget_changes_nothing_and_results_are_kept(tiny, query, run, tmp_path):
    settings = dict(noise=0.3, samples=2, steps=[0], layers=[1], positions=range(6), kind="mlp", window=2)
    widest = []

    def count(tokens, hook):
        widest[-1] = max(widest[-1], len(tokens))

    def counted(**options):
        widest.append(0)
        with tiny.hooks(fwd_hooks=[("denoise.hook_tokens", named("count", count))]):
            return temporal_effect(tiny, query, trajectory=run.replay(tiny, canvas="free"), **settings, **options)

    wide, narrow = counted(), counted(max_bytes=1_500_000)
    assert widest[0] > widest[1] >= 2
    with pytest.raises(ValueError, match="max_bytes=1 is too small: 2 samples"):
        temporal_effect(tiny, query, trajectory=run, **settings, max_bytes=1)
    torch.testing.assert_close(wide.scores, narrow.scores, rtol=0, atol=0, equal_nan=True)
    again = TemporalEffect.load(wide.save(tmp_path / "effect.safetensors"))
    torch.testing.assert_close(again.scores, wide.scores, rtol=0, atol=0, equal_nan=True)
    assert (again.steps, again.layers, again.subject, again.record) == (
        wide.steps,
        wide.layers,
        wide.subject,
        wide.record,
    )
    torch.testing.assert_close(wide.indirect_effect, wide.scores - wide.corrupted, equal_nan=True)


def test_steps_after_the_answer_are_refused(tiny, query, run):
    with pytest.raises(ValueError, match=r"steps=\[99\]"):
        temporal_effect(tiny, query, trajectory=run, noise=0.1, steps=[99])


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_steps_at_which_no_branch_can_begin_are_named(tiny, query):
    """ReMDM masks the least confident tokens, and of those that it masks later their confidence is not recorded."""
    given = query.tokens[None, : query.answer_positions[0]]
    run = tiny.denoise(given, length=14, steps=6, sampler=ReMDM("conf"), temperature=1.0, seed=1)
    call = dict(trajectory=run, noise=0.5, samples=2, layers=[0], positions=[1])
    with pytest.raises(ValueError, match=r"at the steps \[1\]: .*'remdm' .* Give steps=\[0, 2, 3, 4, 5\], or"):
        temporal_effect(tiny, query, **call)
    assert temporal_effect(tiny, query, **call, steps=[0, 2, 3, 4, 5]).scores.isfinite().all()


SAMPLERS = [
    ("tiny-mdm", dict(sampler="ancestral", temperature=1.0, seed=3)),
    ("tiny-mdm", dict(sampler=Blocks(3), cfg_scale=1.0, steps=3)),
    ("tiny-mdm", dict(sampler=ReMDM(strategy="cap", eta=0.3), steps=6)),
    ("tiny-ar", dict(temperature=1.0, seed=2)),
    ("tiny-block", dict(temperature=0.7, seed=1)),
    ("tiny-uniform", dict(seed=4)),
]


@pytest.mark.parametrize(("tiny", "options"), SAMPLERS, indirect=["tiny"])
def test_branches_that_are_continued_once_end_as_each_alone(tiny, query, options, token_layers):
    """A hook that only looks makes every branch a run of its own, which takes more of the network."""
    given, length = loop_prompt(tiny, query)
    run = tiny.denoise(
        given[None], length=length, **dict(dict(steps=None if tiny.cfg.is_autoregressive else 4), **options)
    )
    steps = [0] if "remdm" in str(run.record["sampler"]) else None
    at = range(1, len(query.tokens), 4)
    settings = dict(noise=noise_scale(tiny, [query]), samples=2, layers=[0, 1], positions=at, steps=steps)
    with token_layers() as once:
        effect = temporal_effect(tiny, query, trajectory=run, **settings)
    with tiny.hooks(fwd_hooks=[("denoise.hook_tokens", named("look", lambda tokens, hook: None))]):
        seen = run.replay(tiny, canvas="free")
        with token_layers() as each:
            alone = temporal_effect(tiny, query, trajectory=seen, **settings)
    torch.testing.assert_close(effect.token_scores, alone.token_scores, rtol=0, atol=0, equal_nan=True)
    assert effect.token_scores.nan_to_num(nan=effect.token_scores[0, 0, 0, 0]).unique().numel() > 1
    assert once[0] < 0.7 * each[0]


def test_the_restored_step_begins_at_the_restored_layer(tiny, query, run, token_layers):
    """Of the step in which a state is restored only the blocks above it are run, so less than every branch in full."""
    with token_layers() as counted:
        effect = temporal_effect(tiny, query, trajectory=run, noise=0.3, samples=2, positions=[1, 2, 4], steps=[0, 1])
    n_branches = len(effect.positions) * len(effect.layers) * 2
    steps_left = sum(run.n_steps - step for step in effect.steps)
    all_branches = n_branches * steps_left * run.tokens.shape[1] * tiny.cfg.n_layers
    assert 0 < counted[0] < 0.8 * all_branches
