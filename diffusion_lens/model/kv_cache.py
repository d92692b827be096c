"""Keys and values of earlier positions, so that a model processes each filled block of positions once."""

import torch
from jaxtyping import Float
from torch import Tensor

KVHeads = Float[Tensor, "batch pos kv_head d_head"]
AllKVHeads = Float[Tensor, "batch key kv_head d_head"]


class LayerKeyValues:
    """Rotated keys, and values, of one layer in order of position.

    Args:
        copies: Number of copies of these rows that a pass computes, one after the other. They exist in the pass of the
            layer only: nothing is appended.
    """

    def __init__(
        self, keys: AllKVHeads | None = None, values: AllKVHeads | None = None, *, copies: int | None = None
    ) -> None:
        self.keys = keys
        self.values = values
        self.copies = copies

    @property
    def n_pos(self) -> int:
        """Number of positions stored."""
        return 0 if self.keys is None else self.keys.shape[1]

    def extend(self, keys: KVHeads, values: KVHeads) -> tuple[AllKVHeads, AllKVHeads]:
        """Append keys and values of new positions; returns those of all positions."""
        if self.keys is not None and self.values is not None:
            # They may have been stored on another device than that of the block.
            keys, values = (
                self._joined(self.keys.to(keys.device), keys),
                self._joined(self.values.to(keys.device), values),
            )
        if self.copies is None:
            self.keys, self.values = keys, values
        return keys, values

    def _joined(self, earlier: Float[Tensor, "row column kv_head d_head"], new: KVHeads) -> AllKVHeads:
        """The positions of `earlier`, then the new ones."""
        if self.copies is None:
            return torch.cat([earlier, new], dim=1)
        by_copy = new.unflatten(0, (self.copies, -1))
        return torch.cat([earlier.expand(self.copies, -1, -1, -1, -1), by_copy], dim=2).flatten(0, 1)

    def keep(self, n_pos: int) -> None:
        """Forget the positions from `n_pos` on."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :n_pos], self.values[:, :n_pos]


class KeyValueCache:
    """A `LayerKeyValues` for each layer. Pass it as `past_kv_cache` with only the new tokens as input."""

    def __init__(self, n_layers: int) -> None:
        self.layers = [LayerKeyValues() for _ in range(n_layers)]

    @property
    def n_pos(self) -> int:
        """Number of positions stored."""
        return self.layers[0].n_pos

    def keep(self, n_pos: int) -> None:
        """Forget the positions from `n_pos` on."""
        for layer in self.layers:
            layer.keep(n_pos)
