"""Several positions a step by confidence: every canvas of Fast-dLLM's code, its caches, and the laws of both."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_runs import same
from safetensors.torch import load_file
from small_networks import small_architecture

from diffusion_lens import HookedDiffusionTransformer, load
from diffusion_lens.analysis import cache_drift, logit_lens, temporal_effect
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.sampler import Plan, most_confident
from diffusion_lens.denoising.samplers import ConfidenceThreshold, describe_sampler, llada, sampler_from, threshold
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.facts.fact import Query
from diffusion_lens.model.config import DiffusionConfig

GOLDEN = Path(__file__).parents[1] / "golden"
WEIGHTS = {"llada": "llada/gqa", "dream": "dream"}
CASES = {
    f"{family}/{name}": case
    for family in WEIGHTS
    for name, case in json.loads((GOLDEN / "fast_dllm" / f"{family}.json").read_text()).items()
}
MASK = 500
PROMPT = torch.tensor([[5, 6, 7], [8, 9, 10]])
LOOK = [("blocks.1.hook_resid_post", lambda resid, hook: None)]
relaxed = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def model_of(family):
    source = GOLDEN / WEIGHTS[family] if family in WEIGHTS else family
    return HookedDiffusionTransformer.from_pretrained(source, device="cpu")


@cache
def repeated(name, hooked=False):
    """A recorded run by our sampler, and what the authors' code recorded."""
    family, _, run = name.partition("/")
    case, tensors = CASES[name], load_file(GOLDEN / "fast_dllm" / f"{family}.safetensors")
    sampler = threshold(case["threshold"], case["factor"], case["block_length"], case["cache"])
    ours = model_of(family).denoise(
        tensors[f"{run}/prompt"],
        max_new_tokens=case["max_new_tokens"],
        sampler=sampler,
        fwd_hooks=LOOK if hooked else [],
    )
    return ours, {key.removeprefix(f"{run}/"): x for key, x in tensors.items() if key.startswith(f"{run}/")}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_canvas_of_every_recorded_run(name, hooked):
    """Hooks see the whole canvas, and the run is the same; after the text is filled, nothing is computed."""
    run, theirs = repeated(name, hooked)
    n_steps = len(theirs["x_steps"])
    assert torch.equal(run.canvases[0, 0], theirs["x_init"])
    assert torch.equal(run.canvases[1 : n_steps + 1, 0], theirs["x_steps"])
    assert (run.canvases[n_steps:, 0] == theirs["x_steps"][-1]).all()
    assert run.n_steps == CASES[name]["max_new_tokens"]
    if not hooked:
        assert run.forward_passes == n_steps == CASES[name]["authors_forward_passes"] - CASES[name]["idle_passes"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["cache"]])
def test_the_drift_of_the_authors_caches(name, tmp_path):
    run, theirs = repeated(name)
    drift = cache_drift(model_of(name.partition("/")[0]), run)
    expected = theirs["drift"].float()
    assert drift.steps == tuple(range(len(expected)))
    torch.testing.assert_close(torch.stack([drift.keys, drift.values], dim=1), expected, rtol=0, atol=1e-5)
    opened = [i for i, row in enumerate(expected) if not row.any()]
    assert (drift.keys[opened] == 0).all()
    assert (drift.values[opened] == 0).all()
    assert (drift.keys[:, 0] == 0).all()
    assert drift.record["approximate_cache"] == drift.record["trajectory"]["approximate_cache"] == CASES[name]["cache"]
    assert torch.equal(load(drift.save(tmp_path / "drift.safetensors")).values, drift.values)
    assert list(drift.to_dataframe().columns) == ["step", "layer", "keys", "values", "n_held"]


def slow_factor(scores, factor):
    """The rule of Fast-dLLM, section 3.3, one position after another; and the last one with all others."""
    ordered, n = sorted(scores, reverse=True), 1
    while n < len(ordered) and ordered[n] >= 1 - factor / (n + 2):
        n += 1
    return len(ordered) if n == len(ordered) - 1 else n


