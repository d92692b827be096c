"""What there is to load: every name, or those that fit some filters."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from diffusion_lens.catalogue.embedded import EMBEDDED, EMBEDDED_LENGTH, embedded_folder
from diffusion_lens.catalogue.published import PUBLISHED
from diffusion_lens.catalogue.smdm import SMDM

KINDS = {"masked": "bidirectional", "causal": "causal"}


@dataclass(frozen=True)
class Listed:
    """One line of the list.

    Attributes:
        name: what `from_pretrained` takes.
        n_bytes: size of the weights, if it is known.
        sees: "bidirectional" or "causal", or "unknown" until its config is read.
        family: format of its checkpoint, or "unknown".
        trained_length: as in `Published`.
        evidence, source: what was seen of it, and where it lies.
    """

    name: str
    n_bytes: int | None
    sees: str
    family: str
    trained_length: int | None
    evidence: str
    source: str


def find_pretrained(
    text: str | None = None, *, kind: str | None = None, family: str | None = None, max_bytes: int | None = None
) -> list[Listed]:
    """The names that fit every filter given. Of a model that is known by name only, size, kind and family are not.

    Args:
        text: a part of its name or source, in any case.
        kind: "masked" or "causal".
        family: of its checkpoint.
        max_bytes: of its weights.

    Raises:
        ValueError: a kind or a family that there is not, or nothing that fits.
    """
    every = list(_every())
    families = sorted({each.family for each in every} - {"unknown"})
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; models are {' or '.join(KINDS)}")
    if family is not None and family not in families:
        near = get_close_matches(family, families, n=1, cutoff=0.0)
        raise ValueError(f"family={family!r} is unknown; there are {', '.join(families)} (nearest: {near[0]})")
    found = [
        each
        for each in every
        if (text is None or text.lower() in f"{each.name} {each.source}".lower())
        and (kind is None or each.sees == KINDS[kind])
        and (family is None or each.family == family)
        and (max_bytes is None or (each.n_bytes is not None and each.n_bytes <= max_bytes))
    ]
    if not found:
        raise ValueError(f"none of the {len(every)} models fits all of these filters; leave one out")
    return found


def as_table(models: Sequence[Listed]) -> list[str]:
    """The models as lines of a table."""
    rows = [("name", "size", "sees", "evidence", "source")]
    rows += [(each.name, _readable(each.n_bytes), each.sees, each.evidence, each.source) for each in models]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def list_pretrained() -> None:
    """Print every name that `from_pretrained` takes, with its size, what it is, and where it comes from."""
    for line in as_table(find_pretrained()):
        sys.stdout.write(f"{line}\n")


def _every() -> Iterator[Listed]:
    for name in EMBEDDED:
        path = embedded_folder() / f"{name}.safetensors"
        sees = "causal" if name.endswith("ar") else "bidirectional"
        family = SMDM[0].architecture.family  # the pair is in the format of its large relatives
        source = f"assets/tiny/{path.name}"
        yield Listed(name, path.stat().st_size, sees, family, EMBEDDED_LENGTH, "in the package", source)
    for entry in PUBLISHED.values():
        shape = entry.architecture
        sees, family = ("unknown", "unknown") if shape is None else (shape.attention_dir, shape.family)
        yield Listed(entry.name, entry.n_bytes, sees, family, entry.trained_length, entry.evidence, entry.source)


def _readable(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "unknown"
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
