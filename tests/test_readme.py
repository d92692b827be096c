"""The Python on the pages runs, and the commands, files and links that they name exist."""

import re
from pathlib import Path

import pytest
from snippets import blocks, run_python, same_output

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "diffusion_lens"
# The site has tests of its own, in test_docs.py.
MARKDOWN = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("diffusion_lens/**/*.md"))
)
WITH_PYTHON = [page for page in MARKDOWN if any(block.language == "python" for block in blocks(ROOT / page))]


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block, said in run_python(ROOT / page):
        told = said if block.output is None else block.output  # a model card need not show what it prints
        assert same_output(said, told), f"{page}, line {block.line}, prints\n{said}\nand the page says\n{told}"


def test_the_readme_has_twenty_lines_of_python_and_is_read_in_one_sitting() -> None:
    [code] = [block for block in blocks(ROOT / "README.md") if block.language == "python"]
    assert len([line for line in code.text.splitlines() if line]) <= 20
    assert code.output
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_the_two_commands_stand_alone(command: str) -> None:
    assert [command] in [block.text.splitlines() for block in blocks(ROOT / "README.md")]


def test_the_list_of_examples_has_all_in_order() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", page, re.MULTILINE)
    assert listed == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert "(examples/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tour_names_every_room_and_no_file_that_is_not_there() -> None:
    tour = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([\w/]+(?:\.py|/))`", tour)
    invented = ("yours.py",)
    missing = [p for p in paths if not p.endswith(invented) and not any((f / p).exists() for f in (ROOT, PACKAGE))]
    assert not missing, f"CONTRIBUTING.md names files that do not exist: {missing}"
    named = {path.removeprefix("diffusion_lens/").split("/")[0] for path in paths}
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    rooms |= {f"analysis/{path.name}" for path in (PACKAGE / "analysis").iterdir()}
    named |= {"/".join(path.rstrip("/").split("/")[:2]) for path in paths}
    unnamed = {room for room in rooms if Path(room).name not in ("__init__.py", "__pycache__")} - named
    assert not unnamed, f"CONTRIBUTING.md does not name {sorted(unnamed)}"


@pytest.mark.parametrize("page", MARKDOWN)
def test_make_targets_exist(page: str) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shell = "\n".join(block.text for block in blocks(ROOT / page) if block.language != "python")
    named = set(re.findall(r"`make ([a-z]+)", (ROOT / page).read_text(encoding="utf-8")))
    named |= set(re.findall(r"^make ([a-z]+)", shell, re.MULTILINE))
    assert named <= set(targets), f"{page} names targets that the Makefile lacks: {sorted(named - set(targets))}"


@pytest.mark.parametrize("page", MARKDOWN)
def test_links_into_the_checkout_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not ((ROOT / page).parent / t).exists()]
    assert not missing, f"{page} links to what is not there: {missing}"
