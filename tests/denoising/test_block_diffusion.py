"""Block after block: every canvas of SDAR's own samplers, and the laws of canvases whose blocks open one by one."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from authors_networks import distinct
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.predictor import Cached, Conditional
from diffusion_lens.denoising.sampler import Plan, PositionNoise, Proposal, most_confident
from diffusion_lens.denoising.samplers import BlockConfidence, describe_sampler, sampler_from, sdar
from diffusion_lens.denoising.trajectory import Trajectory

GOLDEN = Path(__file__).parents[1] / "golden" / "sdar"
MASK = 151
relaxed = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def model_of(size):
    from diffusion_lens import HookedDiffusionTransformer

    return HookedDiffusionTransformer.from_pretrained(GOLDEN, block_size=size, device="cpu")


@cache
def recordings(name):
    return json.loads((GOLDEN / f"{name}.json").read_text()), load_file(GOLDEN / f"{name}.safetensors")


def recorded(name, case, tensors):
    """The distinct canvases of a recorded run; blocks that are not open contain [MASK] there."""
    prompt, steps = tensors[f"{name}/prompt"], tensors[f"{name}/x_steps"]
    start = torch.full((1, case["total_length"]), MASK)
    start[0, : len(prompt)] = prompt
    return prompt, distinct(torch.cat([start, steps]))


def check(name, file, **more):
    cases, tensors = recordings(file)
    case = cases[name]
    prompt, theirs = recorded(name, case, tensors)
    is_eval = file.endswith("eval")
    threshold = case["threshold"] if is_eval else case["confidence_threshold"]
    strategy = "low_confidence_static" if is_eval and threshold == 1 else case.get("remasking_strategy")
    sampler = sdar(
        case["block_length"],
        case["denoising_steps"],
        strategy or "low_confidence_dynamic",
        threshold,
        top_p=case["top_p"] if case["top_p"] < 1 else None,
        top_k=case["top_k"] or None,
    )
    run = model_of(case["block_length"]).denoise(prompt[None], length=case["total_length"], sampler=sampler, **more)
    assert torch.equal(distinct(run.canvases[:, 0].masked_fill(run.canvases[:, 0] < 0, MASK)), theirs)
    return run


def exact(file):
    cases = json.loads((GOLDEN / f"{file}.json").read_text())
    return [name for name, case in cases.items() if not case.get("raises") and not case.get("tie_dependent")]


@pytest.mark.parametrize("name", [name for name in exact("trajectories") if not name.startswith("sampled")])
def test_every_canvas_of_generate(name):
    if not name.startswith("topk1"):
        check(name, "trajectories")
        return
    # With one token to sample from, every confidence is 1, and sampling takes the likeliest token.
    check(name, "trajectories", temperature=1.0)


@pytest.mark.parametrize("name", ["eval_static_b8_s4", "eval_dynamic_b4_s2", "eval_dynamic_b8_s2"])
def test_every_canvas_of_the_evaluation_code(name):
    check(name, "trajectories_eval")


@pytest.mark.parametrize(
    ("name", "file"), [("sampled_dynamic_b4", "trajectories"), ("sampled_filtered_static_b8", "trajectories")]
)
def test_every_canvas_of_sampled_runs_by_the_recorded_draws(name, file, monkeypatch):
    """The authors take argmax p / e with exponential e; ours is argmax log p / T - log(-log u), so u = exp(-e)."""
    cases, tensors = recordings(file)
    draws, size = tensors[f"{name}/draws"], cases[name]["block_length"]
    at = [(block, step) for block, step, _ in cases[name]["block_and_step_and_masks_left"]]
    seen = []

    def uniform(self, step, positions, n_tokens):
        columns = positions[0].nonzero().flatten()
        e = draws[len(seen)][columns % size].double()
        seen.append(int(columns[0]) // size)
        return torch.exp(-e)

    monkeypatch.setattr(PositionNoise, "by_token", uniform)
    check(name, file, temperature=cases[name]["temperature"])
    assert seen == [block for block, _ in at]


def test_a_surplus_of_the_quota_changes_no_decided_token():
    """Three positions a step where two are masked: the authors' code rewrites a third one."""
    model = model_of(8)
    prompt = torch.randint(140, (1, 3), generator=torch.Generator().manual_seed(0))
    for strategy in ("low_confidence_dynamic", "low_confidence_static"):
        run = model.denoise(prompt, length=16, sampler=sdar(8, 3, strategy, threshold=0.35))
        masked = run.canvases == MASK
        assert torch.equal(run.canvases[1:][~masked[:-1] & (run.canvases[:-1] >= 0)],
                           run.canvases[:-1][~masked[:-1] & (run.canvases[:-1] >= 0)])  # fmt: skip
        assert torch.equal(run.tokens[:, :3], prompt)


