"""Samplers by transitions write the authors' canvases from the authors' draws, and losses equal theirs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden"


def load(name: str) -> Any:
    from diffusion_lens import HookedDiffusionTransformer

    return HookedDiffusionTransformer.from_pretrained(str(GOLDEN / name), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "run", "passes"),
    [
        ("udlm", "ddpm_cache", 16),
        ("sedd_uniform", "analytic_geometric_prefix", 7),
        ("sedd_uniform", "euler_loglinear", 17),
    ],
)
def test_canvases_equal_the_authors(name: str, run: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusion_lens.denoising.canvas import Canvas
    from diffusion_lens.denoising.denoise_settings import DenoiseSettings
    from diffusion_lens.denoising.prepare import denoise
    from diffusion_lens.denoising.randomness import PositionNoise
    from diffusion_lens.denoising.samplers import sedd, udlm
    from weight_conversion import NoiseSchedule

    recorded = load_file(GOLDEN / name / "trajectories.safetensors")
    g = {key.split("/")[1]: value for key, value in recorded.items() if key.startswith(f"{run}/")}
    monkeypatch.setattr(
        PositionNoise, "by_token", lambda self, step, positions, n: g["draws"][step].double()[positions][:, :n]
    )
    sampler: Any = udlm() if name == "udlm" else sedd(run.split("_")[0])
    if run.endswith("loglinear"):
        sampler = replace(sampler, schedule=NoiseSchedule("log_linear"))
    start, final = g["x_init"].clone(), g["x_final"].clone()
    given = torch.zeros_like(start, dtype=torch.bool)
    if "prefix" in g:
        given[:, : len(g["prefix"])] = True
        start[:, : len(g["prefix"])] = final[:, : len(g["prefix"])] = g["prefix"]
    settings = DenoiseSettings(len(g["draws"]), sampler, temperature=1.0)
    written = denoise(load(name), Canvas(start, given, None, -1, rewrites=True), settings)
    expected = torch.cat([start[None], g["x_steps"]]) if "x_steps" in g else g["x_after_projection"]
    assert torch.equal(written.canvases[: len(expected)], expected)
    assert torch.equal(written.tokens, final)
    assert written.forward_passes == passes


@pytest.mark.parametrize(("name", "key"), [("mdlm", "per_token"), ("sedd_uniform", "value"), ("udlm", "diffusion")])
def test_losses_equal_the_authors(name: str, key: str) -> None:
    from diffusion_lens.noise import schedule_of
    from diffusion_lens.scheduled_loss import scheduled_batch

    g, model = load_file(GOLDEN / name / "noise.safetensors"), load(name)
    t, noisy = g.get("loss.t", g.get("loss.t_drawn")), g["loss.xt"]
    assert t is not None
    p = schedule_of(model.cfg.schedule).chance(t.double())[:, None].expand(noisy.shape)
    batch = scheduled_batch(model, g.get("loss.x0", g.get("x0")), noisy, p, None)
    with torch.no_grad():
        by_position = batch.by_position(model.run_layers(batch.tokens, logits_at=batch.rows, **batch.beside))
    actual = by_position.sum(dim=1) if key == "value" else by_position
    expected = g[f"loss.{key}"]
    torch.testing.assert_close(actual, expected, rtol=3e-5, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("run", ["direct_tweedie_prefix", "top_p_tweedie"])
def test_canvases_under_absorbing_noise_equal_the_authors(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their probabilities are float16, ours float64: the recorded draws are far from a tie."""
    from diffusion_lens.denoising.canvas import Canvas
    from diffusion_lens.denoising.denoise_settings import DenoiseSettings
    from diffusion_lens.denoising.prepare import denoise
    from diffusion_lens.denoising.randomness import PositionNoise
    from diffusion_lens.denoising.samplers import radd

    recorded = load_file(GOLDEN / "radd" / "trajectories.safetensors")
    g = {key.split("/")[1]: value for key, value in recorded.items() if key.startswith(f"{run}/")}

    def by_token(self: Any, step: int, positions: torch.Tensor, n: int) -> torch.Tensor:
        return g["token_draws"][step][: int(positions.sum()), :n].double()

    monkeypatch.setattr(PositionNoise, "by_token", by_token)
    monkeypatch.setattr(
        PositionNoise, "by_position", lambda self, step, positions: g["update_uniforms"][step][positions].double()
    )
    start = torch.full((2, 12), 90)
    if "prefix" in g:
        start[:, : len(g["prefix"])] = g["prefix"].long()
    sampler = radd() if run.startswith("direct") else radd("sampled", top_p=0.8)
    settings = DenoiseSettings(len(g["x_steps"]), sampler, temperature=1.0)
    written = denoise(load("radd"), Canvas(start, start != 90, None, 90), settings)
    assert torch.equal(written.canvases[1:], g["x_steps"].long())


@pytest.mark.parametrize("name", ["t_DCE", "t_DSE"])
def test_losses_of_the_time_free_model_equal_the_authors(name: str) -> None:
    """The own loss is the score entropy of its own scores; the authors' cross-entropy has other constants."""
    from diffusion_lens.noise import LogLinear
    from diffusion_lens.scheduled_loss import scheduled_batch

    g, model, schedule = load_file(GOLDEN / "radd" / "noise.safetensors"), load("radd"), LogLinear()
    t, noisy = g[f"loss.{name}.t"].double()[:, None], g[f"loss.{name}.xt"]
    batch = scheduled_batch(model, g["x0"], noisy, schedule.chance(t).expand(noisy.shape), None)
    with torch.no_grad():
        by_position = batch.by_position(model.run_layers(batch.tokens, logits_at=batch.rows))
    ratio = torch.expm1(schedule.sigma(t))
    constant = 0.0 if name == "t_DSE" else ((noisy == 90) * schedule.rate(t) * ratio.log() / ratio).sum(dim=1)
    actual = by_position.double().sum(dim=1) + constant
    torch.testing.assert_close(actual, g[f"loss.{name}.value"].double(), rtol=1e-5, atol=0)
