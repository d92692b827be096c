"""The activations that can be patched, under TransformerLens's names, and the cells of a sweep over one of them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.settings import Whole, one_of, pick_indices

PositionOrPair = Whole | tuple[Whole, Whole]
Neurons = Iterable[Whole | Sequence[Whole]] | None
CellPositions = str | Iterable[PositionOrPair | list[Whole] | list[tuple[Whole, Whole]]] | None
PositionPairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Site:
    """One kind of activation, by TransformerLens's short name."""

    name: str
    point: str  # hook point within a block
    heads: str | None = None  # the axis of heads, "query" or "key/value"; `None` where a position has one state
    heads_first: bool = False  # whether the activation is [batch head query key] and not [batch pos ...]
    ends_block: bool = False  # whether nothing of its block is left to run after it
    is_local: bool = True  # whether what follows in its block reads a position's state at that position only
    has_neurons: bool = False  # whether the entries of a position's state are neurons, which can be patched alone

    @property
    def moves_to_block_end(self) -> bool:
        """Whether one pass of a block gives the stream after it for the patch of each position alone."""
        return self.is_local and self.heads is None and not self.ends_block

    def hook_point(self, layer: int) -> str:
        """Full name of its hook point in a block."""
        return f"blocks.{layer}.{self.point}"

    def pick_heads(self, heads: Iterable[Whole] | None, cfg: DiffusionConfig) -> list[int] | None:
        """Heads to sweep; `None` for a site without heads."""
        if self.heads is None:
            return None
        n_heads = cfg.n_heads if self.heads == "query" else cfg.n_key_value_heads or cfg.n_heads
        return pick_indices(f"{self.name} heads", heads, n_heads)

    def pick_neurons(self, neurons: Neurons, cfg: DiffusionConfig) -> list[list[int]] | None:
        """The neurons of each cell; `None` for a site without neurons, and where whole states are patched."""
        if neurons is None or not self.has_neurons:
            return None
        assert cfg.d_mlp is not None
        groups = [list(each) if isinstance(each, Sequence) else [each] for each in neurons]
        return [pick_indices(f"{self.name} neurons", group, cfg.d_mlp) for group in groups]

    def with_positions_first(self, activation: Tensor) -> Tensor:
        """A view with the axes [batch pos ...] or [batch pos head ...]."""
        return activation.transpose(1, 2) if self.heads_first else activation


