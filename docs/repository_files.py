"""Sphinx extension: pages with the text of files at the root of the repository, and the citation as BibTeX.

`docs/changelog.md` shows CHANGELOG.md, and `docs/contributing.md` shows CONTRIBUTING.md. Links to pages lead
to pages of the site, and paths of other files are set as code. `{bibtex}` shows CITATION.cff as BibTeX.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]
SHOWN = {"changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}


def show_file(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the text of a page by that of its file."""
    if docname in SHOWN:
        file = ROOT / SHOWN[docname]
        app.env.note_dependency(str(file))
        source[0] = re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", _link, file.read_text(encoding="utf-8"))


def _link(link: re.Match[str]) -> str:
    """A link of a file at the root, as a link of a page in `docs/`."""
    text, target = link[1], link[2]
    path, hash_sign, anchor = target.partition("#")
    pages = {file: f"{page}.md" for page, file in SHOWN.items()}
    if not path or "://" in path:
        return link[0]
    if path in pages or re.fullmatch(r"docs/\S+\.md", path):
        return f"[{text}]({pages.get(path) or path.removeprefix('docs/')}{hash_sign}{anchor})"
    return f"`{path}`" if text == path else f"{text} (`{path}`)"


def entries(citation: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """The software, then the works that it refers to: kind and key of an entry, and its fields."""
    for work in (citation, *citation["references"]):
        people = [
            f"{who['family-names']}, {who['given-names']}" if "family-names" in who else f"{{{who['name']}}}"
            for who in work["authors"]
        ]
        first = work["authors"][0].get("family-names", work["title"].partition(":")[0])
        key = f"{first}{work.get('year', '')}".lower()
        fields = {"title": f"{{{work['title']}}}", "author": " and ".join(people)}
        fields |= {name: str(work[name]) for name in ("year", "version", "url") if name in work}
        yield f"{'software' if work['type'] == 'software' else 'article'}{{{key}", fields


def bibtex(file: Path) -> str:
    """A CITATION.cff as BibTeX."""
    citation = yaml.safe_load(file.read_text(encoding="utf-8"))
    return "\n\n".join(
        "@" + ",\n".join([head, *(f"  {name:7} = {{{value}}}" for name, value in fields.items())]) + "\n}"
        for head, fields in entries(citation)
    )


class BibTeX(SphinxDirective):
    """`{bibtex}`: CITATION.cff as BibTeX."""

    def run(self) -> list[nodes.Node]:
        file = ROOT / "CITATION.cff"
        self.env.note_dependency(str(file))
        text = bibtex(file)
        return [nodes.literal_block(text, text, language="bibtex")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", show_file)
    app.add_directive("bibtex", BibTeX)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
