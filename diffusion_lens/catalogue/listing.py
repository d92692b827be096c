"""Lists the names that `from_pretrained` takes: all, or those that match some filters."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from diffusion_lens.catalogue.bundled import BUNDLED
from diffusion_lens.catalogue.published import PUBLISHED

KINDS = {"masked": ("bidirectional", "block_causal"), "causal": ("causal",)}


@dataclass(frozen=True)
class ListedModel:
    """One line of the list.

    Attributes:
        name: Argument of `from_pretrained`.
        n_bytes: Size of the weights in bytes, or `None` if it is unknown.
        sees: Attention direction, "bidirectional", "block_causal" or "causal"; "unknown" until its config is read.
        family: Family of its checkpoint, or "unknown".
        trained_length: Trained length of `Published`.
        evidence: How the entry was verified.
        source: Path of the checkpoint on the hub or in the package.
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
) -> list[ListedModel]:
    """The names that match all filters. Size, kind and family are unknown for models without a config in the catalogue.

    Args:
        text: Part of the name or source; case is ignored.
        kind: "masked" or "causal".
        family: Family of the checkpoint.
        max_bytes: Largest size of the weights in bytes.

    Raises:
        ValueError: The kind or the family does not exist, or no name matches.
    """
    models = list(_all_models())
    families = sorted({model.family for model in models} - {"unknown"})
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; it must be {' or '.join(KINDS)}")
    if family is not None and family not in families:
        near = get_close_matches(family, families, n=1, cutoff=0.0)
        raise ValueError(f"family={family!r} is unknown; the families are {', '.join(families)} (nearest: {near[0]})")
    matching = [
        model
        for model in models
        if (text is None or text.lower() in f"{model.name} {model.source}".lower())
        and (kind is None or model.sees in KINDS[kind])
        and (family is None or model.family == family)
        and (max_bytes is None or (model.n_bytes is not None and model.n_bytes <= max_bytes))
    ]
    if not matching:
        raise ValueError(f"none of the {len(models)} models fits all of these filters; leave one out")
    return matching


def as_table(models: Sequence[ListedModel]) -> list[str]:
    """The models as lines of a table."""
    rows = [("name", "size", "sees", "evidence", "source")]
    rows += [(model.name, _readable(model.n_bytes), model.sees, model.evidence, model.source) for model in models]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def list_pretrained() -> None:
    """Print every name that `from_pretrained` takes, with its size, attention direction and source."""
    for line in as_table(find_pretrained()):
        sys.stdout.write(f"{line}\n")


def _all_models() -> Iterator[ListedModel]:
    for name, model in BUNDLED.items():
        n_bytes, place = model.path.stat().st_size, (model.trained_length, "in the package", model.source)
        yield ListedModel(name, n_bytes, model.attention_dir, model.family, *place)
    for entry in PUBLISHED.values():
        shape = entry.architecture
        sees, family = ("unknown", "unknown") if shape is None else (shape.attention_dir, shape.family)
        yield ListedModel(entry.name, entry.n_bytes, sees, family, entry.trained_length, entry.evidence, entry.source)


def _readable(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "unknown"
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
