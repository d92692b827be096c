"""A caller's hooks that read the denoising step are given it in every pass that an analysis makes for a step."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens.analysis import answer_probability, noise_scale, patch_grid, temporal_effect, trace_trajectory
from diffusion_lens.data import toy_facts
from diffusion_lens.interventions import at_steps, freeze, named, on_branch, swap, while_masked, zero_ablate

FACTS = toy_facts.load().facts(trained="p2d", asked="p2d")
POINT = "blocks.0.hook_attn_out"
HOOKS = {
    "at_steps": at_steps(zero_ablate(), range(2)),
    "while_masked": while_masked(zero_ablate()),
    "on_branch": on_branch(zero_ablate(), "unconditional"),
}

guided_or_causal = pytest.mark.parametrize(("small", "cfg_scale"), [("mdm", 0.8), ("ar", 0.0)], indirect=["small"])
every_hook = pytest.mark.parametrize(
    ("small", "cfg_scale", "name"),
    [
        *(("mdm", 0.8, name) for name in ("at_steps", "on_branch")),
        ("mdm", 0.0, "while_masked"),
        ("ar", 0.0, "at_steps"),
        ("ar", 0.0, "while_masked"),
    ],
    indirect=["small"],
)

on_another_networks_canvases = pytest.mark.filterwarnings(
    "ignore:the .* (was|were) written by another network:UserWarning"
)


def watching(hook=lambda activation, hook: None):
    """The hooks of a run that is watched. By their name they belong to one network, whatever they read."""
    return [(POINT, named("watches", hook))]


def denoise(model, fact, cfg_scale=0.0, hooks=()):
    """A run, and the query whose answer is the first tokens that this run writes, right or wrong."""
    prompt = model.to_tokens(fact.prompt)
    n_prompt, n_answer = prompt.shape[1], 3
    length = 14 if model.cfg.has_mask else n_prompt + n_answer
    run = model.denoise(prompt, length=length, steps=4, cfg_scale=cfg_scale, fwd_hooks=hooks)
    query = fact.to_query(model, first_tokens=n_answer)
    answer = run.tokens[0, list(query.answer_positions)]
    tokens = torch.cat([prompt[0], answer[:-1]])
    if model.cfg.has_mask:
        tokens = torch.nn.functional.pad(prompt[0], (0, 14 - n_prompt), value=model.cfg.mask_token_id)
    return run, replace(query, tokens=tokens, answer_tokens=tuple(answer.tolist()))


class Witness:
    """A hook that records the step of every activation, and checks that it describes the rows that run."""

    def __init__(self):
        self.states = []

    def __call__(self, activation, hook):
        state = hook.step
        assert state is not None
        for rows in (state.tokens, state.masked, state.given):
            assert rows.shape == activation.shape[:2]
        self.states.append(state)

    def of_loop(self, model, run):
        with model.hooks(fwd_hooks=[(POINT, self)]):
            run.replay(model)
        return {(state.index, state.branch): state for state in self.states}


def assert_states_equal_the_loops(states, loop, same_canvas):
    assert states
    for state in states:
        of_loop = loop[state.index, state.branch]
        assert (state.n_steps, state.t, state.s) == (of_loop.n_steps, of_loop.t, of_loop.s)
        assert (state.given == of_loop.given).all()
        assert not (state.masked & state.given).any()
        if same_canvas:
            assert (state.tokens == of_loop.tokens).all()
            assert (state.masked == of_loop.masked).all()


@every_hook
def test_clean_scores_are_those_of_the_loop_under_the_same_hook(small, name, cfg_scale):
    with small.hooks(fwd_hooks=[(POINT, HOOKS[name])]):
        run, query = denoise(small, FACTS[0], cfg_scale)
        trace = trace_trajectory(small, query, trajectory=run, noise=0.0, samples=2, layers=[1], positions=[1, 3])
    for token, (position, step) in enumerate(zip(query.answer_positions, trace.revealed_at, strict=True)):
        score = trace.clean_token_scores[trace.steps.index(step), token]
        assert score.item() == pytest.approx(run.confidence[0, position].item(), abs=1e-5)
    torch.testing.assert_close(trace.corrupted, trace.clean, rtol=1e-3, atol=0)
    on_canvas = ~trace.scores.isnan()
    everywhere = trace.clean[:, None, None].expand_as(trace.scores)
    torch.testing.assert_close(trace.scores[on_canvas], everywhere[on_canvas], rtol=1e-3, atol=0)


@guided_or_causal
def test_a_hook_of_some_steps_changes_the_scores_of_these_steps_alone(small, cfg_scale):
    run, query = denoise(small, FACTS[0], cfg_scale)
    settings = dict(trajectory=run, noise=0.0, samples=1, layers=[0], positions=[1])
    plain = trace_trajectory(small, query, **settings)
    with (
        small.hooks(fwd_hooks=[(POINT, at_steps(zero_ablate(), plain.steps[0]))]),
        pytest.warns(UserWarning, match="written by another network"),
    ):
        hooked = trace_trajectory(small, query, **settings)
    changed = (hooked.clean_token_scores - plain.clean_token_scores).abs().amax(dim=1) > 1e-6
    assert changed.tolist() == [True] + [False] * (len(plain.steps) - 1)


@guided_or_causal
@pytest.mark.parametrize("canvas", ["forced", "free"])
def test_every_pass_of_a_trace_reads_its_step(small, canvas, cfg_scale):
    run, query = denoise(small, FACTS[0], cfg_scale, watching())
    loop, witness = Witness().of_loop(small, run), Witness()
    with small.hooks(fwd_hooks=watching(witness)):
        trace = trace_trajectory(
            small, query, canvas=canvas, trajectory=run, noise=1.0, samples=3, layers=[1], positions=[1, 3]
        )
    assert_states_equal_the_loops(witness.states, loop, same_canvas=canvas == "forced")
    assert {state.index for state in witness.states} >= set(trace.steps)
    assert {len(state.tokens) for state in witness.states} >= {1, 3}
    assert {state.branch for state in witness.states} == {branch for _, branch in loop}


@guided_or_causal
def test_without_noise_no_cell_of_a_temporal_effect_differs(small, cfg_scale):
    with small.hooks(fwd_hooks=[(POINT, HOOKS["at_steps"]), ("blocks.1.hook_mlp_out", HOOKS["while_masked"])]):
        run, query = denoise(small, FACTS[0], cfg_scale)
        effect = temporal_effect(small, query, trajectory=run, noise=0.0, samples=1, positions=[1, 3, 5])
    assert effect.clean == effect.corrupted == 1
    assert set(effect.token_scores.nan_to_num(nan=1.0).flatten().tolist()) == {1.0}


@guided_or_causal
@pytest.mark.parametrize("method", ["exact", "attribution"])
def test_every_pass_of_a_grid_reads_its_step(small, cfg_scale, method):
    (clean, _), (corrupted, query) = (denoise(small, fact, cfg_scale, watching()) for fact in (FACTS[0], FACTS[5]))
    loops = [Witness().of_loop(small, run) for run in (clean, corrupted)]
    metrics = [lambda logits: logits[0, -1, 7], answer_probability(small, query)]
    for metric in metrics if method == "exact" else metrics[:1]:
        witness = Witness()
        with small.hooks(fwd_hooks=watching(witness)):
            patch_grid(small, clean, corrupted, metric, "mlp_out", [0, 2], positions=[1, 2], layers=[0], method=method)
        for run, loop in zip((clean, corrupted), loops, strict=True):
            of_run = [state for state in witness.states if (state.tokens == run.canvases[state.index]).all()]
            assert_states_equal_the_loops(of_run, loop, same_canvas=True)
            assert {state.index for state in of_run} == {0, 2}
        assert {state.branch for state in witness.states} == {branch for _, branch in loops[0]}


@every_hook
def test_a_grid_reads_what_the_loop_reads_under_the_same_hook(small, name, cfg_scale):
    loop_logits = {}

    def record(logits, hook):
        loop_logits[hook.step.index] = logits[0].clone()

    with small.hooks(fwd_hooks=[(POINT, HOOKS[name])]):
        run, _ = denoise(small, FACTS[0], cfg_scale)
        run.replay(small, fwd_hooks=[("denoise.hook_logits", record)])
        for step in (0, 2):
            (target,) = (run.revealed_at[0] == step).nonzero().flatten()[:1].tolist()
            row = target - small.cfg.is_autoregressive
            grid = patch_grid(
                small, run, run, lambda logits: logits[0, 0, 3], "resid_post", [step], layers=[1], logits_at=[row]
            )
            assert grid.clean[0].item() == pytest.approx(loop_logits[step][target, 3].item(), abs=1e-4)
            torch.testing.assert_close(grid.scores, grid.clean.expand_as(grid.scores), rtol=0, atol=1e-5)


@on_another_networks_canvases
@pytest.mark.parametrize("small", ["ar"], indirect=True)
def test_a_hook_in_a_grid_reads_the_whole_canvas_of_the_twin(small):
    """Rows that the metric counts from the end stay those of the positions reached."""
    (clean, _), (corrupted, _) = (denoise(small, fact) for fact in (FACTS[0], FACTS[5]))
    widths = []
    settings = dict(steps=[0, 1], positions=[1], layers=[0])
    plain = patch_grid(small, clean, corrupted, lambda logits: logits[0, -1, 7], "mlp_out", **settings)
    for rows in (None, [-1]):
        with small.hooks(fwd_hooks=[(POINT, lambda activation, hook: widths.append(activation.shape[1]))]):
            watched = patch_grid(
                small, clean, corrupted, lambda logits: logits[0, -1, 7], "mlp_out", logits_at=rows, **settings
            )
        torch.testing.assert_close(watched.scores, plain.scores, rtol=0, atol=1e-5)
        torch.testing.assert_close(watched.clean, plain.clean, rtol=0, atol=1e-5)
    assert set(widths) == {clean.tokens.shape[1]}


def test_the_step_is_taken_back_after_an_exception(small):
    run, query = denoise(small, FACTS[0], hooks=watching())

    def fails(activation, hook):
        raise RuntimeError("a hook of the caller's")

    settings = dict(noise=noise_scale(small, [query]), samples=2)
    with small.hooks(fwd_hooks=watching(at_steps(fails, 1))):
        for analysis in (
            lambda: trace_trajectory(small, query, trajectory=run, steps=[1], **settings),
            lambda: temporal_effect(small, query, trajectory=run, steps=[1], **settings),
            lambda: patch_grid(small, run, run, answer_probability(small, query), "mlp_out", [1]),
        ):
            with pytest.raises(RuntimeError, match="a hook of the caller's"):
                analysis()
            assert (small.clock.step, small.clock.branches) == (None, None)


@on_another_networks_canvases
def test_freeze_is_refused_and_a_cache_replaces_it(small):
    run, query = denoise(small, FACTS[0])
    settings = dict(trajectory=run, noise=0.0, samples=1, layers=[0], positions=[1])
    with (
        small.hooks(fwd_hooks=[(POINT, freeze())]),
        pytest.raises(ValueError, match=rf"freeze\(\) fixes '{POINT}' at the value of an earlier step"),
    ):
        trace_trajectory(small, query, **settings)
    prompt = small.to_tokens(FACTS[0].prompt)
    _, cache = small.denoise_with_cache(prompt, POINT, length=14, steps=4)
    with small.hooks(fwd_hooks=[(POINT, swap(cache, positions=[0, 1]))]):
        swapped = trace_trajectory(small, query, **settings)
    torch.testing.assert_close(swapped.clean, trace_trajectory(small, query, **settings).clean, rtol=1e-3, atol=0)
