"""The bounds of each noise and head against the exact likelihood of a process that is small enough to write out."""

from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from authors_networks import GOLDEN, authors_network
from safetensors.torch import load_file
from small_networks import small_architecture, with_time_conditioning
from torch.nn import functional as F

EMPTY = torch.zeros(0, dtype=torch.long)
KINDS = [("subs", 3), ("logits", 3), ("log_scores", 3), ("logits", None), ("log_scores", None)]


@cache
def small(head: str, mask: int | None, conditioned: bool = True) -> Any:
    """A random model of texts of three tokens."""
    from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
    from weight_conversion import NoiseSchedule

    timed = with_time_conditioning() if conditioned else {**with_time_conditioning(), "time": None}
    n_tokens = 3 if mask is None else 4
    architecture = small_architecture(
        d_vocab=n_tokens,
        d_vocab_out=n_tokens,
        n_ctx=8,
        mask_token_id=mask,
        head=head,
        schedule=NoiseSchedule(),
        **timed,
    )
    model = HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"), seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3, generator=generator)
        model.unembed.weight.mul_(0.5)
    return model


@cache
def exact_odds(model: Any, n_steps: int = 400) -> torch.Tensor:
    """The probability that the reverse process of many steps ends at each pair of tokens. Float[first second]."""
    from diffusion_lens.evaluation.likelihood import conditioning, sigma_of_chance

    n, mask, noise = model.cfg.d_vocab, model.cfg.mask_token_id, model.head.noise
    states = torch.tensor(list(product(range(n), repeat=2)))
    probability = torch.full((n * n,), 1 / n**2, dtype=torch.float64)
    if mask is not None:
        probability = (states == mask).all(dim=1).double()

    def moved(q: torch.Tensor) -> torch.Tensor:
        q = q.clamp(min=0) / q.clamp(min=0).sum(dim=-1, keepdim=True)
        if mask is not None:
            q = torch.where((states == mask)[..., None], q, F.one_hot(states, n).double())
        return probability @ (q[:, 0, :, None] * q[:, 1, None, :]).flatten(1)

    chances = torch.linspace(1, 0, n_steps + 1, dtype=torch.float64)
    with torch.no_grad():
        times = chances[:-1].repeat_interleave(n * n)
        outputs = model(states.repeat(n_steps, 1), **conditioning(model, times)).double().unflatten(0, (n_steps, n * n))
    for (t, s), output in zip(pairwise(chances), outputs, strict=True):
        sigma = sigma_of_chance(t).expand(states.shape)
        if model.cfg.head == "log_scores":
            d_sigma = sigma - sigma_of_chance(s)
            q = noise.analytic(model.head.scores(output, states, sigma), states, d_sigma)
        else:
            q = noise.posterior(model.head.clean_logits(output).softmax(dim=-1), states, float(t), float(s))
        probability = moved(q)
    if mask is None and model.cfg.head == "logits":
        with torch.no_grad():
            probability = moved(model(states, **conditioning(model, torch.zeros(1))).double().softmax(dim=-1))
    assert float(probability.sum()) == pytest.approx(1)
    return probability.view(n, n)


@pytest.mark.parametrize(("head", "mask"), KINDS)
def test_bound_is_above_the_exact_likelihood(head: str, mask: int | None) -> None:
    from diffusion_lens.evaluation import monte_carlo_nll

    model = small(head, mask)
    for text in (torch.tensor([0, 2]), torch.tensor([1, 1])):
        estimate = monte_carlo_nll(model, EMPTY, text, samples=1024, batch_size=256, max_batch=1024)
        exact = -float(exact_odds(model)[tuple(text)].log())
        assert estimate.value + 3 * estimate.standard_error > exact, (estimate.value, estimate.standard_error, exact)
        assert estimate.value < exact + 12, (estimate.value, estimate.standard_error, exact)


