"""Edge attribution patching (EAP): how much of a metric passes along each edge of the residual stream?

An edge leads from a writer u to a later reader v (see `graph.py`). To first order, giving v the clean output of u in a
corrupted run changes the metric M by

    (u_clean - u_corrupted) · dM/dv

(Syed et al. 2023, arXiv 2310.10348), with the gradient in the corrupted run. Gradients of saturated parts are
misleading, so EAP with integrated gradients (EAP-IG, Hanna et al. 2024, arXiv 2403.17806, eq. 3) averages the gradient
over m runs whose embeddings lie on the line from the corrupted to the clean ones, at k/m for k = 1 … m. With many steps
the scores of the embedding's edges add up to M_clean - M_corrupted. With `path="nodes"`, the output of each writer is
interpolated in m runs of its own, at (k - 1/2)/m: the scores of every writer's edges then add up to the effect of
patching this writer alone.

Under guidance, the metric of a patched run has the unconditional branch of the corrupted run. The sums are M_clean -
M_corrupted only where both runs have the same unconditional branch, such as at step 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.circuits.graph import OPTIONAL, Graph, by_part, require_same_positions
from diffusion_lens.analysis.circuits.result import EdgeScores
from diffusion_lens.analysis.patching.inputs import Patchable, PatchInputs
from diffusion_lens.analysis.patching.metrics import Metric, Reading
from diffusion_lens.analysis.patching.runs import Side
from diffusion_lens.hook_names import Hook
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, at_least, whole_numbers

PATHS = ("inputs", "nodes")


@begins_run
@torch.inference_mode(False)
@torch.no_grad()
def edge_attribution(
    model: DiffusionTransformer,
    clean: Patchable,
    corrupted: Patchable,
    metric: Metric,
    steps: Iterable[Whole] | None = None,
    *,
    ig_steps: Whole = 5,
    path: str = "inputs",
    logits_at: Sequence[int] | Tensor | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> EdgeScores:
    """The score of every edge, summed over positions and rows: positive where the clean output raises the metric.

    Args:
        model: Model whose corrupted run is patched, of either variant.
        clean, corrupted: Inputs of one length: texts, tokens, queries or, with `steps`, trajectories.
        metric: Function of the logits, as in `patch_grid`; it must be differentiable.
        steps: Steps of the trajectories, each with scores of its own.
        ig_steps: Number m of gradients that are averaged; 1 is plain EAP, with the gradient of the corrupted run.
        path: "inputs" or "nodes" (see the module); "nodes" takes m runs for each writer.
        logits_at: Rows of the logits to compute, as in `patch_grid`.
        max_bytes: Memory to use in addition to the weights; with "nodes", as many runs as fit share a pass.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The inputs differ in length or padding, the metric has no gradient, a setting is unknown, or the
            budget is too small for one run.
    """
    m = at_least(1, "ig_steps", ig_steps)
    if path not in PATHS:
        raise ValueError(f"path={path!r}; it must be 'inputs' or 'nodes'")
    reading = Reading.of(metric, logits_at)
    inputs = PatchInputs(model, clean, model, corrupted, None if steps is None else whole_numbers("steps", steps))
    graph, written_by = Graph.of(model.cfg), inputs.canvas_provenances()
    sides = inputs.sides(reading)
    passes = [_Passes(graph, *pair, max_bytes) for pair in sides]
    with model.optional_hooks(**OPTIONAL):
        scored = [run.scores(m, path, progress) for run in passes]
    stacked = [torch.stack(values) for values in zip(*scored, strict=True)]
    scores, clean_scores, corrupted_scores = stacked if inputs.steps is not None else [values[0] for values in stacked]
    record = {
        "ig_steps": m,
        "path": path,
        "metric": reading.name,
        "logits_at": reading.rows,
        "steps": inputs.steps,
        "clean_tokens": [side.tokens.tolist() for side, _ in sides],
        "corrupted_tokens": [side.tokens.tolist() for _, side in sides],
        "trajectory": written_by,
        **provenance(model, model.cfg),
    }
    return EdgeScores(scores, clean_scores, corrupted_scores, graph, record)


class _Passes:
    """The passes of one pair of inputs, and the scores of its edges."""

    def __init__(self, graph: Graph, clean: Side, corrupted: Side, max_bytes: int) -> None:
        require_same_positions(clean, corrupted)
        self.graph, self.clean, self.corrupted = graph, clean.guided(), corrupted.guided()
        self.given = corrupted.input
        names = [point.name for point in graph.reader_points]
        # Measured: a pass keeps each reader's copy, its gradient, and about six intermediate results of its size.
        one_run = 8 * self.given.stored_bytes(names) + 2 * self.given.logits_bytes
        # What every writer wrote in both runs, as activations and as one tensor, and the difference.
        stored = 5 * self.given.stored_bytes(graph.writer_points)
        self.runs_at_once = (max_bytes - stored) // one_run
        if self.runs_at_once < 1:
            raise ValueError(f"max_bytes={max_bytes:,} is too small: one run takes {stored + one_run:,} bytes")

    def scores(self, m: int, path: str, progress: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Scores Float[writer reader], and the metric of both runs."""
        # 1. Compute both runs, and the difference that each writer makes.
        embeddings = self.clean.input.embed(), self.given.embed()
        runs = [
            side.input.run(self.graph.writer_points, embedded)
            for side, embedded in zip((self.clean, self.corrupted), embeddings, strict=True)
        ]
        clean, corrupted = (self.graph.written(run.activations) for run in runs)
        wide = torch.promote_types(clean.dtype, torch.float32)
        change = clean.to(wide) - corrupted.to(wide)
        clean_score, corrupted_score = (
            torch.tensor(float(side.reading(run.logits)), dtype=torch.float64)
            for side, run in zip((self.clean, self.corrupted), runs, strict=True)
        )

        # 2. Average the gradients of the readers over the path, and contract them with the differences.
        scores = change.new_zeros(self.graph.edges.shape)
        if path == "inputs":
            between = [0.0] if m == 1 else [k / m for k in range(1, m + 1)]
            for share in tqdm(between, desc="edge attribution", unit="pass", disable=not progress):
                embedded = torch.lerp(embeddings[1], embeddings[0], share)
                self._add(scores, change, self._gradients(embedded, 1, ()), 1 / m)
        else:
            self._score_nodes(scores, change, embeddings[1], m, progress)
        return scores.cpu(), clean_score, corrupted_score

    def _score_nodes(self, scores: Tensor, change: Tensor, embedded: Tensor, m: int, progress: bool) -> None:
        """Add the scores of each writer, from runs in which only this writer's output is interpolated."""
        n_rows = len(embedded)
        between = [0.0] if m == 1 else [(k - 0.5) / m for k in range(1, m + 1)]
        runs = [
            (name, row, share) for name, rows in self.graph.writer_points.items() for row in rows for share in between
        ]
        blocks = [runs[i : i + self.runs_at_once] for i in range(0, len(runs), self.runs_at_once)]
        for block in tqdm(blocks, desc="edge attribution", unit="pass", disable=not progress):
            start = embedded.repeat(len(block), 1, 1)
            moved: dict[str, list[tuple[slice, int, Tensor]]] = {}
            for copy, (name, row, share) in enumerate(block):
                rows = slice(copy * n_rows, (copy + 1) * n_rows)
                moved.setdefault(name, []).append((rows, row, share * change[:, :, row].to(embedded.dtype)))
            for rows, _, step in moved.pop("hook_embed", []):
                start[rows] += step
            hooks = [(name, _mover(self.graph.writer_points[name], moves)) for name, moves in moved.items()]
            gradients = self._gradients(start, len(block), hooks)
            for copy, (_, row, _) in enumerate(block):
                rows = slice(copy * n_rows, (copy + 1) * n_rows)
                own = {name: gradient[rows] for name, gradient in gradients.items()}
                self._add(scores, change, own, 1 / m, only=row)

    def _gradients(
        self, embedded: Float[Tensor, "batch pos d_model"], copies: int, hooks: Sequence[tuple[str, Hook]]
    ) -> dict[str, Tensor]:
        """The gradient of the metric at every reader point, for copies of the corrupted rows."""
        model, given = self.given.model, self.given
        stored: dict[str, Tensor] = {}

        def store(activation: Tensor, hook: Any) -> None:
            stored[hook.name] = activation

        names = [point.name for point in self.graph.reader_points]
        attached = [*hooks, *((name, store) for name in names)]
        with torch.enable_grad(), given.at_step(copies), model.hooks(fwd_hooks=attached):
            logits = model(
                embedded.clone().requires_grad_(),
                start_at_layer=0,
                attention_mask=given.mask(copies),
                logits_at=given.rows,
            )
            by_copy = [self.corrupted.reading(part) for part in logits.split(len(embedded) // copies)]
            if not all(score.requires_grad for score in by_copy):
                raise ValueError(
                    "the metric has no gradient: compute it from the logits with torch, without .item(), .detach() or "
                    "argmax"
                )
            gradients = torch.autograd.grad(torch.stack(by_copy).sum(), [stored[name] for name in names])
        return dict(zip(names, gradients, strict=True))

    def _add(
        self,
        scores: Float[Tensor, "writer reader"],
        change: Float[Tensor, "batch pos writer d_model"],
        gradients: Mapping[str, Tensor],
        weight: float,
        only: int | None = None,
    ) -> None:
        """Add the contraction of differences and gradients, of all writers or of one."""
        for point in self.graph.reader_points:
            writers = slice(point.n_writers) if only is None else slice(only, min(only + 1, point.n_writers))
            gradient = by_part(gradients[point.name]).to(change.dtype)
            part = torch.einsum("bpwd,bprd->wr", change[:, :, writers], gradient)
            scores[writers, point.columns.start : point.columns.stop] += weight * part


def _mover(writers: range, moves: Sequence[tuple[slice, int, Tensor]]) -> Hook:
    """A hook that moves the output of one writer in each copy of the rows."""

    def move(activation: Tensor, hook: Any) -> Tensor:
        moved = activation.clone()
        for rows, row, step in moves:
            if moved.dim() == 3:
                moved[rows] += step
            else:
                moved[rows, :, row - writers.start] += step
        return moved

    return move
