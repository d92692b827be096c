"""Dream's own sampler, canvas by canvas; its schedule, its ranking, its chance."""

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_runs import same
from safetensors.torch import load_file

from diffusion_lens.denoising.sampler import PositionNoise, most_confident
from diffusion_lens.denoising.samplers import Ancestral, Confidence, describe_sampler, dream, sampler_from
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.step import StepState
from diffusion_lens.records.identity import run_of

GOLDEN = Path(__file__).parents[1] / "golden" / "dream"
CASES = json.loads((GOLDEN / "trajectories.json").read_text())
RECORDED = load_file(GOLDEN / "trajectories.safetensors")
LEFT_WITH_MASKS = {"edge_mask_id_can_win", "edge_unequal_mask_counts"}  # read by tests of their own
MASK = 500
relaxed = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def model():
    from diffusion_lens import HookedDiffusionTransformer

    return HookedDiffusionTransformer.from_pretrained(GOLDEN, device="cpu")


def repeating(name, as_published=False):
    """The prompt and settings of a recorded run."""
    case = CASES[name]
    chosen = {key: case.get(key) for key in ("alg", "alg_temp", "top_p", "top_k")}
    sampler = dream(**chosen, eps=case.get("eps", 1e-3), as_published=as_published)
    return RECORDED[f"{name}/prompt"], dict(
        attention_mask=RECORDED.get(f"{name}/prompt_attention_mask"),
        max_new_tokens=case["max_new_tokens"],
        steps=case["steps"],
        sampler=sampler,
    )


def test_every_canvas_of_every_recorded_run(model, monkeypatch):
    """As published and not, where a filter or padding could tell them apart."""
    with run_of(model):  # identified once
        for name in CASES.keys() - LEFT_WITH_MASKS:
            expected = torch.cat([RECORDED[f"{name}/x_init"][None], RECORDED[f"{name}/x_steps"]])
            for as_published in (False, True) if name.startswith("edge") or name == "topk_margin_steps4" else (False,):
                prompt, options = repeating(name, as_published)
                with monkeypatch.context() as patch:
                    draw_again(name, patch)
                    assert torch.equal(model.denoise(prompt, **options).canvases, expected), (name, as_published)


def draw_again(name, patch):
    """Let the loop draw the numbers that the authors' code drew, one for each masked position in reading order."""
    if f"{name}/draws" in RECORDED:
        samples = RECORDED[f"{name}/draws"].double()
        patch.setattr(PositionNoise, "by_position", lambda self, step, masked: samples[step, : int(masked.sum())])


def test_logits_are_at_the_position_they_predict(model):
    prompt, options = repeating("maskgit_plus_steps4")
    seen = []
    model.denoise(prompt, **options, fwd_hooks=[("denoise.hook_logits", lambda a, hook: seen.append(a.clone()))])
    recorded = RECORDED["maskgit_plus_steps4/shifted_logits_step0"]
    torch.testing.assert_close(seen[0][:, 5:], recorded[:, 5:], rtol=1e-5, atol=3e-5)


def test_a_mask_that_wins(model):
    """As published its position stays masked, in the end too; otherwise it is filled."""
    name = "edge_mask_id_can_win"
    added = CASES[name]["logit_bias"]["added"]
    hooks = [("denoise.hook_logits", lambda a, hook: a + added * (torch.arange(512) == MASK))]
    prompt, options = repeating(name, as_published=True)
    published = model.denoise(prompt, **options, fwd_hooks=hooks)
    assert torch.equal(published.canvases[1:], RECORDED[f"{name}/x_steps"])
    assert (published.tokens == MASK).sum() == 1
    for canvas in ("forced", "free"):
        same(published.replay(model, canvas=canvas, fwd_hooks=hooks), published)
    prompt, options = repeating(name)
    assert (model.denoise(prompt, **options, fwd_hooks=hooks).tokens != MASK).all()


def test_rows_with_other_numbers_of_masks(model):
    """As published the row with more keeps some. The other, whose picks run out, is left alone, not overwritten."""
    name = "edge_unequal_mask_counts"
    recorded = RECORDED[f"{name}/x_steps"]
    prompt, options = repeating(name, as_published=True)
    published = model.denoise(prompt, **options)
    assert torch.equal(published.canvases[1:, 0], recorded[:, 0])
    assert (published.tokens[0] == MASK).sum() == 2
    assert torch.equal(published.canvases[1:4, 1], recorded[:3, 1])
    assert (recorded[3, 1] == MASK).sum() == 1
    assert (published.tokens[1] != MASK).all()
    prompt, options = repeating(name)
    together = model.denoise(prompt, **options)
    assert (together.tokens != MASK).all()
    for row in range(2):
        alone = model.denoise(prompt[row : row + 1], **options)
        assert torch.equal(together.canvases[:, row], alone.canvases[:, 0])


