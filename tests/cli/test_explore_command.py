"""`diffusion-lens explore` writes a page or serves one; what does not fit is refused before a model is loaded."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from page_reader import PageFile
from processes import hears_ctrl_c
from typer.testing import CliRunner, Result

from diffusion_lens.cli import app
from diffusion_lens.cli.load_model import ModelChoice

ASK = ["--prompt", "Gustav Geisser is the", "--subject", "Gustav Geisser", "--answer", " brave drummer of Rolsen."]


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, ["explore", *arguments])


def test_a_file_shows_the_pair_without_a_server(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    asked = [*ASK[:2], *ASK[4:]]
    result = invoke("tiny-mdm", "--against", "pair", *asked, "--steps", "2", "--attention", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert re.fullmatch(rf"Wrote {re.escape(str(out))} \([\d,]+ bytes\)\.\n", result.stdout)
    page = PageFile(out.read_text(encoding="utf-8"))
    assert [model["name"] for model in page.manifest["models"]] == ["tiny-mdm", "tiny-ar"]
    assert page.run()["attention"]["layers"] == [1]
    assert page.texts(page.run()["answer"]["words"]) == ["brave", "drummer", "of", "Rolsen", "."]
    assert page.run()["traces"] == []


def test_a_default_prompt_has_the_canvas_of_its_data_set(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = invoke("site-mdm", "--steps", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert len(PageFile(out.read_text(encoding="utf-8")).run()["canvases"][0]) == 16


def test_what_does_not_fit_is_refused_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(ModelChoice, "load", load)
    for arguments, message in (
        (["tiny-mdm", "--out", str(tmp_path / "page.png")], "--out .* ends in .html"),
        (["tiny-mdm", "--attention", "1"], "--attention selects what a file contains, so it needs --out"),
        (["tiny-mdm", *ASK[:4]], "--subject is traced together with --answer"),
        (["tiny-mdm", *ASK[2:]], "give --prompt too"),
        (["smdm-170m"], "no default prompt: give --prompt"),
        (
            ["llama-3-8b", "--against", "pair", "--prompt", "a"],
            "no published pair; name the second model with --against",
        ),
        (["tiny-mdm", "--sampler", "best"], "unknown --sampler 'best'"),
        (["tiny-mdm", "--port", "70000"], "--port"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert re.search(message, result.output), (arguments, result.output)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_lens.cli.extras.find_spec", lambda package: None)
    result = invoke("tiny-mdm")
    assert result.exit_code == 2
    assert "pip install 'diffusion-lens[explore]'" in result.output


def test_the_page_is_served_until_ctrl_c() -> None:
    command = [sys.executable, "-m", "diffusion_lens", "explore", "tiny-mdm", *ASK, "--steps", "2", "--no-browser"]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_ctrl_c,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert child.stdout is not None
    try:
        lines = [child.stdout.readline() for _ in range(3)]
        assert lines[0] == "Explore tiny-mdm at\n"
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}\n", lines[1])
        assert lines[2] == "Ctrl-C ends it.\n"
        assert b"mountLive" in urllib.request.urlopen(lines[1].strip(), timeout=60).read()
        child.send_signal(signal.SIGINT)
        _, complaint = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert (child.returncode, complaint) == (130, "Stopped.\n")
