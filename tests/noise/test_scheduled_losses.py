"""Losses under each noise and head: the laws of a loss, and the time that the network is conditioned on."""

from typing import Any

import pytest
import torch
from small_networks import small_architecture, with_time_conditioning

HEADS = [("subs", 39), ("log_scores", 39), ("logits", None), ("log_scores", None)]


def small(head: str, mask: int | None, conditioned: bool = True) -> Any:
    from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
    from weight_conversion import NoiseSchedule

    timed = with_time_conditioning() if conditioned else {**with_time_conditioning(), "time": None}
    architecture = small_architecture(mask_token_id=mask, head=head, schedule=NoiseSchedule(), **timed)
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"))


TEXT = torch.randint(39, (4, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("head", "mask"), HEADS)
def test_loss_is_that_of_its_noise_and_has_gradients(head: str, mask: int | None) -> None:
    model = small(head, mask)
    loss = model(TEXT, return_type="loss")
    by_position = model(TEXT, return_type="loss", loss_per_token=True)
    torch.testing.assert_close(by_position.mean(), loss)
    assert loss.isfinite()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    noisy, p = model.hide(TEXT)
    with torch.no_grad():
        logits, both = model(TEXT, return_type="both")
    torch.testing.assert_close(both, loss.detach())
    torch.testing.assert_close(model.loss_fn(logits, TEXT, noisy=noisy, p_mask=p), both)


@pytest.mark.parametrize(("head", "mask"), HEADS)
def test_exact_prediction_has_the_smallest_loss(head: str, mask: int | None) -> None:
    """Of all outputs, the one that is certain of the clean tokens has the smallest loss."""
    from diffusion_lens.model.loss import masked_batch

    model = small(head, mask)
    batch = masked_batch(model, TEXT, generator=torch.Generator().manual_seed(1))
    certain = torch.full((len(batch.targets), 40), -20.0).scatter_(1, batch.targets[:, None], 20.0)
    if head == "log_scores":
        # The scores that follow from certainty, before the constants of the head.
        present, sigma = batch.tokens[batch.predicted], batch.sigma[batch.predicted]
        exact = torch.nn.functional.one_hot(batch.targets, 40).double()
        certain = model.head.noise.scores(exact, present, sigma.double()).clamp(min=1e-30).log().float()
        if mask is not None:
            certain = certain + torch.log(torch.expm1(sigma) * 39)[:, None]
    best = batch.loss(certain)
    assert abs(float(best)) < 1e-3
    other = batch.loss(certain + 30 * torch.randn(certain.shape, generator=torch.Generator().manual_seed(2)))
    assert other > best + 1e-3


def test_time_conditions_the_network_by_row() -> None:
    model, seen = small("subs", 39), []
    model.run_with_hooks(TEXT, return_type="loss", fwd_hooks=[("hook_time", lambda x, hook: seen.append(x.detach()))])
    assert seen[0].shape[0] == len(TEXT)
    assert not torch.allclose(seen[0][0], seen[0][1])


@pytest.mark.parametrize(("head", "mask"), HEADS)
def test_a_loss_reads_no_more_noise_than_its_schedule_has(head: str, mask: int | None) -> None:
    """At p = 1 as at the schedule's last time, whose p is 0.999."""
    from diffusion_lens.model.loss import masked_batch
    from diffusion_lens.model.noise import LogLinear

    model, noise = small(head, mask), torch.randint(39, TEXT.shape, generator=torch.Generator().manual_seed(3))
    noisy, losses = noise if mask is None else torch.full_like(TEXT, mask), []
    for p in (0.999, 0.9995, 1.0):
        batch = masked_batch(model, TEXT, noisy, torch.full(TEXT.shape, p, dtype=torch.float64))
        assert float(batch.sigma.max()) == pytest.approx(LogLinear().sigma_at(1.0))
        losses.append(batch.loss(model(batch.tokens, logits_at=batch.rows, **batch.beside)).detach())
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(3))
    assert losses[0].isfinite()
    assert losses[0] > 0


@pytest.mark.parametrize("t", [0.9, 0.99, 0.999, 1.0])
def test_the_bound_under_uniform_noise_vanishes_at_time_1(t: float) -> None:
    """Against the formula written out in double precision, at 1 against its limit."""
    from diffusion_lens.model.noise import PlainLogits, Uniform, uniform_bound

    noise, generator = Uniform(40), torch.Generator().manual_seed(0)
    output, clean, present = torch.randn(9, 40, generator=generator), TEXT[0], TEXT[1]
    bound = uniform_bound(PlainLogits(noise), output, clean, present, torch.full((9,), t), torch.full((9,), 1.0))
    alpha = max(1 - t, 1e-8)
    true = 40 * alpha * torch.nn.functional.one_hot(clean, 40).double() + 1 - alpha
    model = 40 * alpha * output.double().softmax(dim=-1) + 1 - alpha
    here = torch.arange(9), present
    ratio = true / true[here][:, None]
    terms = ratio * (model[here].log()[:, None] - model.log() + true.log() - true[here].log()[:, None])
    expected = (40 / model[here] - 40 / true[here] + terms.sum(dim=1)) / (40 * alpha)
    torch.testing.assert_close(bound.double(), expected, rtol=1e-3, atol=0.02)
    assert (bound > -0.02).all()


@pytest.mark.parametrize("eps", [1e-3, 1e-2])
def test_schedules_are_undone_by_their_inverse(eps: float) -> None:
    from diffusion_lens.model.noise import Geometric, Linear, LogLinear

    t = torch.linspace(0.01, 0.98, 9, dtype=torch.float64)
    for schedule in (LogLinear(eps), Linear(eps), Geometric()):
        torch.testing.assert_close(schedule.time(schedule.sigma(t)), t)
