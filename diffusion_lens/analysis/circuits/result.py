"""The result of edge attribution, and the circuits that it selects."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_lens.analysis.circuits.graph import Graph
from diffusion_lens.records import as_dataclass, load_result, save_result
from diffusion_lens.settings import Whole, at_least, whole_number

_TENSORS = ("scores", "clean", "corrupted")


@dataclass(frozen=True)
class Circuit:
    """Some edges of a network's graph, as pairs (writer, reader) of names such as ("a0.h1", "m2")."""

    edges: frozenset[tuple[str, str]]

    def __len__(self) -> int:
        return len(self.edges)

    def jaccard(self, other: "Circuit") -> float:
        """Edges of both circuits, divided by edges of at least one; NaN if both are empty."""
        union = len(self.edges | other.edges)
        return len(self.edges & other.edges) / union if union else float("nan")

    def share_by_layer(self) -> dict[str, float]:
        """Share of the edges whose reader is in each layer ("0", "1", ..., "logits"), as far as there are any."""
        counts = Counter(
            reader.lstrip("am").split(".")[0] if reader != "logits" else reader for _, reader in self.edges
        )
        in_order = sorted(counts, key=lambda name: (name == "logits", int(name) if name.isdigit() else 0))
        return {name: counts[name] / len(self.edges) for name in in_order}


@dataclass(frozen=True, eq=False)
class EdgeScores:
    """The scores of all edges.

    Attributes:
        scores: Float[*step writer reader], estimated change of the metric if the reader gets the writer's clean output
            in the corrupted run; 0 where the reader comes before the writer.
        clean: Float[*step], metric of the clean run.
        corrupted: Float[*step], metric of the corrupted run.
        graph: The writers, the readers, and the edges between them.
        record: Number of gradients, path, metric, steps, tokens of both inputs, model, hash of the weights, hooks,
            versions.
    """

    scores: Float[Tensor, "*step writer reader"]
    clean: Float[Tensor, "*step"]
    corrupted: Float[Tensor, "*step"]
    graph: Graph
    record: dict[str, Any]

    @property
    def nodes(self) -> Float[Tensor, "*step writer"]:
        """Sum of the scores of each writer's edges: its estimated effect when it is patched alone."""
        return self.scores.sum(dim=-1)

    def at_step(self, step: Whole) -> "EdgeScores":
        """The scores of one of the `steps`."""
        step = whole_number("step", step)
        if self.record["steps"] is None or step not in self.record["steps"]:
            raise ValueError(f"step {step} was not attributed; the steps are {self.record['steps']}")
        index = self.record["steps"].index(step)
        parts = {name: getattr(self, name)[index] for name in _TENSORS}
        tokens = {name: [self.record[name][index]] for name in ("clean_tokens", "corrupted_tokens")}
        return replace(self, **parts, record={**self.record, **tokens, "steps": None, "step": step})

    @property
    def writers(self) -> tuple[str, ...]:
        """Name of each writer: "embed", head "a0.h0" of layer 0, MLP "m0", and so on."""
        return self.graph.writers

    @property
    def readers(self) -> tuple[str, ...]:
        """Name of each reader: queries "a0.h0<q>", keys "a0.h0<k>" and values "a0.h0<v>" of a head, MLP "m0", and so
        on; the last is "logits". Keys and values are numbered by key/value head.
        """
        return self.graph.readers

    @property
    def exists(self) -> Bool[Tensor, "writer reader"]:
        """True where the reader comes after the writer."""
        return self.graph.edges

    def top(self, k: Whole) -> Circuit:
        """The circuit of the `k` edges with the largest absolute scores.

        Raises:
            ValueError: There are several steps (take `at_step`), or there are fewer edges.
        """
        if self.scores.dim() > 2:
            raise ValueError(f"there are scores of the steps {self.record['steps']}: take one of them by at_step")
        k, n_edges = at_least(0, "k", k), int(self.exists.sum())
        if k > n_edges:
            raise ValueError(f"k={k}, but the graph has {n_edges} edges")
        flat = self.scores.abs().masked_fill(~self.exists, -1).flatten().topk(k).indices
        return Circuit(frozenset(self._edge(int(index)) for index in flat))

    def mask(self, circuit: Circuit) -> Bool[Tensor, "writer reader"]:
        """True at the edges of a circuit.

        Raises:
            ValueError: The circuit has an edge that this graph lacks.
        """
        table = torch.zeros_like(self.exists)
        rows, columns = ({name: i for i, name in enumerate(names)} for names in (self.writers, self.readers))
        for writer, reader in circuit.edges:
            if writer not in rows or reader not in columns or not self.exists[rows[writer], columns[reader]]:
                raise ValueError(f"this graph has no edge from {writer!r} to {reader!r}")
            table[rows[writer], columns[reader]] = True
        return table

    def _edge(self, index: int) -> tuple[str, str]:
        writer, reader = divmod(index, len(self.readers))
        return self.writers[writer], self.readers[reader]

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return save_result(path, "edge scores", tensors, {"graph": asdict(self.graph), "record": self.record})

    @classmethod
    def load(cls, path: str | Path) -> "EdgeScores":
        """Read what `save` wrote."""
        tensors, record = load_result(path, "edge scores")
        return as_dataclass(cls, {**tensors, **record, "graph": Graph(**record["graph"])})

    def __repr__(self) -> str:
        return f"EdgeScores({len(self.writers)} writers, {len(self.readers)} readers, {int(self.exists.sum())} edges)"
