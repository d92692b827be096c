"""`PUBLISHED`, the table of all published names."""

from diffusion_lens.catalogue.entries import PublishedFile, Repository
from diffusion_lens.catalogue.repositories import REPOSITORIES
from diffusion_lens.catalogue.smdm import SMDM

_ENTRIES: tuple[PublishedFile | Repository, ...] = (*SMDM, *REPOSITORIES)
PUBLISHED: dict[str, PublishedFile | Repository] = {entry.name: entry for entry in _ENTRIES}
