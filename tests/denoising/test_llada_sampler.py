"""Blocks from left to right: every canvas of LLaDA's own sampler, and the laws of the schedule."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_runs import same
from safetensors.torch import load_file

from diffusion_lens.denoising.sampler import PositionNoise
from diffusion_lens.denoising.samplers import Blocks, Confidence, describe_sampler, llada, sampler_from
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.step import StepState
from diffusion_lens.records.identity import run_of

GOLDEN = Path(__file__).parents[1] / "golden" / "llada"
LEFT_WITH_MASKS = ("edge_mask_id_can_win", "edge_mask_inside_prompt", "edge_mask_inside_prompt_cfg")
MASK = 500
relaxed = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def models():
    from diffusion_lens import HookedDiffusionTransformer

    return {heads: HookedDiffusionTransformer.from_pretrained(GOLDEN / heads, device="cpu") for heads in ("mha", "gqa")}


@cache
def recordings(heads):
    folder = GOLDEN / heads
    return json.loads((folder / "trajectories.json").read_text()), load_file(folder / "trajectories.safetensors")


def recorded(heads, name):
    """A recorded run: what is known of it, its tensors, and the settings that repeat it."""
    cases, tensors = recordings(heads)
    case = cases[name]
    run = {key.removeprefix(f"{name}/"): x for key, x in tensors.items() if key.startswith(f"{name}/")}
    options = dict(
        attention_mask=run.get("prompt_attention_mask"),
        max_new_tokens=case["gen_length"],
        steps=case["steps"],
        cfg_scale=case["cfg_scale"],
        temperature=case["temperature"],
        fwd_hooks=bias(case) if "logit_bias" in case else [],
    )
    return case, run, options


def draw_again(run, patch):
    """Let the loop draw the numbers that the authors' code drew, if it drew any."""
    if "draws" in run:
        samples = run["draws"].double()
        patch.setattr(PositionNoise, "by_position", lambda self, step, positions: samples[step][positions])
        patch.setattr(PositionNoise, "by_token", lambda self, step, positions, n: samples[step][positions])


def bias(case):
    """A hook that raises one token's logit, as the recording did."""
    token, added = case["logit_bias"]["token"], case["logit_bias"]["added"]

    def raised(logits, hook):
        logits = logits.clone()
        logits[..., token] += added
        return logits

    return [("denoise.hook_logits", raised)]


@pytest.mark.parametrize("heads", ["mha", "gqa"])
def test_every_canvas_of_every_recorded_run(models, heads, monkeypatch):
    """As published and not, where the masks that are left, guidance, padding or a remainder could tell them apart."""
    with run_of(models[heads]):  # identified once
        for name in recordings(heads)[0]:
            case, run, options = recorded(heads, name)
            ways = (False, True) if name.startswith("edge") or name == "steps8_block4_cfg1.5" else (False,)
            for as_published in (True,) if name in LEFT_WITH_MASKS else ways:
                sampler = llada(
                    case["block_length"], case.get("remasking", "low_confidence"), as_published=as_published
                )
                with monkeypatch.context() as patch:
                    draw_again(run, patch)
                    trajectory = models[heads].denoise(run["prompt"], sampler=sampler, **options)
                assert torch.equal(trajectory.canvases[1:], run["x_steps"]), (name, as_published)
                assert torch.equal(trajectory.canvases[0], run["x_init"]), (name, as_published)


@pytest.mark.parametrize("name", LEFT_WITH_MASKS)
def test_runs_that_end_with_masks(models, name):
    """As published they end with the very masks of the authors' code; otherwise with none."""
    heads = "mha"
    case, run, options = recorded(heads, name)
    sampler = llada(case["block_length"], as_published=True)
    published = models[heads].denoise(run["prompt"], sampler=sampler, **options)
    left = published.tokens == MASK
    assert left.sum() == case["masks_left_at_end"] > 0
    assert (published.revealed_at[left] == -1).all()
    assert (published.confidence[left] == 0).all()
    hooks = options["fwd_hooks"]
    same(published.replay(models[heads], fwd_hooks=hooks), published)
    same(published.replay(models[heads], fwd_hooks=hooks, canvas="free"), published)
    filled = models[heads].denoise(run["prompt"], sampler=llada(), **options)
    assert (filled.tokens != MASK).all()
    assert (filled.confidence > 0).all()


