"""`diffusion-lens explore` writes a page or serves one; what does not fit is refused before a model is loaded."""

import os
import re
import signal
import sys
import urllib.request
from pathlib import Path

import pytest
from page_reader import PageFile
from processes import forked
from typed_commands import ASK
from typer.testing import CliRunner, Result

from diffusion_lens.__main__ import main
from diffusion_lens.cli import app
from diffusion_lens.cli.load_model import ModelChoice


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, ["explore", *arguments])


@pytest.mark.usefixtures("few_samples")
def test_a_file_shows_the_pair_without_a_server(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    asked = [*ASK[:2], *ASK[4:], "--limit", "1"]
    result = invoke("tiny-mdm", "--against", "pair", *asked, "--steps", "2", "--attention", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert re.fullmatch(rf"Wrote {re.escape(str(out))} \([\d,]+ bytes\)\.\n", result.stdout)
    page = PageFile(out.read_text(encoding="utf-8"))
    assert [model["name"] for model in page.manifest["models"]] == ["tiny-mdm", "tiny-ar"]
    assert (page.run()["attention"]["layers"], page.run()["n_steps"]) == ([1], 2)
    assert page.texts(page.run()["answer"]["words"]) == ["brave", "drummer", "of", "Rolsen", "."]
    assert page.run()["traces"] == []


def written(out: Path, *arguments: str) -> PageFile:
    result = invoke(*arguments, "--out", str(out))
    assert result.exit_code == 0, result.output
    return PageFile(out.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("few_samples")
def test_a_diffusion_model_is_asked_in_reverse_and_an_ar_model_alone_forward(tmp_path: Path) -> None:
    page = written(tmp_path / "pair.html", "site-mdm", "--against", "pair", "--limit", "1")
    mdm, ar = page.manifest["runs"][:2]
    fact = next(fact for fact in page.manifest["facts"] if fact["prompt"] == mdm["prompt"])
    assert (fact["trained"], fact["asked"]) == ("p2d", "d2p")
    assert mdm["prompt"] == ar["prompt"]
    assert mdm["verdict"] == {"right": True, "wrote": fact["answer"].strip(), "answer": fact["answer"]}
    assert (ar["verdict"]["right"], ar["verdict"]["answer"]) == (False, fact["answer"])
    # The canvas is that of the data set, and hardly a step writes nothing.
    assert [len(run["canvases"][0]) for run in (mdm, ar)] == [16, 16]
    assert len({at for at in mdm["revealed_at"] if at >= 0}) >= mdm["n_steps"] - 1
    for run in (mdm, ar):
        assert page.texts([run["canvases"][-1][run["end"]]], page.manifest["runs"].index(run)) == ["<eos>"]

    alone = written(tmp_path / "ar.html", "tiny-ar", "--limit", "1")
    fact = next(fact for fact in alone.manifest["facts"] if fact["prompt"] == alone.run()["prompt"])
    assert (fact["trained"], fact["asked"]) == ("p2d", "p2d")


@pytest.mark.usefixtures("few_samples")
def test_the_table_has_the_facts_that_are_chosen(tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    file.write_text('{"prompt": "Gustav Geisser is the", "subject": "Gustav Geisser", "answer": " brave drummer"}\n')
    page = written(tmp_path / "page.html", "tiny-mdm", "--data", str(file), "--length", "10", "--steps", "2")
    (fact,) = page.manifest["facts"]
    assert (fact["prompt"], fact["values"]["0"]["run"]) == (page.run()["prompt"], page.run()["id"])
    page = written(
        tmp_path / "one.html", "tiny-mdm", "--trained", "d2p", "--asked", "d2p", "--limit", "2", "--steps", "1"
    )
    assert [(fact["trained"], fact["asked"]) for fact in page.manifest["facts"]] == [("d2p", "d2p")] * 2
    page = written(tmp_path / "two.html", "tiny-mdm", "--steps", "1")
    asked = [fact["asked"] for fact in page.manifest["facts"]]
    assert (len(asked), asked.count("d2p")) == (60, 30)


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
    monkeypatch.setattr("diffusion_lens.cli.report.find_spec", lambda package: None)
    result = invoke("tiny-mdm")
    assert result.exit_code == 2
    assert "pip install 'diffusion-lens[explore]'" in result.output


def test_the_page_is_served_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which gets a real signal."""
    complaint, (said, says) = tmp_path / "complaint", os.pipe()

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the child of a background job would ignore it
        monkeypatch.setattr(sys, "stdout", os.fdopen(says, "w", buffering=1))
        monkeypatch.setattr(sys, "stderr", complaint.open("w"))
        asked = ["explore", "tiny-mdm", *ASK, "--steps", "2", "--no-browser"]
        monkeypatch.setattr(sys, "argv", ["diffusion-lens", *asked])
        main()

    with forked(work) as child, os.fdopen(said) as lines:
        os.close(says)
        assert lines.readline() == "Explore tiny-mdm at\n"
        address = lines.readline()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}\n", address)
        assert lines.readline() == "Ctrl-C ends it.\n"
        assert b"mountLive" in urllib.request.urlopen(address.strip(), timeout=60).read()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
        child.join(timeout=60)
    assert (child.exitcode, complaint.read_text()) == (130, "Stopped.\n")
