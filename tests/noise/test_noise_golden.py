"""Schedules, noise and heads give the numbers of the authors' code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / name / "noise.safetensors")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "name", "prefix"),
    [
        ("log_linear", "mdlm", "noise"),
        ("log_linear", "sedd_uniform", "noise.loglinear"),
        ("geometric", "sedd_uniform", "noise.geometric"),
    ],
)
def test_schedules_equal_the_authors(kind: Any, name: str, prefix: str) -> None:
    from diffusion_lens.model.noise import schedule_of
    from weight_conversion import NoiseSchedule

    g, schedule = golden(name), schedule_of(NoiseSchedule(kind))
    close(schedule.sigma(g[f"{prefix}.t"]), g[f"{prefix}.sigma"])
    close(schedule.rate(g[f"{prefix}.t"]), g[f"{prefix}.dsigma"])
    close(schedule.chance(g[f"{prefix}.t"]), 1 - torch.exp(-g[f"{prefix}.sigma"]))


def test_linear_schedule_is_capped() -> None:
    from diffusion_lens.model.noise import Linear

    t = torch.tensor([0.0, 0.5, 0.999, 1.0])
    close(Linear().sigma(t), torch.tensor([0.0, 0.6931472, 6.9077554, 6.9077554]))
    close(Linear().chance(t), t)


def test_subs_scores_at_masked_positions_equal_the_authors() -> None:
    from diffusion_lens.model.noise import Absorbing, WithoutMask

    g = golden("mdlm")
    masked, sigma = g["tokens"] == 129, g["sigma"][:, None].expand_as(g["tokens"])
    scores = WithoutMask(Absorbing(129)).scores(g["logits"][masked], g["tokens"][masked], sigma[masked])
    torch.testing.assert_close(scores, g["score_subs"][masked], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sedd", "sedd_uniform"])
def test_scores_and_steps_equal_the_authors(name: str) -> None:
    from diffusion_lens.model.noise import Absorbing, AbsorbingScores, Uniform, UniformScores

    g = golden(name)
    tokens, d_sigma = g["tokens"], g["graph.dsigma"]
    head = AbsorbingScores(Absorbing(129)) if name == "sedd" else UniformScores(Uniform(70))
    close(head.log_scores(g["raw_logits"], tokens, g["sigma"][:, None]), g["log_score"])
    scores, n_columns = g["log_score"].exp(), g["log_score"].shape[-1]
    torch.testing.assert_close(head.noise.staggered(scores, d_sigma), g["graph.staggered_score"], rtol=1e-5, atol=1e-5)
    close(head.noise.transition(tokens, d_sigma, n_columns), g["graph.transp_transition"])
    torch.testing.assert_close(head.noise.reverse_rate(scores, tokens), g["graph.reverse_rate"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["udlm", "duo"])
def test_posterior_under_uniform_noise_equals_the_authors(name: str) -> None:
    from diffusion_lens.model.noise import Uniform

    g = golden(name)
    for row in range(3):
        chances = [1 - g[f"posterior.alpha_{x}"][row].item() for x in "ts"]
        close(
            Uniform(64).posterior(g["log_probs"][row].exp(), g["tokens"][row], *chances), g["posterior.q"][row].float()
        )


def test_log_condition_of_the_time_free_model_is_softmax_without_mask() -> None:
    from diffusion_lens.model.noise import Absorbing, WithoutMask

    g = golden("radd")
    clean = WithoutMask(Absorbing(90)).clean_logits(g["logits"]).log_softmax(dim=-1)
    close(clean[..., :-1], g["log_condition"][..., :-1])


def random_prediction(n: int, mask: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(6, n, generator=generator, dtype=torch.float64)
    present = torch.randint(n, (6,), generator=generator)
    if mask is not None:
        p[:, mask], present = 0.0, torch.full((6,), mask)
    return p / p.sum(dim=-1, keepdim=True), present, torch.linspace(0.1, 3, 6, dtype=torch.float64)


@pytest.mark.parametrize("mask", [None, 3])
def test_scores_and_probabilities_determine_each_other(mask: int | None) -> None:
    from diffusion_lens.model.noise import Absorbing, Uniform

    noise = Uniform(11) if mask is None else Absorbing(mask)
    p, present, sigma = random_prediction(11, mask)
    torch.testing.assert_close(noise.analytic(noise.scores(p, present, sigma), present, sigma), p)


@pytest.mark.parametrize("mask", [None, 3])
def test_analytic_step_is_the_exact_reverse_process(mask: int | None) -> None:
    """The probability of x_s is the sum over x_0 of p(x_0) q(x_s | x_0, x_t), written out with matrices."""
    from diffusion_lens.model.noise import Absorbing, Uniform

    n = 7
    noise = Uniform(n) if mask is None else Absorbing(mask)
    p, present, sigma = random_prediction(n, mask)
    d_sigma = 0.4 * sigma
    got = noise.analytic(noise.scores(p, present, sigma), present, d_sigma)
    for row, z in enumerate(present.tolist()):

        def moved(amount: torch.Tensor) -> torch.Tensor:
            """Matrix [from, to] of the noising process."""
            target = torch.full((n, n), 1 / n) if mask is None else torch.eye(n)[[mask]].expand(n, n)
            return torch.exp(-amount) * torch.eye(n) + (1 - torch.exp(-amount)) * target.double()

        to_s, s_to_t, to_t = moved(sigma[row] - d_sigma[row]), moved(d_sigma[row]), moved(sigma[row])
        expected = sum(p[row, x] * to_s[x] * s_to_t[:, z] / to_t[x, z] for x in range(n) if x != mask)
        torch.testing.assert_close(got[row], expected)


def test_head_that_needs_the_canvas_says_so() -> None:
    from diffusion_lens.model.noise import Uniform, UniformScores

    with pytest.raises(ValueError, match=r"pass present= and sigma="):
        UniformScores(Uniform(5)).clean_logits(torch.zeros(2, 5))


def test_plain_logits_are_returned_as_they_are() -> None:
    from diffusion_lens.model.noise import Absorbing, PlainLogits

    output = torch.randn(2, 5)
    assert PlainLogits(Absorbing(4)).clean_logits(output) is output
