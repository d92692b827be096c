"""The bundled models without a reference: their page and their facts show each mistake, and the report names it.

Most tests read a short page: what the diagnosis concludes does not depend on its length.
"""

import re
from dataclasses import replace

import pytest
import torch
from faults import FAULTS, faulty
from judged import (
    BRIEFLY,
    bundled,
    judged_by_behaviour,
    on_eight_sentences,
    on_short_page,
    only_tiny_ar,
    only_tiny_mdm,
    outcomes,
    with_changes,
    without_search_of_parts,
)

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.checks import Expected, check_model
from diffusion_lens.checks.run import CHECKS
from diffusion_lens.checks.texts import (
    KNOWN_LOSS,
    N_SAMPLES,
    NOISE_SEED,
    Page,
    check_page,
    page_loss,
    read_page,
    texts_for,
)
from diffusion_lens.loading.catalogue import BUNDLED
from diffusion_lens.model.loss import autoregressive_loss, hide, masked_diffusion_loss


def test_right_models_pass_every_check(tiny):
    """With the known losses on the whole page."""
    weights = {name: weight.clone() for name, weight in tiny.state_dict().items()}
    cfg = replace(tiny.cfg)
    checks = [check for check in CHECKS if check != "diagnosis"]
    report = check_model(tiny, expected=Expected.of(tiny.cfg.model_name), only=checks)
    assert report.passed, report.to_text()
    passed = {name for name, outcome in outcomes(report).items() if outcome == "ok"}
    assert {"config", "weights", "page loss", "facts, one pass", "facts, by the loop"} <= passed
    assert {"recall", "padding", "bfloat16"} <= passed
    assert all(torch.equal(weight, weights[name]) for name, weight in tiny.state_dict().items())
    assert tiny.cfg == cfg
    (weights_finding,) = (finding for finding in report.findings if finding.check == "weights")
    assert min(score["reads"] + score["writes"] - 2 for score in weights_finding.numbers["composition"]) > 0.3


@on_short_page
@only_tiny_mdm
def test_no_mistake_explains_a_right_model(tiny):
    report = check_model(tiny, expected=Expected.of(tiny.cfg.model_name), only=("config", "page loss", "diagnosis"))
    assert report.passed
    assert outcomes(report) == {"config": "ok", "page loss": "ok", "diagnosis": "ok"}


# One fault of each kind: the references of the other file show all of them.
FAULTS_BY_MODEL = [
    *(("tiny-ar", fault) for fault in ("query heads permuted", "causal for bidirectional")),
    *(("tiny-ar", fault) for fault in ("a layer of another seed", "head rows off by one")),
    *(("tiny-mdm", fault) for fault in ("wrong mask id", "readout shifted", "another rotary base")),
    ("tiny-mdm", "embedding rows off by one"),
]


@on_short_page
@pytest.mark.parametrize(("tiny", "fault"), FAULTS_BY_MODEL, indirect=["tiny"])
def test_each_fault_is_flagged_and_named(tiny, fault):
    report = check_model(faulty(tiny, fault), expected=judged_by_behaviour(tiny.cfg.model_name), only=BRIEFLY)
    assert not report.passed
    assert any(FAULTS[fault][1] in cause for cause in report.likely), report.to_text()


@on_short_page
@only_tiny_ar
def test_only_the_config_shows_the_rotary_base_of_the_ar_baseline(tiny):
    """14 positions: the loss moves by a hundred-thousandth, and no text of this length could show it."""
    other = faulty(tiny, "another rotary base")
    report = check_model(other, expected=Expected.of("tiny-ar"), only=("config", "page loss", "diagnosis"))
    assert outcomes(report) == {"page loss": "ok", "config": "off", "diagnosis": "noted"}
    assert "rotary_base 500000.0 here, 10000.0 in the catalogue" in report.likely[0]
    finding = check_model(tiny, only=("page loss", "diagnosis")).findings[-1]
    assert finding.outcome == "noted"
    assert {"rotary base 1e+06", "norm epsilon 1e-06"} <= set(finding.numbers["untold"])
    assert "only the config can tell (--as NAME)" in finding.said


