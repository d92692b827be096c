"""Blocks, uniform noise, times, experts and folded conditioning: every check ends on models of each kind, and
mistakes in them are named."""

from dataclasses import replace

import pytest
import torch
from faults import FAULTS, faulty
from judged import BRIEFLY, bundled, judged_by_behaviour, on_short_page, outcomes, with_changes, without_search_of_parts

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.checks import Expected, Reference, check_model
from diffusion_lens.checks.diagnosis import alternatives
from diffusion_lens.checks.reference import TIME, at_check_time, check_half_precision, check_padding
from diffusion_lens.checks.texts import N_SAMPLES, NOISE_SEED, page_loss, page_losses
from diffusion_lens.checks.weights import check_config
from diffusion_lens.model.loss import masked_diffusion_loss
from weight_conversion import unfolded_architecture

KINDS = ("llada2", "sdar", "nemotron-prompt", "mdlm", "bd3lm", "udlm", "sedd", "sedd-uniform")
ROWS = torch.randint(430, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def of_kind(configs, specimen):
    """Random models that read the bundled models' words; nothing tells them a time."""

    def build(kind):
        model = specimen(configs[kind]).model
        model.set_tokenizer(bundled("tiny-mdm").tokenizer)
        model.clock.time = None
        return model

    return build


@on_short_page
@without_search_of_parts
@pytest.mark.parametrize("kind", KINDS)
def test_every_check_ends_on_every_kind_of_model(of_kind, kind):
    """Its weights are random, so that texts are off, and only texts."""
    model = of_kind(kind)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    report = check_model(model, only=("config", "weights", "page loss", "facts", "padding", "bfloat16", "diagnosis"))
    assert "failed" not in report.to_text()
    of_texts = {"page loss": "off", "facts, one pass": "off", "facts, by the loop": "off", "diagnosis": "noted"}
    same = {"config": "not run", "weights": "ok", "padding": "ok", "bfloat16": "ok"}
    assert outcomes(report) == {**of_texts, **same}
    assert report.likely == ()
    assert model.clock.time is None
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("kind", ["sdar", "nemotron-prompt", "bd3lm", "udlm", "sedd", "mdlm"])
def test_the_page_loss_is_the_training_loss(of_kind, kind):
    """The trainer's own loss draws the same noise."""
    model = of_kind(kind)
    copies = ROWS.repeat_interleave(N_SAMPLES, dim=0)
    with torch.no_grad():
        own = masked_diffusion_loss(model, copies, generator=torch.Generator().manual_seed(NOISE_SEED))
    assert page_loss(model, ROWS) == pytest.approx(float(own), rel=1e-5)
    assert page_losses(model, ROWS).shape == copies.shape


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("sedd", "query heads permuted"),
        ("sedd", "head rows off by one"),
        ("bd3lm", "embedding rows off by one"),
        ("sedd-uniform", "rotary interleaved"),
        ("llada_moe", "gate and up exchanged"),
    ],
)
def test_a_reference_at_a_time_names_mistakes(of_kind, kind, fault):
    model = of_kind(kind)
    time = torch.tensor([0.2, 0.7, 1.0]) if model.cfg.time_conditioning else None
    with torch.no_grad():
        reference = Reference(ROWS, model(ROWS, time=time), time=time)
    only = ("reference", "diagnosis")
    assert outcomes(check_model(model, reference=reference, only=only))["reference"] == "ok"
    if fault == "gate and up exchanged":
        swapped = {
            name: model.get_parameter(name.replace(*pair)).detach()
            for name, _ in model.named_parameters()
            for pair in ((".gate.", ".up."), (".up.", ".gate."))
            if ".mlp." in name and pair[0] in name
        }
        wrong = with_changes(model, model.cfg.architecture, swapped)
    elif fault == "head rows off by one":
        moved = {
            name: model.get_parameter(name).detach().roll(-1, dims=0) for name in ("unembed.weight", "unembed.bias")
        }
        wrong = with_changes(model, model.cfg.architecture, moved)
    else:
        wrong = faulty(model, fault)
    report = check_model(wrong, reference=reference, only=only)
    assert any(FAULTS[fault][1] in cause for cause in report.likely), report.to_text()


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_rows_are_interleaved_only_among_the_dimensions_that_are_rotated(of_kind):
    model = of_kind("llada2")
    n_turned = model.cfg.rotary_dim
    assert n_turned < model.cfg.d_head
    with torch.no_grad():
        reference = Reference(ROWS, model(ROWS))
    turned = torch.arange(n_turned).view(2, -1).T.flatten()
    order = torch.cat([turned, torch.arange(n_turned, model.cfg.d_head)])
    moved = {
        name: weight.detach().unflatten(0, (-1, model.cfg.d_head))[:, order].flatten(0, 1)
        for name, weight in model.named_parameters()
        if any(part in name for part in ("attn.q.", "attn.k.", "attn.q_norm.", "attn.k_norm."))
    }
    wrong = with_changes(model, model.cfg.architecture, moved)
    report = check_model(wrong, reference=reference, only=("reference", "diagnosis"))
    assert any("their rows were interleaved" in cause for cause in report.likely), report.to_text()


