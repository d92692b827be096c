"""What a command prints and leaves for programs: JSON as the standard has it."""

import json
import math

import numpy as np

from diffusion_lens.cli.report import COMMAND, Report


def refuse(word):
    raise AssertionError(f"{word} is no JSON")


def test_json_has_null_and_a_reason_for_what_is_not_finite(tmp_path, capsys):
    report = Report("trace", {"noise": np.float32(0.5), "seed": np.int64(3), "folder": tmp_path}, tmp_path, True)
    report.finish({"ate": math.nan, "by_layer": [1.0, -math.inf]}, {"clean": math.inf})
    printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert printed == json.loads((tmp_path / COMMAND).read_text(), parse_constant=refuse)
    assert printed["results"] == {"ate": None, "by_layer": [1.0, None]}
    assert printed["settings"] == {"noise": 0.5, "seed": 3, "folder": str(tmp_path)}
    assert printed["not_finite"] == {
        "/results/ate": "NaN",
        "/results/by_layer/1": "-Infinity",
        "/record/clean": "Infinity",
    }
