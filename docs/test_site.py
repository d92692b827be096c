"""The site that `make docs` has built: its tables are complete, and no page fetches anything."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = DOCS / "_build"


def text_of(page: Path) -> str:
    """The words of a built page."""
    return re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["tiny-mdm", "tiny-ar"])
def test_every_hook_point_has_its_row(name: str) -> None:
    from diffusion_lens import HookedDiffusionTransformer

    text = text_of(SITE / "write_a_hook.html")
    model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
    names = {re.sub(r"^blocks\.\d+\.", "blocks.{i}.", point) for point in model.hook_dict}
    assert len(names) == 34
    assert all(re.search(rf"^{re.escape(name)}$", text, re.MULTILINE) for name in names)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("hook_embed", "Float[batch pos d_model]"),
        ("blocks.{i}.ln1.hook_scale", "Float[batch pos 1]"),
        ("blocks.{i}.attn.hook_k", "Float[batch pos kv_head d_head]"),
        ("blocks.{i}.attn.hook_k_input", "Float[batch pos kv_head d_model]"),
        ("blocks.{i}.attn.hook_pattern", "Float[batch head query key]"),
        ("blocks.{i}.attn.hook_result", "Float[batch pos head d_model]"),
        ("blocks.{i}.mlp.hook_post", "Float[batch pos d_mlp]"),
        ("denoise.hook_logits", "Float[batch pos d_vocab_out]"),
        ("denoise.hook_reveal", "Bool[batch pos]"),
    ],
)
def test_hook_points_have_their_shapes(name: str, shape: str) -> None:
    text = text_of(SITE / "write_a_hook.html")
    assert re.search(rf"^{re.escape(name)}\n{re.escape(shape)}$", text, re.MULTILINE)


def test_every_axis_has_its_row() -> None:
    from diffusion_lens.model import shapes

    assert shapes.__doc__ is not None
    glossary = shapes.__doc__.split("\n\n")[1].splitlines()
    text = text_of(SITE / "write_a_hook.html")
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
        "one_layer",
        "diffusion_lens.training",
        "weight_conversion",
    ],
)
def test_every_public_function_and_class_is_in_the_reference(room: str) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (SITE / "api").glob("*.html"))
    documented = {name.rsplit(".", 1)[-1] for name in re.findall(r'<dt [^>]*id="([\w.]+)"', pages)}
    module = import_module(room)
    missing = [name for name in module.__all__ if callable(getattr(module, name)) and name not in documented]
    assert not missing, f"{room} has public names that the reference lacks: {missing}"


def test_every_command_and_option_is_on_its_page() -> None:
    from diffusion_lens.cli import app

    page = SITE / "command_line.html"
    text, html = text_of(page), page.read_text(encoding="utf-8")
    for name, command in get_command(app).commands.items():
        section = re.search(rf'<section id="{name}">(.*?)</section>', html, re.DOTALL)
        assert section, f"{name} has no section"
        written = name.replace("-", " ")  # `dictionary-train` is called as two words
        assert f"diffusion-lens {written}" in re.sub(r"<[^>]+>", "", section[1])
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.opts[0] in section[1], f"{name} {parameter.opts[0]} is missing"
    for code in ("0", "1", "2", "130"):
        assert re.search(rf"^{code}\n\w+", text, re.MULTILINE)


def test_the_notebooks_have_the_totals_that_their_script_prints() -> None:
    script = ROOT / "benchmarks" / "transformer_lens_notebooks.py"
    printed = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
    totals = re.findall(r"^(\w+) +tiny-(?:mdm|ar) +(\d+) cells: (.+)$", printed, re.MULTILINE)
    assert len(totals) == 12
    text = text_of(SITE / "coming_from.html")
    for (name, cells, diffusion), (_, _, baseline) in zip(totals[::2], totals[1::2], strict=True):
        assert f"{name}\n{cells}\n{diffusion}\n{baseline}\n" in text
    assert "wrong" not in printed


def test_each_tool_of_transformer_lens_has_its_row() -> None:
    from transformer_lens.tools import analysis

    text = text_of(SITE / "coming_from.html")
    assert all(re.search(rf"^{name}$", text, re.MULTILINE) for name in analysis.__all__)


def test_published_numbers_stand_under_both_names() -> None:
    """Rai's row and the paper's number for people told description first, asked for the description."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", (SITE / "study.html").read_text(encoding="utf-8"), re.DOTALL)
    cells = [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", row, re.DOTALL)] for row in rows]
    found = {tuple(row[:2]): row[2:] for row in cells if row}
    rai = ["0", "0.7", "17", "27.3", "31", "29.7", ""]
    assert found["d2p reverse = NtD reverse", "SMDM-1028M (Rai 2025)"] == rai
    assert ["d2p_reverse_prompts_test", "d2p reverse", "NtD reverse"] in [row[:3] for row in cells]
    paper = [row for row in cells if row[:2] == ["d2p reverse = NtD reverse", "SMDM-1028M (Nie 2024)"]]
    assert [[each for each in row[2:] if each] for row in paper] == [["37*"], ["67*"]]  # accuracy, then BLEU


def test_families_and_their_sizes() -> None:
    from weight_conversion.registry import FAMILIES

    families, sizes = text_of(SITE / "families.html"), text_of(SITE / "extend.html")
    for name in set(FAMILIES) - {"diffusion_lens"}:
        assert re.search(rf"^{name}$", families, re.MULTILINE), f"{name} is missing"
        assert re.search(rf"\b{name}\b", sizes), f"{name} has no file in the table of sizes"
    for file in (ROOT / "weight_conversion" / "families").glob("*.py"):
        if re.search(r"^FAMILIES\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            lines = file.read_text(encoding="utf-8").count("\n")
            assert re.search(rf"^families/{file.name}\n.*\n{lines}$", sizes, re.MULTILINE), file.name


def test_the_pictures_are_made_by_the_pages() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    shown = set(re.findall(r"!\[[^\]]*\]\(_made/(\w+\.png)\)", pages))
    assert shown
    assert all((SITE / "_images" / name).read_bytes().startswith(b"\x89PNG") for name in shown)


def test_chromium_takes_pictures_of_the_explorer_and_the_home_page() -> None:
    made = DOCS / "_made"
    for picture in (*made.glob("explorer*.png"), SITE / "_static" / "home.png"):
        header = picture.read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        assert int.from_bytes(header[16:20], "big") == 1280


def test_nothing_is_fetched_to_show_a_page() -> None:
    for page in SITE.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)\"", page.read_text(encoding="utf-8")
        )
        assert not fetched, f"{page.name} needs {fetched}"
