"""Keys and values of places already run, so that a causal model runs each place once."""

import torch
from jaxtyping import Float
from torch import Tensor

KVHeads = Float[Tensor, "batch pos kv_head d_head"]
AllKVHeads = Float[Tensor, "batch key kv_head d_head"]


class LayerKeyValues:
    """One layer's rotated keys, and values, in order of place."""

    def __init__(self, keys: AllKVHeads | None = None, values: AllKVHeads | None = None) -> None:
        self.keys = keys
        self.values = values

    @property
    def n_pos(self) -> int:
        """Places held."""
        return 0 if self.keys is None else self.keys.shape[1]

    def extend(self, keys: KVHeads, values: KVHeads) -> tuple[AllKVHeads, AllKVHeads]:
        """Append those of new places; returns all."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=1), torch.cat([self.values, values], dim=1)
        self.keys, self.values = keys, values
        return keys, values


class KeyValueCache:
    """A `LayerKeyValues` for each layer; pass it as `past_kv_cache` and only new tokens as input."""

    def __init__(self, n_layers: int) -> None:
        self.layers = [LayerKeyValues() for _ in range(n_layers)]

    @property
    def n_pos(self) -> int:
        """Places held."""
        return self.layers[0].n_pos
