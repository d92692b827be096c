"""The embedded pair without a reference: its page and its facts show each mistake, and say which it is."""

import re
from dataclasses import replace

import pytest
import torch
from faults import FAULTS, faulty, layer_of_another_seed

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.checks import Expected, check_model
from diffusion_lens.checks.composition import Composition
from diffusion_lens.checks.page import KNOWN_LOSS
from diffusion_lens.losses import autoregressive_loss, masked_diffusion_loss

# So that only behaviour is judged: neither hash nor the catalogue's numbers.
UNKNOWN = dict(architecture=None, sha256=None)
BRIEFLY = ("weights", "page loss", "diagnosis")


def with_changes(model, architecture, tensors):
    cfg = DiffusionConfig.from_architecture(architecture, device="cpu", model_name="changed")
    weights = {**model.state_dict(), **tensors}
    return HookedDiffusionTransformer(cfg, model.tokenizer, tensors=weights.items())


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
    if fault == "wrong mask id" and not tiny.cfg.has_mask:
        fault = "readout shifted"  # a causal model has no [MASK] to mistake
    if fault == "another rotary base" and not tiny.cfg.has_mask:
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
    report = check_model(other, expected=Expected.of("tiny-ar"), only=("config", "page loss", "diagnosis"))
    assert outcomes(report) == {"page loss": "ok", "config": "off", "diagnosis": "noted"}
    assert "rotary_base 500000.0 here, 10000.0 in the catalogue" in report.likely[0]
    for unnamed in (other, model):
        found = check_model(unnamed, only=("page loss", "diagnosis")).findings[-1]
        assert found.outcome == "noted"
        assert {"rotary base 1e+06", "norm epsilon 1e-06"} <= set(found.numbers["untold"])
        assert "only the config can tell (--as NAME)" in found.said


@pytest.mark.parametrize("base", [1_000.0, 20_000.0, 100_000.0])
def test_a_near_rotary_base_shows_where_the_loss_is_known_and_is_said_to_be_untold_elsewhere(base):
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    other = with_changes(model, replace(model.cfg.architecture, rotary_base=base), {})
    known = check_model(other, expected=replace(Expected.of("tiny-mdm"), **UNKNOWN), only=BRIEFLY)
    assert known.likely == (f"the rotary base is wrong: the config says {base:g}, and the weights fit 10000",)
    found = check_model(other, only=("page loss", "diagnosis")).findings[-1]
    assert "rotary base 10000" in found.numbers["untold"]


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_another_norm_epsilon_is_named(tiny):
    other = with_changes(tiny, replace(tiny.cfg.architecture, norm_eps=1e-2), {})
    report = check_model(other, only=BRIEFLY)
    assert report.likely == ("the norms' epsilon is wrong: the config says 0.01, and the weights fit 1e-05",)


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_rows_of_the_head_off_from_some_id_on_are_named(tiny):
    rows = tiny.unembed.weight.detach()
    moved = torch.cat([rows[:200], rows[200:].roll(-1, dims=0)])
    report = check_model(with_changes(tiny, tiny.cfg.architecture, {"unembed.weight": moved}), only=BRIEFLY)
    (cause,) = report.likely
    first = int(re.search(r"rows of the head are one too early from about id (\d+) on", cause)[1])
    assert abs(first - 200) <= 5


def test_gate_and_up_of_one_block_exchanged_are_named(tiny):
    gate, up = (tiny.get_parameter(f"blocks.2.mlp.{name}.weight").detach() for name in ("gate", "up"))
    swapped = {"blocks.2.mlp.gate.weight": up, "blocks.2.mlp.up.weight": gate}
    expected = replace(Expected.of(tiny.cfg.model_name), **UNKNOWN)
    report = check_model(with_changes(tiny, tiny.cfg.architecture, swapped), expected=expected, only=BRIEFLY)
    assert report.likely == ("gate and up projections of block 2 were read as each other",)


def test_rows_of_the_embedding_off_from_some_id_on_are_named_though_the_last_come_round():
    """[MASK]'s row comes round too, so of the masked model no search finds it."""
    model = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    rows = model.embed.weight.detach()
    moved = torch.cat([rows[:350], rows[350:].roll(1, dims=0)])
    expected = replace(Expected.of("tiny-ar"), **UNKNOWN)
    report = check_model(
        with_changes(model, model.cfg.architecture, {"embed.weight": moved}), expected=expected, only=BRIEFLY
    )
    assert report.likely == (
        "the rows of the embedding are one too late from about id 350 on: an off-by-one in the vocabulary",
    )


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_what_helps_and_does_not_make_the_model_right_is_not_blamed(tiny):
    """Two mistakes at once: undoing one of them leaves the other."""
    turned = "causal" if tiny.cfg.attention_dir == "bidirectional" else "bidirectional"
    architecture = replace(tiny.cfg.architecture, attention_dir=turned)
    moved = tiny.embed.weight.detach().roll(1, dims=0)
    expected = replace(Expected.of(tiny.cfg.model_name), **UNKNOWN)
    report = check_model(with_changes(tiny, architecture, {"embed.weight": moved}), expected=expected, only=BRIEFLY)
    assert outcomes(report)["page loss"] == "off"
    assert report.likely == ()
    assert "which helps and is still wrong" in report.findings[-1].said


