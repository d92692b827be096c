"""What a command takes where nobody says: the trained length, a folder of the model's name, the device's own price."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typed_commands import done
from typer.testing import CliRunner

from diffusion_lens import Fact, HookedDiffusionTransformer
from diffusion_lens.analysis import (
    answer_probability,
    average_indirect_effect,
    causal_trace,
    key_value_study,
    logit_lens,
    optimize_value,
    patch_grid,
)
from diffusion_lens.analysis.rome import ValueSettings
from diffusion_lens.cli import app
from diffusion_lens.cli.load_model import ModelChoice, default_folder
from diffusion_lens.data import toy_facts
from diffusion_lens.data.fact_files import open_source
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.loading.catalogue import BUNDLED
from weight_conversion import export, open_checkpoint

pytestmark = pytest.mark.usefixtures("undrawn_figures")

ASSETS = BUNDLED["tiny-mdm"].folder


@pytest.fixture
def own_facts(tmp_path: Path) -> Path:
    """A few of the pair's facts, as somebody would write them down: without directions or names."""
    path = tmp_path / "facts.json"
    facts = toy_facts.load().facts(trained="both", asked="d2p")[:20:5]
    rows = [{"prompt": fact.prompt, "subject": fact.subject, "answer": fact.answer} for fact in facts]
    path.write_text(json.dumps(rows))
    return path


def test_two_models_in_one_folder_do_not_collide(own_facts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_facts.parent)
    for model in ("tiny-mdm", "tiny-ar"):
        done("recall", model, "--data", str(own_facts), "--steps", "4")
        assert json.loads(Path(f"recall-{model}/command.json").read_text())["record"]["model"] == model


def test_a_default_folder_carries_every_models_name() -> None:
    assert default_folder("compare", ["runs/a", "owner/b"]) == Path("compare-a-b")


@pytest.mark.parametrize("name", [".", "./", "inside/..", "../mine/."])
def test_a_folder_named_by_dots_gives_its_own_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert default_folder("recall", [name]) == Path("recall-mine")
    assert ModelChoice(name).label == "mine"


def test_own_facts_are_queried_at_the_trained_length(own_facts: Path, tmp_path: Path) -> None:
    ask = ["recall", "tiny-mdm", "--data", str(own_facts), "--steps", "8"]
    told = done(*ask, "--out", str(tmp_path / "default"))
    said = told.stdout
    assert "length 14," in said
    assert re.search(r"^facts, n = 4$", said, re.MULTILINE)
    assert re.search(r"^  tiny-mdm +100\.0$", said, re.MULTILINE)
    assert not re.search("person|description|direction|name first", said)
    assert not told.stderr


def test_a_single_fact_has_no_interval_and_says_why(own_facts: Path, tmp_path: Path) -> None:
    said = done("recall", "tiny-mdm", "--data", str(own_facts), "--limit", "1", "--out", str(tmp_path / "o")).stdout
    assert "nan" not in said
    assert "one fact" in said
    assert "has no interval" in said
    ask = ["aie", "tiny-mdm", "--trained", "p2d", "--asked", "p2d", "--limit", "1", "--samples", "2"]
    assert "nan" not in done(*ask, "--out", str(tmp_path / "aie")).stdout


def test_text_is_written_at_the_trained_length() -> None:
    told = json.loads(done("denoise", "tiny-mdm", "Gustav Geisser is the", "--steps", "8", "--json").stdout)
    assert told["settings"]["length"] == 14
    assert "brave drummer of Rolsen." in told["results"]["text"]


def test_a_canvas_beyond_training_is_warned_of() -> None:
    result = done("denoise", "tiny-mdm", "Gustav Geisser is the", "--length", "16", "--steps", "2")
    (line,) = result.stderr.splitlines()
    assert line.startswith("Warning: the canvas has 16 positions, and 'tiny-mdm' was trained on texts of 14")
    assert "--length 14" in line


def facts_of(people: int) -> list[Fact]:
    """A fact in each direction about each of some people."""
    facts: dict[tuple[str, str], Fact] = {}
    for asked in ("p2d", "d2p"):
        for fact in toy_facts.load().facts(trained="both", asked=asked):
            facts.setdefault((fact.person, asked), fact)
    wanted = list(dict.fromkeys(person for person, _ in facts))[:people]
    return [fact for (person, _), fact in facts.items() if person in wanted]


