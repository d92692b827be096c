"""The graph of a network's residual stream: parts that write to it, parts that read it, and the edges between them.

Every part reads the sum of what all earlier parts wrote. A writer is the embedding, an attention head, or an MLP. A
reader is the input of a head's queries, keys or values, the input of an MLP, or the final norm ("logits"). Biases of
the output projections are written by no part; they are the same in every run.

A `Circuit` is some of the edges, such as those with the largest scores.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_lens.hooks.names import mlp_out, resid_post
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.records.results import Result, Saved, Table

# The optional hook points at which writers and readers pass.
OPTIONAL = {"use_attn_result": True, "use_split_qkv_input": True, "use_hook_mlp_in": True}
MOST_PAIRS = 2**29  # of writer and reader: the table of the edges then takes 512 MiB
_HEAD = re.compile(r"\.h\d+")


@dataclass(frozen=True)
class ReaderPoint:
    """A hook point with the readers of these indices, and the number of writers before it."""

    name: str
    columns: range
    n_writers: int


@dataclass(frozen=True)
class Graph:
    """The graph of a network with these sizes."""

    n_layers: int
    n_heads: int
    n_key_value_heads: int

    def __post_init__(self) -> None:
        sizes = (self.n_layers, self.n_heads, self.n_key_value_heads)
        if min(sizes) < 1 or self.n_writers * self.n_readers > MOST_PAIRS:
            raise ValueError(
                f"a network of {sizes[0]} layers, {sizes[1]} heads and {sizes[2]} key/value heads has no graph that "
                f"fits in memory; give positive numbers with at most {MOST_PAIRS:,} pairs of writer and reader"
            )

    @property
    def n_writers(self) -> int:
        """Number of writers."""
        return 1 + self.n_layers * (self.n_heads + 1)

    @property
    def n_readers(self) -> int:
        """Number of readers."""
        return 1 + self.n_layers * (self.n_heads + 2 * self.n_key_value_heads + 1)

    @classmethod
    def of(cls, cfg: DiffusionConfig) -> "Graph":
        """The graph of a model."""
        return cls(cfg.n_layers, cfg.n_heads, cfg.n_key_value_heads or cfg.n_heads)

    @cached_property
    def writers(self) -> tuple[str, ...]:
        """Names of the writers, in order: "embed", then for each layer "a0.h0", "a0.h1", ..., "m0"."""
        heads = range(self.n_heads)
        layers = ([*(f"a{layer}.h{head}" for head in heads), f"m{layer}"] for layer in range(self.n_layers))
        return ("embed", *chain.from_iterable(layers))

    @cached_property
    def readers(self) -> tuple[str, ...]:
        """Names of the readers, in order: for each layer "a0.h0<q>", ..., "a0.h0<k>", ..., "m0"; then "logits".

        Keys and values are numbered by key/value head.
        """
        heads = {"q": self.n_heads, "k": self.n_key_value_heads, "v": self.n_key_value_heads}
        inputs = [(of, head) for of, n in heads.items() for head in range(n)]
        layers = ([*(f"a{layer}.h{head}<{of}>" for of, head in inputs), f"m{layer}"] for layer in range(self.n_layers))
        return (*chain.from_iterable(layers), "logits")

    @cached_property
    def writer_groups(self) -> tuple[str, ...]:
        """Each writer without its head: "embed", "a0", ..., "m0"."""
        return tuple(_HEAD.sub("", name) for name in self.writers)

    @cached_property
    def reader_groups(self) -> tuple[str, ...]:
        """Each reader without its head: "a0<q>", ..., "a0<k>", ..., "a0<v>", ..., "m0"; then "logits"."""
        return tuple(_HEAD.sub("", name) for name in self.readers)

    @cached_property
    def reader_layers(self) -> tuple[str, ...]:
        """Layer of each reader: "0", "1", and so on; "logits" of the last one."""
        return (*(re.findall(r"\d+", name)[0] for name in self.readers[:-1]), "logits")

    @cached_property
    def reader_points(self) -> tuple[ReaderPoint, ...]:
        """The hook points of the readers, in the order in which a pass reaches them."""
        found, n_q, n_kv = [], self.n_heads, self.n_key_value_heads  # point, readers, writers before it
        for layer in range(self.n_layers):
            before, block = 1 + layer * (n_q + 1), f"blocks.{layer}"
            found += [(f"{block}.attn.hook_{of}_input", n, before) for of, n in (("q", n_q), ("k", n_kv), ("v", n_kv))]
            found.append((f"{block}.hook_mlp_in", 1, before + n_q))
        found.append((resid_post(self.n_layers - 1), 1, len(self.writers)))
        ends = accumulate(n for _, n, _ in found)
        return tuple(
            ReaderPoint(name, range(end - n, end), before) for (name, n, before), end in zip(found, ends, strict=True)
        )

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

    def _writers_at(self, head_point: str) -> dict[str, range]:
        points, row = {"hook_embed": range(1)}, 1
        for layer in range(self.n_layers):
            points[f"blocks.{layer}.attn.{head_point}"] = range(row, row + self.n_heads)
            points[mlp_out(layer)] = range(row + self.n_heads, row + self.n_heads + 1)
            row += self.n_heads + 1
        return points


def by_part(activation: Tensor) -> Tensor:
    """An activation or gradient [batch pos d_model] of a single part with an axis for it; that of heads as it is."""
    return activation.unsqueeze(2) if activation.dim() == 3 else activation


@dataclass(frozen=True)
class Circuit(Result, Saved):
    """Some edges of a network's graph.

    Columns of the data frame: writer, reader.

    Attributes:
        edges: Pairs (writer, reader) of names such as ("a0.h1", "m2").
        graph: The graph that has these edges, among others.

    Raises:
        ValueError: The graph lacks one of the edges.
    """

    KIND = "circuit"
    NO_PICTURE = "It is a set of edges; their scores and the faithfulness of circuits have pictures."

    edges: frozenset[tuple[str, str]]
    graph: Graph

    def __post_init__(self) -> None:
        writers, readers = (set(names) for names in (self.graph.writers, self.graph.readers))
        unknown = {(writer, reader) for writer, reader in self.edges if writer not in writers or reader not in readers}
        if unknown := unknown or set(self.edges.difference(self._named(self.mask & self.graph.edges))):
            raise ValueError("this graph has no edge from {!r} to {!r}".format(*min(unknown)))

    def __len__(self) -> int:
        return len(self.edges)

    @property
    def mask(self) -> Bool[Tensor, "writer reader"]:
        """True at the edges of the circuit."""
        rows, columns = (
            {name: i for i, name in enumerate(names)} for names in (self.graph.writers, self.graph.readers)
        )
        mask = torch.zeros_like(self.graph.edges)
        for writer, reader in self.edges:
            mask[rows[writer], columns[reader]] = True
        return mask

    def jaccard(self, other: "Circuit") -> float:
        """Edges of both circuits, divided by edges of at least one; NaN if both are empty.

        Raises:
            ValueError: The circuits are of networks with other layers or heads, where names mean other parts.
        """
        if self.graph != other.graph:
            raise ValueError(
                f"the circuits are of different graphs, {self.graph} and {other.graph}: their edges differ"
            )
        union = len(self.edges | other.edges)
        return len(self.edges & other.edges) / union if union else math.nan

    def share_by_layer(self) -> dict[str, float]:
        """Share of the edges whose reader is in each layer ("0", "1", ..., "logits"); NaN if there are no edges."""
        layers = dict(zip(self.graph.readers, self.graph.reader_layers, strict=True))
        counts = Counter(layers[reader] for _, reader in self.edges)
        return {name: counts[name] / len(self) if len(self) else math.nan for name in dict.fromkeys(layers.values())}

    def _table(self) -> Table:
        edges = sorted(self.edges)
        return Table({"writer": [writer for writer, _ in edges], "reader": [reader for _, reader in edges]})

    def _settings(self) -> Mapping[str, Any]:
        return {}

    def _named(self, mask: Bool[Tensor, "writer reader"]) -> Iterator[tuple[str, str]]:
        writers, readers = self.graph.writers, self.graph.readers
        return ((writers[row], readers[column]) for row, column in mask.nonzero().tolist())

    def __repr__(self) -> str:
        return f"Circuit({len(self)} of {int(self.graph.edges.sum())} edges)"
