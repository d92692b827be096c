"""`python -m one_layer`: the table, the files, and shards."""

from pathlib import Path

import pytest

from one_layer import OneLayerStudy
from one_layer.__main__ import main
from one_layer.result import FOLLOWED
from weight_conversion import read_json

SMALL = ["--positions", "alibi", "rotary", "--data", "mixed", "--depths", "1", "--seeds", "1", "--steps", "2"]


@pytest.mark.usefixtures("undrawn_figures")
def test_table_files_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {
        "trainings", "one_layer.safetensors", "mixed_1_layer.png", "command.json"
    }  # fmt: skip
    assert "after 2 steps, means over the seeds" in capsys.readouterr().out
    report, study = read_json(tmp_path / "command.json"), OneLayerStudy.load(tmp_path / "one_layer.safetensors")
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


def test_shards_merge_to_the_whole(tmp_path: Path, undrawn_figures: None) -> None:
    main([*SMALL, "--out", str(tmp_path / "whole")])
    for i in (0, 1):
        main([*SMALL, "--out", str(tmp_path / f"part{i}"), "--shard", f"{i}/2"])
    joined = OneLayerStudy.merge([tmp_path / f"part{i}" / "trainings" for i in (0, 1)])
    whole = OneLayerStudy.load(tmp_path / "whole" / "one_layer.safetensors")
    assert joined.ids == whole.ids
    assert repr(joined.rows()) == repr(whole.rows())


def test_a_refusal_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--depths", "1", "1", "--out", str(tmp_path)])
    assert "depths=[1, 1]; give at least one, and each once" in capsys.readouterr().err