def numbers_of(command: str, model: HookedDiffusionTransformer, facts: list[Fact]) -> list[float]:
    """What the function of a command gives with its own defaults, as the command's JSON object shows it."""
    fact, other = facts[0], facts[1]
    if command == "trace":
        trace = causal_trace(model, fact)
        return [trace.corrupted, trace.scores.sum().item()]
    if command == "aie":
        average = average_indirect_effect(model, facts)
        return [average.ate, average.aie.nansum().item()]
    if command == "patch":
        corrupted = Fact(other.prompt, other.subject, fact.answer)
        grid = patch_grid(model, fact, corrupted, answer_probability(model, corrupted), "resid_pre")
        return [grid.clean.item(), grid.effect.nansum().item()]
    if command == "lens":
        lens = logit_lens(model, fact)
        answer = [lens.positions.index(position) for position in fact.to_query(model).answer_positions]
        return [lens.target_probabilities[:, 0, answer, 0].sum().item()]
    if command == "recall":
        table = recall_by_steps(model, facts).table("contained")
        return [share.mean for row in table.values() for share in row.values()]
    if command == "rome":
        value = optimize_value(model, fact, 0)
        return [value.probability_after, value.losses.sum().item()]
    return [key_value_study(model, facts, [0]).compare(resamples=9).table("cka")[0]["value"]]


