"""The site: its Python says what the pages say it says, its tables are complete, and it builds without a warning."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from filelock import FileLock
from snippets import blocks, run_python

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if "_build" not in page.parts)
WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(DOCS / page))]
RUN_BY_THE_BUILD = "tutorial.md"  # for its pictures; a warning, and so an error, where it prints what it does not say


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
@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page != RUN_BY_THE_BUILD])
def test_python_runs_and_prints_what_the_page_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block, said in run_python(DOCS / page):
        told = block.output or ""
        assert said == told, f"{page}, line {block.line}, prints\n{said}\nand the page says\n{told}"


def test_the_pages_that_teach_have_python_to_run() -> None:
    taught = {"start.md", "tutorial.md", "concepts.md", "write_a_sampler.md", "add_a_family.md"}
    taught |= {"from_transformer_lens.md", "from_rome.md", "from_smdm.md"}
    assert taught <= set(WITH_PYTHON)


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


def test_the_pictures_are_made_by_the_tutorial(site: Path) -> None:
    shown = set(re.findall(r"!\[[^\]]*\]\(_made/(\w+\.png)\)", (DOCS / "tutorial.md").read_text(encoding="utf-8")))
    assert len(shown) == 4
    assert all((site / "_images" / name).read_bytes().startswith(b"\x89PNG") for name in shown)


def test_nothing_is_fetched_to_show_a_page(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)\"", page.read_text(encoding="utf-8")
        )
        assert not fetched, f"{page.name} needs {fetched}"
