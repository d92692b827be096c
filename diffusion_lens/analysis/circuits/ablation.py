"""How much of the clean metric a circuit keeps, when every edge outside it carries the corrupted output of its writer.

The pass reads the clean input. At each reader, the live output of every writer outside the circuit is replaced by what
the writer wrote in the corrupted run; a writer's live output depends on the edges into it. This is exact, because a
reader's input is the sum of all outputs before it (Conmy et al. 2023, arXiv 2304.14997; Hanna et al. 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_lens.analysis.circuits.graph import OPTIONAL, Graph, by_part, require_same_positions
from diffusion_lens.analysis.circuits.result import Circuit, EdgeScores
from diffusion_lens.analysis.patching.inputs import Patchable, PatchInputs
from diffusion_lens.analysis.patching.metrics import Metric, Reading
from diffusion_lens.analysis.patching.runs import Side
from diffusion_lens.hook_names import Hook
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.shapes import Resid


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """The metric of circuits of growing size.

    Attributes:
        sizes: Number of edges of each circuit.
        scores: Float[entry], metric with each circuit alone.
        clean: Metric of the clean run, which is that of the whole graph.
        corrupted: Metric of the corrupted run, which is that of no edge.
        record: Metric, tokens of both inputs, model, hash of the weights, hooks, versions.
    """

    sizes: tuple[int, ...]
    scores: Float[Tensor, "entry"]
    clean: float
    corrupted: float
    record: dict[str, Any] = field(repr=False)

    @property
    def share(self) -> Float[Tensor, "entry"]:
        """(score - corrupted) / (clean - corrupted): 0 without edges, 1 for the whole graph; not bounded between."""
        return (self.scores - self.corrupted) / (self.clean - self.corrupted)


@begins_run
@torch.no_grad()
def faithfulness(
    model: DiffusionTransformer,
    clean: Patchable,
    corrupted: Patchable,
    metric: Metric,
    edge_scores: EdgeScores,
    circuits: Sequence[int | Circuit],
    *,
    logits_at: Sequence[int] | Tensor | None = None,
) -> Faithfulness:
    """The metric with each circuit alone.

    Args:
        model: Model, of either variant.
        clean, corrupted: Texts, tokens or queries of one length.
        metric: Function of the logits, as in `patch_grid`.
        edge_scores: Scores that order the edges (`edge_attribution`).
        circuits: Circuits, or numbers of edges for those with the largest absolute scores.
        logits_at: Rows of the logits to compute, as in `patch_grid`.

    Raises:
        ValueError: The inputs differ in length or padding, a circuit has an edge that the model lacks, or the scores
            are of another architecture.
    """
    reading, graph = Reading.of(metric, logits_at), Graph.of(model.cfg)
    (pair,) = PatchInputs(model, clean, model, corrupted, None).sides(reading)
    require_same_positions(*pair)
    if edge_scores.graph != graph:
        raise ValueError("the edge scores are of a model with other layers or heads than this one")
    chosen = [one if isinstance(one, Circuit) else edge_scores.top(one) for one in circuits]
    masks = [edge_scores.mask(one) for one in chosen]
    with model.optional_hooks(**OPTIONAL):
        embedded, _ = embeddings = [side.input.embed() for side in pair]
        runs = [side.input.run(graph.writer_points, start) for side, start in zip(pair, embeddings, strict=True)]
        replacement = graph.written(runs[1].activations)
        scores = [_score(pair[0], embedded, graph, replacement, mask) for mask in masks]
    clean_score, corrupted_score = (float(side.reading(run.logits)) for side, run in zip(pair, runs, strict=True))
    record = {
        "metric": reading.name,
        "clean_tokens": pair[0].tokens.tolist(),
        "corrupted_tokens": pair[1].tokens.tolist(),
        **provenance(model, model.cfg),
    }
    sizes = tuple(len(one) for one in chosen)
    return Faithfulness(sizes, torch.tensor(scores, dtype=torch.float64), clean_score, corrupted_score, record)


def _score(
    clean: Side,
    embedded: Resid,
    graph: Graph,
    replacement: Float[Tensor, "batch pos writer d_model"],
    circuit: Bool[Tensor, "writer reader"],
) -> float:
    """The metric of one pass over the clean input in which the edges outside a circuit carry the replacement."""
    excluded = (graph.edges & ~circuit).to(replacement.device)
    change = torch.zeros_like(replacement)  # replacement minus live output, of the writers that the pass has reached

    def keep(activation: Tensor, hook: Any) -> None:
        writers = graph.writer_points[hook.name]
        rows = slice(writers.start, writers.stop)
        change[:, :, rows] = replacement[:, :, rows] - by_part(activation)

    def replace(activation: Tensor, hook: Any) -> Tensor | None:
        point = points[hook.name]
        outside = excluded[: point.n_writers, point.columns.start : point.columns.stop].to(change.dtype)
        if not bool(outside.any()):
            return None
        moved = torch.einsum("bpwd,wr->bprd", change[:, :, : point.n_writers], outside)
        return activation + (moved if activation.dim() == 4 else moved[:, :, 0])

    points = {point.name: point for point in graph.reader_points}
    hooks: list[tuple[str, Hook]] = [(name, keep) for name in graph.writer_points if name != "hook_embed"]
    hooks += [(name, replace) for name in points]
    given = clean.input
    change[:, :, :1] = replacement[:, :, :1] - by_part(embedded)
    with given.at_step(), given.model.hooks(fwd_hooks=hooks):
        logits = given.model(embedded, start_at_layer=0, attention_mask=given.real, logits_at=given.rows)
    return float(clean.reading(logits))