@on_short_page
def test_a_near_rotary_base_is_named_only_where_the_loss_is_known():
    model = bundled("tiny-mdm")
    other = with_changes(model, replace(model.cfg.architecture, rotary_base=1_000.0), {})
    with_known_loss = check_model(other, expected=judged_by_behaviour("tiny-mdm"), only=BRIEFLY)
    assert with_known_loss.likely == ("the rotary base is wrong: the config says 1000, and the weights fit 10000",)
    finding = check_model(other, only=("page loss", "diagnosis")).findings[-1]
    assert "rotary base 10000" in finding.numbers["untold"]


@on_short_page
@without_search_of_parts
def test_without_a_known_loss_a_costly_rotary_base_is_off():
    model = bundled("tiny-mdm")
    other = with_changes(model, replace(model.cfg.architecture, rotary_base=500.0), {})
    report = check_model(other, only=("page loss", "diagnosis"))
    assert outcomes(report) == {"page loss": "ok", "diagnosis": "off"}
    assert "the rotary base is wrong: the config says 500" in report.likely[0]


@on_short_page
@only_tiny_ar
def test_another_norm_epsilon_is_named(tiny):
    other = with_changes(tiny, replace(tiny.cfg.architecture, norm_eps=1e-2), {})
    report = check_model(other, expected=judged_by_behaviour("tiny-ar"), only=BRIEFLY)
    assert report.likely == ("the norms' epsilon is wrong: the config says 0.01, and the weights fit 1e-05",)


def first_wrong_id(report, rows):
    (cause,) = report.likely
    return int(re.search(rf"{rows} from about id (\d+) on: an off-by-one in the vocabulary", cause)[1])


@on_short_page
@on_eight_sentences
@only_tiny_ar
def test_rows_of_the_head_off_from_some_id_on_are_named(tiny):
    rows = tiny.unembed.weight.detach()
    moved = torch.cat([rows[:200], rows[200:].roll(-1, dims=0)])
    report = check_model(with_changes(tiny, tiny.cfg.architecture, {"unembed.weight": moved}), only=BRIEFLY)
    assert abs(first_wrong_id(report, "rows of the head are one too early") - 200) <= 5


@on_short_page
@only_tiny_ar
def test_gate_and_up_of_one_block_exchanged_are_named(tiny):
    gate, up = (tiny.get_parameter(f"blocks.2.mlp.{name}.weight").detach() for name in ("gate", "up"))
    swapped = {"blocks.2.mlp.gate.weight": up, "blocks.2.mlp.up.weight": gate}
    expected = judged_by_behaviour("tiny-ar")
    report = check_model(with_changes(tiny, tiny.cfg.architecture, swapped), expected=expected, only=BRIEFLY)
    assert report.likely == ("gate and up projections of block 2 were read as each other",)


@on_short_page
@on_eight_sentences
@only_tiny_ar
def test_embedding_rows_off_with_the_last_row_are_named(tiny):
    """In the masked model [MASK]'s row is shifted too, so no search finds the mistake there."""
    rows = tiny.embed.weight.detach()
    moved = torch.cat([rows[:350], rows[350:].roll(1, dims=0)])
    other = with_changes(tiny, tiny.cfg.architecture, {"embed.weight": moved})
    report = check_model(other, expected=judged_by_behaviour("tiny-ar"), only=BRIEFLY)
    assert abs(first_wrong_id(report, "rows of the embedding are one too late") - 350) <= 1


@on_short_page
@without_search_of_parts
@only_tiny_ar
def test_a_change_that_helps_but_leaves_the_model_wrong_is_not_blamed(tiny):
    """Two mistakes at once: undoing one of them leaves the other."""
    architecture = replace(tiny.cfg.architecture, attention_dir="bidirectional")
    moved = {"embed.weight": tiny.embed.weight.detach().roll(1, dims=0)}
    other = with_changes(tiny, architecture, moved)
    report = check_model(other, expected=judged_by_behaviour("tiny-ar"), only=BRIEFLY)
    assert outcomes(report)["page loss"] == "off"
    assert report.likely == ()
    assert "which helps and is still wrong" in report.findings[-1].said


