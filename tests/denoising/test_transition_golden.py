"""Samplers by transitions write the authors' canvases from the authors' draws, and losses equal theirs."""

import json
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from authors_networks import GOLDEN, authors_network
from safetensors.torch import load_file

from diffusion_lens.denoising import DenoiseSettings, Trajectory, denoise
from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.sampler import PositionNoise
from diffusion_lens.denoising.samplers import Sampler, duo, mdlm, radd, sedd, udlm
from diffusion_lens.model.loss import masked_batch
from diffusion_lens.model.noise import LogLinear, schedule_of, uniform_bound
from weight_conversion import NoiseSchedule


def runs_of(name: str) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((GOLDEN / name / "trajectories.json").read_text())
    return cases


def recorded(name: str, run: str) -> dict[str, torch.Tensor]:
    tensors = load_file(GOLDEN / name / "trajectories.safetensors")
    return {key.split("/")[1]: value for key, value in tensors.items() if key.startswith(f"{run}/")}


def written_from_mask(
    model: Any, g: dict[str, torch.Tensor], mask: int, n_steps: int, sampler: Sampler
) -> tuple[torch.Tensor, Trajectory]:
    """The first canvas, masked but for the prefix, and the run from it."""
    start = torch.full((2, 12), mask)
    if "prefix" in g:
        start[:, : len(g["prefix"])] = g["prefix"].long()
    settings = DenoiseSettings(n_steps, sampler, temperature=1.0)
    return start, denoise(model, Canvas(start, start != mask, None, mask), settings)


SAMPLERS: dict[str, Any] = {
    "ddpm_cache": udlm(),
    "ancestral": duo(),
    "greedy_tail": duo("greedy"),
    "without_removal": duo("none"),
    "analytic_geometric_prefix": sedd("analytic"),
    "euler_loglinear": replace(sedd("euler"), schedule=NoiseSchedule("log_linear")),
}