def numbers_in(command: str, results: Any) -> list[float]:
    """The same numbers of a command."""
    if command == "trace":
        effect = torch.tensor(results["indirect_effect"])
        return [results["corrupted"], (effect + results["corrupted"]).sum().item()]
    if command == "aie":
        return [results["ate"], sum(x for effects in results["aie"].values() for x in effects if x is not None)]
    if command == "patch":
        grid = results["resid_pre"]
        return [grid["clean"], torch.tensor(grid["effect"]).nansum().item()]
    if command == "lens":
        return [torch.tensor(results["target_probability"]).sum().item()]
    if command == "recall":
        return [share["mean"] for row in results.values() for share in row.values()]
    if command == "rome":
        return [results["after"], torch.tensor(results["losses"]).sum().item()]
    (study,) = results.values()
    return [study["0"]["value"]]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((command, "tiny-mdm") for command in ("trace", "patch", "lens", "recall", "rome")),
        *((command, "tiny-ar") for command in ("trace", "aie", "recall", "compare")),
    ],
)
def test_a_command_and_its_function_have_the_same_defaults(command: str, name: str, tmp_path: Path) -> None:
    facts, path = facts_of(21 if command == "compare" else 2), tmp_path / "facts.json"
    kept = ("id", "prompt", "subject", "answer", "person", "trained", "asked")
    path.write_text(json.dumps([{key: getattr(fact, key) for key in kept} for fact in facts]))
    ask, subject = ["--prompt", facts[0].prompt, "--answer", facts[0].answer], ["--subject", facts[0].subject]
    given = {
        "trace": [*ask, *subject],
        "rome": [*ask, *subject, "--layer", "0"],
        "patch": [*ask, "--corrupted", facts[1].prompt],
        "lens": ask,
        "compare": ["--data", str(path), "--layer", "0", "--resamples", "9"],
    }.get(command, ["--data", str(path)])
    model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
    printed = done(command, name, *given, "--out", str(tmp_path / "out"), "--device", "cpu", "--json").stdout
    expected = numbers_of(command, model, open_source(str(path)).pick())
    assert numbers_in(command, json.loads(printed)["results"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("people", "said"), [(6, "6 facts are too few for {} 3: give at least 15"), (15, None)])
def test_both_doors_refuse_to_compare_few_people(people: int, said: str | None, tmp_path: Path) -> None:
    facts, path = facts_of(people), tmp_path / "facts.json"
    kept = ("id", "prompt", "subject", "answer", "person", "trained", "asked")
    path.write_text(json.dumps([{key: getattr(fact, key) for key in kept} for fact in facts]))
    settings = dict(rank=3, resamples=2)
    ask = ["compare", "tiny-ar", "--data", str(path), "--layer", "0", "--rank", "3", "--resamples", "2"]
    result = CliRunner().invoke(app, [*ask, "--out", str(tmp_path / "out")])
    model = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    study = key_value_study(model, facts, [0], search=ValueSettings(steps=1))
    if said is None:
        assert result.exit_code == 0
        assert study.compare(**settings).at[0].record["rank"] == 3
        return
    assert said.format("--rank") in result.stderr
    with pytest.raises(ValueError, match=said.format("rank=").replace("= ", "=")):
        study.compare(**settings)


def test_options_that_say_how_long_to_go_on() -> None:
    ask = ["denoise", "tiny-mdm", "Gustav Geisser is the", "--steps", "2", "--json", "--max-new-tokens", "3"]
    assert len(json.loads(done(*ask).stdout)["results"]["revealed_at"]) == 4 + 3


def test_config_and_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(ASSETS / "tiny-mdm.safetensors")
    written = export(dict(checkpoint.tensors()), checkpoint.architecture, tmp_path / "bare" / "model.safetensors")
    shutil.move(written.parent / "lit_config.json", tmp_path / "config.json")
    assert [path.name for path in written.parent.iterdir()] == ["model.safetensors"]
    there = ["--config", str(tmp_path / "config.json"), "--tokenizer", str(ASSETS)]
    ask = ["denoise", str(written), "Gustav Geisser is the", "--length", "14", "--steps", "8", *there]
    assert "brave drummer of Rolsen." in done(*ask).stdout
    assert ModelChoice(str(written), config=tmp_path / "config.json").shape().n_layers == 4


@pytest.mark.parametrize(
    "command",
    [
        "info",
        "denoise",
        "recall",
        "trace",
        "aie",
        "patch",
        "lens",
        "rome",
        "compare",
        "signatures",
        "finetune",
        "adapt",
    ],
)
def test_every_command_that_loads_a_model_takes_its_parts(command: str) -> None:
    said = done(command, "--help").stdout
    assert "--config" in said
    assert "--tokenizer" in said


def test_bfloat16_by_its_name() -> None:
    ask = ["denoise", "tiny-mdm", "Gustav Geisser is the", "--steps", "4", "--dtype", "bfloat16", "--json"]
    assert json.loads(done(*ask).stdout)["record"]["dtype"] == "bfloat16"


def cost(*more: str) -> dict[str, object]:
    ask = ["recall", "smdm-1028m", "--data", "toy", "--limit", "1", "--length", "14", "--dry-run", "--json"]
    results: dict[str, object] = json.loads(done(*ask, *more).stdout)["results"]
    return results


def test_a_time_is_that_of_the_operations_at_the_given_rate() -> None:
    named = cost("--flops", "1e12")
    assert float(str(named["seconds"])) == pytest.approx(float(str(named["flops"])) / 1e12, rel=0.01)
    assert cost()["seconds"] is None, "the weights are elsewhere"
    refused = CliRunner().invoke(app, ["denoise", "tiny-mdm", "Ada is", "--device", "h100"])
    assert refused.exit_code == 2
    assert "--device 'h100' is unknown" in refused.stderr


def test_models_by_kind_family_size_and_text() -> None:
    def names(*filters: str) -> set[str]:
        return {each["name"] for each in json.loads(done("models", *filters, "--json").stdout)["results"]["models"]}

    assert names("reverse") == {"smdm-1028m-reverse"}
    causal, masked = names("--kind", "causal"), names("--kind", "masked")
    assert "ar-1028m" in causal
    assert "smdm-1028m" in masked
    assert not causal & masked
    published = names()
    assert {"tiny-mdm", "tiny-ar"} <= names("--largest", "0.01") < published
    assert names("--family", "llada") <= {name for name in published if "llada" in name}
    assert names("tiny", "--kind", "causal") == {"tiny-ar", "tinyllama-1.1b"}


@pytest.mark.parametrize(
    ("rule", "said"),
    [("all", "2 of 2 facts, known or not"), ("one-canvas", "facts, known on one canvas"), ("recalled", "recalled")],
)
def test_which_facts_are_averaged_may_be_said(rule: str, said: str, tmp_path: Path) -> None:
    ask = ["aie", "tiny-mdm", "--trained", "p2d", "--asked", "d2p", "--limit", "2", "--samples", "1", "--known", rule]
    result = done(*ask, "--out", str(tmp_path))
    assert re.search(f"^tiny-mdm, the average over .*{said}", result.stdout, re.MULTILINE)
