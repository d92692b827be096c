"""The command line, as somebody types it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import typer
from processes import hears_ctrl_c
from typer.main import get_command
from typer.testing import CliRunner, Result

from diffusion_lens.__main__ import main
from diffusion_lens.cli import app
from diffusion_lens.evaluation import Recall

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
PNG = b"\x89PNG\r\n\x1a\n"
GOLDEN = Path(__file__).parent / "golden" / "lit_gpt" / "gqa" / "mdm"
COMMANDS = get_command(app).commands
ASK = ["--prompt", "Gustav Geisser is the", "--subject", "Gustav Geisser", "--answer", " brave drummer of Rolsen."]
# Each with what it is about; options that make it quick.
QUICK = {
    "denoise": ["tiny-mdm", "Gustav Geisser is the", "--length", "14", "--steps", "8"],
    "trace": ["tiny-mdm", *ASK, "--length", "14", "--first-tokens", "1", "--samples", "2"],
    "aie": ["tiny-mdm", "--trained", "p2d", "--asked", "d2p", "--limit", "2", "--samples", "2"],
    "rome": ["tiny-mdm", *ASK, "--length", "14", "--layer", "0"],
    "compare": ["tiny-mdm", "--limit", "7", "--layer", "1", "--draws", "9"],
    "recall": ["tiny-mdm", "--limit", "2", "--steps", "1", "--steps", "4"],
    "finetune": ["tiny-ar", "--epochs", "0.02", "--batch-size", "8"],
}


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, arguments)


def done(*arguments: str) -> Result:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def example_of(command: str) -> list[str]:
    """What the help shows, as the shell splits it."""
    (shown,) = re.findall(r"Example: diffusion-lens (.*)", " ".join((COMMANDS[command].help or "").split()))
    return shlex.split(shown)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Every command's example, run in one folder, in an order in which each finds what it reads."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copy(GOLDEN / "model.safetensors", folder / "checkpoint.safetensors")
    shutil.copy(GOLDEN / "lit_config.json", folder)
    order = sorted(COMMANDS, key=lambda name: name == "plot")
    here = Path.cwd()
    os.chdir(folder)
    try:
        return {name: invoke(*example_of(name)) for name in order if name != "demo"}
    finally:
        os.chdir(here)


def test_the_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="diffusion-lens")
    assert script.load() in (main, app)
    assert 'diffusion-lens = "diffusion_lens.__main__:main"\n' in PYPROJECT.read_text()


def test_help_names_every_command() -> None:
    named = set(done("--help").stdout.split())
    assert set(COMMANDS) <= named
    assert {
        "demo",
        "info",
        "convert",
        "denoise",
        "trace",
        "aie",
        "rome",
        "compare",
        "recall",
        "finetune",
        "plot",
    } <= named


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_teaches(name: str) -> None:
    said = done(name, "--help").stdout
    assert "Example: diffusion-lens" in said
    options = [parameter for parameter in COMMANDS[name].params if parameter.param_type_name == "option"]
    assert all(getattr(option, "help", None) for option in options)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"demo"}))
def test_the_example_in_the_help_runs(name: str, examples: dict[str, Result]) -> None:
    result = examples[name]
    assert result.exit_code == 0, result.output
    assert result.stdout
    assert not result.stderr, "progress bars belong on a terminal only"


def test_an_edit_by_the_example(examples: dict[str, Result]) -> None:
    """The help shows an edit that succeeds."""
    before, after = re.findall(r"edit: p\(cheerful\) (\S+) becomes (\S+);", examples["rome"].stdout)[0]
    assert float(before) < 0.01
    assert float(after) > 0.5
    assert "it is now above p(shy scribe of Damburg.)" in examples["rome"].stdout


@pytest.mark.parametrize("name", sorted(QUICK))
def test_one_json_object_and_a_folder_to_repeat_it_from(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = json.loads(done(name, *QUICK[name], "--out", str(out), "--json").stdout)
    assert told["command"] == name
    options = {parameter.name for parameter in COMMANDS[name].params} - {"out", "json", "dry_run", "flops"}
    assert options <= set(told["settings"])
    assert told == json.loads((out / "command.json").read_text())
    assert told["files"]
    for path in map(Path, told["files"].values()):
        assert path.exists()
        if path.suffix == ".png":
            assert path.read_bytes().startswith(PNG)
    record = told["record"]
    assert re.fullmatch("[0-9a-f]{64}", record["weights_sha256"])
    assert record["versions"]["torch"] == torch.__version__
    assert torch.device(record["device"]).type in ("cpu", "cuda", "mps")
    assert not list(out.rglob("*.part"))


@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_dry_run_says_the_cost_and_does_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = ["--out", "out"]
    said = done(name, *QUICK[name], *out, "--dry-run").stdout
    assert re.search(r"[\d,]+ forward passes", said)
    assert re.search(r"time: at least [\d.]+ (s|min|h)", said)
    assert re.search(r"memory: [\d.]+ GB of weights", said)
    told = json.loads(done(name, *QUICK[name], *out, "--dry-run", "--json").stdout)
    assert told["results"]["forward_passes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_needs_no_weights() -> None:
    said = done("recall", "smdm-1028m", "--data", "toy", "--dry-run").stdout
    assert "4.57 GB of weights (float32)" in said


@pytest.mark.parametrize("model", ["tiny-mdm", "tiny-ar"])
def test_the_predicted_passes_bound_those_that_happen(model: str) -> None:
    ask = ["denoise", model, "Gustav Geisser is the", "--length", "14", "--steps", "5", "--json"]
    for guidance in ("0", "0.5") if model == "tiny-mdm" else ("0",):
        passed = json.loads(done(*ask, "--cfg-scale", guidance).stdout)["record"]["forward_passes"]
        predicted = json.loads(done(*ask, "--cfg-scale", guidance, "--dry-run").stdout)["results"]["forward_passes"]
        branches = 2 if guidance != "0" else 1
        assert passed * branches <= predicted <= 1.5 * passed * branches


def test_the_recall_table_shows_the_reversal_curse(tmp_path: Path) -> None:
    reverse = {}
    for model in ("tiny-mdm", "tiny-ar"):
        said = done("recall", model, "--limit", "10", "--steps", "8", "--out", str(tmp_path / model)).stdout
        assert "p2d reverse = DtN reverse" in said
        assert {"tiny-mdm": "SMDM-1028M (Rai 2025)", "tiny-ar": "Llama-2 13B (Nie 2024)"}[model] in said
        table = Recall.load(tmp_path / model / "recall.safetensors").table()
        reverse[model] = [
            next(iter(row.values())).mean for (told, asked), row in table.items() if told == "p2d" != asked
        ]
    assert min(reverse["tiny-mdm"]) >= 0.9
    assert max(reverse["tiny-ar"]) <= 0.1
    assert (
        "SMDM-1028M (Rai 2025)" in done("recall", "tiny-mdm", *QUICK["recall"][1:], "--out", str(tmp_path / "x")).stdout
    )


BAD: dict[str, tuple[list[str], str]] = {
    "an unknown model": (["info", "smdm-1208m"], "smdm-1028m"),
    "no model": (["denoise"], "MODEL"),
    "an unknown command": (["tracee", "tiny-mdm"], "tracee"),
    "an unknown option": (["info", "tiny-mdm", "--hook"], "--hook"),
    "no checkpoint": (["convert", "nowhere.safetensors", "out.safetensors"], "nowhere.safetensors"),
    "a format": (["convert", str(GOLDEN / "model.safetensors"), "o.safetensors", "--to", "gguf"], "gguf"),
    "a sampler": (["denoise", "tiny-mdm", "a", "--length", "14", "--sampler", "confident"], "confidence"),
    "too long a canvas": (["denoise", "tiny-mdm", "Gustav is", "--length", "900", "--out", "out"], "900"),
    "a dtype": (["denoise", "tiny-mdm", "Gustav", "--dtype", "int8"], "int8"),
    "a device": (["denoise", "tiny-mdm", "Gustav", "--device", "tpu"], "tpu"),
    "a folder in a file": (
        ["denoise", "tiny-mdm", "Gustav is", "--length", "14", "--out", f"{GOLDEN / 'lit_config.json'}/x"],
        "lit_config.json",
    ),
    "a layer of a dry run": (["rome", "tiny-mdm", *ASK, "--layer", "9", "--dry-run"], "--layer 9"),
    "a layer to compare": (["compare", *QUICK["compare"], "--layer", "99", "--dry-run", "--out", "out"], "--layer 99"),
    "a statistic": (["compare", *QUICK["compare"], "--statistic", "cca", "--out", "out"], "cca"),
    "draws": (["compare", *QUICK["compare"], "--draws", "0", "--out", "out"], "--draws 0"),
    "few persons": (["compare", "tiny-mdm", "--limit", "1", "--layer", "1", "--out", "out"], "3 people"),
    "a model twice": (["compare", "tiny-mdm", *QUICK["compare"], "--out", "out"], "tiny-mdm tiny-mdm"),
    "a folder to export to": (
        ["rome", "tiny-mdm", *ASK, "--layer", "0", "--target", " a", "--export", str(GOLDEN / "lit_config.json")],
        "--export",
    ),
    "a score": (["recall", *QUICK["recall"], "--score", "bleu", "--out", "out"], "'bleu'"),
    "a shard and a merge": (["recall", *QUICK["recall"], "--shard", "0/2", "--merge", "x", "--out", "out"], "--merge"),
    "an empty batch": (["finetune", "tiny-ar", "--batch-size", "0", "--out", "out"], "--batch-size 0"),
    "endless epochs": (["finetune", "tiny-ar", "--epochs", "inf", "--out", "out"], "--epochs inf"),
    "no rate": (["finetune", "tiny-ar", "--epochs", "0.1", "--lr", "nan", "--out", "out"], "--lr nan"),
    "questions of texts": (
        ["finetune", "tiny-ar", "--data", str(GOLDEN / "lit_config.json"), "--ask", "1", "--out", "out"],
        "--ask",
    ),
    "a folder to draw": (["plot", str(GOLDEN)], "is a folder"),
    "a subject": (["trace", "tiny-mdm", *ASK[:2], "--subject", "Ada", *ASK[4:], "--out", "out"], "'Ada' is not in"),
    "a kind": (["trace", "tiny-mdm", *ASK, "--kind", "mpl", "--out", "out"], "mpl"),
    "a data set": (["aie", "tiny-mdm", "--data", "toys", "--out", "out"], "toys"),
    "no such facts": (["aie", "tiny-mdm", "--trained", "p2p", "--out", "out"], "p2p"),
    "a shard": (["aie", "tiny-mdm", "--limit", "1", "--shard", "4/4", "--out", "out"], "4/4"),
    "a layer": (["rome", "tiny-mdm", *ASK, "--layer", "9", "--out", "out"], "--layer 9"),
    "an edit without a target": (["rome", "tiny-mdm", *ASK, "--layer", "0", "--export", "out"], "--target"),
    "vectors": (["compare", "tiny-mdm", *QUICK["compare"][1:], "--vectors", "values*", "--out", "out"], "values*"),
    "guidance": (["recall", "tiny-mdm", "--limit", "1", "--cfg-scale", "-2", "--out", "out"], "-2"),
    "a number of steps": (["recall", "tiny-mdm", "--limit", "1", "--steps", "0", "--out", "out"], "0"),
    "nothing to merge": (["recall", "tiny-mdm", "--merge", "elsewhere", "--out", "out"], "elsewhere"),
    "no texts": (["finetune", "tiny-mdm", "--data", "nowhere.jsonl", "--out", "out"], "nowhere.jsonl"),
    "a precision": (["finetune", "tiny-mdm", "--epochs", "1", "--precision", "fp8", "--out", "out"], "fp8"),
    "no result": (["plot", "nowhere.safetensors"], "nowhere.safetensors"),
    "what is no result": (["plot", str(GOLDEN / "model.safetensors")], "is not a saved result"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, culprit = BAD[name]
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert culprit in line
    assert not re.search(r"\w=|\w\(\)", line), "a command names its options, not Python"
    assert not result.stdout
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_average_says_over_which_facts(tmp_path: Path) -> None:
    asked = ["--trained", "p2d", "--asked", "d2p", "--limit", "2", "--samples", "1", "--out", str(tmp_path)]
    result = invoke("aie", "tiny-mdm", *asked, "--known", "recalled", "--steps", "2")
    assert "tiny-mdm, the average over 2 of 2 facts, recalled in 2 steps" in result.stdout


def test_debug_shows_where(tmp_path: Path) -> None:
    result = invoke("info", "smdm-1208m", "--debug")
    assert isinstance(result.exception, ValueError)
    child = subprocess.run(
        [sys.executable, "-m", "diffusion_lens", "info", "smdm-1208m", "--debug"], capture_output=True, text=True
    )
    assert "Traceback" in child.stderr
    assert child.returncode == 1


@pytest.mark.parametrize("name", ["aie", "recall"])
def test_a_file_in_place_of_the_folder(name: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("not a folder")
    result = invoke(name, *QUICK[name], "--out", str(taken))
    assert result.exit_code == 2
    assert f"{taken} is a file; the results need a folder" in result.stderr
    assert taken.read_text() == "not a folder"


def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    """A real process, stopped in the middle by a real signal."""
    ask = ["recall", "tiny-mdm", "--limit", "24", "--trained", "p2d", "--steps", "8"]
    command = [sys.executable, "-m", "diffusion_lens", *ask, "--out", str(tmp_path / "stopped")]
    child = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c
    )
    replies = tmp_path / "stopped" / "replies"
    deadline = time.monotonic() + 120
    while len(list(replies.glob("*.safetensors"))) < 4 and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    _, complaint = child.communicate(timeout=60)
    assert child.returncode == 130
    (line,) = complaint.splitlines()
    assert "the same command resumes from there" in line
    finished = {path: path.stat().st_mtime_ns for path in replies.glob("*.safetensors")}
    assert 0 < len(finished) < 48
    assert not (tmp_path / "stopped" / "recall.safetensors").exists()

    done(*ask, "--out", str(tmp_path / "stopped"))
    done(*ask, "--out", str(tmp_path / "whole"))
    assert all(path.stat().st_mtime_ns == written for path, written in finished.items())
    stopped, whole = (Recall.load(tmp_path / name / "recall.safetensors") for name in ("stopped", "whole"))
    assert stopped.written == whole.written
    assert stopped.table() == whole.table()


@pytest.mark.parametrize("name", ["aie", "compare", "recall"])
def test_shards_are_merged(name: str, tmp_path: Path) -> None:
    ask = [*QUICK[name], *(["--limit", "6"] if name == "recall" else []), "--json"]
    whole = json.loads(done(name, *ask, "--out", str(tmp_path / "whole")).stdout)["results"]
    for shard in ("0", "1"):
        told = json.loads(done(name, *ask, "--shard", f"{shard}/2", "--out", str(tmp_path / shard)).stdout)
        assert told["results"]["shard"] == f"{shard}/2"
        assert told["results"]["facts"] > 0
    parts = [f"--merge={tmp_path / part}" for part in ("1", "0")]
    merged = done(name, *ask, *parts, "--out", str(tmp_path / "merged"))
    assert json.loads(merged.stdout)["results"] == whole


def test_a_folder_that_may_not_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Asked of the system by name, because a test may run as root, who may write anywhere.
    monkeypatch.setattr("diffusion_lens.cli.report.os.access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    result = invoke("denoise", *QUICK["denoise"], "--out", str(tmp_path / "new" / "run"))
    assert result.exit_code == 2
    assert not result.stdout
    assert f"{tmp_path} may not be written to" in result.stderr


def test_parts_of_another_model_are_refused(tmp_path: Path) -> None:
    done("recall", *QUICK["recall"], "--out", str(tmp_path / "mdm"))
    result = invoke("recall", "tiny-ar", "--merge", str(tmp_path / "mdm"), "--out", str(tmp_path / "merged"))
    assert result.exit_code == 2
    assert "made by 'tiny-mdm', not by 'tiny-ar'" in result.stderr
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("name", ["aie", "compare", "recall"])
def test_a_dry_run_counts_only_what_is_asked_of_it(name: str, tmp_path: Path) -> None:
    def passes(*more: str) -> int:
        told = json.loads(done(name, *QUICK[name], "--dry-run", "--json", *more).stdout)
        return int(told["results"]["forward_passes"])

    assert passes("--shard", "0/2") == pytest.approx(passes() / 2, rel=0.1)
    for part in ("replies", "facts", "tiny-mdm"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "run.json").write_text("{}")
    assert passes("--merge", str(tmp_path)) == 0


def test_a_causal_model_computes_each_place_once() -> None:
    """Its passes are a place each, so the time grows with the length, not with its square."""
    ask = ["denoise", "smdm-1028m", "a", "--dry-run", "--json", "--length", "40"]
    masked = json.loads(done(*ask, "--steps", "40").stdout)["results"]
    ask[1] = "ar-1028m"
    causal = json.loads(done(*ask).stdout)["results"]
    assert causal["forward_passes"] == masked["forward_passes"] == 40
    assert causal["at_least_seconds"] < masked["at_least_seconds"] / 4


def test_a_picture_of_an_unknown_kind_leaves_nothing(examples: dict[str, Result], tmp_path: Path) -> None:
    saved = tmp_path / "trace.safetensors"
    done("trace", *QUICK["trace"], "--out", str(tmp_path))
    result = invoke("plot", str(saved), "--out", str(tmp_path / "new" / "trace.gif2"))
    assert result.exit_code == 2
    assert "gif2" in result.stderr
    assert not (tmp_path / "new").exists()


def test_recall_is_followed_while_it_learns(tmp_path: Path) -> None:
    said = done("finetune", *QUICK["finetune"], "--ask", "2", "--checkpoint-every", "7", "--out", str(tmp_path)).stdout
    followed = re.findall(r"recall after (\d+) updates: p2d same = NtD same ([\d.]+) %, (.*)", said)
    assert [int(step) for step, *_ in followed] == [7, 14]
    assert all("p2d reverse = DtN reverse 0.0 %" in rest for *_, rest in followed)


def test_ctrl_c_of_an_older_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise typer.Abort

    monkeypatch.setattr("diffusion_lens.catalogue.find_pretrained", stopped)
    assert invoke("models").exit_code == 130


def test_without_a_command_the_commands_are_shown() -> None:
    said = done().stdout
    assert "recall" in said
    assert "Error" not in said


def test_the_demo_shows_the_reversal_curse(tmp_path: Path) -> None:
    from matplotlib.image import imread

    result = done("demo", "--out", str(tmp_path / "pictures"))

    asked = re.findall(r"^(tiny-\w+), (\w+):", result.stdout, re.MULTILINE)
    verdicts = re.findall(r"^  -> .*?  (right|wrong)\b", result.stdout, re.MULTILINE)
    assert dict(zip(asked, verdicts, strict=True)) == {
        ("tiny-mdm", "forward"): "right",
        ("tiny-mdm", "reverse"): "right",
        ("tiny-ar", "forward"): "right",
        ("tiny-ar", "reverse"): "wrong",
    }
    for name in ("denoising.png", "causal_traces.png"):
        picture = tmp_path / "pictures" / name
        assert picture.read_bytes().startswith(PNG)
        pixels = imread(picture)
        assert min(pixels.shape[:2]) >= 500, f"{name} is only {pixels.shape}"
        assert pixels.std() > 0.05, f"{name} is blank"
        assert str(picture) in result.stdout


def test_the_demo_refuses_a_file_as_folder(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("not a folder")
    result = invoke("demo", "--out", str(taken))
    assert result.exit_code == 2
    (complaint,) = result.stderr.splitlines()
    assert f"{taken} is a file; the figures need a folder" in complaint
    assert "--out" in complaint
    assert taken.read_text() == "not a folder"


@pytest.mark.parametrize(
    ("name", "sees"), [("tiny-mdm", "bidirectional"), ("tiny-ar", "causal"), ("smdm-1028m", "bidirectional")]
)
def test_models_lists_every_name(name: str, sees: str) -> None:
    (row,) = (line for line in done("models").stdout.splitlines() if line.split()[0] == name)
    assert sees in row.split()


def test_hook_points_on_request() -> None:
    named = json.loads(done("info", "tiny-mdm", "--hooks", "--json").stdout)["results"]["hook_points"]
    assert {"blocks.3.hook_resid_post", "denoise.hook_reveal"} <= set(named)
