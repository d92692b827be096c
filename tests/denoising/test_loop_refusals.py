"""Numbers that are none never become text, and ids that are no tokens never reach the canvas."""

import math
import re

import numpy as np
import pytest
import torch
from jaxtyping import config

from diffusion_lens.denoising.samplers import Ancestral, Blocks, Confidence, Proposal, ReMDM
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.interventions import at_steps

PROMPT = torch.tensor([[5, 6, 7], [8, 9, 10]])
NAN, INF = math.nan, math.inf
SAMPLERS = ["confidence", "ancestral", "remdm", "blocks", "left_to_right"]


@pytest.fixture
def unchecked():
    """Annotations unchecked, as when users call the library."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def put(value, token=slice(None), *, row=1, position=3, step=0):
    """A hook that puts `value` into the logits of a position."""

    def hook_fn(logits, hook):
        changed = logits.clone()
        if hook.step.index == step:
            changed[row, position, token] = value
        return changed

    return [("denoise.hook_logits", hook_fn)]


@pytest.mark.parametrize(
    ("value", "token", "temperature"),
    [(NAN, 7, 0.0), (INF, 7, 1.0), (NAN, slice(None), 1.0), (-INF, slice(None), 0.0), (-INF, slice(None), 1.0)],
)
def test_logits_that_tell_no_token_are_refused(either, value, token, temperature):
    for sampler in SAMPLERS if either.kind == "mdm" else ["left_to_right"]:
        with pytest.raises(FloatingPointError, match=r"at step 0, row 1, position 3 \(1 of \d+ positions\)"):
            either.model.denoise(
                PROMPT, length=6, steps=3, sampler=sampler, temperature=temperature, fwd_hooks=put(value, token)
            )
    assert not either.model.list_hooks()


@pytest.mark.parametrize("proposal", [Proposal(top_p=0.5), Proposal("margin", "sampled", top_k=3), Proposal("entropy")])
@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_no_proposal_swallows_them(either, proposal):
    for sampler in (Confidence(proposal=proposal), Ancestral(proposal=proposal), Blocks(proposal=proposal)):
        for value in (NAN, INF) if isinstance(sampler, Confidence) else (INF,):
            with pytest.raises(FloatingPointError, match="row 1, position 3"):
                either.model.denoise(
                    PROMPT, length=6, steps=3, temperature=1.0, sampler=sampler, fwd_hooks=put(value, 7)
                )


def test_a_damaged_model_writes_nothing(several):
    """NaN in one weight: without the check every position becomes token 0 with confidence 1."""
    with torch.no_grad():
        before = several.model.blocks[0].mlp.W_out.clone()
        several.model.blocks[0].mlp.W_out[0, 0] = NAN
    try:
        with pytest.raises(FloatingPointError, match=r"row 0, position .*weights"):
            several.model.denoise(several.tokens[:1, :8], max_new_tokens=4)
    finally:
        with torch.no_grad():
            several.model.blocks[0].mlp.W_out.copy_(before)


def test_single_tokens_may_be_forbidden(either):
    plain = either.model.denoise(PROMPT, length=6, steps=3)
    written = plain.tokens[:, 3:].unique()

    def forbid(logits, hook):
        return logits.index_fill(-1, written, -INF)

    run = either.model.denoise(PROMPT, length=6, steps=3, fwd_hooks=[("denoise.hook_logits", forbid)])
    assert not torch.isin(run.tokens[:, 3:], written).any()
    assert ((run.confidence > 0) & (run.confidence <= 1)).all()


def test_positions_without_a_proposal_may_have_any_id(either):
    plain = either.model.denoise(PROMPT, length=6, steps=3)
    run = either.model.denoise(PROMPT, length=6, steps=3, fwd_hooks=put(NAN, position=1))
    assert torch.equal(run.tokens, plain.tokens)


@pytest.fixture
def with_mask_column(configs, specimen):
    """A model whose head has a column for [MASK]."""
    return specimen(configs["llada"]).model


def only_mask(logits, hook):
    return torch.full_like(logits, -INF).index_fill(-1, torch.tensor([512]), 1.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_only_the_mask_is_left_it_must_be_allowed(with_mask_column, temperature):
    options = dict(length=6, steps=3, temperature=temperature, fwd_hooks=[("denoise.hook_logits", only_mask)])
    with pytest.raises(FloatingPointError, match=r"but \[MASK\] is forbidden.*at step 0, row 0, position 3"):
        with_mask_column.denoise(PROMPT, **options)
    for sampler in (Confidence(proposal=Proposal(writes_mask=True)), Ancestral(proposal=Proposal(writes_mask=True))):
        run = with_mask_column.denoise(PROMPT, sampler=sampler, **options)
        assert (run.tokens[:, 3:] == 512).all()
        assert (run.revealed_at == -1).all()
        assert not run.confidence[:, 3:].any()


def test_a_run_that_reveals_nothing_can_be_kept_but_not_traced(with_mask_column, tmp_path):
    from diffusion_lens import Query
    from diffusion_lens.analysis import trace_trajectory

    model, prompt = with_mask_column, PROMPT[:1]
    sampler = Confidence(proposal=Proposal(writes_mask=True))
    run = model.denoise(prompt, length=6, steps=3, sampler=sampler, fwd_hooks=[("denoise.hook_logits", only_mask)])
    assert torch.equal(Trajectory.load(run.save(tmp_path / "run.safetensors")).tokens, run.tokens)
    assert torch.equal(run.replay(model).tokens, run.tokens)
    assert "·" in run.to_html()
    query = Query(run.tokens[0], (1, 2), (3, 4), (11, 12))
    with pytest.raises(ValueError, match=r"reveals none of the answer positions \[3, 4\]"):
        trace_trajectory(model, query, trajectory=run)


def test_confidence_that_ranks_nothing_is_refused(either):
    hooks = [("denoise.hook_confidence", lambda a, hook: a * NAN)]
    with pytest.raises(FloatingPointError, match="hook_confidence returned NaN at step 0, row 0, position 3"):
        either.model.denoise(PROMPT, length=6, steps=3, fwd_hooks=hooks)


@pytest.mark.parametrize("point", ["denoise.hook_tokens", "denoise.hook_candidates"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda ids: ids.masked_fill(ids == ids[1, 3], 10**6), ValueError, "returned the id 1000000 at step 0, row"),
        (lambda ids: ids * 0 - 2, ValueError, "returned the id -2 at step 0, row 0, position"),
        (lambda ids: ids.double(), TypeError, r".*returned torch.float64; the activation is torch.int64"),
        (lambda ids: ids > 3, TypeError, r".*returned torch.bool; the activation is torch.int64"),
    ],
)
def test_ids_that_are_no_tokens_are_refused(either, point, change, error, message):
    with pytest.raises(error, match=rf"{point}.*{message}"):
        either.model.denoise(PROMPT, length=6, steps=3, fwd_hooks=[(point, lambda ids, hook: change(ids))])


def test_what_is_revealed_is_a_mask(either):
    hooks = [("denoise.hook_reveal", lambda a, hook: a.long())]
    with pytest.raises(TypeError, match=r"denoise.hook_reveal.*returned torch.int64; the activation is torch.bool"):
        either.model.denoise(PROMPT, length=6, steps=3, fwd_hooks=hooks)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_analyses_by_step_take_whole_steps(unchecked, tiny):
    from diffusion_lens import Fact
    from diffusion_lens.analysis import answer_probability, patch_grid, trace_trajectory

    fact = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")
    query = fact.to_query(tiny)
    run = tiny.denoise(query.tokens[None], length=len(query.tokens), steps=4)
    for steps in ([1.5], [True], ["1"]):
        with pytest.raises(TypeError, match="it must be a whole number"):
            trace_trajectory(tiny, query, trajectory=run, steps=steps, noise=0.1, samples=1)
        with pytest.raises(TypeError, match="it must be a whole number"):
            patch_grid(tiny, run, run, answer_probability(tiny, query), "resid_pre", steps)


def test_ids_of_other_widths_are_taken(either):
    plain = either.model.denoise(PROMPT, length=6, steps=3)
    for point in ("denoise.hook_tokens", "denoise.hook_candidates"):
        run = either.model.denoise(PROMPT, length=6, steps=3, fwd_hooks=[(point, lambda ids, hook: ids.int())])
        assert torch.equal(run.canvases, plain.canvases)


WRONG_KINDS = [
    dict(length=14.7),
    dict(length=14.0),
    dict(length=True),
    dict(length="14"),
    dict(max_new_tokens=2.5),
    dict(length=10, steps=2.5),
    dict(length=10, steps=[1.5]),
    dict(length=10, steps=True),
    dict(length=10, seed="7"),
    dict(length=10, seed=["7", "8"]),
    dict(length=10, seed=[1.5, 2]),
    dict(length=10, seed=1.5),
    dict(length=10, seed=True),
    dict(length=10, seed=None),
    dict(length=10, cfg_scale="1"),
    dict(length=10, cfg_scale=True),
    dict(length=10, temperature="hot"),
    dict(length=10, temperature=torch.tensor([1.0, 2.0])),
]


def refusal(model, options):
    try:
        model.denoise(PROMPT, **options)
    except TypeError as error:
        return str(error)
    return "accepted"


def test_settings_of_the_wrong_kind_are_refused(either, unchecked):
    refusals = [(list(options)[-1], refusal(either.model, options)) for options in WRONG_KINDS]
    pattern = r"{}.* is an? \w+; it must be a (whole )?number"
    assert [pair for pair in refusals if not re.search(pattern.format(pair[0]), pair[1])] == []


@pytest.mark.parametrize("steps", [[1.5], 1.0, "1", True, [np.bool_(True)], [0, None]], ids=str)
def test_steps_of_the_wrong_kind_are_refused(either, unchecked, steps):
    with pytest.raises(TypeError, match=r"steps_filter.*whole number"):
        either.model.denoise_with_cache(PROMPT, "hook_embed", steps_filter=steps, length=6, steps=3)
    with pytest.raises(TypeError, match=r"steps.*whole number"):
        at_steps(lambda a, hook: None, steps)
    if isinstance(steps, float):
        with pytest.raises(TypeError, match=r"step=1\.0 is a float"):
            either.model.denoise(PROMPT, length=6, steps=3).from_step(steps)


def test_positions_of_a_cache_are_on_the_canvas(either):
    with pytest.raises(IndexError, match=r"pos_slice=\[7\] reaches outside the 6 positions of the canvas"):
        either.model.denoise_with_cache(PROMPT, "hook_embed", pos_slice=7, length=6, steps=3)


@pytest.mark.parametrize("steps", [10, [0, 10], -5, range(2, 6)])
def test_steps_that_a_run_does_not_have_are_named(either, steps):
    hook = at_steps(lambda a, hook: None, steps)
    named = {10: r"\[10\]", -5: r"\[-5\]"}.get(steps if isinstance(steps, int) else 0, r"\[.*\]")
    with pytest.raises(ValueError, match=rf"the steps {named}, and this run has the 4 steps 0 to 3"):
        either.model.denoise(PROMPT, length=7, steps=4, fwd_hooks=[("hook_embed", hook)])


def test_numpys_numbers_are_pythons(either, unchecked, tmp_path):
    mdm = either.kind == "mdm"
    options = dict(length=10, steps=4, cfg_scale=0.5 if mdm else 0.0, temperature=0.5, seed=3)
    kinds = dict(length=np.int32, steps=np.int64, cfg_scale=np.float32, temperature=np.float64, seed=np.int64)
    numpys = {name: kinds[name](value) for name, value in options.items()}
    if mdm:
        options["sampler"] = Confidence(choice_temperature=0.5, proposal=Proposal(top_p=0.5, top_k=4))
        numpys["sampler"] = Confidence(
            choice_temperature=np.float32(0.5), proposal=Proposal(top_p=np.float32(0.5), top_k=np.int64(4))
        )
    plain, run = either.model.denoise(PROMPT, **options), either.model.denoise(PROMPT, **numpys)
    assert torch.equal(run.canvases, plain.canvases)
    for each in (run, run.from_step(np.int64(2)), run.repeat(np.int64(2)), run.replay(either.model)):
        Trajectory.load(each.save(tmp_path / "run.safetensors"))
    branch = run.from_step(np.int64(2)).replay(either.model, canvas="free", seeds=np.array([3, 4]))
    assert Trajectory.load(branch.save(tmp_path / "run.safetensors")).record["seeds"] == [3, 4]


def test_numpys_numbers_name_steps(either, tmp_path):
    for steps in (np.int64(1), np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), torch.tensor(2)]):
        seen = []
        hook = at_steps(lambda a, hook, seen=seen: seen.append(hook.step.index), steps)
        _, cache = either.model.denoise_with_cache(
            PROMPT, "hook_embed", steps_filter=steps, length=7, steps=4, fwd_hooks=[("hook_embed", hook)]
        )
        assert set(cache.steps) == set(seen) == set(np.atleast_1d(np.asarray(steps)).tolist())
        cache.save(tmp_path / "cache.safetensors")


@pytest.mark.parametrize(
    "make", [lambda: Proposal(top_k=2.0), lambda: Proposal(top_k=True), lambda: Blocks(block_length=4.0)]
)
def test_samplers_count_in_whole_numbers(unchecked, make):
    with pytest.raises(TypeError, match="it must be a whole number"):
        make()


def test_what_stays_allowed_stays(either):
    """Identity hooks at each of the loop's points, and ReMDM, whose masks return."""
    hooks = [(lambda name: name.startswith("denoise."), lambda a, hook: a.clone())]
    samplers = [None] if either.kind == "ar" else [None, ReMDM("rescale", eta=0.6)]
    for sampler in samplers:
        options = dict(length=9, steps=6, sampler=sampler, temperature=0.7)
        run = either.model.denoise(PROMPT, fwd_hooks=hooks, **options)
        assert torch.equal(run.canvases, either.model.denoise(PROMPT, **options).canvases)
