"""The catalogue of published names.

To add a name, add a line to a table: to `SMDM` in `smdm.py` for a file of `nieshen/SMDM`, or to `REPOSITORIES` in
`repositories.py` for any other repository. `evidence` says how the entry was verified. Listing, sizing and describing
entries downloads nothing. If the model has a causal counterpart, add a line to `PAIRS` in `diffusion_lens/pairs.py`.
"""

from difflib import get_close_matches

from diffusion_lens.catalogue.bundled import BUNDLED, BundledModel
from diffusion_lens.catalogue.entries import Published, PublishedFile, Repository
from diffusion_lens.catalogue.listing import ListedModel, as_table, find_pretrained, list_pretrained
from diffusion_lens.catalogue.published import PUBLISHED
from diffusion_lens.catalogue.repositories import REPOSITORIES
from diffusion_lens.catalogue.smdm import REPO, SMDM, TOKENIZER_REPO

__all__ = [
    "BUNDLED",
    "PUBLISHED",
    "REPO",
    "REPOSITORIES",
    "SMDM",
    "TOKENIZER_REPO",
    "BundledModel",
    "ListedModel",
    "Published",
    "PublishedFile",
    "Repository",
    "as_table",
    "find_pretrained",
    "list_pretrained",
    "unknown_name",
]


def unknown_name(name: str) -> ValueError:
    """The error for a name that is neither published nor a path; the message gives the nearest names."""
    near = get_close_matches(name.lower(), [*PUBLISHED, *BUNDLED], n=3, cutoff=0.0)
    return ValueError(
        f"{name!r} is neither a published name nor a file or folder; nearest names: {', '.join(near)} "
        "(all of them: diffusion_lens.list_pretrained()). A repository of the hub is 'owner/name'."
    )
