"""`diffusion-lens one-layer`: the table, the files, the dry run, shards, and its figure by `plot`."""

import json
from pathlib import Path

import pytest
from in_this_process import InThisProcess
from typer.testing import CliRunner, Result

from diffusion_lens.cli import app
from diffusion_lens.one_layer import OneLayerStudy, one_layer_study
from diffusion_lens.one_layer.result import FOLLOWED
from diffusion_lens.one_layer.study import DEPTHS, POSITIONS, SEEDS, STEPS, seconds_per_training
from diffusion_lens.one_layer.toy import DATA
from weight_conversion import from_json

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
DEFAULTS = {
    "positions": list(POSITIONS),
    "data": list(DATA),
    "depths": list(DEPTHS),
    "seeds": SEEDS,
    "steps": STEPS,
    "shard": None,
    "merge": None,
    "workers": None,
    "dask": None,
    "slurm": None,
}


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, ["one-layer", *arguments])


@pytest.mark.usefixtures("undrawn_figures")
def test_table_files_and_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*SMALL, "--json")
    assert result.exit_code == 0, result.output
    report = from_json(result.stdout)
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
    followed = report["results"]["curves"]
    assert [(row["positions"], row["variant"], row["seeds"]) for row in followed] == [
        (row["positions"], row["variant"], [0]) for row in rows
    ]
    for row in followed:
        for measure in FOLLOWED:
            curve = study.curves(measure, row["positions"], row["variant"], "mixed")
            if curve.isnan().all():
                assert measure not in row
            else:
                assert row[measure] == [pytest.approx(each, rel=1e-3) for each in curve.tolist()]
    text = invoke(*SMALL).stdout
    assert "after 2 steps, means over the seeds" in text
    assert "wrote one-layer/mixed_1_layer.png" in text


def test_a_dry_run_counts_what_is_left_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diffusion_lens.one_layer.study.seconds_per_training", lambda depth, steps: 0.5 * depth * steps)
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
    # 2 of the 8 trainings are there, with one layer; 6 are left, of which 4 have two layers.
    asked = dict(positions=["none", "alibi"], data=["mixed"], depths=[1, 2], seeds=1, steps=1)
    one_layer_study(**asked, out="one-layer/trainings", shard="0/4")
    only = ["--positions", "none", "--positions", "alibi", "--data", "mixed", "--seeds", "1", "--steps", "1"]
    options = [*only, "--depth", "1", "--depth", "2", "--dry-run", "--json"]
    results = json.loads(invoke(*options).stdout)["results"]
    assert results == {"trainings": 8, "done": 2, "updates": 6, "seconds": 0.5 * (3 * 1 + 3 * 2)}
    results = json.loads(invoke(*options, "--shard", "0/2").stdout)["results"]
    assert results == {"trainings": 4, "done": 2, "updates": 2, "seconds": 0.5 * (1 + 2)}


def test_a_training_takes_its_steps_and_its_measurements() -> None:
    short, long = (seconds_per_training(1, steps) for steps in (1, 100_000))
    assert 0 < short < long
    assert long > 100_000 * 1e-4


@pytest.mark.usefixtures("undrawn_figures")
def test_shards_merge_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke(*SMALL, "--out", "whole").exit_code == 0
    monkeypatch.setattr("diffusion_lens.analysis.LocalWorkers", InThisProcess)
    n_calls, workers = InThisProcess.n_calls, ([], ["--workers", "2"])
    shards = [invoke(*SMALL, "--out", f"part{i}", "--shard", f"{i}/2", *workers[i]) for i in (0, 1)]
    assert InThisProcess.n_calls == n_calls + 2  # a task for each training
    assert "shard 1/2: 2 trainings done in part1; join the shards with --merge" in shards[1].stdout
    parts = ["--merge", "part0", "--merge", "part1"]
    merged = invoke(*SMALL, "--out", "merged", *parts)
    assert merged.exit_code == 0, merged.output
    whole, joined = (OneLayerStudy.load(f"{name}/one_layer.safetensors") for name in ("whole", "merged"))
    assert joined.ids == whole.ids
    assert repr(joined.rows()) == repr(whole.rows())
    assert "2 of 4 trainings are missing" in invoke(*SMALL, "--out", "half", *parts[:2]).stderr
    assert "with other settings" in invoke(*SMALL[:-1], "3", "--out", "half", *parts).stderr
    assert "give one of them" in invoke(*SMALL, "--shard", "0/2", *parts).stderr
    assert not Path("half").exists()


@pytest.mark.usefixtures("undrawn_figures")
def test_plot_draws_the_study(tmp_path: Path) -> None:
    study = one_layer_study(positions=["none"], data=["mixed"], depths=[2], seeds=1, steps=1)
    study.save(tmp_path / "one_layer.safetensors")
    result = CliRunner().invoke(app, ["plot", str(tmp_path / "one_layer.safetensors")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "one_layer.png").exists()


def test_a_refusal_names_the_option() -> None:
    said = invoke("--depth", "1", "--depth", "1", "--dry-run").stderr
    assert "--depth [1, 1]; give at least one, and each once" in said
