"""The reversal experiment: `{naming-table}`, the two names of its cells, and `{published-table}` with a score.

Both are generated from `evaluation.recall`, so that no number is written twice.
"""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import markdown, parsed

from diffusion_lens.data.reversal_curse import FILES
from diffusion_lens.evaluation.recall import (
    MARKS,
    PUBLISHED,
    QUESTION,
    SOURCES,
    DirectionPair,
    PublishedNumber,
    cell_meaning,
    cell_name,
    published_rows,
)

CELLS: tuple[DirectionPair, ...] = (("p2d", "p2d"), ("d2p", "p2d"), ("d2p", "d2p"), ("p2d", "d2p"))
LEFT_TO_RIGHT = "left to right"


def naming_rows() -> list[tuple[str, str, str, str]]:
    """File, both names, and meaning of the four cells; a `ValueError` if a file does not exist."""
    rows = []
    for trained, asked in CELLS:
        file = f"{trained}_{'' if trained == asked else 'reverse_'}prompts_test"
        if file not in FILES:
            raise ValueError(f"there is no file {file}; there are {', '.join(FILES)}")
        berglund, smdm = cell_name(trained, asked).split(" = ")
        rows.append((f"`{file}`", berglund, smdm, cell_meaning(trained, asked)))
    return rows


def published_lines(score: str) -> list[str]:
    """The published numbers of a score, cell by cell, in percent, with their marks and sources."""
    numbers = [number for number in PUBLISHED if number.score == score]
    if not numbers:
        raise ValueError(f"no number is published for {score!r}; there are {sorted({n.score for n in PUBLISHED})}")
    columns = sorted({number.steps for number in numbers}, key=lambda steps: (steps is None, steps or 0))
    heads = [LEFT_TO_RIGHT if steps is None else f"{steps}" for steps in columns]
    rows = []
    for cell in CELLS:
        for label, row in published_rows(cell, score).items():
            rows.append((cell_name(*cell), label, *(_percent(row.get(steps)) for steps in columns)))
    notes = [f"- *{source}*: {SOURCES[source]}." for source in SOURCES if any(n.source == source for n in numbers)]
    notes += [f"- {_escaped(mark)} {how}, not read in the source." for how, mark in MARKS.items() if mark]
    return [*markdown(("cell", "model", *heads), rows), "", *notes]


def _percent(number: PublishedNumber | None) -> str:
    return "" if number is None else f"{100 * number.value:g}{_escaped(MARKS[number.certainty])}"


def _escaped(mark: str) -> str:
    return mark.replace("*", r"\*")


class NamingTable(SphinxDirective):
    """`{naming-table}`."""

    def run(self) -> list[nodes.Node]:
        head = ("file of Berglund et al.", "the people", f"SMDM's column ({', '.join(QUESTION.values())})", "meaning")
        return parsed(self, markdown(head, naming_rows()))


class PublishedTable(SphinxDirective):
    """`{published-table} contained`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return parsed(self, published_lines(self.arguments[0]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("naming-table", NamingTable)
    app.add_directive("published-table", PublishedTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