PATCH_SITES = {
    site.name: site
    for site in (
        Site("resid_pre", "hook_resid_pre", is_local=False),
        Site("resid_mid", "hook_resid_mid"),
        Site("resid_post", "hook_resid_post", ends_block=True),
        Site("attn_out", "hook_attn_out"),
        Site("mlp_out", "hook_mlp_out"),
        Site("q", "attn.hook_q", "query"),
        Site("k", "attn.hook_k", "key/value", is_local=False),
        Site("v", "attn.hook_v", "key/value", is_local=False),
        Site("z", "attn.hook_z", "query"),
        Site("post", "mlp.hook_post", has_neurons=True),
        Site("pattern", "attn.hook_pattern", "query", heads_first=True),
    )
}


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one layer, as a list of entries: each patches one clean state into one corrupted position.

    The entries of a cell are patched together. A cell without entries has no position in this run.
    """

    shape: tuple[int, ...]  # number of cells along each axis within a layer: positions, if they are swept, and units
    cell: Int[Tensor, "entry"]  # flat index into `shape`; ascending
    source: Int[Tensor, "entry"]  # position in the clean run
    target: Int[Tensor, "entry"]  # position in the corrupted run
    unit: Int[Tensor, "entry"] | None  # head or neuron; `None` where the whole state of a position is patched

    @property
    def n(self) -> int:
        """Number of cells."""
        return math.prod(self.shape)

    @property
    def present(self) -> Bool[Tensor, "cell"]:
        """Which cells have a position in this run."""
        return torch.isin(torch.arange(self.n, device=self.cell.device), self.cell)

    def pick(self, selected: Int[Tensor, "cell"]) -> "Cells":
        """The selected cells (ascending), renumbered from 0."""
        entries = torch.isin(self.cell, selected)
        source, target = self.source[entries], self.target[entries]
        unit = None if self.unit is None else self.unit[entries]
        return Cells((len(selected),), torch.searchsorted(selected, self.cell[entries]), source, target, unit)

    def from_clean(self, activation: Float[Tensor, "batch pos ..."]) -> Float[Tensor, "entry batch ..."]:
        """The state that each entry takes from the clean run."""
        return self._states(activation, self.source)

    def from_corrupted(self, activation: Float[Tensor, "batch pos ..."]) -> Float[Tensor, "entry batch ..."]:
        """The state that each entry replaces in the corrupted run."""
        return self._states(activation, self.target)

    def _states(self, activation: Tensor, positions: Int[Tensor, "entry"]) -> Tensor:
        at = (positions,) if self.unit is None else (positions, self.unit)
        # Blocks may be on several devices.
        return activation.to(positions.device)[(slice(None), *at)].transpose(0, 1)


@dataclass(frozen=True)
class Sweep:
    """One site over layers, positions, and heads or neurons."""

    site: Site
    layers: list[int]
    groups: list[PositionPairs]  # one for each cell
    all_together: bool  # whether the only group has all positions, so that the grid has no axis of positions
    heads: list[int] | None  # `None` for a site without heads
    neurons: list[list[int]] | None = None  # those of each cell; `None` where whole states are patched

    @property
    def coordinates(self) -> dict[str, list[Any]]:
        """The coordinates along each axis of the grid; those of "pos" are positions or [clean, corrupted] pairs."""
        positions = [
            # One number where one position is patched into the same position.
            group[0][0] if len(group) == 1 and group[0][0] == group[0][1] else [list(pair) for pair in group]
            for group in self.groups
        ]
        by_axis: dict[str, list[Any] | None] = {
            "layer": self.layers,
            "pos": None if self.all_together else positions,
            "head": self.heads,
        }
        if self.neurons is not None:
            by_axis["neuron"] = [group[0] if len(group) == 1 else group for group in self.neurons]
        return {axis: coordinates for axis, coordinates in by_axis.items() if coordinates is not None}

    def cells(self, n_clean: int, n_corrupted: int, device: str | torch.device | None) -> Cells:
        """The cells of a layer, with heads or neurons as the last axis, without positions beyond those of both runs."""
        units = self.neurons or [[head] for head in self.heads or [0]]
        table = [
            (cell, source, target, unit)
            for cell, (group, of_cell) in enumerate(product(self.groups, units))
            for source, target in group
            if source < n_clean and target < n_corrupted
            for unit in of_cell
        ]
        cell, source, target, unit = torch.tensor(table, dtype=torch.long, device=device).view(-1, 4).unbind(1)
        shape = tuple(len(coordinates) for axis, coordinates in self.coordinates.items() if axis != "layer")
        return Cells(shape, cell, source, target, None if self.heads is None and self.neurons is None else unit)


def resolve_sites(sites: str | Sequence[str]) -> list[Site]:
    """The sites of these names."""
    names, check = [sites] if isinstance(sites, str) else list(sites), one_of(*PATCH_SITES)
    if not names:
        raise ValueError(f"no site was given; they are {', '.join(PATCH_SITES)}")
    return [PATCH_SITES[check("site", name)] for name in names]


def resolve_groups(positions: CellPositions, n_clean: int, n_corrupted: int) -> list[PositionPairs]:
    """The (clean position, corrupted position) pairs of each cell; for "all", one group of all pairs."""
    if positions is None or isinstance(positions, str):
        if positions not in (None, "all"):
            raise ValueError(f"positions={positions!r}; it must be None (each one), 'all' (together), or a list")
        if n_clean != n_corrupted:
            raise ValueError(
                f"the clean run has {n_clean} positions and the corrupted run {n_corrupted}: pair them by hand with "
                "positions=[(clean_position, corrupted_position), ...]"
            )
        everywhere = [(position, position) for position in range(n_corrupted)]
        return [everywhere] if positions == "all" else [[pair] for pair in everywhere]
    positions = list(positions)
    entries = [entry if isinstance(entry, list) else [entry] for entry in positions]
    if not all(entries) or not entries:
        raise ValueError(f"positions={positions} has no entry, or an empty one; give at least one position per cell")
    groups = [[_pair(given, n_clean, n_corrupted) for given in entry] for entry in entries]
    if len({frozenset(group) for group in groups}) < len(groups):
        raise ValueError(f"positions={positions} contains duplicates; give each once")
    if any(len({target for _, target in group}) < len(group) for group in groups):
        raise ValueError(f"positions={positions} patches a position twice in one cell; give it one state")
    return groups


def _pair(given: PositionOrPair, n_clean: int, n_corrupted: int) -> tuple[int, int]:
    source, target = given if isinstance(given, tuple) else (given, given)
    clean = pick_indices("positions in the clean run", [source], n_clean)
    return clean[0], pick_indices("positions in the corrupted run", [target], n_corrupted)[0]
