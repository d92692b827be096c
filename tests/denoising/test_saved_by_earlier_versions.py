"""Runs that were saved before the library knew blocks, uniform noise and time load, replay and compare as before."""

from pathlib import Path

import pytest
import torch

from diffusion_lens.denoising.same_network import require_same_network
from diffusion_lens.denoising.trajectory import Trajectory

SAVED = Path(__file__).parents[1] / "golden" / "saved_runs"
NOT_COMPARED = ("seconds", "device", "versions")


@pytest.fixture
def saved(tiny):
    return Trajectory.load(SAVED / f"{tiny.cfg.model_name}.safetensors")


def test_the_same_call_gives_the_saved_run_and_its_record(tiny, saved):
    settings = {"steps": 4, "cfg_scale": 0.5} if tiny.cfg.has_mask else {}
    run = tiny.denoise("Gustav Geisser is the", length=9, seed=3, temperature=0.5, **settings)
    assert torch.equal(run.canvases, saved.canvases)
    assert torch.equal(run.prompt, saved.prompt)
    torch.testing.assert_close(run.confidence, saved.confidence, rtol=1e-4, atol=1e-5)
    ours, theirs = (
        {name: value for name, value in record.items() if name not in (*NOT_COMPARED, "modules")}
        for record in (run.record, saved.record)
    )
    assert ours == theirs


def test_a_saved_run_is_replayed_and_is_of_the_same_network(tiny, saved):
    require_same_network(saved.record, tiny, "replay")
    for canvas in ("forced", "free"):
        again = saved.replay(tiny, canvas=canvas)
        assert torch.equal(again.canvases, saved.canvases)
    branch = saved.from_step(2).replay(tiny, canvas="free")
    assert torch.equal(branch.canvases, saved.canvases[2:])


def test_hooks_and_saved_runs_name_the_same_noise(tiny, saved):
    """The record of a network that has no time conditioning does not name it; the schedule gives it."""
    told = []
    tiny.denoise(
        "Gustav Geisser is the",
        length=9,
        **({"steps": 4} if tiny.cfg.has_mask else {}),
        fwd_hooks=[("denoise.hook_tokens", lambda tokens, hook: told.append(hook.step.sigma))],
    )
    assert [saved.state_at(step).sigma for step in range(saved.n_steps)] == told