def test_a_reference_that_does_not_fit_the_kind_is_refused(of_kind):
    logits = torch.zeros(3, 12, 513)
    told, deaf, uniform = (of_kind(kind).cfg.architecture for kind in ("sedd", "mdlm", "udlm"))
    with pytest.raises(ValueError, match="add a tensor time"):
        Reference(ROWS, logits).check_fits(told)
    with pytest.raises(ValueError, match="leave the tensor time out"):
        Reference(ROWS, logits, time=torch.ones(3)).check_fits(deaf)
    untold = replace(uniform, time=None)
    with pytest.raises(ValueError, match=r"has no \[MASK\]"):
        Reference(ROWS, logits[..., : uniform.d_vocab_out], before=ROWS, after=ROWS + 1).check_fits(untold)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_the_networks_hear_the_time_of_the_checks(of_kind):
    model, deaf = of_kind("sedd"), of_kind("mdlm")
    with at_check_time(model), torch.no_grad():
        torch.testing.assert_close(model(ROWS), model(ROWS, time=TIME))
    with at_check_time(deaf):
        assert deaf.clock.time is None


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_a_choice_of_experts_that_rounding_changes_is_no_error(of_kind):
    """All experts have nearly one score, and outputs of their own."""
    model = of_kind("llada_moe")
    changed = {}
    for name, weight in model.named_parameters():
        if name.endswith("router.weight"):
            changed[name] = weight[:1].detach() + 1e-3 * weight.detach()
        elif ".experts." in name and ".down." in name:
            changed[name] = 10 * weight.detach()
    torn = with_changes(model, model.cfg.architecture, changed)
    half = HookedDiffusionTransformer(replace(torn.cfg, dtype=torch.bfloat16), tensors=torn.state_dict().items())
    with torch.no_grad():
        logits = torn(ROWS)
        assert float((half(ROWS) - logits).square().mean().sqrt() / logits.std()) > 0.1
    assert check_half_precision(torn, ROWS).outcome == "ok"
    assert check_padding(torn, ROWS[0]).numbers["apart"] < 1e-5
    assert check_padding(half, ROWS[0]).outcome == "ok"


def test_a_folded_conditioning_is_the_config_of_the_catalogue(of_kind):
    architecture = of_kind("mdlm").cfg.architecture
    assert architecture.time.folded
    expected = Expected("mdlm", unfolded_architecture(architecture))
    assert check_config(expected, architecture).outcome == "ok"
    other = replace(architecture, time=replace(architecture.time, d_cond=4))
    assert check_config(expected, other).outcome == "off"


def test_alternatives_fit_the_kind(of_kind):
    """No gates are exchanged where there are none, and no text is predicted from itself."""
    for kind in KINDS:
        a = of_kind(kind).cfg.architecture
        tried = alternatives(a)
        assert any("gate" in one.name for one in tried) == (a.mlp == "gated")
        assert not any(one.architecture.is_autoregressive and one.architecture.readout == "in_place" for one in tried)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@on_short_page
@without_search_of_parts
def test_only_an_exact_measure_tries_smaller_blocks(of_kind):
    model = with_changes(of_kind("sdar"), replace(of_kind("sdar").cfg.architecture, causal_block=8), {})
    only = ("reference", "diagnosis")
    wrong_by_text = check_model(model, only=("page loss", "diagnosis"))
    with torch.no_grad():
        reference = Reference(ROWS, of_kind("sdar")(ROWS))
    wrong_by_logits = check_model(model, reference=reference, only=only)
    tried = [trial["name"] for trial in wrong_by_text.findings[-1].numbers["trials"]]
    assert "with blocks of 16" in tried
    assert "with blocks of 4" not in tried
    assert wrong_by_logits.likely == ("the block size is wrong: the config says 8, and the weights fit 4",)


def test_tiny_uniform_passes_every_check():
    checks = ("hash", "config", "weights", "page loss", "facts", "padding", "bfloat16")
    report = check_model(bundled("tiny-uniform"), expected=Expected.of("tiny-uniform"), only=checks)
    assert report.passed, report.to_text()
    passed = {name for name, outcome in outcomes(report).items() if outcome == "ok"}
    assert {"page loss", "facts, one pass", "facts, by the loop", "padding", "bfloat16"} <= passed


@on_short_page
@without_search_of_parts
def test_no_mistake_explains_tiny_uniform():
    only = ("config", "page loss", "diagnosis")
    report = check_model(bundled("tiny-uniform"), expected=Expected.of("tiny-uniform"), only=only)
    assert set(outcomes(report).values()) == {"ok"}, report.to_text()


@on_short_page
@without_search_of_parts
@pytest.mark.parametrize("fault", ["query heads permuted", "readout shifted", "head rows off by one"])
def test_mistakes_under_uniform_noise_are_named(fault):
    wrong = faulty(bundled("tiny-uniform"), fault)
    report = check_model(wrong, expected=judged_by_behaviour("tiny-uniform"), only=BRIEFLY)
    assert any(FAULTS[fault][1] in cause for cause in report.likely), report.to_text()