def test_the_page_loss_is_the_training_loss():
    """The same noise, passed to the trainer's own objective."""
    rows = torch.randint(430, (3, 14), generator=torch.Generator().manual_seed(1))
    mdm, ar = bundled("tiny-mdm"), bundled("tiny-ar")
    repeated = rows.repeat_interleave(N_SAMPLES, dim=0)
    noisy, p_mask = hide(repeated, mdm.cfg.mask_token_id, generator=torch.Generator().manual_seed(NOISE_SEED))
    with torch.no_grad():
        assert page_loss(mdm, rows) == pytest.approx(float(masked_diffusion_loss(mdm, repeated, noisy, p_mask)))
        assert page_loss(ar, rows) == pytest.approx(float(autoregressive_loss(ar, rows)))


@on_short_page
@only_tiny_ar
def test_a_page_on_which_the_order_of_words_does_not_matter_is_off(tiny):
    texts = texts_for(tiny)
    rows = read_page(tiny, texts).ordered
    finding = check_page(tiny, texts, Page(rows, rows), None, page_loss(tiny, rows))
    assert finding.outcome == "off"
    assert "the order of words lowers the loss by less than 0.5 nats" in finding.said


@on_short_page
@without_search_of_parts
@only_tiny_ar
def test_an_untrained_model_is_off_and_no_mistake_is_blamed(tiny):
    fresh = HookedDiffusionTransformer(tiny.cfg, tiny.tokenizer, seed=1)
    report = check_model(fresh, only=BRIEFLY)
    assert outcomes(report)["page loss"] == "off"
    assert outcomes(report)["diagnosis"] == "noted"
    assert "no better than chance" in report.to_text()


@on_short_page
@only_tiny_ar
@pytest.mark.parametrize(("value", "only"), [("nan", CHECKS), ("inf", ("weights", "page loss"))])
def test_every_check_of_weights_that_are_not_finite_ends_and_names_them(tiny, value, only):
    down = tiny.blocks[1].mlp.down.weight.detach().clone()
    down[3, 4] = float(value)
    report = check_model(with_changes(tiny, tiny.cfg.architecture, {"blocks.1.mlp.down.weight": down}), only=only)
    assert not report.passed
    assert any("blocks.1.mlp.down.weight are not finite" in cause for cause in report.likely)


@on_short_page
@only_tiny_mdm
def test_facts_and_recall_of_a_wrong_model_are_off(tiny):
    wrong = faulty(tiny, "embedding rows off by one")
    report = check_model(wrong, expected=Expected.of(tiny.cfg.model_name), only=("facts", "recall"))
    assert outcomes(report) == {"facts, one pass": "off", "facts, by the loop": "off", "recall": "off"}


@only_tiny_ar
def test_an_unknown_check_is_refused(tiny):
    with pytest.raises(ValueError, match="'pages'; the checks are hash"):
        check_model(tiny, only=["pages"])


def test_the_known_losses_are_of_the_bundled_models():
    assert set(KNOWN_LOSS) == set(BUNDLED)


@on_short_page
@without_search_of_parts
@pytest.mark.parametrize("name", ["site-mdm", "site-ar"])
def test_the_pair_with_a_subject_site_is_read_on_its_own_texts(name):
    model = bundled(name)
    texts = texts_for(model)
    assert "rows of the bundled models" in texts.name
    unknown = model.tokenizer.unk_token_id
    assert not bool((read_page(model, texts).ordered == unknown).any())
    report = check_model(model, expected=Expected.of(name), only=("page loss", "facts", "recall"))
    assert set(outcomes(report).values()) == {"ok"}, report.to_text()
