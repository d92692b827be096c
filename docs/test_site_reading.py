"""What helps a reader of the built site: notebooks, examples, copy buttons, links to source, full signatures."""

import html
import inspect
import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS, SITE = ROOT / "docs", ROOT / "docs" / "_build"
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted(path.stem for path in (DOCS / "notebooks").glob("*.py"))
REFERENCE = sorted((SITE / "api").glob("*.html"))


def page(name: str) -> str:
    return (SITE / name).read_text(encoding="utf-8")


def words(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def signatures() -> list[tuple[str, str, str]]:
    """Kind, full name and markup of every function, class and method of the reference."""
    pattern = r'<dl class="py (function|class|method|exception)">\s*<dt class="sig[^"]*" id="([\w.]+)">(.*?)</dt>'
    found = [each for file in REFERENCE for each in re.findall(pattern, file.read_text(encoding="utf-8"), re.DOTALL)]
    assert len(found) > 400
    return found


def documented(name: str) -> Any:
    """The object of a full name."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        try:
            value = import_module(".".join(parts[:n]))
        except ImportError:
            continue
        for part in parts[n:]:
            value = inspect.getattr_static(value, part) if inspect.isclass(value) else getattr(value, part)
        return getattr(value, "__func__", value)
    raise AssertionError(f"{name} cannot be imported")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_what_its_cells_give(name: str) -> None:
    text = page(f"notebooks/{name}.html")
    inputs, outputs = text.count('class="cell_input'), text.count('class="cell_output')
    assert inputs >= 8
    assert outputs >= inputs - 2  # a cell may only define something, or assert it
    assert "stderr" not in text
    assert "&lt;Axes" not in text
    assert text.count("<img ") >= 2


def test_every_example_has_a_card_and_a_page() -> None:
    gallery = page("gallery.html")
    assert len(EXAMPLES) == 21
    for name in EXAMPLES:
        assert f'href="examples/{name}.html"' in gallery
        assert f'src="_images/{name}.png"' in gallery
        assert (SITE / "_images" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        text = words(page(f"examples/{name}.html"))
        assert f"python examples/{name}.py" in text
        assert "def main(argv" in text
        assert "wrote out/" in text or "more lines" in text


def test_commands_have_copy_buttons_that_leave_the_prompt_out() -> None:
    script = page("_static/copybutton.js")
    assert "div.highlight-console pre" in script
    assert "'$ '" in script
    assert "highlight-output pre" not in script  # what a snippet prints has no button
    assert "_static/copybutton.js" in page("command_line.html")


def test_every_function_class_and_method_links_to_its_source() -> None:
    missing = [name for _, name, markup in signatures() if "viewcode-link" not in markup]
    assert not missing


def test_the_links_to_source_lead_somewhere() -> None:
    for name, _, markup in ((name, kind, markup) for kind, name, markup in signatures()):
        target, anchor = re.findall(r'href="\.\./(_modules/[^"#]+)#([^"]+)"><span class="viewcode-link', markup)[0]
        assert f'id="{anchor}"' in page(target), f"{name}: {target}#{anchor}"


def test_functions_show_all_parameters_with_types_and_defaults() -> None:
    for kind, name, markup in signatures():
        if kind != "function":
            continue
        shown = {}
        for parameter in re.findall(r'<em class="sig-param">(.*?)</em>', markup, re.DOTALL):
            text = words(parameter)
            shown[re.split(r"[:=]", text)[0].strip(" *")] = (":" in text, "=" in text)
        shown.pop("", None)
        shown.pop("/", None)
        expected = {
            parameter.name: (parameter.annotation is not parameter.empty, parameter.default is not parameter.empty)
            for parameter in inspect.signature(documented(name)).parameters.values()
        }
        assert shown == expected, name


def test_types_of_other_projects_link_to_their_documentation() -> None:
    reference = "".join(file.read_text(encoding="utf-8") for file in REFERENCE)
    for target in (
        "https://docs.pytorch.org/docs/stable/tensors.html#torch.Tensor",
        "https://docs.python.org/3/library/pathlib.html#pathlib.Path",
        "https://docs.python.org/3/library/exceptions.html#ValueError",
    ):
        assert f'href="{target}"' in reference


def test_options_keep_their_hyphens() -> None:
    assert "--shard can split the work" in words(page("command_line.html"))
    for file in SITE.rglob("*.html"):
        if "_modules" not in file.parts:
            assert not re.search(r"[–—][a-z]", words(file.read_text(encoding="utf-8"))), file.name


@pytest.mark.parametrize(("name", "file"), [("changelog", "CHANGELOG.md"), ("contributing", "CONTRIBUTING.md")])
def test_files_of_the_repository_are_pages(name: str, file: str) -> None:
    text, markup = (ROOT / file).read_text(encoding="utf-8"), page(f"{name}.html")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert headings
    shown = [words(heading).rstrip("¶") for heading in re.findall(r"<h\d>(.*?)</h\d>", markup, re.DOTALL)]
    assert shown == [heading.replace("`", "") for heading in headings]
    assert 'href="glossary.html"' in markup


def test_the_citation_is_that_of_the_repository() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    shown = re.sub(r"\s+", " ", words(page("citation.html")))
    assert citation["version"] == version("diffusion-lens")
    assert f"title = {{{{{citation['title']}}}}}" in shown
    assert f"version = {{{citation['version']}}}" in shown
    for work in citation["references"]:
        assert work["title"] in shown
        assert all(author["family-names"] in shown for author in work["authors"])


def test_pages_have_an_icon() -> None:
    assert 'href="_static/favicon.svg"' in page("index.html")
    assert (SITE / "_static" / "favicon.svg").is_file()
