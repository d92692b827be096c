"""How much of the clean metric a circuit keeps, when every edge outside it carries the corrupted output of its writer.

The pass reads the clean input. At each reader, the live output of every writer outside the circuit is replaced by what
the writer wrote in the corrupted run; a writer's live output depends on the edges into it. This is exact, because a
reader's input is the sum of all outputs before it (Conmy et al. 2023, arXiv 2304.14997; Hanna et al. 2024).

At a denoising step, the metric of every pass is that of the clean canvas, as in `edge_attribution`. So the whole graph
always gives the metric of the clean run, and no edge that of the corrupted run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.circuits.attribution import (
    EdgeScores,
    NodeScores,
    joined,
    on_one_metric,
    require_plain_stream,
    require_same_positions,
)
from diffusion_lens.analysis.circuits.graph import OPTIONAL, Circuit, Graph, by_part
from diffusion_lens.analysis.engine.batching import reserved, row_bytes
from diffusion_lens.analysis.patching.grid import Patchable, PatchInputs
from diffusion_lens.analysis.patching.metrics import Metric, Reading
from diffusion_lens.analysis.patching.runs import Side
from diffusion_lens.hooks.names import Hook
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance
from diffusion_lens.settings import Whole
from diffusion_lens.settings.figures import styled


@dataclass(frozen=True, eq=False, repr=False)
class Faithfulness(PicturedResult, Saved):
    """The metric of circuits of growing size.

    Columns of the data frame: step (of a trajectory), edges, score, share.

    Attributes:
        sizes: Number of edges of each circuit.
        scores: Float[*step entry], metric with each circuit alone.
        clean: Float[*step], metric of the clean run, which is that of the whole graph.
        corrupted: Float[*step], metric of the corrupted run, which is that of no edge.
        record: Circuits, settings of the edge scores, metric, rows, steps, tokens of both inputs, model, hash of the
            weights, hooks, versions.
    """

    KIND = "faithfulness"
    SHOWS = "how much of the metric a circuit keeps, by its number of edges"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"steps": list[int] | None}

    sizes: tuple[int, ...]
    scores: Float[Tensor, "*step entry"]
    clean: Float[Tensor, "*step"]
    corrupted: Float[Tensor, "*step"]
    record: dict[str, Any] = field(repr=False)

    def _axes(self) -> Iterable[tuple[str, Any]]:
        return (("*step", self.record["steps"]), ("entry", self.sizes))

    @property
    def share(self) -> Float[Tensor, "*step entry"]:
        """(score - corrupted) / (clean - corrupted): 0 without edges, 1 for the whole graph; not bounded between."""
        corrupted = self.corrupted[..., None]
        return (self.scores - corrupted) / (self.clean[..., None] - corrupted)

    def _table(self) -> Table:
        steps = {} if self.record["steps"] is None else {"step": self.record["steps"]}
        return Table.of_cells({**steps, "edges": self.sizes}, {"score": self.scores, "share": self.share})

    @styled
    def plot(self, ax: Any = None, title: str | None = None, label: str | None = None) -> Any:
        """Curve of `share` by the number of edges, on a logarithmic axis; one curve for each step, or one with a label.
        Returns the matplotlib axes.
        """
        steps = self.record["steps"]
        names = [label or "share"] if steps is None else [f"step {step}" for step in steps]
        curves = dict(zip(names, self.share.view(len(names), -1), strict=True))
        return plots.kept_by_size(curves, self.sizes, title=title, ax=ax)


@begins_run
@torch.no_grad()
def faithfulness(
    model: DiffusionTransformer,
    clean: Patchable,
    corrupted: Patchable,
    metric: Metric,
    edge_scores: EdgeScores | NodeScores,
    circuits: Iterable[Whole | Circuit] | Whole | Circuit,
    steps: Iterable[Whole] | None = None,
    *,
    logits_at: Sequence[int] | Tensor | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> Faithfulness:
    """The metric with each circuit alone.

    Args:
        model, clean, corrupted, metric, steps, logits_at, progress: Those of `edge_attribution`; the metric need not be
            differentiable.
        edge_scores: Scores that order the edges (`edge_attribution`). If they have steps, those of each step order its
            edges.
        circuits: Circuits, or numbers of edges for those with the largest absolute scores.
        max_bytes: Memory to use in addition to the weights; as many circuits as fit share a pass.

    Raises:
        TypeError: The scores are of nodes, or `circuits` is not a list of circuits or sizes.
        ValueError: As in `edge_attribution`, or the edge scores or a circuit are of another architecture, or the edge
            scores lack a step.
    """
    require_plain_stream(model)
    if isinstance(edge_scores, NodeScores):
        raise TypeError("NodeScores do not order edges: give faithfulness the result of edge_attribution")
    if not isinstance(circuits, Iterable):
        raise TypeError(f"circuits={circuits!r} is one circuit or size; give several in a list, such as [{circuits!r}]")
    circuits = list(circuits)
    reading, graph = Reading.of(metric, logits_at), Graph.of(model.cfg)
    graphs = [edge_scores.graph, *(one.graph for one in circuits if isinstance(one, Circuit))]
    if any(other != graph for other in graphs):
        raise ValueError("the edge scores or circuits are of a model with other layers or heads than this one")
    inputs = PatchInputs.of(model, clean, model, corrupted, steps)
    written_by, pairs = inputs.canvas_provenances(), inputs.sides(reading)
    by_step = edge_scores.record["steps"] is not None and inputs.steps is not None
    ordered = map(edge_scores.at_step, inputs.steps or ()) if by_step else [edge_scores] * len(pairs)
    chosen = [[one if isinstance(one, Circuit) else scores.top(one) for one in circuits] for scores in ordered]
    runs = [_AblatedRuns(graph, *pair, max_bytes) for pair in pairs]
    with model.optional_hooks(**OPTIONAL):
        scored = [of_pair.scores(of_step, progress) for of_pair, of_step in zip(runs, chosen, strict=True)]
    scores, clean_scores, corrupted_scores = joined(scored, inputs.steps)
    record = {
        "circuits": [
            sorted(one.edges) if isinstance(one, Circuit) else len(chosen[0][i]) for i, one in enumerate(circuits)
        ],
        "edge_scores": {name: edge_scores.record[name] for name in ("ig_steps", "path", "metric", "steps")},
        "steps": inputs.steps,
        **inputs.describe(reading, pairs, written_by),
        **provenance(model, model.cfg),
    }
    return Faithfulness(tuple(map(len, chosen[0])), scores, clean_scores, corrupted_scores, record)


class _AblatedRuns:
    """The passes over one clean input, in which the edges outside of circuits carry the corrupted outputs."""

    def __init__(self, graph: Graph, clean: Side, corrupted: Side, max_bytes: int) -> None:
        require_same_positions(clean, corrupted)
        self.graph, given = graph, clean.input
        written, cfg = given.stored_bytes(graph.writer_points), given.model.cfg
        # The streams that queries, keys and values of a block read, before and after their norm, and the last of them
        # inside its norm, in float32 at least.
        points = [point.name for point in graph.reader_points[:3]]
        copies = 2 * given.stored_bytes(points) + 2 * given.stream_bytes
        copies += given.stored_bytes(points[2:]) * (1 if cfg.dtype.itemsize >= 4 else 8 // cfg.dtype.itemsize)
        one_block = given.n_rows * row_bytes(cfg, given.n_pos, len(given.read_rows)) + 3 * given.stream_bytes
        one_circuit = reserved(cfg, written + max(copies, one_block))
        stored = written + 2 * given.stream_bytes
        self.circuits_at_once = (max_bytes - stored) // one_circuit
        if self.circuits_at_once < 1:
            raise ValueError(f"max_bytes={max_bytes:,} is too small: one circuit takes {stored + one_circuit:,} bytes")
        self.clean, self.corrupted = on_one_metric(clean, corrupted)

    def scores(self, circuits: Sequence[Circuit], progress: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Metric of each circuit, of the clean and of the corrupted run."""
        # 1. Compute both runs, and keep what each writer wrote in the corrupted one.
        embeddings = [side.input.embed() for side in (self.clean, self.corrupted)]
        clean_logits = self.clean.input.run((), embeddings[0]).logits
        run = self.corrupted.input.run(self.graph.writer_points, embeddings[1])
        ends = torch.tensor([float(self.clean.reading(x)) for x in (clean_logits, run.logits)], dtype=torch.float64)
        replacement = self.graph.written(run.activations).permute(2, 0, 1, 3).contiguous()
        del run

        # 2. Compute the circuits, several in one pass.
        blocks = [circuits[i : i + self.circuits_at_once] for i in range(0, len(circuits), self.circuits_at_once)]
        scores = [
            score
            for block in tqdm(blocks, desc="circuits", unit="pass", disable=not progress)
            for score in self._block(embeddings[0], replacement, block)
        ]
        return torch.tensor(scores, dtype=torch.float64), ends[0], ends[1]

    def _block(
        self,
        embedded: Float[Tensor, "batch pos d_model"],
        replacement: Float[Tensor, "writer batch pos d_model"],
        circuits: Sequence[Circuit],
    ) -> list[float]:
        """The metric of each circuit, from one pass over a copy of the clean rows for each."""
        graph, given, n, n_rows = self.graph, self.clean.input, len(circuits), self.clean.input.n_rows
        excluded: Bool[Tensor, "member writer reader"] = torch.stack([graph.edges & ~one.mask for one in circuits])
        # Replacement minus live output, of the writers that the pass has reached.
        change = replacement.new_zeros(n, *replacement.shape)

        def keep(activation: Tensor, hook: Any) -> None:
            writers = graph.writer_points[hook.name]
            rows = slice(writers.start, writers.stop)
            live = by_part(activation.to(change.device)).unflatten(0, (n, n_rows)).permute(0, 3, 1, 2, 4)
            torch.sub(replacement[rows], live, out=change[:, rows])

        def replaced(activation: Tensor, hook: Any) -> Tensor | None:
            point = points[hook.name]
            outside = excluded[:, : point.n_writers, point.columns.start : point.columns.stop]
            if not bool(outside.any()):
                return None
            weights = outside.to(change).mT
            moved = torch.bmm(weights, change[:, : point.n_writers].flatten(2)).unflatten(2, change.shape[2:])
            by_row = moved.permute(0, 2, 3, 1, 4).flatten(0, 1).to(activation.device)
            patched: Tensor = activation + (by_row if activation.dim() == 4 else by_row[:, :, 0])
            return patched

        points = {point.name: point for point in graph.reader_points}
        hooks: list[tuple[str, Hook]] = [(name, keep) for name in graph.writer_points if name != "hook_embed"]
        hooks += [(name, replaced) for name in points]
        change[:, 0] = replacement[0] - embedded
        with given.at_step(n), given.model.hooks(fwd_hooks=hooks):
            logits = given.model(
                embedded.repeat(n, 1, 1), start_at_layer=0, attention_mask=given.mask(n), logits_at=given.rows
            )
        return [float(self.clean.reading(part)) for part in logits.split(n_rows)]
