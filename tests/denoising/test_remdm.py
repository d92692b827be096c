"""Remasking: shares are kept, chances are the formulas', and every run still ends without a mask."""

import pytest
import torch

from diffusion_lens.denoising.sampler import PositionNoise
from diffusion_lens.denoising.samplers import ReMDM
from diffusion_lens.hooks.step import StepState

N = 4000


def planned(sampler, t, s, share_masked=0.5, confidence=None):
    """One plan on a canvas of N places, of which the first part is masked."""
    masked = torch.arange(N)[None] < share_masked * N
    tokens = torch.where(masked, 512, 7)
    step = StepState(3, 10, t, s, tokens, masked, torch.zeros_like(masked))
    known = torch.full((1, N), 0.9) if confidence is None else confidence
    noise = PositionNoise([0], torch.arange(N)[None])
    return masked, sampler.plan(step, noise, known.masked_fill(masked, float("nan")))


@pytest.mark.parametrize(
    ("sampler", "sigma"),
    [(ReMDM("cap", eta=0.2), 0.2), (ReMDM("rescale", eta=0.2), 0.2 * 0.4 / 0.5), (ReMDM("cap", eta=1.0), 0.4 / 0.5)],
)
def test_chances_are_the_formulas(sampler, sigma):
    """At t=0.5, s=0.4: alpha_t=0.5, alpha_s=0.6, sigma_max=0.4/0.5."""
    masked, plan = planned(sampler, 0.5, 0.4)
    reveal = (0.6 - (1 - sigma) * 0.5) / 0.5
    error = 4 * (0.25 / (N / 2)) ** 0.5
    assert plan.positions[masked].float().mean() == pytest.approx(reveal, abs=error)
    assert plan.remask[~masked].float().mean() == pytest.approx(sigma, abs=error)
    assert not plan.positions[~masked].any()
    assert not plan.remask[masked].any()


def test_no_strength_is_the_ancestral_chance():
    masked, plan = planned(ReMDM("cap", eta=0.0), 0.5, 0.4)
    assert not plan.remask.any()
    assert plan.positions[masked].float().mean() == pytest.approx(1 - 0.4 / 0.5, abs=0.03)


def test_conf_returns_the_least_sure_first():
    confidence = torch.full((1, N), 0.95)
    confidence[0, -100:] = -20.0  # far below any probability, so that softmax(-p) all but picks these
    masked, plan = planned(ReMDM("conf"), 0.5, 0.4, confidence=confidence)
    assert not plan.remask[0, N // 2 : -100].any()
    assert plan.positions[masked].float().mean() == pytest.approx(1 - 0.4 / 0.5, abs=0.03)


def test_loop_rests_at_a_constant_share():
    sampler = ReMDM("loop", eta=0.1)
    masked, plan = planned(sampler, 0.4, 0.35, share_masked=0.1)
    assert plan.remask[~masked].float().mean() == pytest.approx(0.1, abs=0.02)
    assert plan.positions[masked].float().mean() == pytest.approx(0.9 * 0.1 / 0.1, abs=0.1)
    for t, s in ((0.9, 0.8), (0.04, 0.02)):
        assert not planned(sampler, t, s)[1].remask.any()


on_mdm = pytest.mark.parametrize("either", ["mdm"], indirect=True)


@on_mdm
@pytest.mark.parametrize("strategy", ["cap", "rescale", "conf", "loop"])
def test_every_run_ends_without_a_mask_and_leaves_the_prompt(either, strategy):
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
    run = either.model.denoise(prompt, length=24, steps=12, sampler=ReMDM(strategy, eta=0.9), seed=2)
    assert (run.tokens < 512).all()
    assert (run.canvases[:, :, :3] == prompt).all()
    returned = (run.canvases[1:] == 512) & (run.canvases[:-1] != 512)
    assert returned.any()
    last = run.n_steps - 1
    for step in range(last + 1):
        here = run.revealed_at == step
        assert (run.canvases[step + 1 :][:, here] != 512).all()


@on_mdm
def test_by_name(either):
    run = either.model.denoise(torch.tensor([[5]]), length=8, steps=4, sampler="remdm")
    assert run.record["sampler"]["name"] == "remdm"


@pytest.mark.parametrize(
    ("settings", "message"),
    [(dict(strategy="capped"), "strategy='capped'"), (dict(eta=1.5), "eta=1.5"), (dict(t_on=0.01), "t_on=0.01")],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ReMDM(**settings)