def test_entropy_bounded_reveals_the_surest_positions_within_the_bound():
    scores = -torch.tensor([[0.05, 0.4, 0.1, 0.3], [0.9, 0.8, 0.7, 0.6], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    open_ = torch.ones_like(scores, dtype=torch.bool)
    open_[2, 0] = False
    plan = Plan(open_, torch.tensor([1, 1, 0]), bound=0.46)
    assert most_confident(scores, plan).tolist() == [[True, False, True, True], [False, False, False, True],
                                                     [False, True, True, True]]  # fmt: skip

    model = model_of(4)
    prompt = torch.randint(140, (2, 5), generator=torch.Generator().manual_seed(0))
    run = model.denoise(prompt, length=16, sampler=sdar(strategy="entropy_bounded", eb_threshold=1.5))
    one_by_one = model.denoise(prompt, length=16, sampler=sdar(strategy="entropy_bounded", eb_threshold=0.0))
    at_once = model.denoise(prompt, length=16, sampler=sdar(strategy="entropy_bounded", eb_threshold=100.0))
    assert one_by_one.revealed_at[0, 5:].unique().numel() == 11
    assert at_once.revealed_at[0, 5:].unique().tolist() == [0, 1, 2]
    for step in range(run.n_steps):
        state = run.state_at(step)
        logits = model(model.cfg.readable(state.tokens))
        for row in range(2):
            chosen = run.revealed_at[row] == step
            entropy = -Proposal("entropy").scores(logits[row, chosen], run.tokens[row, chosen])
            assert chosen.sum() <= 1 or entropy.sum() <= 1.5


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=3)


@relaxed
@given(prompt_lengths=lengths, size=st.integers(1, 6), dynamic=st.booleans(), seed=st.integers(0, 99))
def test_a_row_of_a_ragged_batch_gives_what_it_gives_alone(prompt_lengths, size, dynamic, seed):
    model, n_pos = model_of(size), 11
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(140, (n,), generator=generator) for n in prompt_lengths]
    together = torch.full((len(prompts), n_pos), MASK)
    for row, prompt in enumerate(prompts):
        together[row, : len(prompt)] = prompt
    sampler = sdar(threshold=0.4) if dynamic else BlockConfidence(2)
    run = model.denoise(together, sampler=sampler, temperature=0.5, seed=list(range(len(prompts))))
    assert_blocks_open_one_by_one(run, size)
    for row, prompt in enumerate(prompts):
        alone = model.denoise(prompt[None], length=n_pos, sampler=sampler, temperature=0.5, seed=[row])
        n = len(alone.canvases)
        assert torch.equal(alone.canvases[:, 0], run.canvases[:n, row])
        assert (run.canvases[n:, row] == alone.tokens[0]).all()
        for step in (0, (n - 2) // 2, n - 2):
            ours, theirs = run.state_at(step).block, alone.state_at(step).block
            for name in ("index", "start", "stop", "step", "order", "n_blocks"):
                assert getattr(ours, name)[row] == getattr(theirs, name)[0], name
    text = model.denoise(together, sampler=sampler, temperature=0.5, seed=list(range(len(prompts))),
                         fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: None)])  # fmt: skip
    assert torch.equal(text.canvases, run.canvases), "what hooks see is the whole canvas, without a cache"
    torch.testing.assert_close(text.confidence, run.confidence, rtol=1e-4, atol=1e-5)


