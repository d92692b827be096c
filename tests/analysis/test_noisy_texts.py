"""Texts under noise are read as in training: each with its own noise, and by blocks after the clean text."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from diffusion_lens.analysis import RidgeSettings, activations, fit_translators, probe_time, second_moment
from diffusion_lens.analysis.dictionaries import dictionary_loss
from diffusion_lens.model.loss import noised
from diffusion_lens.model.noise import HeadAt
from diffusion_lens.model.transformer import normalized
from diffusion_lens.settings import own_seed

KEYS, RESID = "blocks.1.mlp.hook_post", "blocks.1.hook_resid_post"
TOLD = ["sedd", "udlm", "sedd-uniform", "bd3lm"]
BY_BLOCKS = ["sdar", "nemotron-block"]
TEXTS = torch.randint(10, 500, (6, 8), generator=torch.Generator().manual_seed(4))


class Identity:
    """A dictionary that loses nothing."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        return features


@pytest.fixture(params=[*TOLD, *BY_BLOCKS])
def model(request: pytest.FixtureRequest, configs: Any, specimen: Any) -> Any:
    """A network that is conditioned on the time, or attends by blocks, or both; outside of `at_time`."""
    config = configs[request.param]
    if request.param == "sedd-uniform":  # with the schedule of `time=`
        config["noise"] = {"type": "loglinear"}
    built = specimen(config).model
    built.clock.time = None
    return built


def beside(model: Any, text: torch.Tensor, p: float) -> dict[str, Any]:
    """What the network is given beside one noisy row: under the log-linear schedule p = (1 - 0.001) t."""
    time = p / (1 - 1e-3)
    told = {} if not model.cfg.time_conditioning else {"time": time} if time else {"sigma": torch.zeros(1)}
    return told | ({} if model.cfg.causal_block is None else {"clean": text[None]})


def states(model: Any, name: str, text: torch.Tensor, noisy: torch.Tensor, p: float) -> torch.Tensor:
    """Float[pos d], states of one noisy row that is read alone."""
    _, cache = model.run_with_cache(noisy[None], names_filter=name, **beside(model, text, p))
    found: torch.Tensor = cache[name][0, : len(text)]
    return found


def test_second_moment(model: Any) -> None:
    texts, keys = [row[: 8 - i] for i, row in enumerate(TEXTS)], []
    moment = second_moment(model, texts, 1, seed=20, batch_size=4)
    for i, text in enumerate(texts):
        noisy, p = noised(model, text[None], generator=torch.Generator().manual_seed(own_seed(20, i)))
        keys.append(states(model, KEYS, text, noisy[0], float(p[0, 0])).double())
    together = torch.cat(keys)
    assert moment.count == len(together)
    assert "time" not in moment.record
    assert_close(moment.matrix, together.T @ together / len(together), rtol=1e-4, atol=1e-5)


def test_activations(model: Any, tmp_path: Any) -> None:
    """Also of texts without noise, and of a text of which nothing is left."""
    levels, row = [0.0, 0.3, 0.9, 0.999], 0
    store = activations(model, TEXTS, RESID, out=tmp_path / "a", t=levels, batch_size=5)
    for i, text in enumerate(TEXTS):
        for level, t in enumerate(levels):
            generator = torch.Generator().manual_seed(own_seed(0, f"{i}/{level}"))
            masked = torch.rand(9, generator=generator)[1:] < torch.tensor(t)
            noisy = torch.where(masked, model.head.noise.replacements(text, generator), text)
            rows = torch.arange(row, row + 8)
            assert_close(store.rows(RESID, rows), states(model, RESID, text, noisy, t), rtol=1e-3, atol=1e-4)
            row += 8
    assert len(store) == row


@pytest.mark.parametrize("model", TOLD[:-1], indirect=True)
def test_loss_of_a_dictionary(model: Any) -> None:
    """That of the model under the same noise; at the lowest level often nothing is masked."""
    result = dictionary_loss(model, TEXTS, RESID, Identity(), t=[0.05, 0.6], batch_size=1)
    assert_close(result.losses[..., 0], result.losses[..., 1], rtol=1e-4, atol=1e-5)
    uniform = torch.rand(9, generator=(generator := torch.Generator().manual_seed(own_seed(0, "0/1"))))
    noisy = torch.where(uniform[1:] < 0.6, model.head.noise.replacements(TEXTS[0], generator), TEXTS[0])[None]
    logits = model(noisy, **beside(model, TEXTS[0], 0.6))
    loss = model.loss_fn(logits, TEXTS[:1], noisy=noisy, p_mask=torch.full((1, 8), 0.6))
    assert_close(result.losses[0, 1, 0].float(), loss.detach(), rtol=1e-4, atol=1e-5)


