"""The settings of a patch grid: the states that are patched, and the method."""

from dataclasses import dataclass

from diffusion_lens.analysis.patching.sites import CellPositions, Site, Sweep, resolve_groups
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.settings import Whole

METHODS = ("exact", "attribution")


@dataclass(frozen=True, eq=False)
class PatchSettings:
    """The states that are patched, and the method.

    Attributes:
        sites: Activations to patch.
        positions: Positions of each cell, as `patch_grid` takes them.
        layers: Layers to sweep.
        heads: Heads to sweep; `None` for all.
        method: "exact" or "attribution".
        check: Number of cells of each site that "attribution" patches exactly as well.
    """

    sites: list[Site]
    positions: CellPositions
    layers: list[int]
    heads: list[Whole] | None
    method: str
    check: int

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}; it must be one of {', '.join(METHODS)}")
        if self.heads is not None and not any(site.n_heads for site in self.sites):
            raise ValueError(f"heads={self.heads}, but {', '.join(site.name for site in self.sites)} has no heads")

    def sweeps(self, n_clean: int, n_corrupted: int, cfg: DiffusionConfig) -> list[Sweep]:
        """One sweep per site, for runs with these numbers of positions."""
        groups = resolve_groups(self.positions, n_clean, n_corrupted)
        all_together = isinstance(self.positions, str)
        return [Sweep(site, self.layers, groups, all_together, site.pick_heads(self.heads, cfg)) for site in self.sites]
