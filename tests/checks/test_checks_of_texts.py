"""The embedded pair without a reference: its page and its facts show each mistake, and say which it is."""

from dataclasses import replace

import pytest
import torch
from faults import FAULTS, faulty, layer_of_another_seed

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.checks import Expected, check_model
from diffusion_lens.checks.page import KNOWN_LOSS
from diffusion_lens.training.objectives import autoregressive_loss, masked_diffusion_loss

# So that only behaviour is judged: neither hash nor the catalogue's numbers.
UNKNOWN = dict(architecture=None, sha256=None)
BRIEFLY = ("weights", "page loss", "diagnosis")


def outcomes(report):
    return {finding.check: finding.outcome for finding in report.findings}


def test_right_models_pass_every_check(tiny):
    weights = {name: weight.clone() for name, weight in tiny.state_dict().items()}
    report = check_model(tiny, expected=Expected.of(tiny.cfg.model_name))
    assert report.passed, report.to_text()
    ran = {name for name, outcome in outcomes(report).items() if outcome == "ok"}
    assert {"config", "weights", "page loss", "facts, one pass", "facts, by the loop", "recall", "padding"} <= ran
    assert {"bfloat16", "diagnosis"} <= ran
    assert all(torch.equal(weight, weights[name]) for name, weight in tiny.state_dict().items())
    assert tiny.cfg == HookedDiffusionTransformer.from_pretrained(tiny.cfg.model_name, device="cpu").cfg


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_flagged_and_named(tiny, fault):
    if fault == "wrong mask id" and tiny.cfg.mask_token_id is None:
        fault = "readout shifted"  # a causal model has no [MASK] to mistake
    if fault == "another rotary base" and tiny.cfg.mask_token_id is None:
        expected, only = Expected.of(tiny.cfg.model_name), (*BRIEFLY, "config")  # only the config can tell, see below
    else:
        expected, only = replace(Expected.of(tiny.cfg.model_name), **UNKNOWN), BRIEFLY
    report = check_model(faulty(tiny, fault), expected=expected, only=only)
    assert not report.passed
    assert any(FAULTS[fault][1] in cause for cause in report.likely), report.to_text()


def test_the_twin_hardly_feels_its_rotary_base_so_its_config_must_tell():
    """14 places: the loss moves by a hundred-thousandth, and no text of this length could show it."""
    model = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    other = faulty(model, "another rotary base")
    report = check_model(other, expected=Expected.of("tiny-ar"), only=("config", "page loss"))
    assert outcomes(report)["page loss"] == "ok"
    assert outcomes(report)["config"] == "off"
    assert "rotary_base 500000.0 here, 10000.0 in the catalogue" in report.likely[0]


@pytest.mark.parametrize("layer_of", [("tiny-mdm", "tiny-ar"), ("tiny-ar", "tiny-mdm")])
def test_a_trained_layer_of_another_model_is_foreign_too(layer_of):
    model, other = (HookedDiffusionTransformer.from_pretrained(name, device="cpu") for name in layer_of)
    taken = {name: weight for name, weight in other.state_dict().items() if name.startswith("blocks.2.")}
    mixed = HookedDiffusionTransformer(model.cfg, model.tokenizer, tensors={**model.state_dict(), **taken}.items())
    report = check_model(mixed, expected=replace(Expected.of(layer_of[0]), **UNKNOWN), only=BRIEFLY)
    assert any("block 2 are foreign" in cause for cause in report.likely), report.to_text()


def test_the_page_loss_is_the_training_loss():
    """The same noise, passed to the trainer's own objective."""
    from diffusion_lens.checks.page import DRAWS, NOISE_SEED, page_loss
    from diffusion_lens.training.objectives import hide

    rows = torch.randint(430, (3, 14), generator=torch.Generator().manual_seed(1))
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    repeated = rows.repeat_interleave(DRAWS, dim=0)
    noisy, p_mask = hide(repeated, model.cfg.mask_token_id, generator=torch.Generator().manual_seed(NOISE_SEED))
    with torch.no_grad():
        assert page_loss(model, rows) == pytest.approx(float(masked_diffusion_loss(model, repeated, noisy, p_mask)))
        twin = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
        assert page_loss(twin, rows) == pytest.approx(float(autoregressive_loss(twin, rows)))


