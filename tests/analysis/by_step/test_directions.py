"""Directions: projections are dot products of cached states; weights that never write one are hooks that remove it."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.analysis import (
    Projection,
    difference_of_means,
    orthogonalize,
    probe_time,
    projection,
    writes_to_stream,
)
from diffusion_lens.interventions import ablate_direction, add_direction, named

CLOSE = dict(rtol=1e-4, atol=1e-4)
NAMES = ["blocks.0.hook_attn_out", "blocks.1.hook_resid_post"]


def drawn(model, seed=0):
    return torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("small", ["mdm", "ar", "uniform"], indirect=True)
def test_projections_are_dot_products_of_cached_states(small, tmp_path):
    settings = {} if small.cfg.is_autoregressive else {"steps": 4}
    runs = []
    for prompts in (["Gustav is", "Tilda Drusser is the"], ["Ada was"]):
        runs.append(small.denoise_with_cache(prompts, names_filter=NAMES, max_new_tokens=4, **settings))
    d = drawn(small)
    found = projection(small, [run for run, _ in runs], 3 * d, NAMES)
    assert_close(found.direction, d / d.norm())
    first = 0
    for run, cache in runs:
        reached = (run.canvases[:-1] != -1) & run.real
        for point, name in enumerate(NAMES):
            own = found.values[:, point, first : first + len(run), : run.tokens.shape[1]]
            expected = torch.einsum("sbpd,d->sbp", cache.stack(name), d / d.norm())
            assert_close(own, expected.masked_fill(~reached, torch.nan), equal_nan=True, rtol=1e-4, atol=1e-5)
        first += len(run)
    assert found.values[:, :, 2, runs[1][0].tokens.shape[1] :].isnan().all()
    late = projection(small, [run for run, _ in runs], d, NAMES, steps=[-1])
    assert_close(late.values, found.values[-1:], equal_nan=True, **CLOSE)
    loaded = Projection.load(found.save(tmp_path / "projection.safetensors"))
    assert torch.equal(loaded.values.nan_to_num(), found.values.nan_to_num())
    frame = found.to_dataframe()
    assert list(frame) == ["step", "point", "batch", "pos", "masked", "projection"]
    assert len(frame) == found.values.isfinite().sum()
    unmasked = frame[(frame.step == 2) & (frame.point == NAMES[1]) & ~frame.masked]
    assert unmasked.projection.mean() == pytest.approx(float(found.mean(masked=False)[2, 1]), abs=1e-5)


def test_projections_of_texts_have_no_step(several):
    d = drawn(several.model)
    found = projection(several.model, several.tokens, d)
    _, cache = several.model.run_with_cache(several.tokens)
    assert found.values.shape == (several.model.cfg.n_layers + 1, 3, 17)
    for name, own in zip(found.names, found.values, strict=True):
        assert_close(own, cache[name] @ (d / d.norm()), rtol=1e-3, atol=1e-4)
    assert found.plot().lines
    assert found.plot(row=1).lines


def test_orthogonal_weights_are_hooks_at_every_write(every):
    """A network whose stream is no plain sum, or whose head is the embedding, is refused with the reason."""
    model, d = every.model, drawn(every.model)
    cfg = model.cfg
    if cfg.layer_scalars or cfg.time_conditioning or cfg.tied:
        with pytest.raises(ValueError, match=r"a factor of the whole stream|through a gate|is also its head"):
            orthogonalize(model, d)
        return
    hooks = [(writes_to_stream, ablate_direction(d))]
    hooked = model.run_with_hooks(every.tokens, fwd_hooks=hooks)
    before = model(every.tokens)
    with orthogonalize(model, d):
        logits, cache = model.run_with_cache(every.tokens)
    assert_close(logits, hooked, rtol=1e-3, atol=1e-3)
    assert (logits - before).abs().max() > 0.01
    assert torch.equal(model(every.tokens), before)
    for layer in range(cfg.n_layers):
        stream = cache[f"blocks.{layer}.hook_resid_post"]
        assert ((stream @ d).abs() / stream.norm(dim=-1) / d.norm()).max() < 1e-4


def test_a_tied_model_is_edited_with_a_head_of_its_own(specimen, configs):
    """The copy that the refusal names computes the same, and loses the direction."""
    from dataclasses import replace

    tied = specimen({**configs["qwen2"], "tie_word_embeddings": True})
    with pytest.raises(ValueError, match="tied=False"):
        orthogonalize(tied.model, drawn(tied.model))
    cfg = DiffusionConfig.from_architecture(replace(tied.model.cfg.architecture, tied=False), device="cpu")
    copy = HookedDiffusionTransformer(cfg, tied.model.tokenizer, tensors=tied.model.state_dict().items())
    assert torch.equal(copy(tied.tokens), tied.model(tied.tokens))
    hooks, d = [(writes_to_stream, ablate_direction(drawn(copy)))], drawn(copy)
    with orthogonalize(copy, d):
        assert_close(copy(tied.tokens), tied.model.run_with_hooks(tied.tokens, fwd_hooks=hooks), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_reads_the_edited_model(specimen, configs, family, tmp_path):
    from transformers import AutoModelForCausalLM

    model, tokens = (one := specimen({**configs[family], "tie_word_embeddings": False})).model, one.tokens
    edit = orthogonalize(model, drawn(model)).apply()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(model.export_hf(tmp_path / family))
    with torch.no_grad():
        assert_close(theirs(tokens).logits, model(tokens), rtol=1e-3, atol=1e-3)
    embedded = theirs.get_input_embeddings().weight.detach() @ edit.direction
    assert embedded.abs().max() < 1e-5
    edit.revert()


def test_what_does_not_fit_is_refused(small):
    d = drawn(small)
    run = small.denoise("Gustav is", max_new_tokens=2)
    for call, message in (
        (lambda: projection(small, run, d[:5]), "the direction has 5 entries"),
        (lambda: projection(small, run, 0 * d), "the direction has length 0.0"),
        (lambda: projection(small, run, d, max_bytes=10), "but max_bytes is 10: give fewer"),
        (lambda: projection(small, run, d, "blocks.0.mlp.hook_post"), r"a state at 'blocks.0.mlp.hook_post' is \[48\]"),
        (lambda: projection(small, "Gustav is", d, steps=0), "requires a trajectory"),
        (lambda: projection(small, run, d).plot(row=3), "row=3; there are 1 rows"),
        (lambda: orthogonalize(small, d[:5]), "the direction has 5 entries"),
        (lambda: orthogonalize(small, d * torch.inf), "the direction has length"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_module_is_no_filter_of_hook_points(small):
    """It is callable, and yet no predicate of names."""
    texts = ["Gustav is the", "Tilda was the", "Ada is the"]
    for call in (
        lambda: projection(small, texts, drawn(small), small),
        lambda: probe_time(small, texts, small.blocks[0]),
        lambda: small.run_with_cache("Ada is", names_filter=small.hook_dict[NAMES[0]]),
    ):
        with pytest.raises(TypeError, match=r"a \w+ is no filter of hook points; pass a name, a list of names, or one"):
            call()


@pytest.mark.filterwarnings("ignore:the trajectory was written by another network")
@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_strength_follows_the_run(small):
    """Projected on the direction, a steered stream has moved by what the function returned at each step."""
    d, name = drawn(small), NAMES[1]
    d = d / d.norm()
    run = small.denoise(["Gustav is", "Ada is the"], max_new_tokens=4, steps=4)

    def unmasked(step):
        return (~step.masked & ~step.given).sum(dim=1) / (~step.given).sum(dim=1)

    plain = projection(small, run, d, name).values
    for strength, expected in (
        (lambda step: step.t, torch.tensor(run.record["times"][:-1])[:, None, None, None]),
        (unmasked, torch.stack([unmasked(run.state_at(i)) for i in range(4)])[:, None, :, None]),
        (lambda step: 2.0 * step.masked, 2.0 * torch.stack([run.state_at(i).masked for i in range(4)])[:, None]),
        (3.0, torch.tensor(3.0)),
    ):
        with small.hooks(fwd_hooks=[(name, add_direction(d, strength))]):
            moved = projection(small, run, d, name).values - plain
        assert_close(moved, expected.expand_as(moved).masked_fill(plain.isnan(), torch.nan), equal_nan=True, **CLOSE)
    half = add_direction(d, lambda step: 2.0 * step.masked, [-1, 0])
    with small.hooks(fwd_hooks=[(name, half)]):
        moved = projection(small, run, d, name).values - plain
    assert moved[:, :, :, 1:-1].nan_to_num().abs().max() < 1e-4
    longest = int(run.real.sum(dim=1).argmax())
    assert moved[0, 0, longest, -1] == pytest.approx(2.0, abs=1e-4)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_strength_that_does_not_fit_is_refused(small):
    d = drawn(small)
    for strength, message in (
        (lambda step: torch.ones(7), r"the strength of step 0 has shape \[7\]; it must be a number, \[batch\]"),
        (lambda step: float("nan"), "the strength of step 0 is not finite"),
        (lambda step: None, "the strength of step 0 is None; it must be a number, Float"),
        (lambda step: "a", "the strength of step 0 is 'a'; it must be a number"),
        (lambda step: [[1.0], [2.0, 3.0]], "the strength of step 0 is .* it must be a number"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            small.denoise("Ada is", max_new_tokens=2, steps=2, fwd_hooks=[(NAMES[1], add_direction(d, strength))])
    fading = add_direction(d, named("fades", lambda step: step.t))
    masked = small.to_tokens("Ada [MASK]")
    assert torch.equal(small(masked), small.run_with_hooks(masked, fwd_hooks=[(NAMES[1], fading)]))
    run = small.denoise("Ada is", max_new_tokens=2, steps=2, fwd_hooks=[(NAMES[1], fading)])
    assert run.record["hooks"][NAMES[1]][0].endswith("strength=fades)")


def test_ablation_removes_a_difference_of_means(small):
    name = NAMES[1]
    d = difference_of_means(small, ["Gustav is", "Ada is"], ["Tilda was"], name)[name]
    with small.hooks(fwd_hooks=[(name, ablate_direction(d))]):
        gone = projection(small, "Gustav was the", d, name).values
    kept = projection(small, "Gustav was the", d, name).values
    assert gone.abs().max() < 1e-4 < 0.1 < kept.abs().max()
    again = ablate_direction(5 * d)(torch.randn(2, 3, len(d)), hook=small.hook_dict[name])
    assert_close(ablate_direction(d)(again, hook=small.hook_dict[name]), again, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"the direction has \d+ entries, and .* is \[..., 48\]"):
        small.run_with_hooks("Ada is", return_type=None, fwd_hooks=[("blocks.0.mlp.hook_post", ablate_direction(d))])
