"""p(answer) and any other metric in sweeps over steps: what the loop would read, guided or not, on both models."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from diffusion_lens.analysis import answer_probability, patch_grid, trace_trajectory
from diffusion_lens.data import toy_facts
from diffusion_lens.hooks.names import mlp_out, resid_post
from diffusion_lens.interventions import at_steps, named, on_branch

FACTS = toy_facts.load().facts(trained="p2d", asked="p2d")
CLEAN, CORRUPTED = FACTS[0], FACTS[5]

GUIDED_OR_CAUSAL = [("tiny-mdm", 0.8), ("tiny-ar", 0.0), ("tiny-block", 0.0), ("tiny-uniform", 0.0)]
guided_or_causal = pytest.mark.parametrize(("tiny", "cfg_scale"), GUIDED_OR_CAUSAL, indirect=["tiny"])


def lay_out(model, fact):
    n_masks = 14 - model.to_tokens(fact.prompt).shape[1]
    return fact.to_query(model, n_masks=None if model.cfg.is_autoregressive else n_masks)


@cache
def denoise(model, query, cfg_scale=0.0):
    given = query.tokens[None, : query.answer_positions[0]]
    if model.cfg.is_autoregressive:
        return model.denoise(given, max_new_tokens=len(query.answer_tokens))
    return model.denoise(given, length=len(query.tokens), steps=5, cfg_scale=cfg_scale)


@pytest.fixture(scope="module")
def queries(tiny):
    """The queries about two people, laid out alike."""
    return lay_out(tiny, CLEAN), lay_out(tiny, CORRUPTED)


def only(query, n):
    """The first tokens of an answer."""
    return replace(query, answer_positions=query.answer_positions[:n], answer_tokens=query.answer_tokens[:n])


every_kind = pytest.mark.parametrize("tiny", [name for name, _ in GUIDED_OR_CAUSAL], indirect=True)
ONE_TOKEN, WHOLE = "the clean answer's first token", "the corrupted answer"
every_answer = pytest.mark.parametrize(
    ("tiny", "cfg_scale", "answer"),
    [
        ("tiny-mdm", 0.0, ONE_TOKEN),
        ("tiny-mdm", 0.8, WHOLE),
        ("tiny-ar", 0.0, WHOLE),
        ("tiny-block", 0.0, WHOLE),
        ("tiny-uniform", 0.0, WHOLE),
    ],
    indirect=["tiny"],
)


@pytest.fixture
def query(queries, answer):
    return only(queries[0], 1) if answer == ONE_TOKEN else queries[1]


def put(states, position):
    def hook_fn(activation, hook):
        activation = activation.clone()
        activation[:, position] = states[:, position]
        return activation

    return hook_fn


def slow_p_answer(model, query, run, cfg_scale, step, name=None, states=None, positions=(None,)):
    """p(answer) of one canvas, read by hand from the whole network: of each row, with its position patched."""
    shown, answer = run.canvases[step, 0].clone(), dict(zip(query.answer_positions, query.answer_tokens, strict=True))
    for position in (shown == -1).nonzero().flatten().tolist():
        filled = answer.get(position, run.tokens[0, position])
        shown[position] = filled if model.cfg.is_autoregressive else model.cfg.mask_token_id

    def put_one_in_each_row(activation, hook):
        activation = activation.clone()
        for row, position in enumerate(positions):
            activation[row, position] = states[0, position]
        return activation

    with torch.no_grad():
        hooks = [(name, put_one_in_each_row)] if name else []
        logits = model.run_with_hooks(shown.repeat(len(positions), 1), fwd_hooks=hooks)
        if cfg_scale:
            unprompted = model(shown.masked_fill(run.given[0], model.cfg.mask_token_id)[None])
            logits = (1 + cfg_scale) * logits - cfg_scale * unprompted
    p = torch.ones(len(positions))
    for position, token in answer.items():
        written, row = run.canvases[step, 0, position].item(), position - model.cfg.is_autoregressive
        is_open = run.uniform_noise or written in (-1, model.cfg.mask_token_id)
        p *= logits[:, row].softmax(-1)[:, token] if is_open else float(written == token)
    return p, shown


@every_answer
def test_p_answer_of_a_step_is_that_of_its_masked_positions(tiny, queries, query, cfg_scale):
    runs = [denoise(tiny, laid_out, cfg_scale) for laid_out in queries]
    steps = [0, 1 if tiny.cfg.opens_blocks else 4]  # by blocks the answer is written early
    positions, layers, close = [1, 3, 4], [0, 3], dict(rtol=0, atol=1e-5)
    grid = patch_grid(
        tiny, *runs, answer_probability(tiny, query), "mlp_out", steps, positions=positions, layers=layers
    )
    nontrivial = 0
    for i, step in enumerate(steps):
        (clean, shown), (corrupted, _) = (slow_p_answer(tiny, query, run, cfg_scale, step) for run in runs)
        torch.testing.assert_close(grid.clean[[i]], clean, **close)
        torch.testing.assert_close(grid.corrupted[[i]], corrupted, **close)
        _, states = tiny.run_with_cache(shown[None], names_filter=[mlp_out(layer) for layer in layers])
        reached = [k for k, position in enumerate(positions) if runs[1].canvases[step, 0, position] != -1]
        assert grid.scores[i].isnan().sum() == len(layers) * (len(positions) - len(reached))
        for j, layer in enumerate(layers):
            patched = mlp_out(layer), states[mlp_out(layer)], [positions[k] for k in reached]
            slow, _ = slow_p_answer(tiny, query, runs[1], cfg_scale, step, *patched)
            torch.testing.assert_close(grid.scores[i, j, reached], slow, **close)
            nontrivial += int(((slow - corrupted).abs() > 1e-3).sum())
    assert nontrivial >= 2
    assert grid.record["cfg_scale"] == cfg_scale


@pytest.mark.parametrize(
    ("tiny", "cfg_scale", "answer"),
    [(*kind, WHOLE) for kind in GUIDED_OR_CAUSAL],
    indirect=["tiny"],
)
def test_a_stream_patched_at_a_step_is_a_trace_of_a_swapped_subject(tiny, queries, query, cfg_scale):
    clean, corrupted = (denoise(tiny, laid_out, cfg_scale) for laid_out in queries)
    shown, layers = queries[0].tokens, [1]
    if tiny.cfg.is_autoregressive:
        shown = torch.cat([shown[: query.answer_positions[0]], torch.tensor(query.answer_tokens[:-1])]).long()
    query = replace(query, tokens=shown)
    swapped = dict(corruption="swap", swap=queries[1], layers=layers)
    trace = trace_trajectory(tiny, query, canvas="free", trajectory=clean, **swapped)
    grid = patch_grid(tiny, clean, corrupted, answer_probability(tiny, query), "resid_post", trace.steps, layers=layers)
    n_patched = grid.scores.shape[2]
    assert trace.scores[:, n_patched:].isnan().all()
    assert trace.indirect_effect.nan_to_num().abs().max() > 0.1
    for ours, theirs in (
        (grid.scores.transpose(1, 2), trace.scores[:, :n_patched]),
        (grid.clean, trace.clean),
        (grid.corrupted, trace.corrupted),
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, equal_nan=True)


@guided_or_causal
def test_a_callers_metric_reads_what_the_loop_reads(tiny, queries, cfg_scale):
    """The same state put back by hooks within the loop: the logits that it reveals from."""
    clean, corrupted = (denoise(tiny, query, cfg_scale) for query in queries)
    step, layer, position = 1, 1, 2
    (target,) = (corrupted.revealed_at[0] == step).nonzero().flatten()[:1].tolist()
    row = target - tiny.cfg.is_autoregressive
    loop_logits = []

    def record(logits, hook):
        if hook.step.index == step:
            loop_logits.append(logits[0, target].clone())

    shown = clean.canvases[step]
    _, states = tiny.run_with_cache(shown[shown != -1][None])
    name = resid_post(layer)
    patched = at_steps(on_branch(put(states[name], position), "conditional"), step)
    corrupted.replay(tiny, fwd_hooks=[(name, patched), ("denoise.hook_logits", record)])
    corrupted.replay(tiny, fwd_hooks=[("denoise.hook_logits", record)])
    for method in ("exact", "attribution"):
        shapes = []

        def metric(logits, shapes=shapes):
            shapes.append(logits.shape[1])
            return logits[0, -1, 3] - logits[0, -1, 5].square()

        grid = patch_grid(
            tiny,
            clean,
            corrupted,
            metric,
            "resid_post",
            [step],
            positions=[position],
            layers=[layer],
            logits_at=[row],
            method=method,
        )
        exact = grid.scores[0, 0, 0] if method == "exact" else grid.corrupted[0] + grid.error.exact[0]
        assert exact.item() == pytest.approx((loop_logits[0][3] - loop_logits[0][5].square()).item(), abs=1e-4)
        assert grid.corrupted[0].item() == pytest.approx(
            (loop_logits[1][3] - loop_logits[1][5].square()).item(), abs=1e-4
        )
        assert set(shapes) == {1}
    assert abs(grid.error.exact[0]) > 1e-3


@guided_or_causal
def test_estimates_of_p_answer(tiny, queries, cfg_scale):
    """Their exact cells are those of the exact grid; in inference mode they are the same."""
    runs, metric, steps = (
        [denoise(tiny, query, cfg_scale) for query in queries],
        answer_probability(tiny, queries[1]),
        [0, 1],
    )
    cells = dict(sites="resid_post", steps=steps, positions=[1, 2, 3], layers=[1])
    exact = patch_grid(tiny, *runs, metric, **cells)
    estimate = patch_grid(tiny, *runs, metric, **cells, method="attribution", check=4)
    torch.testing.assert_close(estimate.error.exact, exact.effect[tuple(estimate.error.cells.T)], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(estimate.corrupted, exact.corrupted)
    assert estimate.effect.nan_to_num().abs().max() > 1e-4
    with torch.inference_mode():
        inferred = patch_grid(tiny, *runs, metric, **cells, method="attribution", check=4)
    assert torch.equal(inferred.scores.nan_to_num(), estimate.scores.nan_to_num())


@every_kind
def test_all_positions_patched_at_a_step_are_the_clean_run(tiny, queries):
    runs = [denoise(tiny, query) for query in queries]
    for step in range(2):
        metric = answer_probability(tiny, queries[0])
        grid = patch_grid(tiny, *runs, metric, "resid_pre", [step], positions="all", layers=[0])
        if torch.equal(*(run.canvases[step, 0, list(queries[0].answer_positions)] for run in runs)):
            torch.testing.assert_close(grid.scores[:, 0], grid.clean, rtol=1e-4, atol=1e-6)
            assert grid.clean > grid.corrupted + 0.1


@every_kind
def test_a_clean_run_of_another_layout_is_patched_and_not_read(tiny, queries):
    """Its prompt is a token longer: positions are paired by hand, and only the corrupted run's p(answer) is read."""
    longer = denoise(tiny, lay_out(tiny, FACTS[1]))
    run = denoise(tiny, queries[1])
    pairs = [(2, 1), (4, 3)]
    grid = patch_grid(tiny, longer, run, answer_probability(tiny, queries[1]), "mlp_out", [0, 1], positions=pairs)
    assert grid.clean.isnan().all()
    assert not grid.scores.isnan().any()
    assert grid.corrupted[0].item() == pytest.approx(slow_p_answer(tiny, queries[1], run, 0.0, 0)[0].item(), abs=1e-5)