@pytest.mark.parametrize("layer_of", [("tiny-mdm", "tiny-ar"), ("tiny-ar", "tiny-mdm")])
def test_a_trained_layer_of_another_model_is_foreign_too(layer_of):
    model, other = (HookedDiffusionTransformer.from_pretrained(name, device="cpu") for name in layer_of)
    taken = {name: weight for name, weight in other.state_dict().items() if name.startswith("blocks.2.")}
    mixed = HookedDiffusionTransformer(model.cfg, model.tokenizer, tensors={**model.state_dict(), **taken}.items())
    report = check_model(mixed, expected=replace(Expected.of(layer_of[0]), **UNKNOWN), only=BRIEFLY)
    assert any("of block 2 are foreign" in cause for cause in report.likely), report.to_text()


def test_the_page_loss_is_the_training_loss():
    """The same noise, passed to the trainer's own objective."""
    from diffusion_lens.checks.page import N_SAMPLES, NOISE_SEED, page_loss
    from diffusion_lens.losses import hide

    rows = torch.randint(430, (3, 14), generator=torch.Generator().manual_seed(1))
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    repeated = rows.repeat_interleave(N_SAMPLES, dim=0)
    noisy, p_mask = hide(repeated, model.cfg.mask_token_id, generator=torch.Generator().manual_seed(NOISE_SEED))
    with torch.no_grad():
        assert page_loss(model, rows) == pytest.approx(float(masked_diffusion_loss(model, repeated, noisy, p_mask)))
        twin = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
        assert page_loss(twin, rows) == pytest.approx(float(autoregressive_loss(twin, rows)))


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_an_untrained_model_is_off_and_no_reading_is_blamed(tiny):
    fresh = HookedDiffusionTransformer(tiny.cfg, tiny.tokenizer, seed=1)
    report = check_model(fresh, only=BRIEFLY)
    assert outcomes(report)["page loss"] == "off"
    assert outcomes(report)["diagnosis"] == "noted"
    assert "no better than chance" in report.to_text()


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
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


def test_a_part_that_looks_foreign_is_right_if_texts_get_less_likely_without_it(tiny, monkeypatch):
    """The weights' look is a suspicion; here of an MLP that the right model needs."""
    scores = [Composition(1, "MLP", 1.0, 1.0)]
    monkeypatch.setattr("diffusion_lens.checks.run.foreign_parts", lambda _: scores)
    monkeypatch.setattr("diffusion_lens.checks.weights.foreign_parts", lambda _: scores)
    report = check_model(tiny, expected=Expected.of(tiny.cfg.model_name), only=(*BRIEFLY, "config"))
    assert outcomes(report) == {"config": "ok", "weights": "noted", "page loss": "ok", "diagnosis": "ok"}
    assert report.passed


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
@pytest.mark.parametrize("part", ["", "attn.", "mlp."])
@pytest.mark.parametrize("block", [0, 2])
def test_weights_of_another_seed_are_foreign_though_the_norms_are_kept(tiny, block, part):
    """Whole blocks, or their attention or MLP alone: the loss hardly feels some of them, and the weights tell."""
    tensors = dict(tiny.state_dict())
    draw = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.startswith(f"blocks.{block}.{part}") and tensor.dim() == 2:
            tensors[name] = torch.randn(tensor.shape, generator=draw) * tensor.std()
    model = HookedDiffusionTransformer(tiny.cfg, tiny.tokenizer, tensors=tensors.items())
    report = check_model(model, only=BRIEFLY)
    assert not report.passed
    parts = {"": ("attention", "MLP"), "attn.": ("attention",), "mlp.": ("MLP",)}[part]
    blamed = [f"the {each} of block {block}" for each in parts]
    noted = report.findings[0]
    assert noted.outcome == "noted"
    assert all(each in noted.said for each in blamed)
    (cause,) = report.likely
    assert any(f"the weights of {each} are foreign" in cause for each in blamed)


def test_blocks_of_the_right_pair_belong_to_each_other(tiny):
    (found,) = check_model(tiny, only=["weights"]).findings
    assert found.outcome == "ok"
    assert min(score["reads"] + score["writes"] - 2 for score in found.numbers["composition"]) > 0.3