def test_the_mask_is_passed_over_for_the_next_likeliest(models):
    case, run, options = recorded("mha", "edge_mask_id_can_win")
    seen = {}

    def look(x, hook):
        seen.setdefault(hook.step.index, {})[hook.name] = x.clone()

    names = ("denoise.hook_logits", "denoise.hook_candidates", "denoise.hook_confidence")
    options["fwd_hooks"] = [*bias(case), *[(name, look) for name in names]]
    trajectory = models["mha"].denoise(run["prompt"], sampler="llada", **options)
    passed_over = 0
    for step, at in seen.items():
        masked = trajectory.canvases[step] == MASK
        logits, tokens = at["denoise.hook_logits"][masked], at["denoise.hook_candidates"][masked]
        passed_over += int((logits.argmax(-1) == MASK).sum())
        without = torch.cat([logits[:, :MASK], torch.full((len(logits), 1), -1e9), logits[:, MASK + 1 :]], dim=1)
        assert torch.equal(tokens, without.argmax(-1))
        share = logits.double().softmax(-1)[range(len(tokens)), tokens]  # [MASK] keeps its share
        torch.testing.assert_close(at["denoise.hook_confidence"][masked], share)
    assert passed_over


layouts = st.fixed_dictionaries(
    {
        "prompt_length": st.integers(1, 4),
        "block_length": st.integers(1, 4),
        "n_blocks": st.integers(1, 3),
        "steps_a_block": st.integers(1, 3),
        "remasking": st.sampled_from(["low_confidence", "random"]),
        "cfg_scale": st.sampled_from([0.0, 0.8]),
        "temperature": st.sampled_from([0.0, 0.7]),
        "seed": st.integers(0, 2**40),
    }
)


def start(layout, n_batch=1):
    prompt = torch.randint(
        490, (n_batch, layout["prompt_length"]), generator=torch.Generator().manual_seed(layout["seed"] % 1000)
    )
    return prompt, dict(
        max_new_tokens=layout["block_length"] * layout["n_blocks"],
        steps=layout["n_blocks"] * layout["steps_a_block"],
        sampler=llada(layout["block_length"], layout["remasking"]),
        **{name: layout[name] for name in ("cfg_scale", "temperature", "seed")},
    )


