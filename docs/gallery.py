"""Sphinx extension: the gallery of the examples, and a page for each of them.

The examples run at every build, with the options that their tests use (`tests/quick_examples.py`), in a process of
their own beside the pages that draw figures. `docs/examples/NAME.md` is written from the docstring of an example, its
figure and what it printed. `{gallery}` shows a card for each of these pages.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from commands import plain
from docutils import nodes
from quick_examples import QUICKLY
from run_examples import EXAMPLES
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective
from tables import parsed

HERE = Path(__file__).parent
PAGES, MADE = HERE / "examples", HERE / "_made" / "examples"
MOST_LINES = 40  # of what an example printed, on its page
running: list[subprocess.Popen[str]] = []


def words(example: Path) -> tuple[str, str, str]:
    """The title of an example, from the name of its file; the first paragraph of its docstring; and the others."""
    sentence, _, rest = str(ast.get_docstring(ast.parse(example.read_text(encoding="utf-8")))).partition("\n\n")
    title = re.sub(r"^\d+_", "", example.stem).replace("_", " ").capitalize()
    return title, sentence.replace("\n", " "), rest


def command(example: Path) -> str:
    """How the gallery runs an example, shortened if a list of prompts makes it long."""
    options = " ".join(shlex.quote(option) for option in QUICKLY.get(example.stem, []))
    if "--prompts" in options:
        options = f"{options.split(' ', 2)[0]} {options[options.index(' ') + 1 :][:40]}..."
    return f"python examples/{example.name} {options}".strip()


def page_of(example: Path) -> str:
    """The page of an example in Markdown."""
    title, sentence, rest = words(example)
    printed = (MADE / f"{example.stem}.txt").read_text(encoding="utf-8").rstrip().splitlines()
    more = [f"... {len(printed) - MOST_LINES} more lines"] if len(printed) > MOST_LINES else []
    return "\n".join(
        [
            *(f"# {title}", "", plain(sentence), "", plain(rest), ""),
            *("```sh", f"python examples/{example.name}", "```", ""),
            f"![The figure that the example writes](../_made/examples/{example.stem}.png)",
            "",
            f"This figure was drawn when the site was built, by `{command(example)}`, which printed:",
            "",
            *("```text", *printed[:MOST_LINES], *more, "```", ""),
            *("## Source", ""),
            *(f"```{{literalinclude}} ../../examples/{example.name}", ":language: python", "```", ""),
        ]
    )


def start(app: Sphinx) -> None:
    """Start to run the examples."""
    for folder in (PAGES, MADE):
        shutil.rmtree(folder, ignore_errors=True)
    paths = [*(str(path) for path in (HERE, HERE.parent, HERE.parent / "tests")), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    arguments = [sys.executable, str(HERE / "run_examples.py"), str(MADE)]
    running.append(subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True))


def write_pages(app: Sphinx) -> None:
    """Wait for the examples, and write their pages."""
    process = running.pop()
    _, errors = process.communicate()
    if process.returncode:
        raise ExtensionError(f"an example failed:\n{errors}")
    PAGES.mkdir()
    for example in EXAMPLES:
        (PAGES / f"{example.stem}.md").write_text(page_of(example), encoding="utf-8")


class Gallery(SphinxDirective):
    """`{gallery}`: a card for each example, and their pages in the table of contents."""

    def run(self) -> list[nodes.Node]:
        text = []
        for example in EXAMPLES:
            title, sentence, _ = words(example)
            picture, page = f"_made/examples/{example.stem}.png", f"examples/{example.stem}.md"
            text += ["::::{container} card", f"[![{title}]({picture})]({page})", "", f"[**{title}**]({page})", ""]
            text += [plain(sentence), "::::", ""]
        contents = ["```{toctree}", ":hidden:", "", *(f"examples/{example.stem}" for example in EXAMPLES), "```"]
        return parsed(self, ["::::::{container} cards", *text, "::::::", "", *contents])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("gallery", Gallery)
    app.connect("builder-inited", start, priority=400)
    app.connect("builder-inited", write_pages, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
