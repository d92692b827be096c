"""Published names and what is behind them.

To add a name, add a line to a table: to `SMDM` in `smdm.py` for a file of `nieshen/SMDM`, to `REPOSITORIES` in
`repositories.py` for a repository of its own. `evidence` says what was seen of it; nothing is downloaded to list, size
or describe one. A causal relative of a diffusion model gets a line in `PAIRS` of `diffusion_lens/pairs.py`.
"""

from difflib import get_close_matches

from diffusion_lens.catalogue.embedded import EMBEDDED, EMBEDDED_LENGTH, embedded_folder
from diffusion_lens.catalogue.entries import File, Published, Repository
from diffusion_lens.catalogue.listing import Listed, as_table, find_pretrained, list_pretrained
from diffusion_lens.catalogue.published import PUBLISHED
from diffusion_lens.catalogue.repositories import REPOSITORIES
from diffusion_lens.catalogue.smdm import REPO, SMDM, TOKENIZER_REPO

__all__ = [
    "EMBEDDED",
    "EMBEDDED_LENGTH",
    "PUBLISHED",
    "REPO",
    "REPOSITORIES",
    "SMDM",
    "TOKENIZER_REPO",
    "File",
    "Listed",
    "Published",
    "Repository",
    "as_table",
    "embedded_folder",
    "find_pretrained",
    "list_pretrained",
    "unknown_name",
]


def unknown_name(name: str) -> ValueError:
    """The error for a name that is neither published nor a path, with the nearest names."""
    near = get_close_matches(name.lower(), [*PUBLISHED, *EMBEDDED], n=3, cutoff=0.0)
    return ValueError(
        f"{name!r} is no published name and no file or folder; nearest names: {', '.join(near)} "
        "(all of them: diffusion_lens.list_pretrained()). A repository of the hub is 'owner/name'."
    )