@relaxed
@given(
    scores=st.lists(st.lists(st.floats(0, 1), min_size=5, max_size=5), min_size=1, max_size=3),
    factor=st.floats(0, 4),
    n_open=st.integers(0, 5),
)
def test_the_number_of_a_factor(scores, factor, n_open):
    confidence = torch.tensor(scores, dtype=torch.float64)
    positions = torch.arange(5).expand_as(confidence) < n_open
    revealed = most_confident(confidence, Plan(positions, positions.sum(dim=1).clamp(max=1), factor=factor))
    for row, inside, chosen in zip(confidence, positions, revealed, strict=True):
        expected = slow_factor(row[inside].tolist(), factor) if n_open else 0
        assert int(chosen.sum()) == expected
        assert not (chosen & ~inside).any()
        if 0 < expected < n_open:
            assert row[chosen].min() >= row[inside & ~chosen].max()


@pytest.mark.parametrize("family", ["tiny-mdm", "llada", "dream"])
@pytest.mark.parametrize("options", [dict(confidence=1.0), dict(factor=0.0)])
def test_none_is_confident_enough_is_one_position_a_step(family, options):
    """Then a run is that of LLaDA's sampler with a step for each mask. By a factor, the last two come together."""
    model = model_of(family)
    one_by_one = model.denoise(PROMPT, max_new_tokens=6, sampler=llada(3))
    run = model.denoise(PROMPT, max_new_tokens=6, sampler=threshold(block_length=3, **options))
    if "confidence" in options:
        assert torch.equal(run.canvases, one_by_one.canvases)
    else:
        for row in run.revealed_at[:, 3:].unflatten(1, (2, 3)).sort(dim=2).values:
            assert row.tolist() == [[0, 1, 1], [2, 3, 3]]


def test_all_are_confident_enough_is_one_step_a_block():
    tiny_mdm = model_of("tiny-mdm")
    run = tiny_mdm.denoise(PROMPT, max_new_tokens=7, sampler=threshold(0.0, block_length=3))
    assert run.revealed_at[0, 3:].tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert run.forward_passes == 3
    at_once = tiny_mdm.denoise(PROMPT, max_new_tokens=7, steps=1)
    assert torch.equal(tiny_mdm.denoise(PROMPT, max_new_tokens=7, sampler=threshold(0.0)).tokens, at_once.tokens)


LAYOUTS = dict(
    cached=st.sampled_from(["prefix", "dual"]),
    block_length=st.integers(1, 6),
    confidence=st.sampled_from([0.1, 0.2, 0.9]),
    seed=st.integers(0, 1000),
)


@relaxed
@given(family=st.sampled_from(["llada", "dream"]), pad=st.integers(0, 2), **LAYOUTS)
def test_rows_are_independent_also_padded_and_in_other_blocks(family, pad, cached, block_length, confidence, seed):
    """A row of a batch, beside a shorter prompt on the left of padding or masks, runs as it runs alone."""
    model, generator = model_of(family), torch.Generator().manual_seed(seed)
    prompt, real = torch.randint(490, (2, 5), generator=generator), torch.ones(2, 5, dtype=torch.long)
    real[1, :pad] = 0
    prompt[0, 3] = MASK
    options = dict(max_new_tokens=6, sampler=threshold(confidence, None, block_length, cached))
    together = model.denoise(prompt, attention_mask=real, **options)
    assert (together.tokens != MASK).all()
    for row, begin in ((0, 0), (1, pad)):
        alone = model.denoise(prompt[row : row + 1, begin:], **options)
        n_steps = min(alone.n_steps, together.n_steps)
        assert torch.equal(together.canvases[: n_steps + 1, row, begin:], alone.canvases[: n_steps + 1, 0])
        held = cache_drift(model, alone) if alone.forward_passes > 1 else None
        assert held is None or bool(held.keys.isfinite().all())


@relaxed
@given(family=st.sampled_from(["llada", "dream"]), **LAYOUTS)
def test_a_cached_run_is_replayed_as_it_was(family, cached, block_length, confidence, seed):
    """Forced and free, hooked and not, from its start and from a step that opens a block."""
    model = model_of(family)
    prompt = torch.randint(490, (1, 4), generator=torch.Generator().manual_seed(seed))
    run = model.denoise(prompt, max_new_tokens=6, sampler=threshold(confidence, None, block_length, cached))
    first = run.revealed_at[0, 4 + block_length :]
    opens = int(first.min()) if len(first) else 0
    for branch in (run, run.from_step(opens)):
        for canvas in ("forced", "free"):
            same(branch.replay(model, canvas=canvas), branch)
        same(branch.replay(model, fwd_hooks=LOOK), branch)


