"""What can be patched, under TransformerLens's names, and the cells of a sweep over it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.hook_names import nearest
from diffusion_lens.settings import Whole, pick_indices

Place = Whole | tuple[Whole, Whole]
Positions = str | Iterable[Place | list[Whole] | list[tuple[Whole, Whole]]] | None
Group = list[tuple[int, int]]


@dataclass(frozen=True)
class Site:
    """One kind of activation.

    Attributes:
        name: TransformerLens's short name.
        point: the hook point within a block.
        n_heads: how many heads it has on a model; `None` where a place has one state.
        heads_first: whether it is [batch head query key], and not [batch pos ...].
        ends_block: whether nothing of its block is left to run after it.
        is_local: whether what follows in its block reads a position's state at that position only.
    """

    name: str
    point: str
    n_heads: Callable[[DiffusionConfig], int] | None = None
    heads_first: bool = False
    ends_block: bool = False
    is_local: bool = True

    def hook_point(self, layer: int) -> str:
        """Its hook point in a block."""
        return f"blocks.{layer}.{self.point}"

    def written_out_bytes(self, cfg: DiffusionConfig, n_pos: int) -> int:
        """Bytes to reserve for a row in which the fused attention does not serve: four tensors as large as the pattern.

        Three times that, as `batching.row_bytes` does.
        """
        return 3 * 4 * cfg.n_heads * n_pos**2 * max(cfg.dtype.itemsize, 4) if self.heads_first else 0

    def pick_heads(self, heads: Iterable[Whole] | None, cfg: DiffusionConfig) -> list[int] | None:
        """The heads swept; `None` where there are none."""
        return pick_indices(f"{self.name} heads", heads, self.n_heads(cfg)) if self.n_heads else None

    def by_place(self, activation: Tensor) -> Tensor:
        """A view with the axes [batch pos ...] or [batch pos head ...]."""
        return activation.transpose(1, 2) if self.heads_first else activation


def _heads(cfg: DiffusionConfig) -> int:
    return cfg.n_heads


def _key_value_heads(cfg: DiffusionConfig) -> int:
    return cfg.n_key_value_heads or cfg.n_heads


PATCH_SITES = {
    site.name: site
    for site in (
        Site("resid_pre", "hook_resid_pre", is_local=False),
        Site("resid_mid", "hook_resid_mid"),
        Site("resid_post", "hook_resid_post", ends_block=True),
        Site("attn_out", "hook_attn_out"),
        Site("mlp_out", "hook_mlp_out"),
        Site("q", "attn.hook_q", _heads),
        Site("k", "attn.hook_k", _key_value_heads, is_local=False),
        Site("v", "attn.hook_v", _key_value_heads, is_local=False),
        Site("z", "attn.hook_z", _heads),
        Site("pattern", "attn.hook_pattern", _heads, heads_first=True),
    )
}


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one layer, as a list of entries: each puts one clean place onto one corrupted place.

    The entries of a cell are patched together; a cell without entries has no place in this run.

    Attributes:
        shape: number of cells along each of the grid's axes within a layer: places, if they are swept, and heads.
        cell: Int[entry], the cell an entry belongs to, counted through the shape; ascending.
        source: Int[entry], place in the clean run.
        target: Int[entry], place in the corrupted run.
        head: Int[entry], if the site has heads.
    """

    shape: tuple[int, ...]
    cell: Int[Tensor, "entry"]
    source: Int[Tensor, "entry"]
    target: Int[Tensor, "entry"]
    head: Int[Tensor, "entry"] | None

    @property
    def n(self) -> int:
        """Number of cells."""
        return math.prod(self.shape)

    @property
    def present(self) -> Bool[Tensor, "cell"]:
        """The cells that have a place in this run."""
        return torch.isin(torch.arange(self.n, device=self.cell.device), self.cell)

    def pick(self, chosen: Int[Tensor, "cell"]) -> "Cells":
        """Some of the cells (ascending), numbered anew."""
        kept = torch.isin(self.cell, chosen)
        return Cells(
            shape=(len(chosen),),
            cell=torch.searchsorted(chosen, self.cell[kept]),
            source=self.source[kept],
            target=self.target[kept],
            head=None if self.head is None else self.head[kept],
        )

    def from_clean(self, activation: Float[Tensor, "batch pos ..."]) -> Float[Tensor, "entry batch ..."]:
        """What each entry takes from the clean run."""
        return activation[(slice(None), *self._at(self.source))].transpose(0, 1)

    def from_corrupted(self, activation: Float[Tensor, "batch pos ..."]) -> Float[Tensor, "entry batch ..."]:
        """What each entry replaces in the corrupted run."""
        return activation[(slice(None), *self._at(self.target))].transpose(0, 1)

    def _at(self, places: Int[Tensor, "entry"]) -> tuple[Any, ...]:
        return (places,) if self.head is None else (places, self.head)


