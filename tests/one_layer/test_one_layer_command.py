"""`diffusion-lens one-layer`: the table, the files, the dry run, and the numbers that the documentation shows."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diffusion_lens.cli import app
from diffusion_lens.one_layer import OneLayerStudy
from diffusion_lens.one_layer.study import DEPTHS, POSITIONS, SEEDS, STEPS, describe
from diffusion_lens.one_layer.toy import DATA
from weight_conversion import as_json, read_json

SMALL = [
    "--positions",
    "alibi",
    "--positions",
    "rotary",
    "--data",
    "mixed",
    "--depth",
    "1",
    "--seeds",
    "1",
    "--steps",
    "2",
]
DEFAULTS = {"positions": list(POSITIONS), "data": list(DATA), "depth": list(DEPTHS), "seeds": SEEDS, "steps": STEPS}


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, ["one-layer", *arguments])


@pytest.mark.usefixtures("undrawn_figures")
def test_table_files_and_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*SMALL, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {path.name for path in Path("one-layer").iterdir()} == {
        "trainings", "one_layer.safetensors", "mixed_1_layer.png", "command.json"
    }  # fmt: skip
    study = OneLayerStudy.load("one-layer/one_layer.safetensors")
    assert report["results"]["steps"] == study.steps
    rows = report["results"]["table"]
    assert [(row["positions"], row["variant"]) for row in rows] == [
        ("rotary", "mdm"), ("rotary", "ar"), ("alibi", "mdm"), ("alibi", "ar")
    ]  # fmt: skip
    assert rows[2]["same_probability"][0] == pytest.approx(
        study.table()["alibi", "mdm", "mixed", 1]["same_probability"].mean, abs=1e-4
    )
    assert report["record"]["recipe"]["lr"] == 2e-3
    text = invoke(*SMALL).stdout
    assert "after 2 steps, means over the seeds" in text
    assert "wrote one-layer/mixed_1_layer.png" in text


def test_a_dry_run_counts_trainings_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diffusion_lens.one_layer.study.seconds_per_step", lambda depth: 0.5 * depth)
    result = invoke("--dry-run", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["settings"] == DEFAULTS
    n_trainings = len(POSITIONS) * 2 * len(DATA) * SEEDS
    assert report["results"] == {
        "trainings": n_trainings * len(DEPTHS),
        "done": 0,
        "updates": n_trainings * len(DEPTHS) * STEPS,
        "seconds": n_trainings * STEPS * 0.5 * sum(DEPTHS),
    }
    assert "216 trainings of 600 steps, 0 of them done" in invoke("--dry-run").stdout
    assert list(tmp_path.iterdir()) == []


def test_the_documentation_shows_the_default_command() -> None:
    docs = Path(__file__).parents[2] / "docs"
    shown = read_json(docs / "one_layer.json")
    assert shown["command"] == "one-layer"
    assert shown["settings"] == DEFAULTS
    described = as_json(describe(POSITIONS, DATA, DEPTHS, SEEDS, STEPS))
    for name in ("recipe", "measured_at", "measures"):
        assert shown["record"][name] == described[name]
    assert len(shown["results"]["table"]) == 72
    longer = read_json(docs / "one_layer_long.json")
    asked = {"positions": ["rotary", "standard"], "data": ["one-way"], "depth": [1], "seeds": 5, "steps": 3000}
    assert longer["settings"] == asked
    assert longer["record"]["recipe"] == {**shown["record"]["recipe"], "steps": 3000}
    by_group = {(row["positions"], row["variant"], row["data"], row["depth"]): row for row in shown["results"]["table"]}
    for (positions, variant, data, _), row in by_group.items():
        assert row["seeds"] == SEEDS
        if variant == "mdm" and positions in ("none", "alibi"):
            assert row["reverse_accuracy"] == row["same_accuracy"], "reverse questions are mirror images"
        if variant == "ar" and data == "one-way":
            assert row["reverse_accuracy"][2] < 0.1
