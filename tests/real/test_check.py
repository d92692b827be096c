"""`diffusion-lens check` on real models: right ones pass, and each planted mistake is flagged."""

import json

import pytest
import torch
from faults import FAULTS, faulty
from typer.testing import CliRunner

from diffusion_lens.checks import Reference, check_model
from diffusion_lens.cli import app

# A causal model has no [MASK], and the rows of a head are those of the embedding if it is tied.
ON_SMOLLM = [fault for fault in FAULTS if fault not in ("wrong mask id", "head rows off by one")]


@torch.no_grad()
def reference_of(real):
    """Logits of transformers on two rows of text, and the text that its greedy generation continues."""
    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want"
    tokens = torch.tensor(real.words(text)["input_ids"][:20]).view(2, 10)
    after = tokens[:1]
    for _ in range(2):
        after = torch.cat([after, real.network(after).logits[:, -1:].argmax(-1)], dim=1)
    before = after.clone()
    before[:, tokens.shape[1] :] = -1
    return Reference(tokens, real.network(tokens).logits, before=before, after=after)


@pytest.fixture(scope="module")
def reference(smollm):
    return reference_of(smollm)


def test_the_command_passes_a_right_model(smollm, tmp_path):
    done = CliRunner().invoke(app, ["check", str(smollm.source), "--device", "cpu", "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == 0
    assert report["passed"]
    outcomes = {finding["check"]: finding["outcome"] for finding in report["findings"]}
    checks = ("load", "hash", "config", "weights", "page loss", "padding", "bfloat16", "diagnosis")
    assert {outcomes[check] for check in checks} == {"ok"}, report


@pytest.mark.parametrize("fault", ON_SMOLLM)
def test_each_fault_is_flagged(smollm, reference, fault):
    report = check_model(faulty(smollm.model, fault), reference=reference, only=("reference",))
    assert not report.passed, report.to_text()


@pytest.mark.parametrize("fault", ["query heads permuted", "rotary interleaved", "readout shifted"])
def test_a_fault_is_named(smollm, reference, fault):
    """Three, because each search takes a while; `tests/checks` names all of them on small models."""
    report = check_model(faulty(smollm.model, fault), reference=reference, only=("reference", "diagnosis"))
    assert any(FAULTS[fault][1] in cause for cause in report.likely), report.to_text()


def test_an_untied_model_with_biases(qwen):
    reference = reference_of(qwen)
    right = check_model(qwen.model, reference=reference, only=("reference", "padding"))
    assert right.passed, right.to_text()
    for fault in ("head rows off by one", "query and key heads swapped"):
        wrong = check_model(faulty(qwen.model, fault), reference=reference, only=("reference",))
        assert not wrong.passed, wrong.to_text()