@dataclass(frozen=True)
class Sweep:
    """One site over layers, places and heads.

    Attributes:
        groups: the places, a group a cell.
        together: whether the one group is all places, so that there is no axis of places.
        heads: `None` where the site has none.
    """

    site: Site
    layers: list[int]
    groups: list[Group]
    together: bool
    heads: list[int] | None

    @property
    def coordinates(self) -> dict[str, list[Any]]:
        """What stands along each axis of the grid; for "pos" a place, or [clean, corrupted] pairs."""
        places = [group[0][0] if _is_place(group) else [list(pair) for pair in group] for group in self.groups]
        along = {"layer": self.layers, "pos": None if self.together else places, "head": self.heads}
        return {axis: each for axis, each in along.items() if each is not None}

    def cells(self, n_clean: int, n_corrupted: int, device: str | torch.device | None) -> Cells:
        """The cells of a layer, heads running fastest, in runs of so many places; those beyond are left out."""
        each = [(group, head) for group in self.groups for head in self.heads or [0]]
        table = [
            (cell, source, target, head)
            for cell, (group, head) in enumerate(each)
            for source, target in group
            if source < n_clean and target < n_corrupted
        ]
        cell, source, target, head = torch.tensor(table, dtype=torch.long, device=device).view(-1, 4).unbind(1)
        shape = tuple(len(along) for axis, along in self.coordinates.items() if axis != "layer")
        return Cells(shape, cell, source, target, None if self.heads is None else head)


def resolve_sites(sites: str | Sequence[str]) -> list[Site]:
    """The sites of these names; an unknown one is a `ValueError` with the nearest."""
    names, known = [sites] if isinstance(sites, str) else list(sites), ", ".join(PATCH_SITES)
    if not names:
        raise ValueError(f"no site was given; they are {known}")
    for name in names:
        if name not in PATCH_SITES:
            raise ValueError(f"unknown site {name!r}, nearest is {nearest(name, PATCH_SITES, 1)}; it is one of {known}")
    return [PATCH_SITES[name] for name in names]


def resolve_groups(positions: Positions, n_clean: int, n_corrupted: int) -> list[Group]:
    """The (clean place, corrupted place) pairs of each cell; for "all" one group of them all.

    Raises:
        ValueError: runs of different lengths without pairs, a place outside its run, a cell given twice, or one that
            writes a place twice.
    """
    if positions is None or isinstance(positions, str):
        if positions not in (None, "all"):
            raise ValueError(f"positions={positions!r}; it is None (each place), 'all' (together), or a list of places")
        if n_clean != n_corrupted:
            raise ValueError(
                f"the clean run has {n_clean} places and the corrupted run {n_corrupted}: say which belong together, "
                "positions=[(clean_place, corrupted_place), ...]"
            )
        everywhere = [(place, place) for place in range(n_corrupted)]
        return [everywhere] if positions == "all" else [[pair] for pair in everywhere]
    positions = list(positions)
    entries = [entry if isinstance(entry, list) else [entry] for entry in positions]
    if not all(entries) or not entries:
        raise ValueError(f"positions={positions} holds no place, or an empty group of them")
    groups = [[_pair(place, n_clean, n_corrupted) for place in entry] for entry in entries]
    if len({frozenset(group) for group in groups}) < len(groups):
        raise ValueError(f"positions={positions} names one twice; give each once")
    if any(len({target for _, target in group}) < len(group) for group in groups):
        raise ValueError(f"positions={positions} patches a place twice in one cell; give it one state")
    return groups


def _pair(place: Place, n_clean: int, n_corrupted: int) -> tuple[int, int]:
    """The clean and the corrupted place, counted from the start of each run."""
    source, target = place if isinstance(place, tuple) else (place, place)
    clean = pick_indices("positions in the clean run", [source], n_clean)
    return clean[0], pick_indices("positions in the corrupted run", [target], n_corrupted)[0]


def _is_place(group: Group) -> bool:
    """Whether one place of the clean run is patched into the same place of the corrupted one."""
    return len(group) == 1 and group[0][0] == group[0][1]
