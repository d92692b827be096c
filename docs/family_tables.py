"""Tables of families: `{family-table}` and `{pair-table}` from the catalogue, `{family-sizes}` from the files."""

from collections.abc import Sequence
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import markdown, parsed

from diffusion_lens.loading.catalogue import PUBLISHED, Repository
from diffusion_lens.loading.pairs import PAIRS
from weight_conversion.registry import FAMILIES, MODULES

MOST = 8  # names in a cell
SEES = {
    "bidirectional": "every position",
    "block_causal": "its block and earlier ones",
    "causal": "earlier positions",
}
READS = {"in_place": "in its own row", "shifted": "in the row before"}
UNKNOWN = "known only from its config"


def family_rows() -> list[tuple[str, str, str, str]]:
    """Family, published names, attention direction and readout, with a row for each kind of network."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for name, entry in PUBLISHED.items():
        shape = entry.architecture
        family = (entry.family if isinstance(entry, Repository) else None) or ""
        kind = (shape.family, SEES[shape.attention_dir], READS[shape.readout]) if shape else (family, UNKNOWN, UNKNOWN)
        kinds.setdefault(kind, []).append(name)
    order = [*FAMILIES, ""]
    rows = sorted(kinds.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    return [(f"`{family}`" if family else "", _names(names), *how) for (family, *how), names in rows]


def size_rows() -> list[tuple[str, str, str]]:
    """Each file of families, its families, and its lines."""
    rows = []
    for module in MODULES:
        file = Path(str(module.__file__))
        names = ", ".join(f"`{family.name}`" for family in module.FAMILIES)
        rows.append((f"`families/{file.name}`", names, str(len(file.read_text(encoding="utf-8").splitlines()))))
    return rows


def pair_rows() -> list[tuple[str, str, str, str]]:
    """The pairs of `load_pair`; those of SMDM's sizes share one row."""
    smdm = [pair for pair in PAIRS.values() if pair.diffusion.startswith("smdm-")]
    rows = [
        (_names([pair.diffusion]), _names([pair.causal]), pair.shared, pair.source)
        for pair in PAIRS.values()
        if pair not in smdm
    ]
    first = (
        _names([pair.diffusion for pair in smdm]),
        "the AR baseline of its size, of the same compute if there is one",
        "network, tokenizer and data",
        smdm[0].source,
    )
    return [rows[0], first, *rows[1:]]


def _names(names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names]
    return ", ".join(shown if len(shown) <= MOST else [shown[0], "…", f"{shown[-1]} ({len(shown)} names)"])


class FamilyTable(SphinxDirective):
    """`{family-table}`."""

    def run(self) -> list[nodes.Node]:
        head = ("family", "names", "a position sees", "a token is read")
        return parsed(self, markdown(head, family_rows()))


class FamilySizes(SphinxDirective):
    """`{family-sizes}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, markdown(("file", "families", "lines"), size_rows()))


class PairTable(SphinxDirective):
    """`{pair-table}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, markdown(("diffusion", "causal", "what they share", "source"), pair_rows()))


def setup(app: Sphinx) -> dict[str, bool]:
    for name, directive in (("family-table", FamilyTable), ("family-sizes", FamilySizes), ("pair-table", PairTable)):
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
