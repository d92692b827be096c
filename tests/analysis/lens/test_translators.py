"""Translators: identities are the direct lens, the fit is the descent written out, and it helps on new canvases."""

import re

import pytest
import torch
from torch.testing import assert_close

from bundled_models.rows_and_blocks import toy_rows
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import Translators, fit_translators, logit_lens
from diffusion_lens.analysis.engine.inputs import ForwardPass
from diffusion_lens.data import toy_facts
from diffusion_lens.interventions import zero_ablate
from diffusion_lens.model.noise import HeadAt
from diffusion_lens.model.transformer import normalized

PROMPT = "Gustav Geisser is the"


@pytest.fixture(scope="module")
def sentences(tiny):
    """Training sentences of half of the people, and of the others."""
    tokens = toy_rows(toy_facts.load().sentences(), tiny.tokenizer)
    return tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]


@pytest.fixture(scope="module")
def fitted(tiny, sentences):
    return fit_translators(tiny, sentences[0], iterations=20, learning_rate=3e-3, batch_size=12)


def identity(model):
    d, n = model.cfg.d_model, model.cfg.n_layers
    record = {"weights_sha256": logit_lens(model, torch.tensor([[1]])).record["weights_sha256"], "model": "this"}
    return Translators(torch.zeros(n, d, d), torch.zeros(n, d), [*range(n)], torch.zeros(0, n), record)


def test_identities_are_the_direct_lens(several):
    model, tokens = several.model, several.tokens[:2, :6] % 500
    direct, through = (logit_lens(model, tokens, translators=maps) for maps in (None, identity(model)))
    assert torch.equal(direct.entropy, through.entropy)
    assert torch.equal(direct.top_tokens, through.top_tokens)


def test_a_map_is_applied_before_the_norm(several):
    model, tokens = several.model, several.tokens[:1, :5] % 500
    maps, generator = identity(model), torch.Generator().manual_seed(0)
    maps.weights.copy_(0.1 * torch.randn(maps.weights.shape, generator=generator))
    maps.biases.copy_(torch.randn(maps.biases.shape, generator=generator))
    lens = logit_lens(model, tokens, translators=maps)
    _, cache = model.run_with_cache(tokens)
    for layer in range(model.cfg.n_layers):
        state = cache["resid_pre", layer][0, lens.rows[0]]
        logits = model.unembed(normalized(model, (state + state @ maps.weights[layer] + maps.biases[layer])[None])[0])
        if model.cfg.head != "logits":  # [MASK] takes no part in the softmax
            logits[..., model.cfg.mask_token_id] = -1e6
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        assert_close(lens.entropy[layer, 0], entropy, rtol=1e-4, atol=1e-4)
    assert_close(lens.entropy[-1], logit_lens(model, tokens).entropy[-1])


def test_fitting_helps_on_new_canvases(tiny, sentences, fitted):
    new = sentences[1][::40][:20]
    noisy = tiny.hide(new)[0] if tiny.cfg.has_mask else new
    mask = torch.ones_like(noisy)  # the end token is text here
    direct, tuned = (logit_lens(tiny, noisy, translators=maps, attention_mask=mask) for maps in (None, fitted))
    read = tuned.masked if tiny.cfg.has_mask else ~tuned.entropy[0].isnan()
    for layer in range(tiny.cfg.n_layers):
        before, after = (lens.kl[layer][read].mean() for lens in (direct, tuned))
        assert after < 0.9 * before
    assert torch.equal(tuned.kl[-1], direct.kl[-1])
    assert tuned.record["translators"]["iterations"] == 20
    run = tiny.denoise(PROMPT, length=14, steps=4)
    in_loop = [logit_lens(tiny, run, translators=maps).kl.nanmean() for maps in (None, fitted)]
    assert in_loop[1] < in_loop[0]