runs = st.fixed_dictionaries(
    {
        "prompt_length": st.integers(1, 4),
        "new": st.integers(1, 8),
        "steps": st.integers(1, 5),
        "alg": st.sampled_from(["origin", "maskgit_plus", "topk_margin", "entropy"]),
        "alg_temp": st.sampled_from([None, 0.3]),
        "top_p": st.sampled_from([None, 0.8]),
        "top_k": st.sampled_from([None, 1, 7]),
        "temperature": st.sampled_from([0.0, 0.7]),
        "seed": st.integers(0, 2**40),
    }
)


def start(run, n_batch=2):
    prompt = torch.randint(
        490, (n_batch, run["prompt_length"]), generator=torch.Generator().manual_seed(run["seed"] % 1000)
    )
    chance = None if run["alg"] == "origin" else run["alg_temp"]
    sampler = dream(run["alg"], chance, run["top_p"], run["top_k"])
    options = {key: run[key] for key in ("steps", "temperature", "seed")}
    return prompt, dict(max_new_tokens=run["new"], sampler=sampler, **options)


@relaxed
@given(run=runs)
def test_the_schedule(model, run):
    prompt, options = start(run)
    trajectory = model.denoise(prompt, **options)
    assert (trajectory.tokens != MASK).all()
    assert torch.equal(trajectory.tokens[:, : run["prompt_length"]], prompt)
    if run["alg"] == "origin":
        return
    times = np.linspace(1, 1e-3, run["steps"] + 1)
    for row in trajectory.revealed_at[:, run["prompt_length"] :]:
        left = run["new"]
        for step, n in enumerate(torch.bincount(row, minlength=run["steps"]).tolist()):
            due = left * (1 - times[step + 1] / times[step]) if step < run["steps"] - 1 else left
            # At a whole number the authors' float32 may round to either side.
            assert n == int(due) or abs(due - round(due)) < 1e-4
            left -= n


@relaxed
@given(run=runs, pad=st.integers(1, 3))
def test_rows_are_independent_also_padded(model, run, pad):
    prompt, options = start(run)
    padded = torch.cat([torch.full((2, pad), 498), prompt], dim=1)
    real = torch.ones_like(padded)
    real[1, :pad] = 0
    together = model.denoise(padded, attention_mask=real, **options)
    first = model.denoise(padded[:1], **options)
    second = model.denoise(prompt[1:], **{**options, "seed": [together.record["seeds"][1]]})
    assert torch.equal(together.canvases[:, 0], first.canvases[:, 0])
    assert torch.equal(together.canvases[:, 1, pad:], second.canvases[:, 0])


@relaxed
@given(run=runs, data=st.data())
def test_hooked_replayed_and_branched_runs_are_the_same(model, run, data, tmp_path_factory):
    prompt, options = start(run)
    made, steps = model.denoise(prompt, **options), []
    looked = model.denoise(prompt, **options, fwd_hooks=[("hook_embed", lambda a, hook: steps.append(hook.step.index))])
    assert torch.equal(looked.canvases, made.canvases)
    assert steps == list(range(run["steps"]))
    loaded = Trajectory.load(made.save(tmp_path_factory.mktemp("runs") / "run.safetensors"))
    branch = loaded.from_step(data.draw(st.integers(0, run["steps"] - 1)))
    for canvas in ("forced", "free"):
        same(branch.replay(model, canvas=canvas), branch)