def slow_run(model, prompt, n_new, size, confidence, cached):
    """Every canvas of one row, with whole passes whose hooks put back what a block's first pass had outside it."""
    mask, canvas = model.cfg.mask_token_id, torch.cat([prompt, torch.full((n_new,), model.cfg.mask_token_id)])
    canvases = [canvas]
    for start in range(len(prompt), len(canvas), size):
        block, held = slice(start, start + size), {}
        outside = torch.arange(len(canvas)) < start
        outside[start + size :] = cached == "dual"

        def read(x, hook, held=held, outside=outside):
            held.setdefault(hook.name, x.clone())
            x[:, outside] = held[hook.name][:, outside]
            return x

        while bool((canvas[block] == mask).any()):
            hooks = [(lambda name: name.endswith(("hook_rot_k", "hook_v")), read)]
            logits = model.run_with_hooks(canvas[None], fwd_hooks=hooks)[0, block].double()
            p, proposed = logits.softmax(dim=1).max(dim=1)  # the head has no column for [MASK]
            p = p.masked_fill(canvas[block] != mask, -1)
            sure = (p > confidence) | (p == p.max())
            canvas = canvas.clone()
            canvas[block] = torch.where(sure, proposed, canvas[block])
            canvases.append(canvas)
    return torch.stack(canvases)


@pytest.mark.parametrize("cached", ["prefix", "dual"])
@pytest.mark.parametrize(("size", "confidence"), [(4, 0.5), (3, 0.9), (8, 0.7)])
def test_smdm_reads_what_the_cache_holds(size, confidence, cached):
    model, prompt = model_of("tiny-mdm"), model_of("tiny-mdm").to_tokens("Gustav Geisser is the")[0]
    run = model.denoise(prompt[None], max_new_tokens=8, sampler=threshold(confidence, None, size, cached))
    slow = slow_run(model, prompt, 8, size, confidence, cached)
    assert torch.equal(run.canvases[: len(slow), 0], slow)
    assert run.forward_passes == len(slow) - 1 < 8


@pytest.mark.parametrize("kind", ["rotary", "standard", "alibi"])
@pytest.mark.parametrize("cached", ["prefix", "dual"])
def test_a_step_computes_the_span_alone(kind, cached, monkeypatch):
    """Except where scores are biased by distance; and the numbers are those of the whole canvas, as hooks see it."""
    cfg = DiffusionConfig.from_architecture(small_architecture(mask_token_id=39, positional_embedding_type=kind))
    model, widths, whole = HookedDiffusionTransformer(cfg, seed=5), [], HookedDiffusionTransformer.forward

    def counted(self, tokens, **options):
        widths.append(tokens.shape[1])
        return whole(self, tokens, **options)

    monkeypatch.setattr(HookedDiffusionTransformer, "forward", counted)
    options = dict(max_new_tokens=6, sampler=threshold(1.0, None, 3, cached))
    run = model.denoise(PROMPT, **options)
    spans = {"prefix": [9, 6, 6, 9, 3, 3], "dual": [9, 3, 3, 9, 3, 3]}
    assert widths == ([9] * 6 if kind == "alibi" else spans[cached])
    same(model.denoise(PROMPT, **options, fwd_hooks=LOOK), run)


def test_a_held_position_is_read_as_it_was():
    """A hook on the prompt acts in the step that opens a block, and in no later one of the block."""
    model, sampler = model_of("llada"), threshold(1.0, None, 6, "prefix")
    run = model.denoise(PROMPT[:1], max_new_tokens=6, sampler=sampler)

    def changed(step):
        def add(resid, hook):
            if hook.step.index == step:
                resid[:, :2] += 1
            return resid

        replay = run.replay(model, fwd_hooks=[("blocks.0.hook_resid_post", add)])
        return (replay.confidence != run.confidence)[0, 3:].any()

    assert changed(0)
    assert not changed(2)
    exact = model.denoise(PROMPT[:1], max_new_tokens=6, sampler=threshold(1.0, None, 6))
    assert not torch.equal(exact.confidence, run.confidence)


def test_the_first_position_of_a_block_is_alone_where_its_row_is_held():
    run = model_of("dream").denoise(PROMPT, max_new_tokens=6, sampler=threshold(0.0, None, 3, "dual"))
    assert run.revealed_at[:, 3:].tolist() == [[0, 1, 1, 2, 3, 3]] * 2
    assert run.record["sampler"]["first_alone"]
    run = model_of("llada").denoise(PROMPT, max_new_tokens=6, sampler=threshold(0.0, None, 3, "dual"))
    assert run.revealed_at[:, 3:].tolist() == [[0, 0, 0, 1, 1, 1]] * 2


