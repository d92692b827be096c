"""`diffusion-lens check` as users run it: exit codes, the report, and what it reports of wrong files."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults import faulty
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.checks import CheckReport, Expected, Finding, Reference, check_model
from diffusion_lens.checks.texts import binomial_interval
from diffusion_lens.checks.weights import check_config, check_hash
from diffusion_lens.cli import app
from diffusion_lens.loading.catalogue import BUNDLED, PUBLISHED
from weight_conversion import as_json, export

GOLDEN = Path(__file__).parents[1] / "golden" / "lit_gpt" / "gqa" / "mdm"


def check(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check", *map(str, arguments)])


def unmapped(path):
    """The tensors of a file that is to be rewritten: older releases of safetensors map it while it is read."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def copy(tmp_path):
    """The files of tiny-ar, elsewhere."""
    for name in ("tiny-ar.safetensors", "lit_config.json"):
        shutil.copy(BUNDLED["tiny-mdm"].folder / name, tmp_path)
    return tmp_path / "tiny-ar.safetensors"


@pytest.mark.usefixtures("short_page")
def test_a_right_file_passes_and_leaves_its_report(copy, tmp_path):
    result = check(copy, "--as", "tiny-ar", "--out", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    assert "nothing is off in 11 checks" in result.stdout
    report = strict((tmp_path / "report.json").read_text())
    assert report["passed"] is True
    assert report["expected"] == "tiny-ar"
    assert [finding["check"] for finding in report["findings"]][:4] == ["load", "hash", "config", "weights"]
    assert report["record"]["weights_sha256"]
    assert report["record"]["seconds"]["page loss"] > 0
    assert report["record"]["memory_bytes"] > 0
    assert as_json(CheckReport.load(tmp_path / "report.json").to_dict()) == report


def test_a_model_without_a_tokenizer_or_a_reference_does_not_pass(tmp_path):
    result = check(GOLDEN, "--out", tmp_path / "report.json")
    assert result.exit_code == 1, result.output
    assert "not tested. Nothing that the model computes was compared" in result.stdout
    assert "nothing is off" not in result.stdout
    assert strict((tmp_path / "report.json").read_text())["passed"] is False


@pytest.mark.usefixtures("short_page")
def test_an_edited_file_is_off_by_its_hash_and_by_what_it_computes(copy):
    model = HookedDiffusionTransformer.from_pretrained(copy, device="cpu")
    wrong = faulty(model, "gate and up exchanged")
    export(wrong.state_dict(), wrong.cfg.architecture, copy)
    save_file(unmapped(copy), copy)  # in the layout of the published file
    result = check(copy, "--as", "tiny-ar", "--json")
    assert result.exit_code == 1
    report = strict(result.stdout)
    outcomes = {finding["check"]: finding["outcome"] for finding in report["findings"]}
    assert (outcomes["hash"], outcomes["page loss"], outcomes["diagnosis"]) == ("off", "off", "off")
    assert any("gate and up" in cause for cause in report["likely"])


def test_a_reference_file_replaces_texts(tmp_path):
    recorded = load_file(GOLDEN / "forward.safetensors")
    save_file({name: recorded[name] for name in ("tokens", "logits")}, tmp_path / "reference.safetensors")
    assert check(GOLDEN, "--reference", tmp_path / "reference.safetensors").exit_code == 0
    recorded["logits"] = recorded["logits"].roll(1, dims=-1)
    save_file({name: recorded[name] for name in ("tokens", "logits")}, tmp_path / "reference.safetensors")
    result = check(GOLDEN, "--reference", tmp_path / "reference.safetensors")
    assert result.exit_code == 1
    assert "off-by-one in the vocabulary" in " ".join(result.stdout.split())


def test_a_file_that_does_not_load_is_off(copy):
    tensors = unmapped(copy)
    del tensors["transformer.ln_f.weight"]
    save_file(tensors, copy)
    result = check(copy, "--as", "tiny-ar")
    assert result.exit_code == 1
    assert "transformer.ln_f.weight" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["smdm-1028x"], "smdm-1028m"),
        (["tiny-ar", "--as", "tiny-arr"], "tiny-ar"),
        (["tiny-ar", "--dtype", "int8"], "int8"),
        (["tiny-ar", "--reference", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_unknown_names_are_refused(arguments, word):
    result = check(*arguments)
    assert result.exit_code == 2
    assert word in result.stderr


def test_a_reference_of_another_vocabulary_is_refused(tmp_path):
    save_file({"tokens": torch.zeros(1, 3).long(), "logits": torch.zeros(1, 3, 7)}, tmp_path / "r.safetensors")
    result = check(GOLDEN, "--reference", tmp_path / "r.safetensors")
    assert result.exit_code == 2
    assert "7 logits" in result.stderr
    with pytest.raises(ValueError, match="go together"):
        Reference(torch.zeros(1, 3).long(), torch.zeros(1, 3, 7), before=torch.zeros(1, 3).long())


def test_help_shows_an_example():
    shown = " ".join(check("--help").stdout.split())
    assert "Example: diffusion-lens check site-ar --out report.json" in shown


def test_a_conversion_has_another_size_and_is_only_noted(copy):
    expected = Expected.of("tiny-ar")
    assert check_hash(expected, copy).outcome == "ok"
    save_file(unmapped(copy), copy, {"made": "elsewhere"})
    assert check_hash(expected, copy).outcome == "noted"
    assert check_hash(None, copy).outcome == "noted"


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_config_is_its_own(name):
    expected = Expected.of(name)
    assert check_config(expected, expected.architecture).outcome == "ok"
    other = replace(expected.architecture, rotary_base=20_000.0)
    finding = check_config(expected, other)
    assert finding.outcome == "off"
    assert "rotary_base" in finding.said


def test_the_interval_is_wilsons():
    """By its formula, with z = 2.5758."""
    right, n, z = 3, 10, 2.5758293035489
    middle = (right / n + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(right / n * (1 - right / n) / n + z * z / (4 * n * n))
    assert binomial_interval(right, n) == pytest.approx((middle - half, middle + half))


def test_numbers_that_are_not_finite_become_null(tmp_path):
    report = CheckReport("m", None, (Finding("page loss", "off", "said", numbers={"loss": float("nan")}),))
    saved = strict(report.save(tmp_path / "report.json").read_text())
    assert saved["findings"][0]["numbers"] == {"loss": None}
    assert math.isnan(CheckReport.load(tmp_path / "report.json").findings[0].numbers["loss"])
    assert not report.passed


DIRECTIONS = [(trained, queried) for trained in ("p2d", "d2p") for queried in ("p2d", "d2p")]


def as_lines(prompt, subject, answer, directions):
    rows = ({"prompt": prompt, "subject": subject, "answer": answer, "trained": t, "asked": a} for t, a in directions)
    return "\n".join(json.dumps({**row, "id": str(i)}) for i, row in enumerate(rows))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("f.txt", b"just a text", "a file of facts should end in .json, .jsonl, .csv"),
        ("empty.jsonl", b"", "contains no facts"),
        ("binary.jsonl", b"\x00\x01\xff\xfe", "is not UTF-8 text"),
        ("broken.json", b"[1", "line 1 is not valid JSON"),
        ("folder", None, "contains no .json, .jsonl, .csv file of facts"),
        (
            "one.jsonl",
            b'{"prompt": "Ada is", "subject": "Ada", "answer": " in"}',
            "has no fact trained p2d and queried p2d",
        ),
        ("a.jsonl", as_lines("Ada", "Ada", " x", DIRECTIONS[:3]).encode(), "has no fact trained d2p and queried d2p"),
        ("nowhere.jsonl", None, "is not a data set, file or folder"),
    ],
)
def test_data_that_hold_no_such_facts_are_refused_at_once(name, content, words, tmp_path, monkeypatch):
    monkeypatch.setattr(HookedDiffusionTransformer, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    elif name == "folder":
        (tmp_path / name).mkdir()
    result = check("tiny-mdm", "--data", tmp_path / name)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: --data '")
    assert words in line
    assert "It has to contain facts with a prompt, a subject, an answer and two directions" in line


def test_data_that_the_model_has_no_words_for_are_refused(tmp_path):
    (tmp_path / "facts.jsonl").write_text(as_lines("Ada", "Ada", " x", DIRECTIONS))
    result = check("tiny-mdm", "--data", tmp_path / "facts.jsonl")
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert "contains no fact that 'tiny-mdm' can be queried for: the tokenizer of 'tiny-mdm' does not know 'x'" in line


def test_recall_of_the_users_facts_is_not_compared_with_the_known_recall(tmp_path):
    (tmp_path / "facts.jsonl").write_text(as_lines("Gustav", "Gustav", ".", DIRECTIONS))
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    report = check_model(
        model, expected=Expected.of("tiny-mdm"), data=str(tmp_path / "facts.jsonl"), recall=True, only=["recall"]
    )
    (finding,) = report.findings
    assert finding.outcome == "noted"
    assert finding.said.count("nothing to compare") == 4
