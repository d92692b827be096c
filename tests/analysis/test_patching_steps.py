"""p(answer) and any other metric in sweeps over steps: what the loop would read, guided or not, on both models."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens.analysis import answer_probability, patch_grid, trace_trajectory
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.step_hooks import at_steps, on_branch
from diffusion_lens.hook_names import mlp_out, resid_post

FACTS = toy_facts.load().facts(trained="p2d", asked="p2d")
CLEAN, CORRUPTED = FACTS[0], FACTS[5]

guided_or_not = pytest.mark.parametrize(
    ("tiny", "cfg_scale"), [("tiny-mdm", 0.0), ("tiny-mdm", 0.8), ("tiny-ar", 0.0)], indirect=["tiny"]
)


def lay_out(model, fact):
    places = 14 - model.to_tokens(fact.prompt).shape[1]
    return fact.to_query(model, answer_places=places) if model.cfg.mask_token_id else fact.to_query(model)


def denoise(model, query, cfg_scale=0.0):
    if model.cfg.mask_token_id:
        return model.denoise(query.tokens[None], steps=5, cfg_scale=cfg_scale)
    return model.denoise(query.tokens[None, : query.answer_positions[0]], max_new_tokens=len(query.answer_tokens))


@pytest.fixture
def asked(tiny):
    """The queries about two people, laid out alike."""
    return lay_out(tiny, CLEAN), lay_out(tiny, CORRUPTED)


def only(query, n):
    """The first tokens of an answer."""
    return replace(query, answer_positions=query.answer_positions[:n], answer_tokens=query.answer_tokens[:n])


@pytest.fixture(params=["the clean answer's first token", "the corrupted answer"])
def posed(request, asked):
    return only(asked[0], 1) if "first" in request.param else asked[1]


def put(states, place):
    def hook_fn(activation, hook):
        activation = activation.clone()
        activation[:, place] = states[:, place]
        return activation

    return hook_fn


def slow_p_answer(model, query, run, cfg_scale, step, hooks=()):
    """p(answer) of one canvas, read by hand from the whole network."""
    shown, answer = run.canvases[step, 0].clone(), dict(zip(query.answer_positions, query.answer_tokens, strict=True))
    for place in (shown == -1).nonzero().flatten().tolist():
        shown[place] = answer.get(place, run.tokens[0, place])
    with torch.no_grad():
        logits = model.run_with_hooks(shown[None], fwd_hooks=list(hooks))[0]
        if cfg_scale:
            unprompted = model(shown.masked_fill(run.given[0], model.cfg.mask_token_id)[None])[0]
            logits = (1 + cfg_scale) * logits - cfg_scale * unprompted
    p = 1.0
    for place, token in answer.items():
        written, row = run.canvases[step, 0, place].item(), place - model.cfg.grows
        is_open = written in (-1, model.cfg.mask_token_id)
        p *= logits[row].softmax(-1)[token].item() if is_open else float(written == token)
    return p, shown


@guided_or_not
def test_p_answer_of_a_step_is_that_of_its_open_places(tiny, asked, posed, cfg_scale):
    runs, steps = [denoise(tiny, query, cfg_scale) for query in asked], [0, 1, 2, 4]
    query, places, layers = posed, [1, 3, 4, 6], range(4)
    found = patch_grid(tiny, *runs, answer_probability(tiny, query), "mlp_out", steps, positions=places, layers=layers)
    nontrivial = 0
    for i, step in enumerate(steps):
        (clean, shown), (corrupted, _) = (slow_p_answer(tiny, query, run, cfg_scale, step) for run in runs)
        assert found.clean[i].item() == pytest.approx(clean, abs=1e-5)
        assert found.corrupted[i].item() == pytest.approx(corrupted, abs=1e-5)
        _, states = tiny.run_with_cache(shown[None])
        for j, layer in enumerate(layers):
            for k, place in enumerate(places):
                score = found.scores[i, j, k]
                if runs[1].canvases[step, 0, place] == -1:
                    assert score.isnan()
                    continue
                hooks = [(mlp_out(layer), put(states[mlp_out(layer)], place))]
                slow, _ = slow_p_answer(tiny, query, runs[1], cfg_scale, step, hooks)
                assert score.item() == pytest.approx(slow, abs=1e-5)
                nontrivial += abs(slow - corrupted) > 1e-3
    assert nontrivial >= 2
    assert found.record["cfg_scale"] == cfg_scale


@guided_or_not
def test_the_stream_patched_at_a_step_is_a_free_trace_of_a_swapped_subject(tiny, asked, posed, cfg_scale):
    clean, corrupted = (denoise(tiny, query, cfg_scale) for query in asked)
    shown = asked[0].tokens
    if not tiny.cfg.has_mask:
        shown = torch.cat([shown[: posed.answer_positions[0]], torch.tensor(posed.answer_tokens[:-1])]).long()
    query = replace(posed, tokens=shown)
    trace = trace_trajectory(tiny, query, canvas="free", trajectory=clean, corruption="swap", swap=asked[1])
    grid = patch_grid(tiny, clean, corrupted, answer_probability(tiny, query), "resid_post", trace.steps)
    n_held = grid.scores.shape[2]
    assert trace.scores[:, n_held:].isnan().all()
    assert trace.indirect_effect.nan_to_num().abs().max() > 0.1
    for ours, theirs in (
        (grid.scores.transpose(1, 2), trace.scores[:, :n_held]),
        (grid.clean, trace.clean),
        (grid.corrupted, trace.corrupted),
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, equal_nan=True)


@guided_or_not
def test_a_metric_of_ones_own_reads_what_the_loop_reads(tiny, asked, cfg_scale):
    """The same state put back by hooks within the loop: the logits that it reveals from."""
    clean, corrupted = (denoise(tiny, query, cfg_scale) for query in asked)
    step, layer, place = 1, 1, 2
    (target,) = (corrupted.revealed_at[0] == step).nonzero().flatten()[:1].tolist()
    row = target - tiny.cfg.grows
    read = []

    def look(logits, hook):
        if hook.step.index == step:
            read.append(logits[0, target].clone())

    shown = clean.canvases[step]
    _, states = tiny.run_with_cache(shown[shown != -1][None])
    name = resid_post(layer)
    patched = at_steps(on_branch(put(states[name], place), "conditional"), step)
    corrupted.replay(tiny, fwd_hooks=[(name, patched), ("denoise.hook_logits", look)])
    corrupted.replay(tiny, fwd_hooks=[("denoise.hook_logits", look)])
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
            positions=[place],
            layers=[layer],
            logits_at=[row],
            method=method,
        )
        exact = grid.scores[0, 0, 0] if method == "exact" else grid.corrupted[0] + grid.error.exact[0]
        assert exact.item() == pytest.approx((read[0][3] - read[0][5].square()).item(), abs=1e-4)
        assert grid.corrupted[0].item() == pytest.approx((read[1][3] - read[1][5].square()).item(), abs=1e-4)
        assert set(shapes) == {1}
    assert abs(grid.error.exact[0]) > 1e-3


@guided_or_not
def test_estimates_of_p_answer(tiny, asked, cfg_scale):
    """Their exact cells are those of the exact grid; in inference mode they are the same."""
    runs, metric, steps = (
        [denoise(tiny, query, cfg_scale) for query in asked],
        answer_probability(tiny, asked[1]),
        [0, 1],
    )
    exact = patch_grid(tiny, *runs, metric, "resid_post", steps)
    estimate = patch_grid(tiny, *runs, metric, "resid_post", steps, method="attribution", check=4)
    torch.testing.assert_close(estimate.error.exact, exact.effect[tuple(estimate.error.cells.T)], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(estimate.corrupted, exact.corrupted)
    assert estimate.effect.nan_to_num().abs().max() > 1e-4
    with torch.inference_mode():
        inferred = patch_grid(tiny, *runs, metric, "resid_post", steps, method="attribution", check=4)
    assert torch.equal(inferred.scores.nan_to_num(), estimate.scores.nan_to_num())


def test_all_places_patched_at_a_step_are_the_clean_run(tiny, asked):
    runs = [denoise(tiny, query) for query in asked]
    for step in range(2):
        metric = answer_probability(tiny, asked[0])
        grid = patch_grid(tiny, *runs, metric, "resid_pre", [step], positions="all", layers=[0])
        if torch.equal(*(run.canvases[step, 0, list(asked[0].answer_positions)] for run in runs)):
            torch.testing.assert_close(grid.scores[:, 0], grid.clean, rtol=1e-4, atol=1e-6)
            assert grid.clean > grid.corrupted + 0.1


def test_a_clean_run_of_another_layout_is_patched_and_not_read(tiny, asked):
    """Its prompt is a token longer: places are paired by hand, and p(answer) is asked of the corrupted run alone."""
    longer = denoise(tiny, lay_out(tiny, FACTS[1]))
    run = denoise(tiny, asked[1])
    pairs = [(2, 1), (4, 3)]
    grid = patch_grid(tiny, longer, run, answer_probability(tiny, asked[1]), "mlp_out", [0, 1], positions=pairs)
    assert grid.clean.isnan().all()
    assert not grid.scores.isnan().any()
    assert grid.corrupted[0].item() == pytest.approx(slow_p_answer(tiny, asked[1], run, 0.0, 0)[0], abs=1e-5)


def test_a_run_that_cannot_be_asked(tiny, asked):
    run, metric = denoise(tiny, asked[1]), answer_probability(tiny, asked[1])

    def refused(message, corrupted, metric=metric, steps=(0,)):
        with pytest.raises(ValueError, match=message):
            patch_grid(tiny, corrupted, corrupted, metric, "mlp_out", steps)

    refused("the trajectory has 2 rows", run.repeat(2))
    earlier = run.tokens[0].clone()
    earlier[[3, 4]] = torch.tensor([7, 8]) if tiny.cfg.grows else tiny.cfg.mask_token_id
    refused(
        r"the answer positions \[3\] are part of the trajectory's prompt",
        run,
        answer_probability(tiny, replace(asked[1], answer_positions=(3, 4), answer_tokens=(7, 8), tokens=earlier)),
    )
    other = replace(run, record={**run.record, "architecture": {**run.record["architecture"], "d_model": 7}})
    refused("of another architecture", other)
    refused(r"steps=\[0, 0\] names one twice", run, steps=(0, 0))
    short = tiny.denoise(asked[1].tokens[None, : asked[1].answer_positions[0]], max_new_tokens=2)
    refused("the answer positions .* are outside the 6 positions", short)