def seen_by(model, temperature=0.0, **chosen):
    """Logits, proposed tokens and confidence at the masked positions of the first step, and the run."""
    seen = {}

    def look(x, hook):
        if hook.step.index == 0:
            seen[hook.name.removeprefix("denoise.hook_")] = x.clone()

    hooks = [(f"denoise.hook_{name}", look) for name in ("logits", "candidates", "confidence")]
    run = model.denoise(
        torch.tensor([[5, 6, 7]]),
        max_new_tokens=9,
        steps=3,
        sampler=dream(**chosen),
        temperature=temperature,
        fwd_hooks=hooks,
    )
    return {name: x[0, 3:] for name, x in seen.items()}, run


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_what_being_sure_means(model, temperature):
    heat = temperature or 1.0
    at, run = seen_by(model, temperature, alg="entropy")
    spread = torch.distributions.Categorical(logits=at["logits"].double() / heat)
    torch.testing.assert_close(at["confidence"], -spread.entropy(), rtol=1e-6, atol=1e-6)
    first = (run.revealed_at[0, 3:] == 0).nonzero().flatten()
    assert set(first.tolist()) == set(at["confidence"].topk(len(first)).indices.tolist())
    # What a trajectory keeps is a probability under the model, whatever ranks.
    under_model = at["logits"].softmax(-1).gather(1, at["candidates"][:, None])[:, 0]
    torch.testing.assert_close(run.confidence[0, 3:][first], under_model[first], rtol=1e-5, atol=1e-7)

    at, _ = seen_by(model, temperature, alg="maskgit_plus", top_k=5)
    best = (at["logits"].double() / heat).topk(5)
    among = best.values.softmax(-1)
    chosen = (best.indices == at["candidates"][:, None]).double()
    assert (chosen.sum(dim=1) == 1).all()
    torch.testing.assert_close(at["confidence"], (among * chosen).sum(dim=1))

    at, _ = seen_by(model, temperature, alg="topk_margin", top_k=2)
    difference = (at["logits"].double() / heat).topk(2).values @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(at["confidence"], torch.tanh(difference / 2))


def test_one_token_to_draw_from_is_the_likeliest(model):
    for filtered in (dict(top_k=1), dict(top_p=1e-9)):
        at, _ = seen_by(model, 3.0, alg="maskgit_plus", **filtered)
        assert torch.equal(at["candidates"], at["logits"].argmax(-1))
        assert (at["confidence"] == 1).all()


def test_positions_are_sampled_without_replacement():
    """Two of four positions by softmax(confidence / temperature), the second among the three that remain."""
    n, heat = 6000, 0.4
    confidence = torch.tensor([0.1, 0.3, 0.5, 0.9], dtype=torch.float64)
    masked = torch.ones(n, 4, dtype=torch.bool)
    step = StepState(0, 2, 1.0, 0.5, torch.full((n, 4), MASK), masked, ~masked)
    noise = PositionNoise(range(n), torch.arange(4).expand(n, -1))
    plan = dream("maskgit_plus", alg_temp=heat).plan(step, noise, torch.full((n, 4), float("nan")))
    assert (plan.counts == 2).all()
    drawn = most_confident(confidence.expand(n, -1), plan)
    chances = torch.softmax(confidence / heat, 0).tolist()
    for pair in ((0, 1), (0, 3), (2, 3), (1, 3)):
        p = sum(chances[i] * chances[j] / (1 - chances[i]) for i, j in permutations(pair))
        share = drawn[:, pair].all(dim=1).double().mean().item()
        assert share == pytest.approx(p, abs=5 * (p * (1 - p) / n) ** 0.5)


def test_a_vanishing_choice_temperature_is_none(model):
    prompt, options = repeating("entropy_steps4")
    cold = model.denoise(prompt, **{**options, "sampler": dream("entropy", alg_temp=1e-9)})
    assert torch.equal(cold.canvases, model.denoise(prompt, **options).canvases)


def test_origin_reveals_each_position_with_its_probability(model):
    run = model.denoise(torch.tensor([[5]]).expand(60, -1), max_new_tokens=40, steps=4, sampler="dream", seed=3)
    times = np.linspace(1, 1e-3, 5)
    for step in range(3):
        share, expected = (run.revealed_at[:, 1:] <= step).float().mean().item(), 1 - times[step + 1]
        assert share == pytest.approx(expected, abs=5 * (expected * (1 - expected) / 2400) ** 0.5)


def test_names_and_records(model):
    run = model.denoise(torch.tensor([[5]]), max_new_tokens=4, steps=2, sampler="dream")
    assert sampler_from(run.record["sampler"]) == dream() == Ancestral(1e-3, dream().proposal)
    for sampler in (dream("entropy", 0.1, 0.9, 40, 1e-2), dream("topk_margin", as_published=True)):
        assert sampler_from(json.loads(json.dumps(describe_sampler(sampler)))) == sampler
    assert sampler_from({"name": "confidence", "scope": "batch"}) == Confidence("batch")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (dict(alg="margin"), "alg='margin' is unknown.*; it must be one of origin, maskgit_plus, topk_margin, entropy"),
        (dict(alg="origin", alg_temp=0.1), "ranks none"),
        (dict(alg="entropy", alg_temp=-1.0), "choice_temperature=-1.0"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1.1), "top_p=1.1"),
        (dict(top_k=0), "top_k=0"),
        (dict(eps=1.0), "eps=1.0"),
        (dict(alg="entropy", eps=-0.1), "eps=-0.1"),
    ],
)
def test_bad_settings(chosen, message):
    with pytest.raises(ValueError, match=message):
        dream(**chosen)