def assert_blocks_open_one_by_one(run, size):
    """A position contains -1 until every earlier block of its row is filled, then [MASK], then a token."""
    blocks = torch.arange(run.tokens.shape[1]) // size
    for canvas in run.canvases:
        for row in canvas:
            masked = blocks[row == MASK].unique()
            assert len(masked) <= 1
            unreached = blocks[row < 0]
            assert len(unreached) == 0 or (len(masked) == 1 and bool((unreached > masked).all()))
    assert ((run.tokens >= 0) & (run.tokens != MASK)).all()


def test_hooks_read_the_block_and_the_step_within_it():
    model = model_of(4)
    seen = []

    def look(tokens, hook):
        block = hook.step.block
        seen.append([block.index.tolist(), block.start.tolist(), block.stop.tolist(), block.step.tolist()])
        assert torch.equal(hook.step.masked, tokens == MASK)
        inside = (torch.arange(tokens.shape[1]) >= block.start[:, None]) & (
            torch.arange(tokens.shape[1]) < block.stop[:, None]
        )
        assert not (hook.step.masked & ~inside).any()

    prompt = torch.randint(140, (1, 5), generator=torch.Generator().manual_seed(3))
    run = model.denoise(prompt, length=10, sampler=BlockConfidence(2), fwd_hooks=[("denoise.hook_tokens", look)])
    assert seen == [[[1], [4], [8], [0]], [[1], [4], [8], [1]], [[2], [8], [10], [0]]]
    for step, (index, start, stop, within) in enumerate(seen):
        block = run.state_at(step).block
        assert [block.index.tolist(), block.start.tolist(), block.stop.tolist(), block.step.tolist()] == [
            index, start, stop, within]  # fmt: skip
    repeated = run.repeat(3).state_at(1).block
    assert repeated.index.tolist() == [1, 1, 1]
    assert run.state_at(1).repeat(2).block.start.tolist() == [4, 4]


def test_a_hook_of_the_loop_sees_the_steps_after_a_filled_canvas():
    model, masked = model_of(4), []
    prompt = torch.randint(140, (1, 4), generator=torch.Generator().manual_seed(3))
    look = ("denoise.hook_logits", lambda logits, hook: masked.append(int(hook.step.masked.sum())))
    run = model.denoise(prompt, length=10, steps=4, fwd_hooks=[look])
    assert masked == [4, 2, 2, 0]
    assert torch.equal(run.canvases, model.denoise(prompt, length=10, steps=4).canvases)


def test_a_replay_and_a_branch_open_the_same_blocks(tmp_path):
    model = model_of(4)
    prompt = torch.randint(140, (2, 6), generator=torch.Generator().manual_seed(3))
    run = model.denoise(prompt, length=17, sampler=sdar(4, 4, threshold=0.3), temperature=0.4, seed=5)
    for canvas in ("forced", "free"):
        again = run.replay(model, canvas=canvas)
        assert torch.equal(again.canvases, run.canvases)
        torch.testing.assert_close(again.confidence, run.confidence, rtol=1e-4, atol=1e-5)
    for step in (1, 4, run.n_steps - 1):
        branch = Trajectory.load(run.from_step(step).save(tmp_path / f"{step}.safetensors"))
        assert torch.equal(branch.replay(model, canvas="free").canvases, run.canvases[step:])
    rows = run.row(1).replay(model, canvas="free")
    assert torch.equal(rows.tokens[0], run.tokens[1])


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_the_cache_gives_what_a_pass_over_the_canvas_gives(size, token_layers):
    """Rows that stand at different blocks share what all of them have filled."""
    model = model_of(size)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.full((2, 18), MASK)
    tokens[0, :2], tokens[1, :7] = (
        torch.randint(140, (2,), generator=generator),
        torch.randint(140, (7,), generator=generator),
    )
    canvas = lay_out(model, tokens)
    cached, whole = Cached(Conditional(model, canvas)), Conditional(model, canvas)
    run = model.denoise(tokens, sampler=BlockConfidence(2))
    with torch.no_grad():
        for step in range(run.n_steps):
            state = run.state_at(step)
            if state.masked.any():
                torch.testing.assert_close(
                    cached(state, state.masked), whole(state, state.masked), rtol=1e-4, atol=2e-5
                )
    model.clock.step = None
    if size < 16:
        with token_layers() as with_cache:
            model.denoise(tokens, sampler=BlockConfidence(2))
        with token_layers() as without:
            model.denoise(tokens, sampler=BlockConfidence(2), fwd_hooks=[("hook_embed", lambda x, hook: None)])
        assert with_cache[0] < 0.8 * without[0]


