"""Published names and what is behind them.

To add a name, add a line to a table: to `SMDM` in `smdm.py` for a file of `nieshen/SMDM`, to `REPOSITORIES` in
`repositories.py` for a repository of its own. `evidence` says what was seen of it; nothing is downloaded to list, size
or describe one. A causal relative of a diffusion model gets a line in `PAIRS` of `diffusion_lens/pairs.py`.
"""

import sys
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from diffusion_lens.catalogue.entries import File, Published, Repository
from diffusion_lens.catalogue.repositories import REPOSITORIES
from diffusion_lens.catalogue.smdm import REPO, SMDM, TOKENIZER_REPO

__all__ = [
    "EMBEDDED",
    "PUBLISHED",
    "REPO",
    "REPOSITORIES",
    "SMDM",
    "TOKENIZER_REPO",
    "File",
    "Published",
    "Repository",
    "embedded_folder",
    "list_pretrained",
    "unknown_name",
]

EMBEDDED = ("tiny-mdm", "tiny-ar")
PUBLISHED: dict[str, File | Repository] = {entry.name: entry for entry in (*SMDM, *REPOSITORIES)}


def embedded_folder() -> Path:
    """Where the pair that ships with the package lies."""
    return Path(str(files("diffusion_lens") / "assets" / "tiny"))


def unknown_name(name: str) -> ValueError:
    """The error for a name that is neither published nor a path, with the nearest names."""
    near = get_close_matches(name.lower(), [*PUBLISHED, *EMBEDDED], n=3, cutoff=0.0)
    return ValueError(
        f"{name!r} is no published name and no file or folder; nearest names: {', '.join(near)} "
        "(all of them: diffusion_lens.list_pretrained()). A repository of the hub is 'owner/name'."
    )


def list_pretrained() -> None:
    """Print every name that `from_pretrained` takes, with its size, what it is, and where it comes from."""
    rows = [("name", "size", "sees", "evidence", "source")]
    for name in EMBEDDED:
        path = embedded_folder() / f"{name}.safetensors"
        sees = "causal" if name.endswith("ar") else "bidirectional"
        rows.append((name, _readable(path.stat().st_size), sees, "in the package", f"assets/tiny/{path.name}"))
    for entry in PUBLISHED.values():
        shape = entry.architecture
        sees = "unknown" if shape is None else shape.attention_dir
        rows.append((entry.name, _readable(entry.n_bytes), sees, entry.evidence, entry.source))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        sys.stdout.write("  ".join([*cells, row[-1]]) + "\n")


def _readable(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "unknown"
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
