"""`Circuit`: some edges of a network's graph, such as those with the largest scores."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from diffusion_lens.analysis.circuits.graph import Graph
from diffusion_lens.display import Result, Table
from diffusion_lens.records import load_result, save_result


@dataclass(frozen=True)
class Circuit(Result):
    """Some edges of a network's graph.

    Columns of the data frame: writer, reader.

    Attributes:
        edges: Pairs (writer, reader) of names such as ("a0.h1", "m2").
        graph: The graph that has these edges, among others.

    Raises:
        ValueError: The graph lacks one of the edges.
    """

    edges: frozenset[tuple[str, str]]
    graph: Graph

    def __post_init__(self) -> None:
        rows, columns = self._indices()
        for writer, reader in sorted(self.edges):
            known = writer in rows and reader in columns
            if not known or not self.graph.edges[rows[writer], columns[reader]]:
                raise ValueError(f"this graph has no edge from {writer!r} to {reader!r}")

    def __len__(self) -> int:
        return len(self.edges)

    @property
    def mask(self) -> Bool[Tensor, "writer reader"]:
        """True at the edges of the circuit."""
        table = torch.zeros_like(self.graph.edges)
        rows, columns = self._indices()
        for writer, reader in self.edges:
            table[rows[writer], columns[reader]] = True
        return table

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

    def save(self, path: str | Path) -> Path:
        """Write the edges and the graph to one `.safetensors` file."""
        return save_result(path, "circuit", {}, {"edges": sorted(self.edges), "graph": asdict(self.graph)})

    @classmethod
    def load(cls, path: str | Path) -> "Circuit":
        """Read what `save` wrote."""
        _, saved = load_result(path, "circuit")
        return cls(frozenset((writer, reader) for writer, reader in saved["edges"]), Graph(**saved["graph"]))

    def _table(self) -> Table:
        edges = sorted(self.edges)
        return Table({"writer": [writer for writer, _ in edges], "reader": [reader for _, reader in edges]})

    def _settings(self) -> Mapping[str, Any]:
        return {}

    def _indices(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Index of each writer and of each reader by name."""
        rows, columns = (
            {name: i for i, name in enumerate(names)} for names in (self.graph.writers, self.graph.readers)
        )
        return rows, columns

    def __repr__(self) -> str:
        return f"Circuit({len(self)} of {int(self.graph.edges.sum())} edges)"