def test_a_token_read_before_its_block_has_its_row_computed():
    """As where a hook reveals other positions first, and the run is taken again without it."""
    options = dict(max_new_tokens=8, sampler=ConfidenceThreshold(0.2, None, 4, "dual", first_alone=False))
    run = model_of("dream").denoise(PROMPT, **options)
    assert (run.revealed_at[:, 3] > 0).any()
    same(model_of("dream").denoise(PROMPT, **options, fwd_hooks=LOOK), run)


def test_an_exact_cache_does_not_drift():
    """Of a causal model, and of one that writes block after block."""
    block = HookedDiffusionTransformer.from_pretrained(GOLDEN / "sdar", device="cpu")
    for model in (model_of("tiny-ar"), block):
        drift = cache_drift(model, model.denoise(PROMPT, max_new_tokens=9))
        assert drift.record["approximate_cache"] is None
        assert drift.n_held.min() > 0
        assert max(drift.keys.max(), drift.values.max()) < 1e-5


def test_analyses_read_exact_keys_and_say_so(tmp_path):
    model = model_of("llada")
    run = model.denoise(PROMPT[:1], max_new_tokens=6, sampler=threshold(0.2, None, 3, "dual"))
    assert run.record["sampler"]["approximate_cache"] == "dual"
    loaded = Trajectory.load(run.save(tmp_path / "run.safetensors"))
    with pytest.warns(UserWarning, match="its approximate cache 'dual' held keys and values of earlier canvases"):
        lens = logit_lens(model, loaded)
    assert lens.record["inputs"]["trajectory"][0]["approximate_cache"] == "dual"
    exact = threshold(0.2, None, 3)
    again = loaded.replay(model, sampler=exact)
    assert torch.equal(again.canvases, run.canvases)
    assert not torch.equal(again.confidence, run.confidence)
    query = Query(run.prompt[0], (0, 2), (4,), (int(run.tokens[0, 4]),))
    with pytest.raises(ValueError, match=r"temporal_effect compares the trajectory.*approximate cache 'dual'"):
        temporal_effect(model, query, trajectory=run, noise=1.0, samples=1)


def test_more_steps_than_masks_change_nothing():
    """So studies of recall, whose prompts differ in length, take one number for all."""
    model = model_of("tiny-mdm")
    short, long = (model.denoise(PROMPT, max_new_tokens=5, steps=n, sampler=threshold(0.5)) for n in (None, 9))
    assert torch.equal(long.revealed_at, short.revealed_at)
    assert (long.n_steps, long.forward_passes) == (9, short.forward_passes)
    facts = toy_facts.load().facts("d2p")[:2]
    recall = recall_by_steps(model, facts, steps=[14], length=14, sampler=threshold(0.9))
    assert recall.record["sampler"]["name"] == "confidence_threshold"


def test_settings_are_recorded():
    for sampler in (threshold(), threshold(factor=1.0, block_length=4, approximate_cache="prefix")):
        assert sampler_from(json.loads(json.dumps(describe_sampler(sampler)))) == sampler
    assert threshold().confidence == 0.9
    assert threshold(factor=1.0).confidence is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: threshold(0.5, 1.0), r"confidence=0.5 and factor=1.0: give one of them"),
        (lambda: threshold(-0.1), "confidence=-0.1"),
        (lambda: threshold(block_length=0), "block_length=0"),
        (lambda: threshold(approximate_cache="suffix"), "approximate_cache='suffix'.*prefix, dual"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(steps=3, sampler=threshold()),
            "steps=3, but a step reveals as many positions.*give 6 or more, or leave steps out",
        ),
        (dict(cfg_scale=0.5, sampler=threshold(approximate_cache="dual")), "cfg_scale=0.5 takes two passes"),
    ],
)
def test_runs_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        model_of("llada").denoise(PROMPT, max_new_tokens=6, **options)


def test_what_a_cache_held_is_not_recorded():
    model = model_of("llada")
    run = model.denoise(PROMPT[:1], max_new_tokens=6, sampler=threshold(1.0, None, 3, "dual"))
    with pytest.raises(ValueError, match="step 1 is inside a block"):
        run.from_step(1).replay(model)
    with pytest.raises(ValueError, match="no key/value cache, so nothing drifts"):
        cache_drift(model, model.denoise(PROMPT, max_new_tokens=6, sampler=threshold()))
