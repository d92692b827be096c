"""The results of edge and node attribution."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.circuits.circuit import Circuit
from diffusion_lens.analysis.circuits.graph import Graph
from diffusion_lens.display import PicturedResult, Table
from diffusion_lens.records import as_dataclass, load_result, save_result
from diffusion_lens.settings import Whole, at_least, whole_number

_TENSORS = ("scores", "clean", "corrupted")

S = TypeVar("S", bound="AttributionScores")


@dataclass(frozen=True, eq=False, repr=False)
class AttributionScores(PicturedResult):
    """What the scores of edges and of nodes have in common.

    Attributes:
        scores: Estimated change of the metric.
        clean: Float[*step], metric of the clean run.
        corrupted: Float[*step], metric of the corrupted run.
        graph: The writers, the readers, and the edges between them.
        record: Number of gradients, path, metric, rows, steps, tokens of both inputs, model, hash of the weights,
            hooks, versions.
    """

    scores: Float[Tensor, "*rest"]
    clean: Float[Tensor, "*step"]
    corrupted: Float[Tensor, "*step"]
    graph: Graph
    record: dict[str, Any]

    KIND: ClassVar[str]

    @property
    def writers(self) -> tuple[str, ...]:
        """Name of each writer: "embed", head "a0.h0" of layer 0, MLP "m0", and so on."""
        return self.graph.writers

    def at_step(self: S, step: Whole) -> S:
        """The scores of one of the `steps`."""
        step = whole_number("step", step)
        if self.record["steps"] is None or step not in self.record["steps"]:
            raise ValueError(f"step {step} was not attributed; the steps are {self.record['steps']}")
        index = self.record["steps"].index(step)
        parts = {name: getattr(self, name)[index] for name in _TENSORS}
        tokens = {name: [self.record[name][index]] for name in ("clean_tokens", "corrupted_tokens")}
        return replace(self, **parts, record={**self.record, **tokens, "steps": None, "step": step})

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return save_result(path, self.KIND, tensors, {"graph": asdict(self.graph), "record": self.record})

    @classmethod
    def load(cls: type[S], path: str | Path) -> S:
        """Read what `save` wrote."""
        tensors, record = load_result(path, cls.KIND)
        return as_dataclass(cls, {**tensors, **record, "graph": Graph(**record["graph"])})

    def _picture(self) -> Any:
        """The first step, where there are several."""
        steps = self.record["steps"]
        return self.plot() if steps is None else self.at_step(steps[0]).plot()

    def _steps(self) -> dict[str, Any]:
        """The axis of steps, if there is one."""
        return {} if self.record["steps"] is None else {"step": self.record["steps"]}

    def _require_one_step(self) -> None:
        if self.clean.dim():
            raise ValueError(f"there are scores of the steps {self.record['steps']}: take one of them by at_step")


@dataclass(frozen=True, eq=False)
class NodeScores(AttributionScores):
    """The scores of all writers: the embedding, attention heads and MLPs.

    Columns of the data frame: step (of a trajectory), writer, score.

    Attributes:
        scores: Float[*step writer], estimated change of the metric if the writer's clean output replaces that of the
            corrupted run.
        clean: Float[*step], metric of the clean run.
        corrupted: Float[*step], metric of the corrupted run.
        graph: The writers, the readers, and the edges between them.
        record: Number of gradients, path, metric, rows, steps, tokens of both inputs, model, hash of the weights,
            hooks, versions.
    """

    scores: Float[Tensor, "*step writer"]

    KIND = "node scores"

    def plot(self, ax: Any = None, title: str | None = None, limits: tuple[float, float] | None = None) -> Any:
        """Heat map of heads and MLPs by layer; the title has the score of the embedding.

        Args:
            ax: Matplotlib axes to draw on; by default new ones.
            title: Title of the figure.
            limits: Scores at the ends of the colour scale; by default minus and plus the largest absolute score shown.

        Returns:
            The matplotlib axes.
        """
        self._require_one_step()
        by_layer = self.scores[1:].view(self.graph.n_layers, self.graph.n_heads + 1).T
        bound = float(by_layer.abs().max())
        return plots.labelled_map(
            by_layer,
            rows=[*(f"head {head}" for head in range(self.graph.n_heads)), "MLP"],
            layers=range(self.graph.n_layers),
            xlabel="layer",
            hue="RdBu",
            limits=limits or (-bound, bound),
            bar="score",
            title=title or f"Effect of each part (embedding: {float(self.scores[0]):.2g})",
            ax=ax,
        )

    def _table(self) -> Table:
        return Table.of_cells({**self._steps(), "writer": self.writers}, {"score": self.scores}, most="score")

    def __repr__(self) -> str:
        return f"NodeScores({len(self.writers)} writers)"


@dataclass(frozen=True, eq=False)
class EdgeScores(AttributionScores):
    """The scores of all edges.

    Columns of the data frame: step (of a trajectory), writer, reader, score; a row for each edge that exists.

    Attributes:
        scores: Float[*step writer reader], estimated change of the metric if the reader gets the writer's clean output
            in the corrupted run; 0 where the reader comes before the writer.
        clean: Float[*step], metric of the clean run.
        corrupted: Float[*step], metric of the corrupted run.
        graph: The writers, the readers, and the edges between them.
        record: Number of gradients, path, metric, rows, steps, tokens of both inputs, model, hash of the weights,
            hooks, versions.
    """

    scores: Float[Tensor, "*step writer reader"]

    KIND = "edge scores"

    @property
    def nodes(self) -> Float[Tensor, "*step writer"]:
        """Sum of the scores of each writer's edges: its estimated effect when it is patched alone."""
        return self.scores.sum(dim=-1)

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
            ValueError: There are several steps (take `at_step`), there are fewer edges, or the scores do not order the
                edges because all are 0 or one is not finite. No edge and all edges can be taken of any scores.
        """
        self._require_one_step()
        k, n_edges = at_least(0, "k", k), int(self.exists.sum())
        if k > n_edges:
            raise ValueError(f"k={k}, but the graph has {n_edges} edges")
        if 0 < k < n_edges and not (bool(self.scores.isfinite().all()) and bool(self.scores.any())):
            raise ValueError(
                "the scores are all 0 or not finite, so none is the largest: the metric does not differ between "
                "the inputs, as after the step that reveals the answer, or it overflows. Take another step or metric"
            )
        flat = self.scores.abs().masked_fill(~self.exists, -1).flatten().topk(k).indices
        pairs = (divmod(int(index), len(self.readers)) for index in flat)
        return Circuit(frozenset((self.writers[row], self.readers[column]) for row, column in pairs), self.graph)

    def plot(self, ax: Any = None, title: str | None = None, limits: tuple[float, float] | None = None) -> Any:
        """Heat map of the edges, summed over the heads of a layer: writers down, readers across.

        Args:
            ax: Matplotlib axes to draw on; by default new ones.
            title: Title of the figure.
            limits: Sums at the ends of the colour scale; by default minus and plus the largest absolute sum.

        Returns:
            The matplotlib axes.
        """
        self._require_one_step()
        down, across = _membership(self.graph.writer_groups), _membership(self.graph.reader_groups)
        sums, n_edges = (down.T @ table.double() @ across for table in (self.scores, self.exists))
        return plots.edge_map(
            sums.masked_fill(n_edges == 0, math.nan),
            list(dict.fromkeys(self.graph.writer_groups)),
            list(dict.fromkeys(self.graph.reader_groups)),
            limits=limits,
            title=title,
            ax=ax,
        )

    def _table(self) -> Table:
        axes = {**self._steps(), "writer": self.writers, "reader": self.readers}
        return Table.of_cells(axes, {"score": self.scores}, most="score").where(self.exists.expand_as(self.scores))

    def __repr__(self) -> str:
        return f"EdgeScores({len(self.writers)} writers, {len(self.readers)} readers, {int(self.exists.sum())} edges)"


def _membership(groups: Sequence[str]) -> Float[Tensor, "entry member"]:
    """1 where a part belongs to a group, with a column for each group."""
    names = list(dict.fromkeys(groups))
    return torch.tensor([[float(name == group) for name in names] for group in groups], dtype=torch.float64)
