"""Every published name with its entry."""

from diffusion_lens.catalogue.entries import File, Repository
from diffusion_lens.catalogue.repositories import REPOSITORIES
from diffusion_lens.catalogue.smdm import SMDM

PUBLISHED: dict[str, File | Repository] = {entry.name: entry for entry in (*SMDM, *REPOSITORIES)}