@relaxed
@given(layout=layouts)
def test_blocks_fill_one_after_another_by_the_even_schedule(models, layout):
    prompt, options = start(layout, n_batch=2)
    trajectory = models["gqa"].denoise(prompt, **options)
    length, steps = layout["block_length"], layout["steps_a_block"]
    even = [length // steps + (1 if i < length % steps else 0) for i in range(steps)]
    for row in trajectory.revealed_at[:, prompt.shape[1] :]:
        for block in range(layout["n_blocks"]):
            at = row[block * length : (block + 1) * length] - block * steps
            assert torch.bincount(at, minlength=steps).tolist() == even
    assert (trajectory.tokens != MASK).all()
    assert torch.equal(trajectory.canvases[:, :, : prompt.shape[1]], prompt.expand(options["steps"] + 1, -1, -1))


@relaxed
@given(layout=layouts, pad=st.integers(1, 3))
def test_rows_are_independent_also_padded(models, layout, pad):
    """A row of a batch, padded on the left and beside one with other blanks, runs as it runs alone."""
    prompt, options = start(layout, n_batch=2)
    padded = torch.cat([torch.full((2, pad), 498), prompt], dim=1)
    real = torch.ones_like(padded)
    real[1, :pad] = 0
    together = models["gqa"].denoise(padded, attention_mask=real, **options)
    first = models["gqa"].denoise(padded[:1], **options)
    second = models["gqa"].denoise(prompt[1:], **{**options, "seed": [together.record["seeds"][1]]})
    assert torch.equal(together.canvases[:, 0], first.canvases[:, 0])
    assert torch.equal(together.canvases[:, 1, pad:], second.canvases[:, 0])


@relaxed
@given(layout=layouts, data=st.data())
def test_hooked_replayed_and_branched_runs_are_the_same(models, layout, data, tmp_path_factory):
    prompt, options = start(layout, n_batch=2)
    run, steps = models["gqa"].denoise(prompt, **options), []
    looked = models["gqa"].denoise(
        prompt, **options, fwd_hooks=[("hook_embed", lambda a, hook: steps.append(hook.step))]
    )
    assert torch.equal(looked.canvases, run.canvases)
    branches = 2 if layout["cfg_scale"] else 1
    assert [step.index for step in steps] == [i for i in range(options["steps"]) for _ in range(branches)]
    loaded = Trajectory.load(run.save(tmp_path_factory.mktemp("runs") / "run.safetensors"))
    branch = loaded.from_step(data.draw(st.integers(0, options["steps"] - 1)))
    for canvas in ("forced", "free"):
        same(branch.replay(models["gqa"], canvas=canvas), branch)


def test_a_position_that_a_hook_withholds_stays_a_candidate(models):
    def hold(reveal, hook):
        reveal = reveal.clone()
        reveal[:, 4] &= hook.step.index >= 5
        return reveal

    prompt = torch.tensor([[5, 6, 7]])
    run = models["mha"].denoise(
        prompt, max_new_tokens=8, steps=8, sampler=llada(4), fwd_hooks=[("denoise.hook_reveal", hold)]
    )
    assert run.revealed_at[0, 4] >= 5
    assert (run.tokens != MASK).all()
    assert sorted(run.revealed_at[0, [3, 5, 6]].tolist())[-1] < 4


def test_a_hook_that_masks_the_prompt_moves_no_block(models):
    def mask(tokens, hook):
        return tokens.index_fill(1, torch.tensor([1]), MASK) if hook.step.index == 1 else None

    run = models["mha"].denoise(
        torch.tensor([[5, 6, 7]]),
        max_new_tokens=8,
        steps=8,
        sampler=llada(4),
        fwd_hooks=[("denoise.hook_tokens", mask)],
    )
    assert run.revealed_at[0, [1, 3, 4, 5, 6]].max() == 3
    assert run.revealed_at[0, 7:].sort().values.tolist() == [4, 5, 6, 7]
    assert (run.tokens != MASK).all()


def test_masks_inside_the_prompt_are_blanks_like_the_others(models):
    prompt = torch.tensor([[5, MASK, 7, MASK, 9, MASK, 11], [1, 2, MASK, MASK, 5, 6, MASK]])
    run = models["mha"].denoise(prompt, max_new_tokens=3, steps=6, sampler=llada(2))
    for row in run.revealed_at:
        assert (row[row >= 0].reshape(3, 2).sort(dim=1).values == torch.arange(6).reshape(3, 2)).all()


def test_rows_with_other_numbers_of_blanks_and_blocks_are_independent(models):
    prompt = torch.tensor([[5, MASK, MASK, 8, MASK, MASK, 11], [1, 2, 3, 4, 5, 6, 7]])
    options = dict(max_new_tokens=4, steps=4, sampler=llada(4))
    together = models["mha"].denoise(prompt, **options)
    assert together.revealed_at[1, 7:].sort().values.tolist() == [0, 1, 2, 3]
    assert (together.revealed_at[0, :6].max() < together.revealed_at[0, 7:].min()).all()
    for row in range(2):
        alone = models["mha"].denoise(prompt[row : row + 1], **options)
        assert torch.equal(together.canvases[:, row], alone.canvases[:, 0])


def test_a_single_block_holds_all_blanks_of_its_row(models):
    prompt = torch.tensor([[1, 2, 3, 4], [5, MASK, MASK, 8]])
    together = models["mha"].denoise(prompt, max_new_tokens=2, steps=2, sampler="llada")
    for row in range(2):
        alone = models["mha"].denoise(prompt[row : row + 1], max_new_tokens=2, steps=2, sampler="llada")
        assert torch.equal(together.canvases[:, row], alone.canvases[:, 0])
    assert torch.bincount(together.revealed_at[1, [1, 2, 4, 5]]).tolist() == [2, 2]


def test_random_order_is_even():
    """Of 4 masked positions two are revealed: each position half of the time, each pair a sixth."""
    n = 6000
    masked = torch.tensor([[False, True, True, True, True]]).expand(n, -1)
    step = StepState(0, 2, 1.0, 0.5, torch.where(masked, MASK, 7), masked, ~masked)
    noise = PositionNoise(range(n), torch.arange(5).expand(n, -1))
    plan = Blocks(order="random").plan(step, noise, torch.full(masked.shape, float("nan")))
    pairs, times = torch.unique(plan.positions[:, 1:].long(), dim=0, return_counts=True)
    assert pairs.sum(dim=1).tolist() == [2] * 6
    assert (times / n - 1 / 6).abs().max() < 5 * (1 / 6 * 5 / 6 / n) ** 0.5


def test_steps_by_default_are_one_a_blank(models):
    run = models["mha"].denoise(torch.tensor([[5, 6]]), max_new_tokens=9, sampler=llada(3))
    assert sorted(run.revealed_at[0, 2:].tolist()) == list(range(9))


def test_one_block_and_one_step_reveal_everything_at_once(models):
    prompt = torch.tensor([[5, 6, 7]])
    blocks, pool = (
        models["mha"].denoise(prompt, max_new_tokens=6, steps=1, sampler=sampler).tokens
        for sampler in ("llada", Confidence())
    )
    assert torch.equal(blocks, pool)


def test_a_run_taken_again_with_blocks_that_do_not_divide_is_still_filled(models):
    run = models["mha"].denoise(torch.tensor([[5, 6]]), max_new_tokens=10, steps=7)
    for size in (1, 3, 4):
        again = run.replay(models["mha"], canvas="free", sampler=llada(size))
        assert (again.tokens != MASK).all()
        ends = [int(at.max()) for at in again.revealed_at[0, 2:].split(size)]
        assert ends == sorted(ends)


def test_settings_are_recorded():
    sampler = llada(4, "random", as_published=True)
    assert sampler_from(json.loads(json.dumps(describe_sampler(sampler)))) == sampler


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(max_new_tokens=10, steps=4, sampler=llada(4)),
            r"10 masked positions of row 0: use blocks of 1, 2, 5, 10, or 8 or 12",
        ),
        (
            dict(max_new_tokens=12, steps=8, sampler=llada(4)),
            "steps=8 cannot be divided evenly among 3 blocks.*use 6 or 9 steps",
        ),
        (dict(max_new_tokens=12, steps=2, sampler=llada(4)), "block_length=4: use 3 steps"),
        (dict(max_new_tokens=3, steps=1, sampler=llada(4)), "use blocks of 1, 3, or 4 masked positions"),
    ],
)
def test_blocks_that_do_not_divide(models, options, message):
    with pytest.raises(ValueError, match=message):
        models["mha"].denoise(torch.tensor([[5, 6]]), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: llada(0), "block_length=0"),
        (lambda: llada(4, "high_confidence"), "remasking='high_confidence'"),
        (lambda: Blocks(order="left"), "order='left'"),
        (lambda: Blocks(masks_in_prompt="some"), "masks_in_prompt='some'"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()