@pytest.mark.parametrize(
    ("name", "run", "passes"),
    [
        ("udlm", "ddpm_cache", 16),
        ("duo", "ancestral", 7),
        ("duo", "greedy_tail", 6),
        ("duo", "without_removal", 4),
        ("sedd_uniform", "analytic_geometric_prefix", 7),
        ("sedd_uniform", "euler_loglinear", 17),
    ],
)
def test_canvases_equal_the_authors(name: str, run: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = recorded(name, run)
    draws = g["draws"].double()
    if run == "greedy_tail":  # whose last step takes the likeliest tokens, whatever is drawn
        draws = torch.cat([draws, draws[:1]])
    monkeypatch.setattr(PositionNoise, "by_token", lambda self, step, positions, n: draws[step][positions][:, :n])
    start, final = g["x_init"].clone(), g["x_final"].clone()
    given = torch.zeros_like(start, dtype=torch.bool)
    if "prefix" in g:
        given[:, : len(g["prefix"])] = True
        start[:, : len(g["prefix"])] = final[:, : len(g["prefix"])] = g["prefix"]
    settings = DenoiseSettings(len(draws), SAMPLERS[run], temperature=1.0)
    written = denoise(authors_network(name), Canvas(start, given, None, -1, uniform_noise=True), settings)
    expected = torch.cat([start[None], g["x_steps"]]) if "x_steps" in g else g["x_after_projection"]
    assert torch.equal(written.canvases[: len(expected)], expected)
    assert torch.equal(written.tokens, final)
    assert written.forward_passes == passes


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Probabilities up to a factor of each position; in the last step the authors cut off the column of [MASK]."""
    theirs = torch.nn.functional.pad(theirs, (0, ours.shape[-1] - theirs.shape[-1]))
    ours, theirs = (p.double() / p.double().sum(dim=-1, keepdim=True) for p in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "run"), [(name, run) for name in ("mdlm", "sedd") for run in runs_of(name)])
def test_canvases_that_begin_masked_equal_the_authors(name: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With time conditioning and with constant conditioning; some runs end with masks to remove."""
    g, case = recorded(name, run), runs_of(name)[run]
    conditioned = {key: case[key] for key in ("time_conditioning",) if key in case}
    draws = iter(g["draws"].double())  # of masked positions

    def by_token(self: Any, step: int, positions: torch.Tensor, n: int) -> torch.Tensor:
        drawn = list(islice(draws, int(positions.sum())))
        # The last step of "ddpm" takes the likeliest tokens, whatever is drawn.
        return torch.stack(drawn) if drawn else torch.rand(int(positions.sum()), n, dtype=torch.float64)

    monkeypatch.setattr(PositionNoise, "by_token", by_token)
    final = g["x_final"].long()
    if "prefix" in g:
        final[:, : len(g["prefix"])] = g["prefix"].long()
    steps = case["num_steps"] if name == "mdlm" else case["steps"]
    sampler = (mdlm if name == "mdlm" else sedd)(case["predictor"], eps=case["eps"])
    probabilities: dict[int, torch.Tensor] = {}
    transition = type(sampler).transition

    def kept(self: Any, step: Any, prediction: Any) -> torch.Tensor:
        return probabilities.setdefault(step.index, transition(self, step, prediction))

    monkeypatch.setattr(type(sampler), "transition", kept)
    start, written = written_from_mask(authors_network(name, **conditioned), g, 129, steps + 1, sampler)
    expected = torch.cat([start[None], g["x_steps"].long()]) if name == "mdlm" else g["x_after_projection"].long()
    assert torch.equal(written.canvases, torch.cat([expected, final[None]]))
    assert next(draws, None) is None
    close(probabilities[0].view(2, -1, 130)[:, -2:], g["probs_first"])
    for step, last in ((steps - 1, "probs_last_step"), (steps, "probs_denoise")):
        if last in g:
            close(probabilities[step], g[last])


@pytest.mark.parametrize(
    ("name", "key", "conditioned"),
    [
        ("mdlm", "per_token", {}),
        ("mdlm", "per_token_no_time_conditioning", {"time_conditioning": False}),
        ("sedd", "value", {}),
        ("sedd_uniform", "value", {}),
        ("udlm", "diffusion", {}),
    ],
)
def test_losses_equal_the_authors(name: str, key: str, conditioned: dict[str, bool]) -> None:
    g, model = load_file(GOLDEN / name / "noise.safetensors"), authors_network(name, **conditioned)
    t, noisy = g.get("loss.t", g.get("loss.t_drawn")), g["loss.xt"]
    assert t is not None
    p = schedule_of(model.cfg.schedule).chance(t.double())[:, None].expand(noisy.shape)
    batch = masked_batch(model, g.get("loss.x0", g.get("x0")), noisy, p)
    with torch.no_grad():
        by_position = batch.by_position(model(batch.tokens, logits_at=batch.rows, **batch.beside))
    actual = by_position.sum(dim=1) if key == "value" else by_position
    expected = g[f"loss.{key}"]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


def test_the_bound_of_duo_equals_the_authors() -> None:
    """Theirs is at the share that the schedule leaves, 1 - (1 - eps) t, where that of UDLM, and ours, is at 1 - t."""
    g, model = load_file(GOLDEN / "duo" / "noise.safetensors"), authors_network("duo")
    clean, noisy, t = g["x0"].flatten(), g["loss.xt"], (1 - g["loss.alpha"]).expand_as(g["x0"]).flatten()
    with torch.no_grad():
        logits = model(noisy, time=g["loss.t"].double()).flatten(0, 1)
    bound = uniform_bound(model.head, logits, clean, noisy.flatten(), t, -torch.log1p(-t)) * (1 - 1e-3)
    torch.testing.assert_close(bound, g["loss.diffusion"].flatten(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", ["direct_tweedie_prefix", "top_p_tweedie"])
def test_canvases_under_absorbing_noise_equal_the_authors(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their probabilities are float16, ours float64: the recorded draws are far from a tie."""
    g = recorded("radd", run)

    def by_token(self: Any, step: int, positions: torch.Tensor, n: int) -> torch.Tensor:
        return g["token_draws"][step][: int(positions.sum()), :n].double()

    monkeypatch.setattr(PositionNoise, "by_token", by_token)
    monkeypatch.setattr(
        PositionNoise, "by_position", lambda self, step, positions: g["update_uniforms"][step][positions].double()
    )
    sampler = radd() if run.startswith("direct") else radd("sampled", top_p=0.8)
    _, written = written_from_mask(authors_network("radd"), g, 90, len(g["x_steps"]), sampler)
    assert torch.equal(written.canvases[1:], g["x_steps"].long())


@pytest.mark.parametrize("name", ["t_DCE", "t_DSE"])
def test_losses_of_the_time_free_model_equal_the_authors(name: str) -> None:
    """The own loss is the score entropy of its own scores; the authors' cross-entropy has other constants."""
    g, model, schedule = load_file(GOLDEN / "radd" / "noise.safetensors"), authors_network("radd"), LogLinear()
    t, noisy = g[f"loss.{name}.t"].double()[:, None], g[f"loss.{name}.xt"]
    batch = masked_batch(model, g["x0"], noisy, schedule.chance(t).expand(noisy.shape))
    with torch.no_grad():
        by_position = batch.by_position(model(batch.tokens, logits_at=batch.rows))
    ratio = torch.expm1(schedule.sigma(t))
    constant = 0.0 if name == "t_DSE" else ((noisy == 90) * schedule.rate(t) * ratio.log() / ratio).sum(dim=1)
    actual = by_position.double().sum(dim=1) + constant
    torch.testing.assert_close(actual, g[f"loss.{name}.value"].double(), rtol=1e-5, atol=0)