def test_probe_of_the_time(model: Any) -> None:
    seen: list[torch.Tensor] = []
    with model.hooks(fwd_hooks=[(RESID, lambda x, hook: seen.append(x[:, :8].detach()))]):
        probe = probe_time(model, TEXTS, RESID, samples=3, positions="all", ridge=RidgeSettings(seed=1))
    assert sum(probe.record["n_rows"].values()) == 6 * 3 * 8
    generator, expected = torch.Generator().manual_seed(1), []
    for text in TEXTS:
        noisy, p = noised(model, text.repeat(3, 1), generator=generator)
        expected += [states(model, RESID, text, row, float(p_row[0])) for row, p_row in zip(noisy, p, strict=True)]
    assert_close(torch.cat(seen), torch.stack(expected), rtol=1e-3, atol=1e-4)


def divergence_at(model: Any, logits: torch.Tensor, state: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """KL(last || layer) at some positions, at the current time."""
    head, read = HeadAt.of(model, present[None]), model.unembed(normalized(model, state[None]))
    last, log_p = (head.clean_logits(x)[0].log_softmax(-1) for x in (logits[None], read))
    return (last.exp() * (last - log_p)).sum(-1)


@torch.no_grad()
def test_translators_of_texts(model: Any) -> None:
    """The loss of the identity, before the first update."""
    fitted = fit_translators(model, TEXTS, layers=[1], iterations=1, batch_size=5, seed=3)
    generator, expected = torch.Generator().manual_seed(3), []
    chosen = TEXTS[torch.randint(6, (5,), generator=generator)]
    for text, noisy, p in zip(chosen, *noised(model, chosen, generator=generator), strict=True):
        at = torch.arange(8) if model.cfg.uniform_noise else (noisy == model.cfg.mask_token_id).nonzero()[:, 0]
        rows, given = model.readout.rows(at), beside(model, text, float(p[0]))
        state = states(model, "blocks.0.hook_resid_post", text, noisy, float(p[0]))[rows]
        logits = model(noisy[None], **given)[0, rows]
        with model.at_time(given["time"]) if "time" in given else nullcontext():
            expected.append(divergence_at(model, logits, state, noisy[at]))
    assert_close(fitted.losses[0, 0].float(), torch.cat(expected).mean(), rtol=1e-3, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("model", ["sedd", "sedd-uniform"], indirect=True)
def test_translators_of_runs(model: Any) -> None:
    """Each canvas is read at the time of its step."""
    run = model.denoise(TEXTS[:2, :3], length=8, steps=4, temperature=1.0, seed=5)
    fitted = fit_translators(model, run, layers=[1], iterations=1, batch_size=6, seed=3)
    expected = []
    for canvas in torch.randint(8, (6,), generator=torch.Generator().manual_seed(3)).tolist():
        step, row = divmod(canvas, 2)
        tokens = run.canvases[step, row]
        at = torch.arange(3, 8) if model.cfg.uniform_noise else (tokens == model.cfg.mask_token_id).nonzero()[:, 0]
        with model.clock.at(run.state_at(step)):
            logits, cache = model.run_with_cache(tokens[None])
            state = cache["blocks.0.hook_resid_post"][0, at]
            expected.append(divergence_at(model, logits[0, at], state, tokens[at]))
    assert_close(fitted.losses[0, 0].float(), torch.cat(expected).mean(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("model", ["sedd"], indirect=True)
def test_one_time_for_all_texts_is_refused(model: Any, tmp_path: Any) -> None:
    run = model.denoise(TEXTS[:2, :3], length=8, steps=2)
    with model.at_time(0.5):
        for analyse in (
            lambda: second_moment(model, TEXTS, 1),
            lambda: activations(model, TEXTS, RESID, out=tmp_path / "a"),
            lambda: dictionary_loss(model, TEXTS, RESID, Identity()),
            lambda: probe_time(model, TEXTS, RESID),
            lambda: fit_translators(model, TEXTS),
        ):
            with pytest.raises(ValueError, match=r"noises texts, .* `model.at_time\(0.5\)` .* call it outside"):
                analyse()
        fit_translators(model, run, iterations=1)
