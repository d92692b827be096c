"""The pages of docs/: their Python and their commands print what the pages say."""

import doctest
import re
import shlex
from pathlib import Path

import pytest
from snippets import LONG, blocks, run_python, same_output
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if "_build" not in page.parts)
WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(DOCS / page))]
# `make docs` runs these, most for the pictures that they draw, and fails where they print other than the page says.
WITH_PICTURES = {page for page in WITH_PYTHON if "](_made/" in (DOCS / page).read_text(encoding="utf-8")}
RUN_BY_THE_BUILD = WITH_PICTURES | LONG
# Pages about published models: tests/test_your_own_model.py runs them on small checkpoints in the same formats.
ON_SMALL_CHECKPOINTS = {"your_own_model.md"}
WITH_SESSIONS = [page for page in PAGES if any(block.language == "console" for block in blocks(DOCS / page))]


@pytest.mark.usefixtures("families", "undrawn_figures")
@pytest.mark.parametrize("page", sorted({*WITH_PYTHON} - RUN_BY_THE_BUILD - ON_SMALL_CHECKPOINTS))
def test_python_runs_and_prints_what_the_page_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block, said in run_python(DOCS / page):
        told = block.output or ""
        assert same_output(said, told), f"{page}, line {block.line}, prints\n{said}\nand the page says\n{told}"


def test_the_pages_that_teach_have_python_to_run() -> None:
    assert {
        "index.md",
        "concepts.md",
        "figures.md",
        "causal_tracing.md",
        "circuit_of_a_run.md",
        "explorer.md",
        "patching.md",
        "study.md",
        "rome.md",
        "run_graphs.md",
        "signatures.md",
        "one_layer.md",
        "papers.md",
        "two_sites.md",
    } == WITH_PICTURES
    taught = {"your_own_facts.md", "write_a_hook.md", "saving_and_loading.md", "circuits.md", "cluster.md"}
    taught |= {"extend.md", "families.md", "finetune.md", "coming_from.md", *ON_SMALL_CHECKPOINTS}
    assert taught | RUN_BY_THE_BUILD <= set(WITH_PYTHON)


def test_the_pages_that_show_the_command_line_have_sessions() -> None:
    assert WITH_SESSIONS == ["command_line.md", "your_own_facts.md", "your_own_model.md"]


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize("page", WITH_SESSIONS)
def test_sessions_are_true(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of a page in order, in one folder; "..." in what it says stands for anything.

    A file that is shown with `cat` is there with this text.
    """
    from diffusion_lens.cli import app

    monkeypatch.chdir(tmp_path)
    runner, code, typed = CliRunner(env={"COLUMNS": "100"}), 0, 0
    for block in blocks(DOCS / page):
        if block.language != "console":
            continue
        for command, told in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
            if command == "echo $?":
                said = f"{code}\n"
            elif command.startswith("cat "):
                Path(command.removeprefix("cat ")).write_text(told, encoding="utf-8")
                said = told
            else:
                program, *arguments = shlex.split(command)
                assert program == "diffusion-lens"
                result = runner.invoke(app, arguments)
                said, code = result.output, result.exit_code
            typed += 1
            assert doctest.OutputChecker().check_output(told, said, doctest.ELLIPSIS), f"{command}\nsays\n{said}"
    assert typed >= (10 if page == "command_line.md" else 2)


def test_links_have_a_text_in_the_plain_file_too() -> None:
    """A site fills in the title of a page that a link names without a text; GitHub shows nothing."""
    teaching = [page for page in PAGES if not page.startswith("api/")]
    assert [page for page in teaching if "[](" in (DOCS / page).read_text(encoding="utf-8")] == []
