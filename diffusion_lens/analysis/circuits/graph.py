"""The graph of a network's residual stream: parts that write to it, parts that read it, and the edges between them.

Every part reads the sum of what all earlier parts wrote. A writer is the embedding, an attention head, or an MLP. A
reader is the input of a head's queries, keys or values, the input of an MLP, or the final norm ("logits"). Biases of
the output projections are written by no part; they are the same in every run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.hook_names import mlp_out, resid_post

# The optional hook points at which writers and readers pass.
OPTIONAL = {"use_attn_result": True, "use_split_qkv_input": True, "use_hook_mlp_in": True}


@dataclass(frozen=True)
class ReaderPoint:
    """A hook point with one or several readers.

    Attributes:
        name: Name of the hook point.
        columns: Indices of its readers.
        n_writers: Number of writers before it.
    """

    name: str
    columns: range
    n_writers: int


@dataclass(frozen=True)
class Graph:
    """The graph of a network with these sizes."""

    n_layers: int
    n_heads: int
    n_key_value_heads: int

    @classmethod
    def of(cls, cfg: DiffusionConfig) -> "Graph":
        """The graph of a model."""
        return cls(cfg.n_layers, cfg.n_heads, cfg.n_key_value_heads or cfg.n_heads)

    @cached_property
    def writers(self) -> tuple[str, ...]:
        """Names of the writers, in order: "embed", then for each layer "a0.h0", "a0.h1", ..., "m0"."""
        return ("embed", *(name for layer in range(self.n_layers) for name in self._writers_of(layer)))

    @cached_property
    def readers(self) -> tuple[str, ...]:
        """Names of the readers, in order: for each layer "a0.h0<q>", ..., "a0.h0<k>", ..., "m0"; then "logits".

        Keys and values are numbered by key/value head.
        """
        inputs = self._inputs_of_parts
        return (*(f"m{layer}" if of is None else f"a{layer}.h{head}<{of}>" for layer, of, head in inputs), "logits")

    @cached_property
    def writer_groups(self) -> tuple[str, ...]:
        """Each writer without its head: "embed", "a0", ..., "m0"."""
        return ("embed", *(f"{part}{layer}" for layer in range(self.n_layers) for part in ["a"] * self.n_heads + ["m"]))

    @cached_property
    def reader_groups(self) -> tuple[str, ...]:
        """Each reader without its head: "a0<q>", ..., "a0<k>", ..., "a0<v>", ..., "m0"; then "logits"."""
        inputs = self._inputs_of_parts
        return (*(f"m{layer}" if of is None else f"a{layer}<{of}>" for layer, of, _ in inputs), "logits")

    @cached_property
    def reader_layers(self) -> tuple[str, ...]:
        """Layer of each reader: "0", "1", and so on; "logits" of the last one."""
        return (*(str(layer) for layer, _, _ in self._inputs_of_parts), "logits")

    @cached_property
    def reader_points(self) -> tuple[ReaderPoint, ...]:
        """The hook points of the readers, in the order in which a pass reaches them."""
        points, column, n_writers = [], 0, 1

        def add(name: str, n: int) -> None:
            nonlocal column
            points.append(ReaderPoint(name, range(column, column + n), n_writers))
            column += n

        for layer in range(self.n_layers):
            attn = f"blocks.{layer}.attn"
            add(f"{attn}.hook_q_input", self.n_heads)
            add(f"{attn}.hook_k_input", self.n_key_value_heads)
            add(f"{attn}.hook_v_input", self.n_key_value_heads)
            n_writers += self.n_heads
            add(f"blocks.{layer}.hook_mlp_in", 1)
            n_writers += 1
        add(resid_post(self.n_layers - 1), 1)
        return tuple(points)

    @cached_property
    def writer_points(self) -> dict[str, range]:
        """The writers of each hook point, as indices, in the order in which a pass reaches them."""
        return self._writers_at("hook_result")

    @cached_property
    def node_points(self) -> dict[str, range]:
        """`writer_points`, but heads before the output projection, which is linear: these pass without any flag."""
        return self._writers_at("hook_z")

    @cached_property
    def edges(self) -> Bool[Tensor, "writer reader"]:
        """True where a reader comes after a writer."""
        table = torch.zeros(len(self.writers), len(self.readers), dtype=torch.bool)
        for point in self.reader_points:
            table[: point.n_writers, list(point.columns)] = True
        return table

    def written(self, activations: Mapping[str, Tensor]) -> Float[Tensor, "batch pos writer d_model"]:
        """What each writer added to the residual stream."""
        device = activations["hook_embed"].device  # blocks may be on several
        return torch.cat([by_part(activations[name].to(device)) for name in self.writer_points], dim=2)

    @property
    def _inputs_of_parts(self) -> list[tuple[int, str | None, int]]:
        """Layer, "q", "k" or "v" (`None` for the MLP) and head of each reader but the last, in the order of a pass."""
        of_a_layer = {"q": self.n_heads, "k": self.n_key_value_heads, "v": self.n_key_value_heads, None: 1}
        return [
            (layer, of, head) for layer in range(self.n_layers) for of, n in of_a_layer.items() for head in range(n)
        ]

    def _writers_at(self, head_point: str) -> dict[str, range]:
        points, row = {"hook_embed": range(1)}, 1
        for layer in range(self.n_layers):
            points[f"blocks.{layer}.attn.{head_point}"] = range(row, row + self.n_heads)
            points[mlp_out(layer)] = range(row + self.n_heads, row + self.n_heads + 1)
            row += self.n_heads + 1
        return points

    def _writers_of(self, layer: int) -> Iterator[str]:
        yield from (f"a{layer}.h{head}" for head in range(self.n_heads))
        yield f"m{layer}"


def by_part(activation: Tensor) -> Tensor:
    """An activation or gradient [batch pos d_model] of a single part with an axis for it; that of heads as it is."""
    return activation.unsqueeze(2) if activation.dim() == 3 else activation
