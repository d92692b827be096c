"""Samplers by transitions on models with [MASK]: the laws of every sampler, and what their steps draw."""

from typing import Any

import pytest
import torch

SAMPLERS = ["posterior", "score", "mdlm", "radd"]


def prompt(model: Any, rows: int = 2) -> torch.Tensor:
    return torch.randint(100, (rows, 4), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_run_keeps_what_is_written_and_leaves_nothing_masked(either: Any, sampler: str, temperature: float) -> None:
    model, tokens = either.model, prompt(either.model)
    settings = {"length": 12, "steps": 6, "sampler": sampler, "temperature": temperature}
    written = model.denoise(tokens, **settings)
    masked = written.is_masked(written.canvases)
    assert not bool((masked[1:] & ~masked[:-1]).any())
    assert not bool(masked[-1].any())
    kept = ~masked[:-1]
    assert torch.equal(written.canvases[1:][kept], written.canvases[:-1][kept])
    assert bool((written.tokens < model.cfg.d_vocab_out).all())
    hooked = [("hook_embed", lambda x, hook: x)]
    assert torch.equal(model.denoise(tokens, fwd_hooks=hooked, **settings).canvases, written.canvases)
    alone = model.denoise(tokens[1:], seed=written.record["seeds"][1:], **settings)
    assert torch.equal(alone.canvases[:, 0], written.canvases[:, 1])
    assert torch.equal(written.replay(model).canvases, written.canvases)
    assert torch.equal(written.replay(model, canvas="free").canvases, written.canvases)


def test_uniform_sampler_is_refused(either: Any) -> None:
    name = "under the noise of this model" if either.kind == "mdm" else "grows at its end only"
    with pytest.raises(ValueError, match=name):
        either.model.denoise(either.tokens[:1, :4], length=8, sampler="udlm")


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_posterior_reveals_at_the_rate_of_the_ancestral_sampler(either: Any) -> None:
    """With the time as the chance, a position is revealed with probability 1 - s/t, as by "ancestral"."""
    from diffusion_lens.denoising.samplers import Posterior

    tokens = torch.ones(64, 1, dtype=torch.long)
    run = either.model.denoise(tokens, length=33, steps=5, sampler=Posterior("time", eps=0.2), temperature=1.0)
    still = run.is_masked(run.canvases)[:, :, 1:].float().mean(dim=(1, 2))
    torch.testing.assert_close(still[:5], torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2]), rtol=0, atol=0.03)
    assert still[5] == 0


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_step_that_changed_nothing_is_not_predicted_again(either: Any) -> None:
    run = either.model.denoise(torch.ones(1, 1, dtype=torch.long), length=4, steps=40, sampler="mdlm", temperature=1.0)
    changes = (run.canvases[1:] != run.canvases[:-1]).flatten(1).any(dim=1)
    assert run.forward_passes == 1 + int(changes[:-1].sum()) - int(not bool(run.is_masked(run.canvases[-2]).any()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: s.Posterior(chance="sigma"), "must be one of schedule, time"),
        (lambda s: s.Score("tau"), "step='tau' .*one of analytic, euler"),
        (lambda s: s.mdlm("tau"), "predictor='tau' .*one of ddpm, ddpm_cache, analytic"),
        (lambda s: s.radd("ordered"), "strategy='ordered' .*one of direct, sampled"),
        (lambda s: s.radd(top_p=0.9), "need strategy='sampled'"),
    ],
)
def test_settings_are_checked(make: Any, message: str) -> None:
    from diffusion_lens.denoising import samplers

    with pytest.raises(ValueError, match=message):
        make(samplers)
