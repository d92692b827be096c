"""The site: its Python says what the pages say it says, its tables are complete, and it builds without a warning."""

import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from filelock import FileLock
from snippets import blocks, run_python
from typer.main import get_command
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if "_build" not in page.parts)
WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(DOCS / page))]
# For the pictures that they draw; a warning, and so an error, where they print what they do not say.
RUN_BY_THE_BUILD = {"tutorial.md", "recall.md", "keys_and_values.md"}
WITH_SESSIONS = [page for page in PAGES if any(block.language == "console" for block in blocks(DOCS / page))]


@pytest.fixture
def families() -> Iterator[None]:
    """A page may list a family of its own; the others must not meet it."""
    from weight_conversion.registry import FAMILIES

    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once for all workers."""
    temporary = tmp_path_factory.getbasetemp()
    shared = temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary
    with FileLock(shared / "site.lock"):
        return shared / "checkout" / "site" if (shared / "checkout").exists() else build_site(shared / "checkout")


def build_site(copy: Path) -> Path:
    """Build from a copy, so that nothing of an earlier build is in it and nothing is left in the checkout."""
    shutil.copytree(DOCS, copy / "docs", ignore=shutil.ignore_patterns("_build", "_made", "__pycache__"))
    for beside in ("README.md", "diffusion_lens", "tests"):  # what pages include, and the runner of snippets
        (copy / beside).symlink_to(ROOT / beside)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "docs", "site"]
    build = subprocess.run(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    if build.returncode:
        shutil.rmtree(copy)
    assert build.returncode == 0, build.stderr
    return copy / "site"


@pytest.mark.usefixtures("families")
@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page not in RUN_BY_THE_BUILD])
def test_python_runs_and_prints_what_the_page_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block, said in run_python(DOCS / page):
        told = block.output or ""
        assert said == told, f"{page}, line {block.line}, prints\n{said}\nand the page says\n{told}"


def test_the_pages_that_teach_have_python_to_run() -> None:
    taught = {"start.md", "tutorial.md", "concepts.md", "write_a_sampler.md", "add_a_family.md"}
    taught |= {"from_transformer_lens.md", "from_rome.md", "from_smdm.md", "families.md", "finetune.md"}
    assert taught | RUN_BY_THE_BUILD <= set(WITH_PYTHON)


def test_the_pages_that_show_the_command_line_have_sessions() -> None:
    assert WITH_SESSIONS == ["check.md", "command_line.md"]


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


def text_of(page: Path) -> str:
    """The words of a built page."""
    return re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))


def test_every_hook_point_has_its_row(site: Path, tiny) -> None:
    text = text_of(site / "hook_points.html")
    names = {re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name) for name in tiny.hook_dict}
    assert len(names) == 29
    assert all(re.search(rf"^{re.escape(name)}$", text, re.MULTILINE) for name in names)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("hook_embed", "Float[batch pos d_model]"),
        ("blocks.{i}.ln1.hook_scale", "Float[batch pos 1]"),
        ("blocks.{i}.attn.hook_k", "Float[batch pos kv_head d_head]"),
        ("blocks.{i}.attn.hook_pattern", "Float[batch head query key]"),
        ("blocks.{i}.attn.hook_result", "Float[batch pos head d_model]"),
        ("blocks.{i}.mlp.hook_post", "Float[batch pos d_mlp]"),
        ("denoise.hook_logits", "Float[batch pos d_vocab_out]"),
        ("denoise.hook_reveal", "Bool[batch pos]"),
    ],
)
def test_hook_points_have_their_shapes(site: Path, name: str, shape: str) -> None:
    text = text_of(site / "hook_points.html")
    assert re.search(rf"^{re.escape(name)}\n{re.escape(shape)}$", text, re.MULTILINE)


def test_every_axis_has_its_row(site: Path) -> None:
    from diffusion_lens import shapes

    assert shapes.__doc__ is not None
    glossary = shapes.__doc__.split("\n\n")[1].splitlines()
    text = text_of(site / "shapes.html")
    assert len(glossary) >= 30
    for line in glossary:
        words, meaning = re.split(r"  +", line)
        row = re.escape(f"{words}\n{meaning.replace('`', '')}")
        assert re.search(rf"^{row}$", text, re.MULTILINE), f"{words} is missing"


@pytest.mark.parametrize(
    "room",
    [
        "diffusion_lens",
        "diffusion_lens.analysis",
        "diffusion_lens.analysis.rome",
        "diffusion_lens.checks",
        "diffusion_lens.data",
        "diffusion_lens.denoising.samplers",
        "diffusion_lens.evaluation",
        "diffusion_lens.training",
        "weight_conversion",
    ],
)
def test_every_public_function_and_class_is_in_the_reference(site: Path, room: str) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    documented = {name.rsplit(".", 1)[-1] for name in re.findall(r'<dt [^>]*id="([\w.]+)"', pages)}
    module = import_module(room)
    missing = [name for name in module.__all__ if callable(getattr(module, name)) and name not in documented]
    assert not missing, f"{room} has public names that the reference lacks: {missing}"


def test_every_command_and_option_is_on_its_page(site: Path) -> None:
    from diffusion_lens.cli import app

    page = site / "command_line.html"
    text, html = text_of(page), page.read_text(encoding="utf-8")
    for name, command in get_command(app).commands.items():
        section = re.search(rf'<section id="{name}">(.*?)</section>', html, re.DOTALL)
        assert section, f"{name} has no section"
        assert f"diffusion-lens {name}" in re.sub(r"<[^>]+>", "", section[1])
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.opts[0] in section[1], f"{name} {parameter.opts[0]} is missing"
    for code in ("0", "1", "2", "130"):
        assert re.search(rf"^{code}\n\w+", text, re.MULTILINE)


def test_published_numbers_stand_under_both_names(site: Path) -> None:
    """Rai's row and the paper's number for people told description first, asked for the description."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", (site / "recall.html").read_text(encoding="utf-8"), re.DOTALL)
    cells = [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", row, re.DOTALL)] for row in rows]
    found = {tuple(row[:2]): row[2:] for row in cells if row}
    rai = ["0", "0.7", "17", "27.3", "31", "29.7", ""]
    assert found["d2p reverse = NtD reverse", "SMDM-1028M (Rai 2025)"] == rai
    assert ["d2p_reverse_prompts_test", "d2p reverse", "NtD reverse"] in [row[:3] for row in cells]
    paper = [row for row in cells if row[:2] == ["d2p reverse = NtD reverse", "SMDM-1028M (Nie 2024)"]]
    assert [[each for each in row[2:] if each] for row in paper] == [["37*"], ["67*"]]  # accuracy, then BLEU


def test_families_and_their_sizes(site: Path) -> None:
    from weight_conversion.registry import FAMILIES

    families, sizes = text_of(site / "families.html"), text_of(site / "add_a_family.html")
    for name in set(FAMILIES) - {"diffusion_lens"}:
        assert re.search(rf"^{name}$", families, re.MULTILINE), f"{name} is missing"
        lines = (ROOT / "weight_conversion" / "families" / f"{name}.py").read_text(encoding="utf-8").count("\n")
        assert re.search(rf"^families/{name}.py\n{lines}$", sizes, re.MULTILINE)


def test_the_pictures_are_made_by_the_pages(site: Path) -> None:
    drawing = {page for page in WITH_PYTHON if "(_made/" in (DOCS / page).read_text(encoding="utf-8")}
    assert drawing == RUN_BY_THE_BUILD
    pages = "".join((DOCS / page).read_text(encoding="utf-8") for page in drawing)
    shown = set(re.findall(r"!\[[^\]]*\]\(_made/(\w+\.png)\)", pages))
    assert len(shown) == 7
    assert all((site / "_images" / name).read_bytes().startswith(b"\x89PNG") for name in shown)


def test_nothing_is_fetched_to_show_a_page(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)\"", page.read_text(encoding="utf-8")
        )
        assert not fetched, f"{page.name} needs {fetched}"