@pytest.mark.parametrize(("head", "mask"), [("subs", 3), ("log_scores", 3), ("logits", None), ("log_scores", None)])
def test_bound_of_a_perfect_model_is_the_likelihood(head: str, mask: int | None, monkeypatch: Any) -> None:
    """The network is replaced by the exact answer for a distribution of independent tokens."""
    from diffusion_lens.evaluation import monte_carlo_nll
    from diffusion_lens.evaluation.likelihood import sigma_of_chance

    model, prior = small(head, mask), torch.tensor([0.5, 0.3, 0.2])
    sigmas: list[torch.Tensor] = []

    def perfect(tokens: torch.Tensor, logits_at: Any, sigma: torch.Tensor, **more: Any) -> torch.Tensor:
        present, at = tokens[logits_at], sigma[logits_at[0]].double()
        sigmas.append(sigma)
        p = F.pad(prior, (0, 0 if mask is None else 1)).double().expand(len(present), -1)
        if mask is None:
            kept, here = torch.exp(-at)[:, None], F.one_hot(present, 3)
            # Of logits, the ratios of noised probabilities follow from p(x_0) without the present token.
            p = torch.where(at[:, None] == 0, here, p) if head == "logits" else p * (kept * here + (1 - kept) / 3)
            p = p / p.sum(dim=-1, keepdim=True)
        if head != "log_scores":
            return p.clamp(min=1e-30).log().float()
        scores = model.head.noise.scores(p, present, at)
        constant = 0.0 if mask is None else torch.log(torch.expm1(at) * 3)[:, None]
        return scores.clamp(min=1e-30).log() + constant

    monkeypatch.setattr(model, "forward", perfect)
    text = torch.tensor([0, 2])
    estimate = monte_carlo_nll(model, EMPTY, text, samples=20000, batch_size=500, max_batch=20000)
    expected = -float(prior[text].log().sum())
    assert abs(estimate.value - expected) < max(4 * estimate.standard_error, 0.01 * expected)
    assert float(sigmas[0].min()) < 0.5 < 2 < float(sigmas[0].max())
    assert float(sigma_of_chance(torch.tensor(0.5))) == pytest.approx(0.6931, rel=1e-3)


def test_reconstruction_and_bound_equal_the_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the authors' chance t, where they tell the network the time by a chance that is smaller by a thousandth."""
    from diffusion_lens.evaluation import monte_carlo_nll
    from diffusion_lens.evaluation.likelihood import bound_term, conditioning, sigma_of_chance
    from diffusion_lens.model.time import NetworkTime

    model = authors_network("udlm")
    sigma_of = NetworkTime.sigma_of_noise
    monkeypatch.setattr(NetworkTime, "sigma_of_noise", lambda self, p: sigma_of(self, p * (1 - 1e-3)))
    g = load_file(GOLDEN / "udlm" / "noise.safetensors")
    for row, (text, noisy) in enumerate(zip(g["x0"].long(), g["loss.xt"].long(), strict=True)):
        p = g["loss.t_drawn"][row].expand(len(text))
        estimate = monte_carlo_nll(model, EMPTY, text, noisy=noisy[None], p_mask=p[None])
        with torch.no_grad():
            logits = model(noisy[None], **conditioning(model, p[:1]))[0].double()
        bound = bound_term(model).term(logits, text, noisy, p.double(), sigma_of_chance(p)).sum()
        reconstruction = float(g["loss.reconstruction"][row].sum())
        assert estimate.value - float(bound) == pytest.approx(reconstruction, rel=1e-5, abs=0)
        assert estimate.value == pytest.approx(float(g["loss.total"][row].sum()), rel=1e-5, abs=0)


def test_chain_rule_tells_the_share_that_is_masked() -> None:
    from diffusion_lens.evaluation import chain_rule_nll

    model, answer = small("subs", 3), torch.tensor([0, 2, 1, 1])
    expected = torch.zeros(())
    for i in range(4):
        canvas = answer.masked_fill(torch.arange(4) >= i, 3)
        chance = (4 - i) / 4
        with torch.no_grad():
            logits = model(canvas[None], time=min(1.0, chance / (1 - 1e-3)))[0, i, :3]
        expected = expected - logits.log_softmax(dim=-1)[answer[i]]
    torch.testing.assert_close(chain_rule_nll(model, EMPTY, answer), expected, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_uniform_noise_is_refused() -> None:
    from diffusion_lens.evaluation import chain_rule_nll, monte_carlo_nll

    model, question = small("logits", None), (torch.tensor([1]), torch.tensor([2, 0]))
    with pytest.raises(ValueError, match="monte_carlo_nll estimates the bound under uniform noise"):
        chain_rule_nll(model, *question)
    with pytest.raises(ValueError, match="use cfg_scale=0 under uniform noise"):
        monte_carlo_nll(model, *question, cfg_scale=0.5)
    with pytest.raises(ValueError, match="may only replace positions of the answer"):
        monte_carlo_nll(model, *question, noisy=torch.tensor([[0, 2, 0]]), p_mask=torch.full((1, 3), 0.5))