def test_an_untrained_model_is_off_and_no_reading_is_blamed(tiny):
    fresh = HookedDiffusionTransformer(tiny.cfg, tiny.tokenizer, seed=1)
    report = check_model(fresh, only=BRIEFLY)
    assert outcomes(report)["page loss"] == "off"
    assert outcomes(report)["diagnosis"] == "noted"
    assert "no better than chance" in report.to_text()


def test_a_model_that_overflows_is_off(tiny):
    state = {name: weight.clone() for name, weight in tiny.state_dict().items()}
    state["blocks.0.mlp.down.weight"][3, 5] = float("inf")
    broken = HookedDiffusionTransformer(tiny.cfg, tiny.tokenizer, tensors=state.items())
    report = check_model(broken, only=BRIEFLY)
    assert any("blocks.0.mlp.down.weight" in cause and "not finite" in cause for cause in report.likely)
    assert report.to_dict()  # numbers that are none become null


def test_facts_and_recall_of_a_wrong_model_are_off(tiny):
    wrong = faulty(tiny, "embedding rows off by one")
    report = check_model(wrong, expected=Expected.of(tiny.cfg.model_name), only=("facts", "recall"))
    assert outcomes(report) == {"facts, one pass": "off", "facts, by the loop": "off", "recall": "off"}


def test_a_check_that_is_none_is_refused(tiny):
    with pytest.raises(ValueError, match="'pages'; there are hash"):
        check_model(tiny, only=["pages"])


def test_the_known_losses_are_of_the_embedded_pair():
    assert set(KNOWN_LOSS) == {"tiny-mdm", "tiny-ar"}


def test_random_weights_have_no_foreign_blocks(every):
    """Nothing follows from blocks that do not know of each other anyway."""
    architecture = every.model.cfg.architecture
    _, tensors = layer_of_another_seed(architecture, dict(every.model.state_dict()))
    if architecture.tied:
        tensors.pop("unembed.weight", None)
    cfg = DiffusionConfig.from_architecture(architecture, device="cpu")
    report = check_model(HookedDiffusionTransformer(cfg, tensors=tensors.items()), only=["weights"])
    assert report.findings[0].outcome == "ok", report.to_text()
    assert {score["block"] for score in report.findings[0].numbers["composition"]} == set(range(cfg.n_layers))


@pytest.mark.parametrize("part", ["", "attn.", "mlp."])
@pytest.mark.parametrize("block", range(4))
def test_weights_of_another_seed_are_foreign_though_the_norms_are_kept(tiny, block, part):
    """Whole blocks, or their attention or MLP alone: the loss hardly feels some of them, and the weights tell."""
    tensors = dict(tiny.state_dict())
    draw = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.startswith(f"blocks.{block}.{part}") and tensor.dim() == 2:
            tensors[name] = torch.randn(tensor.shape, generator=draw) * tensor.std()
    model = HookedDiffusionTransformer(tiny.cfg, tiny.tokenizer, tensors=tensors.items())
    report = check_model(model, only=["weights"])
    assert not report.passed
    (cause,) = report.likely
    assert f"block {block} are foreign" in cause
    parts = {"": ("attention", "MLP"), "attn.": ("attention",), "mlp.": ("MLP",)}[part]
    assert cause.endswith(f"({', '.join(f'the {each} of block {block}' for each in parts)})")


def test_blocks_of_the_right_pair_belong_to_each_other(tiny):
    (found,) = check_model(tiny, only=["weights"]).findings
    assert found.outcome == "ok"
    assert min(score["reads"] + score["writes"] - 2 for score in found.numbers["composition"]) > 0.3