def test_the_model_stays_as_it_was(several, monkeypatch):
    model = several.model
    monkeypatch.setattr(model.clock, "time", None)  # every text has a time of its own
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    model.unembed.weight.requires_grad_(True)
    try:
        fit_translators(model, several.tokens % 500, iterations=2)
        assert all(p.grad is None for p in model.parameters())
        assert model.unembed.weight.requires_grad
    finally:
        model.unembed.weight.requires_grad_(before["unembed.weight"][1])
    assert all(torch.equal(p, before[name][0]) for name, p in model.named_parameters())
    assert all(p.requires_grad == before[name][1] for name, p in model.named_parameters())
    assert not model.is_hooked
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("several", ["lit_gpt-mdm", "dream", "llama", "uniform", "sedd-uniform"], indirect=True)
def test_the_descent_written_out(several):
    """On one canvas that is always the same, against Adam on a loss that is written without blocks."""
    model = several.model
    if not model.cfg.is_autoregressive:
        data = model.denoise(several.tokens[:1, :4] % 500, max_new_tokens=3, steps=1)
        tokens, at = data.canvases[0], torch.arange(4, 7)
        rows = at if model.cfg.readout == "in_place" else at - 1
    else:
        data = tokens = several.tokens[:1, :7] % 500
        rows = torch.arange(7)
    fitted = fit_translators(model, data, layers=[0, 2], iterations=4, batch_size=1, learning_rate=0.01)
    step = None if model.cfg.is_autoregressive else data.state_at(0)
    with torch.no_grad(), model.clock.at(step):
        head = HeadAt.of(model, tokens[:, rows])
        logits, cache = model.run_with_cache(tokens)
        last = head.clean_logits(logits[:, rows])[0].log_softmax(-1)
    for i, layer in enumerate([0, 2]):
        state = cache["resid_pre", layer][0, rows]
        weight, bias = torch.zeros(len(state.T), len(state.T)), torch.zeros(len(state.T))
        optimizer = torch.optim.Adam([weight.requires_grad_(), bias.requires_grad_()], lr=0.01)
        for iteration in range(4):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 - iteration / 4)
            with model.clock.at(step):
                logits = model.unembed(normalized(model, state + state @ weight + bias))
            log_p = head.clean_logits(logits[None])[0].log_softmax(-1)
            loss = (last.exp() * (last - log_p)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert_close(fitted.losses[iteration, i].float(), loss.detach(), rtol=1e-3, atol=1e-4)
        assert_close(fitted.weights[i], weight.detach(), rtol=0.02, atol=1e-3)
        assert_close(fitted.biases[i], bias.detach(), rtol=0.02, atol=1e-3)
    for parameter in model.parameters():
        parameter.grad = None


def test_a_seed_repeats_the_fit_and_memory_does_not_change_it(several, monkeypatch):
    model, tokens = several.model, several.tokens % 500
    monkeypatch.setattr(model.clock, "time", None)  # every text has a time of its own
    settings = {"iterations": 3, "batch_size": 4, "learning_rate": 1e-3}
    first, again = (fit_translators(model, tokens, seed=3, **settings) for _ in range(2))
    assert torch.equal(first.weights, again.weights)
    assert not torch.equal(first.losses, fit_translators(model, tokens, seed=4, **settings).losses)
    with pytest.raises(ValueError, match="a pass that reads one row takes") as refused:
        fit_translators(model, tokens, max_bytes=1000, **settings)
    one_row = int(re.findall(r"takes ([\d,]+)", str(refused.value))[0].replace(",", ""))
    maps = 4 * (first.weights.nbytes + first.biases.nbytes)
    small = fit_translators(model, tokens, seed=3, max_bytes=maps + one_row + 2**12, **settings)
    assert_close(small.losses, first.losses, rtol=1e-3, atol=1e-5)


def read_in_fits(model, data, monkeypatch, **settings):
    """What each row of some updates contains: tokens, flags of real positions, and the rows that are read."""
    seen = []

    states = ForwardPass.states

    def spy(network_input, names, entries):
        tokens, real = network_input.tokens.tolist(), network_input.real.tolist()
        read = [sorted(entries[1][entries[0] == row].tolist()) for row in range(len(tokens))]
        seen.extend(zip(tokens, real, read, strict=True))
        return states(network_input, names, entries)

    monkeypatch.setattr(ForwardPass, "states", spy)
    fitted = fit_translators(model, data, layers=[0], iterations=3, batch_size=4, **settings)
    assert (fitted.biases != 0).any()
    return seen, fitted.record["canvases"]


@pytest.mark.parametrize("mask", ["masked", "all"])
def test_which_rows_of_texts_are_fitted(small, monkeypatch, mask):
    texts, facts = [PROMPT, "Gustav is"], toy_facts.load().facts()[:2]
    of_texts = [small.to_tokens(text)[0].tolist() for text in texts]
    of_facts = [prompt + answer for prompt, answer in (fact.tokenize(small) for fact in facts)]
    for data, expected in ((PROMPT, of_texts[:1]), (texts, of_texts), (facts, of_facts)):
        seen, n_canvases = read_in_fits(small, data, monkeypatch, mask=mask)
        assert n_canvases == len(expected)
        used = set()
        for tokens, real, read in seen:
            n = sum(real)
            assert real == [i < n for i in range(len(tokens))]
            assert all(token == small.padding.id for token in tokens[n:])
            masked = [i for i, token in enumerate(tokens[:n]) if small.cfg.has_mask and token == small.cfg.blank]
            (text,) = (i for i, own in enumerate(expected) if len(own) == n and same(tokens, own, masked))
            used.add(text)
            assert read == (masked if small.cfg.has_mask and mask == "masked" else list(range(n)))
        assert len(used) == len(expected)


def same(tokens, text, masked):
    return all(i in masked or tokens[i] == token for i, token in enumerate(text))


def test_which_rows_of_trajectories_are_fitted(small, monkeypatch):
    settings = {"steps": 4} if small.cfg.has_mask else {}
    run = small.denoise([PROMPT, "Gustav is"], max_new_tokens=4, **settings)
    assert not run.real.all()
    seen, n_canvases = read_in_fits(small, run, monkeypatch)
    canvases = run.canvases[:-1] if small.cfg.has_mask else run.canvases[-1:]
    assert n_canvases == 2 * len(canvases)
    given = [(canvas[row].tolist(), run.real[row].tolist()) for canvas in canvases for row in range(2)]
    for tokens, real, read in seen:
        assert (tokens, real) in given
        blank = small.cfg.blank if small.cfg.has_mask else None
        assert read == [i for i, token in enumerate(tokens) if real[i] and blank in (None, token)]


def test_half_precision(several):
    half = HookedDiffusionTransformer(several.model.cfg, tensors=several.model.state_dict().items()).to("bfloat16")
    tokens = several.tokens % 500
    fitted = fit_translators(half, tokens, iterations=5, learning_rate=1e-2)
    assert fitted.weights.dtype == torch.float32
    assert (fitted.losses[-1] < fitted.losses[0]).all()
    assert logit_lens(several.tell(half), tokens, translators=fitted).entropy.isfinite().all()


def test_maps_of_other_weights_are_refused(tiny, fitted, tmp_path):
    again = Translators.load(fitted.save(tmp_path / "maps.safetensors"))
    assert torch.equal(again.weights, fitted.weights)
    assert (again.record, again.layers) == (fitted.record, fitted.layers)
    assert repr(again) == f"Translators({tiny.cfg.model_name}, layers [0, 1, 2, 3], 20 iterations)"
    weight = tiny.blocks[0].ln1.weight
    before = weight.clone()
    try:
        with torch.no_grad():
            weight.mul_(1.1)
        with pytest.raises(ValueError, match="the translators were fitted on other weights"):
            logit_lens(tiny, PROMPT, translators=fitted)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    part = Translators(fitted.weights[:1], fitted.biases[:1], [0], fitted.losses[:, :1], fitted.record)
    with pytest.raises(ValueError, match=r"fitted for the layers \[0\], and not for \[1\]: .* layers=\[0, 4\]"):
        logit_lens(tiny, PROMPT, layers=[0, 1], translators=part)
    logit_lens(tiny, PROMPT, layers=[0, 4], translators=part)


def test_what_cannot_be_fitted_is_refused(tiny):
    for data, arguments, message in (
        ([], {}, "there is no text"),
        (PROMPT, {"mask": "unmasked"}, "mask='unmasked' is unknown.*one of masked, all"),
        (PROMPT, {"iterations": 0}, "iterations=0"),
        (PROMPT, {"learning_rate": -1.0}, "learning_rate=-1.0"),
        (PROMPT, {"layers": [4]}, r"layers=\[4\]; give numbers from 0 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_translators(tiny, data, **arguments)
    broken = [("blocks.0.hook_resid_post", lambda activation, hook: activation * float("nan"))]
    with tiny.hooks(fwd_hooks=broken), pytest.raises(ValueError, match="a loss is not a finite number at iteration 0"):
        fit_translators(tiny, PROMPT)
    with tiny.hooks(fwd_hooks=[("ln_final.hook_scale", zero_ablate())]), pytest.raises(ValueError, match="ln_final"):
        fit_translators(tiny, PROMPT)
    if tiny.cfg.has_mask:
        with pytest.raises(ValueError, match=r"text 0 contains \[MASK\]"):
            fit_translators(tiny, tiny.canvas(PROMPT, 3)[0])
    assert not tiny.is_hooked