def test_a_hook_sees_mask_where_no_block_is_open():
    model = model_of(4)
    widths = []

    def look(embedded, hook):
        tail = embedded[0, int(hook.step.block.stop[0]) :]
        widths.append(embedded.shape[1])
        assert torch.equal(tail, model.W_E[MASK].expand_as(tail))

    prompt = torch.randint(140, (1, 5), generator=torch.Generator().manual_seed(3))
    model.denoise(prompt, length=14, sampler=BlockConfidence(2), fwd_hooks=[("hook_embed", look)])
    assert set(widths) == {14}


def test_masks_and_text_after_the_prompt_are_filled_block_by_block():
    """Infilling: later text is given, and no earlier block sees it."""
    model = model_of(4)
    tokens = torch.randint(140, (1, 12), generator=torch.Generator().manual_seed(3))
    tokens[0, [2, 3, 9]] = MASK
    other = tokens.clone()
    other[0, 10] += 1
    run, moved = (model.denoise(x, sampler=BlockConfidence(2)) for x in (tokens, other))
    assert run.canvases[0, 0, 9:11].tolist() == [-1, tokens[0, 10]]
    assert torch.equal(run.tokens[:, :8], moved.tokens[:, :8])
    assert run.state_at(0).block.n_blocks.tolist() == [2]


def test_samplers_that_do_not_fit_a_model_are_refused(either):
    model, prompt = model_of(4), torch.tensor([[5, 6]])
    for name in ("confidence", "ancestral", "remdm", "blocks", "llada"):
        with pytest.raises(
            ValueError,
            match=r"one block of 4 positions after another. Samplers that fit: left_to_right, block_confidence",
        ):
            model.denoise(prompt, length=9, sampler=name)
    with pytest.raises(ValueError, match=r"blocks of 8 positions, and this model has blocks of 4.*block_size=8"):
        model.denoise(prompt, length=9, sampler=sdar(8))
    with pytest.raises(ValueError, match="this model has none: use"):
        either.model.denoise(prompt, length=9, sampler="sdar")
    with pytest.raises(ValueError, match="steps=2 for 3 blocks"):
        model.denoise(prompt, length=9, steps=2)
    with pytest.raises(ValueError, match=r"steps=5, and with steps_per_block=2 this canvas takes 5|takes 4"):
        model.denoise(prompt, length=9, steps=5, sampler=BlockConfidence(2))
    for wrong in (dict(steps_per_block=0), dict(order="up"), dict(threshold=-1), dict(entropy_bound=1.0)):
        with pytest.raises(ValueError):
            BlockConfidence(**wrong)
    for wrong in (dict(strategy="dynamic"), dict(threshold=None)):
        with pytest.raises(ValueError, match="low_confidence"):
            sdar(**wrong)


def test_a_sampler_is_recorded_with_its_settings():
    for sampler in (sdar(4, 2, "sequential"), sdar(strategy="entropy_bounded"), BlockConfidence(threshold=0.5)):
        assert sampler_from(json.loads(json.dumps(describe_sampler(sampler)))) == sampler


def test_steps_are_shared_among_the_blocks_of_a_row():
    model = model_of(4)
    prompt = torch.randint(140, (1, 4), generator=torch.Generator().manual_seed(3))
    run = model.denoise(prompt, length=16, steps=6)
    assert run.record["sampler"]["name"] == "block_confidence"
    assert [int((run.revealed_at == step).sum()) for step in range(6)] == [2, 2, 2, 2, 2, 2]
    assert model.denoise(prompt, length=16).n_steps == 12
    assert model.denoise(prompt, length=16, sampler="left_to_right").revealed_at[0, 4:].tolist() == list(range(12))
