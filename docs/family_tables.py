"""Tables of families.

From the catalogue: `{family-table}`, `{pair-table}`, `{state-table}` of what may have been verified, and
`{verified-table}` of what was. From the files: `{family-sizes}`.
"""

from collections.abc import Sequence
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import markdown, parsed

from diffusion_lens.loading.catalogue import COMPARED, NOT_OFFERED, PUBLISHED, STATES
from diffusion_lens.loading.pairs import PAIRS
from weight_conversion.families.kinds import KINDS
from weight_conversion.registry import FAMILIES, MODULES

MOST = 8  # names in a cell
SEES = {
    "bidirectional": "every position",
    "block_causal": "its block and earlier ones",
    "causal": "earlier positions",
}
READS = {"in_place": "in its own row", "shifted": "in the row before"}
NO_NAME = ("by the id of a repository", "as its config says", "as its config says")


def family_rows() -> list[tuple[str, str, str, str]]:
    """Family, published names, attention direction and readout, with a row for each kind of network."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for name, entry in PUBLISHED.items():
        shape = entry.architecture
        kinds.setdefault((shape.family, SEES[shape.attention_dir], READS[shape.readout]), []).append(name)
    rows = [(f"`{family}`", _names(names), *how) for (family, *how), names in kinds.items()]
    rows += [(f"`{family}`", *NO_NAME) for family in FAMILIES.keys() - {family for family, *_ in kinds}]
    return sorted(rows, key=lambda row: (row[0], row[2]))


def state_rows() -> list[tuple[str, str]]:
    """Each state of a name with its meaning."""
    return list(STATES.items())


def verified_rows() -> list[tuple[str, str, str]]:
    """Each family and each refused kind, its state, and what it was compared with or why it is refused."""
    rows = [(f"`{family}`", *COMPARED[family]) for family in FAMILIES]
    for kind in KINDS:
        types = ", ".join(f"`{name}`" for name in kind.model_types)
        unsaid = f" without `{kind.settled_by[0]}=`" if kind.settled_by else ""
        rows.append((f"{kind.what}{f' ({types})' if types else ''}{unsaid}", NOT_OFFERED, kind.difference))
    return sorted(rows, key=lambda row: list(STATES).index(row[1]))


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


class StateTable(SphinxDirective):
    """`{state-table}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, markdown(("evidence", "what it means"), state_rows()))


class VerifiedTable(SphinxDirective):
    """`{verified-table}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, markdown(("family, or kind", "evidence", "compared with, or why not"), verified_rows()))


class FamilySizes(SphinxDirective):
    """`{family-sizes}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, markdown(("file", "families", "lines"), size_rows()))


class PairTable(SphinxDirective):
    """`{pair-table}`."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, markdown(("diffusion", "causal", "what they share", "source"), pair_rows()))


def setup(app: Sphinx) -> dict[str, bool]:
    tables = {
        "family-table": FamilyTable,
        "family-sizes": FamilySizes,
        "pair-table": PairTable,
        "state-table": StateTable,
        "verified-table": VerifiedTable,
    }
    for name, directive in tables.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