@pytest.mark.parametrize("tiny", ["tiny-uniform"], indirect=True)
def test_random_tokens_before_the_answer_are_no_part_of_the_prompt(tiny, queries):
    """Nor is what a hook writes over it."""

    def edit(tokens, hook):
        tokens[:, 1] = 7
        return tokens

    query, given = queries[1], queries[1].tokens[None, : queries[1].answer_positions[0]]
    query = replace(query, answer_positions=query.answer_positions[1:], answer_tokens=query.answer_tokens[1:])
    hooks = [("denoise.hook_tokens", named("another token", edit))]
    run = tiny.denoise(given, length=len(query.tokens), steps=5, fwd_hooks=hooks)
    grid = patch_grid(tiny, run, run, answer_probability(tiny, query), "mlp_out", [0], positions=[2], layers=[1])
    assert run.canvases[0, 0, 1] == 7
    assert grid.corrupted[0].item() == pytest.approx(slow_p_answer(tiny, query, run, 0.0, 0)[0].item(), abs=1e-5)


def test_a_run_that_cannot_be_patched_is_refused(tiny, queries):
    run, metric = denoise(tiny, queries[1]), answer_probability(tiny, queries[1])

    def refused(message, corrupted, metric=metric, steps=(0,)):
        with pytest.raises(ValueError, match=message):
            patch_grid(tiny, corrupted, corrupted, metric, "mlp_out", steps)

    refused("the trajectory has 2 rows", run.repeat(2))
    earlier = run.tokens[0].clone()
    earlier[[3, 4]] = torch.tensor([7, 8]) if tiny.cfg.is_autoregressive else tiny.cfg.mask_token_id
    refused(
        r"the answer positions \[3\] are part of the trajectory's prompt",
        run,
        answer_probability(tiny, replace(queries[1], answer_positions=(3, 4), answer_tokens=(7, 8), tokens=earlier)),
    )
    other = replace(run, record={**run.record, "architecture": {**run.record["architecture"], "d_model": 7}})
    refused("whose architecture differs", other)
    refused(r"steps=\[0, 0\] contains duplicates", run, steps=(0, 0))
    short = tiny.denoise(queries[1].tokens[None, : queries[1].answer_positions[0]], max_new_tokens=2)
    refused("the answer positions .* are outside the 6 positions", short)
