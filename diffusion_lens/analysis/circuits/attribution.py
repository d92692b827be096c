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

The score of a node u is (u_clean - u_corrupted) · dM/du, with the same averages. A writer acts through its edges only,
so this is the sum of their scores. `node_attribution` computes it without a copy of the stream for each reader, in less
time and memory.

At a denoising step, the metric of both runs is that of the clean canvas: of an answer it reads the tokens that are
still masked there, and under guidance it has the unconditional branch of the clean run. Scores are 0 once the clean run
has revealed the whole answer.

In bfloat16 the passes themselves round, and more steps do not help: with 40 to 64 steps, the sums were off by up to
0.4% on the bundled AR baseline and by 1 to 20% on small random models (0.3% and 1 to 9% in float32). Differences and
gradients are multiplied and added in float32 whatever the model's precision.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.circuits.graph import OPTIONAL, Circuit, Graph, by_part
from diffusion_lens.analysis.engine.batching import reserved
from diffusion_lens.analysis.engine.kept_run import KeptRun
from diffusion_lens.analysis.patching.grid import Patchable, PatchInputs
from diffusion_lens.analysis.patching.metrics import UNREAD, Metric, Reading
from diffusion_lens.analysis.patching.runs import Side
from diffusion_lens.hooks.names import Hook, shared_out
from diffusion_lens.model.hook_points import is_hooked, listens
from diffusion_lens.model.inputs import require_sum, warn_unless_masked
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance
from diffusion_lens.settings import Whole, at_least, one_of, whole_number
from diffusion_lens.settings.figures import styled

_TENSORS = ("scores", "clean", "corrupted")

S = TypeVar("S", bound="AttributionScores")


@dataclass(frozen=True, eq=False, repr=False)
class AttributionScores(PicturedResult, Saved):
    """What the scores of edges and of nodes have in common."""

    scores: Float[Tensor, "*rest"]
    clean: Float[Tensor, "*step"]
    corrupted: Float[Tensor, "*step"]
    graph: Graph
    record: dict[str, Any]

    ENTRIES: ClassVar[Mapping[str, Any]] = {"steps": list[int] | None}

    def _axes(self) -> Iterable[tuple[str, Any]]:
        sizes = (("writer", self.graph.n_writers), ("reader", self.graph.n_readers))
        return (("*step", self.record["steps"]), *sizes)

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

    Columns of the data frame: step (of a trajectory), writer, score. The other attributes are those of `EdgeScores`.

    Attributes:
        scores: Float[*step writer], estimated change of the metric if the writer's clean output replaces that of the
            corrupted run.
    """

    scores: Float[Tensor, "*step writer"]

    KIND = "node scores"
    SHOWS = "the effect on the metric of each attention head and MLP, estimated by attribution"

    @styled
    def plot(self, ax: Any = None, title: str | None = None, limits: tuple[float, float] | None = None) -> Any:
        """Heat map of heads and MLPs by layer; the title has the score of the embedding. Returns the matplotlib axes.

        Args:
            limits: Scores at the ends of the colour scale; by default minus and plus the largest absolute score shown.
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
    SHOWS = "the effect on the metric of each edge between layers, estimated by attribution and summed over heads"

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

    @styled
    def plot(self, ax: Any = None, title: str | None = None, limits: tuple[float, float] | None = None) -> Any:
        """Heat map of the edges, summed over the heads of a layer: writers down, readers across. Returns the matplotlib
        axes.

        Args:
            limits: Sums at the ends of the colour scale; by default minus and plus the largest absolute sum.
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
        clean, corrupted: Inputs of one length, as in `patch_grid`: facts, queries, texts, tokens or trajectories.
        metric: Function of the logits, as in `patch_grid`; it must be differentiable.
        steps: Steps of the trajectories, each with scores of its own; negative ones count from the end.
        ig_steps: Number m of gradients that are averaged; 1 is plain EAP, with the gradient of the corrupted run.
        path: "inputs" or "nodes" (see the module); "nodes" takes m runs for each writer.
        logits_at: Rows of the logits to compute, as in `patch_grid`.
        max_bytes: Memory to use in addition to the weights; as many runs as fit share a pass.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The inputs differ in length, padding or given positions, a hook of the caller changes the residual
            stream between the parts that write to it and those that read it, the metric has no gradient, a setting is
            unknown, or the budget is too small for one run.
    """
    require_plain_stream(model)
    inputs, averaged = PatchInputs.of(model, clean, model, corrupted, steps), IntegrationPath(ig_steps, path)
    scored, graph, record = attribute(_EdgePasses, inputs, Reading.of(metric, logits_at), averaged, max_bytes, progress)
    scores, clean_scores, corrupted_scores = joined(scored, inputs.steps)
    return EdgeScores(scores, clean_scores, corrupted_scores, graph, record)


@begins_run
@torch.inference_mode(False)
@torch.no_grad()
def node_attribution(
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
) -> NodeScores:
    """The score of every writer: embedding, head or MLP. The scores are those of `edge_attribution(...).nodes`.

    The arguments and errors are those of `edge_attribution`, but the caller may have hooks anywhere in the network, in
    the residual stream too. With `path="nodes"`, a score approaches the effect of patching the writer alone.
    """
    inputs, averaged = PatchInputs.of(model, clean, model, corrupted, steps), IntegrationPath(ig_steps, path)
    scored, graph, record = attribute(_NodePasses, inputs, Reading.of(metric, logits_at), averaged, max_bytes, progress)
    scores, clean_scores, corrupted_scores = joined(scored, inputs.steps)
    return NodeScores(scores, clean_scores, corrupted_scores, graph, record)


def attribute(
    kind: "Callable[..., Passes]",
    inputs: PatchInputs,
    reading: Reading,
    path: "IntegrationPath",
    max_bytes: int,
    progress: bool,
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Graph, dict[str, Any]]:
    """The scores and the metrics of both runs at each step, or of the only pair of inputs; the graph; the record."""
    model = inputs.model
    graph, written_by = Graph.of(model.cfg), inputs.canvas_provenances()
    sides = inputs.sides(reading)
    # The passes begin behind the embedding, where the network no longer sees whether a token is [MASK].
    if reading.rows is None and model.cfg.has_mask and model.tokenizer is not None:
        for side in (side for pair in sides for side in pair if side.step is None):
            warn_unless_masked(side.tokens, model.cfg.blank, model.cfg)
    passes = [kind(graph, *pair, max_bytes) for pair in sides]
    optional = passes[0].optional
    with model.optional_hooks(**optional) if optional else nullcontext():
        scored = [of_pair.scores(path, progress) for of_pair in passes]
    record = {
        "ig_steps": path.n_runs,
        "path": path.kind,
        "steps": inputs.steps,
        **inputs.describe(reading, sides, written_by),
        **provenance(model, model.cfg),
    }
    return scored, graph, record


@dataclass(frozen=True)
class IntegrationPath:
    """The runs over which gradients are averaged: `n_runs` is m, and `kind` moves the embeddings of all positions, at
    k/m ("inputs"), or the output of one writer at a time, at (k - 1/2)/m ("nodes")."""

    n_runs: Whole
    kind: str

    def __post_init__(self) -> None:
        vars(self)["n_runs"] = at_least(1, "ig_steps", self.n_runs)
        one_of("inputs", "nodes")("path", self.kind)

    def runs(self, points: Mapping[str, range]) -> Iterator["MovedRun"]:
        """The runs for these writers."""
        m = int(self.n_runs)
        moved = points.items() if self.kind == "nodes" else [("hook_embed", points["hook_embed"])]
        offset = 0.5 if self.kind == "nodes" else 0.0
        shares = [0.0] if m == 1 else [(k - offset) / m for k in range(1, m + 1)]
        return (
            MovedRun(name, writer, part, share)
            for name, writers in moved
            for part, writer in enumerate(writers)
            for share in shares
        )


class MovedRun(NamedTuple):
    """A corrupted run in which the output of one writer is moved towards the clean run, by a share from 0 to 1."""

    name: str  # hook point of the writer
    writer: int
    part: int  # index of the writer at its hook point
    share: float


class Passes(ABC):
    """The passes of one pair of inputs: runs on a path between them, and the metric's gradients."""

    optional: ClassVar[Mapping[str, bool]] = {}  # the flags under which the hook points pass
    writer_points: Mapping[str, range]  # the writers of each hook point
    gradient_points: Sequence[str]  # the hook points at which the metric is differentiated

    def __init__(self, graph: Graph, clean: Side, corrupted: Side, max_bytes: int) -> None:
        require_same_positions(clean, corrupted)
        self.graph, self.given = graph, corrupted.input
        self._choose_points()
        one_run = reserved(self.given.model.cfg, self.given.graph_bytes + self._copy_bytes(), of_graph=True)
        size = self.given.model.cfg.dtype.itemsize
        changes = self.given.stored_bytes(self.writer_points) * max(size, 4) // size
        stored = changes + 2 * self.given.stream_bytes
        self.runs_at_once = (max_bytes - stored) // one_run
        if self.runs_at_once < 1:
            raise ValueError(f"max_bytes={max_bytes:,} is too small: one run takes {stored + one_run:,} bytes")
        self.clean, self.corrupted = on_one_metric(clean, corrupted)

    def scores(self, path: IntegrationPath, progress: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The scores, and the metric of both runs."""
        # 1. Compute both runs, and the difference that each writer makes.
        clean_input, corrupted_input = self.clean.input, self.corrupted.input
        embedded = corrupted_input.embed()
        clean = clean_input.run(self.writer_points, clean_input.embed())
        corrupted = corrupted_input.run(self.writer_points, embedded)
        self.change = self._change(clean, corrupted)
        scores = [float(self.clean.reading(run.logits)) for run in (clean, corrupted)]
        clean_score, corrupted_score = torch.tensor(scores, dtype=torch.float64)
        del clean, corrupted

        # 2. Average the gradients over the path, and contract them with the differences.
        moved_runs = list(path.runs(self.writer_points))
        total: Any = 0.0
        blocks = [moved_runs[i : i + self.runs_at_once] for i in range(0, len(moved_runs), self.runs_at_once)]
        for block in tqdm(blocks, desc="attribution", unit="pass", disable=not progress):
            total = total + self._scores_of(path, block, self._gradients(embedded, block))
        return (total / int(path.n_runs)).cpu(), clean_score, corrupted_score

    def _scores_of(self, path: IntegrationPath, block: Sequence[MovedRun], gradients: dict[str, Tensor]) -> Tensor:
        """The sum of the scores that the runs of one pass give."""
        by_copy = {name: gradient.unflatten(0, (len(block), -1)) for name, gradient in gradients.items()}
        if path.kind == "inputs":
            summed = {name: copies.sum(dim=0, dtype=wider(copies.dtype)) for name, copies in by_copy.items()}
            return self._contracted(summed, None)
        parts = [
            self._contracted({name: copies[i] for name, copies in by_copy.items()}, run) for i, run in enumerate(block)
        ]
        return torch.stack(parts).sum(dim=0)

    @abstractmethod
    def _choose_points(self) -> None:
        """Set `writer_points`, in the order in which a pass reaches them, and `gradient_points`."""

    def _copy_bytes(self) -> int:
        """Bytes that a run keeps for its gradients at optional hook points."""
        return 0

    def _change(self, clean: KeptRun, corrupted: KeptRun) -> dict[str, Float[Tensor, "batch pos writer *rest"]]:
        """The difference of the writers' outputs at each hook point, clean minus corrupted, in float32 at least."""
        change = {}
        for name in self.writer_points:
            written, before = (by_part(run.activations[name]) for run in (clean, corrupted))
            change[name] = written.to(wider(written.dtype)) - before
        return change

    @abstractmethod
    def _contracted(self, gradients: Mapping[str, Tensor], run: MovedRun | None) -> Float[Tensor, "*rest"]:
        """The differences times the gradients, of all writers or of the one that a run moves."""

    def _gradients(self, corrupted: Float[Tensor, "batch pos d_model"], block: Sequence[MovedRun]) -> dict[str, Tensor]:
        """The gradient of the metric at every gradient point, for copies of the corrupted rows."""
        model, given, n_rows = self.given.model, self.given, self.given.n_rows
        # 1. Move the embeddings, and collect the moves of later writers by hook point.
        embedded = corrupted.repeat(len(block), 1, 1)
        moves: dict[str, list[tuple[slice, int, Tensor]]] = {}
        for copy, run in enumerate(block):
            rows, step = slice(copy * n_rows, (copy + 1) * n_rows), run.share * self.change[run.name][:, :, run.part]
            if run.name == "hook_embed":
                embedded[rows] = (corrupted.to(step.dtype) + step).to(corrupted.dtype)
            else:
                moves.setdefault(run.name, []).append((rows, run.part, step.to(corrupted.dtype)))

        # 2. Run the copies, and differentiate the sum of their metrics.
        leaf = embedded.requires_grad_()
        stored: dict[str, Tensor] = {"hook_embed": leaf}

        def store(activation: Tensor, hook: Any) -> None:
            stored[hook.name] = activation

        hooks = [(name, _mover(of_point)) for name, of_point in moves.items()]
        hooks += [(name, store) for name in self.gradient_points if name != "hook_embed"]
        with torch.enable_grad(), given.at_step(len(block)), model.hooks(fwd_hooks=hooks):
            logits = model(leaf, start_at_layer=0, attention_mask=given.mask(len(block)), logits_at=given.rows)
            by_copy = [self.corrupted.reading(part) for part in logits.split(n_rows)]
            if not all(score.requires_grad for score in by_copy):
                raise ValueError(
                    "the metric has no gradient: compute it from the logits with torch, without .item(), .detach() or "
                    "argmax"
                )
            points = [stored[name] for name in self.gradient_points]
            gradients = torch.autograd.grad(torch.stack(by_copy).sum(), points)
        return dict(zip(self.gradient_points, gradients, strict=True))


class _EdgePasses(Passes):
    """Gradients at the readers, each of which reads a copy of the stream of its own."""

    optional = OPTIONAL

    def _choose_points(self) -> None:
        self.writer_points = self.graph.writer_points
        self.gradient_points = [point.name for point in self.graph.reader_points]

    def _copy_bytes(self) -> int:
        # Each reader's copy, in float32 at least too, and its norm before and after the product with the weights.
        size, stored = self.given.model.cfg.dtype.itemsize, self.given.stored_bytes(self.gradient_points)
        return (3 if size >= 4 else 3 + 4 // size) * stored

    def _change(self, clean: KeptRun, corrupted: KeptRun) -> dict[str, Float[Tensor, "batch pos writer *rest"]]:
        self.of_all = self.graph.written(super()._change(clean, corrupted))
        return dict(
            zip(self.writer_points, self.of_all.split(list(map(len, self.writer_points.values())), dim=2), strict=True)
        )

    def _contracted(self, gradients: Mapping[str, Tensor], run: MovedRun | None) -> Float[Tensor, "writer reader"]:
        scores = self.of_all.new_zeros(self.graph.edges.shape)
        for point in self.graph.reader_points:
            first, last = (0, point.n_writers) if run is None else (run.writer, min(run.writer + 1, point.n_writers))
            gradient = by_part(gradients[point.name]).to(self.of_all)
            part = torch.einsum("bpwd,bprd->wr", self.of_all[:, :, first:last], gradient)
            scores[first:last, point.columns.start : point.columns.stop] = part
        return scores


class _NodePasses(Passes):
    """Gradients at what the writers wrote; of a head, before the output projection."""

    def _choose_points(self) -> None:
        self.writer_points, self.gradient_points = self.graph.node_points, list(self.graph.node_points)

    def _contracted(self, gradients: Mapping[str, Tensor], run: MovedRun | None) -> Float[Tensor, "writer"]:
        scores = next(iter(self.change.values())).new_zeros(len(self.graph.writers))
        for name in self.writer_points if run is None else [run.name]:
            change, writers = self.change[name], self.writer_points[name]
            parts = torch.einsum("bpwd,bpwd->w", change, by_part(gradients[name]).to(change.dtype))
            if run is None:
                scores[writers.start : writers.stop] = parts
            else:
                scores[run.writer] = parts[run.part]
        return scores


# What lies in a block between the outputs of writers and the inputs of readers: hook points, and modules around them.
_BETWEEN = (
    "hook_resid_pre",
    "attn.hook_q_input",
    "attn.hook_k_input",
    "attn.hook_v_input",
    "attn.hook_attn_in",
    "hook_attn_out",
    "hook_resid_mid",
    "hook_mlp_in",
    "hook_resid_post",
)
_AROUND = ("", "attn")


def require_plain_stream(model: DiffusionTransformer) -> None:
    """Raise a `ValueError` if a hook or another module is between what writers write and readers read, where a change
    of an output is not the same change of the input, or if parts that are no writers, shared experts, write too."""
    require_sum(model.cfg, "an edge stands for an output that its reader adds up with the others")
    for layer, block in enumerate(model.blocks):
        if shared_out(layer) in model.hook_dict:
            raise ValueError(
                f"block {layer} of {model.cfg.model_name!r} has a shared expert, which writes to the residual stream "
                f"at {shared_out(layer)!r} and is no part of the graph: use node_attribution, or patch_grid"
            )
        points = [name for name in _BETWEEN if is_hooked(block.get_submodule(name))]
        modules = [name for name in _AROUND if listens(block.get_submodule(name))]
        if found := [".".join(("blocks", str(layer), name)).removesuffix(".") for name in points + modules]:
            raise ValueError(
                f"a hook or another module is at {', '.join(map(repr, found))}, between the outputs that are added to "
                "the residual stream and the parts that read it, and an edge stands for an unchanged output: attach it "
                "to what one part writes ('hook_embed', 'attn.hook_z', 'attn.hook_result', 'hook_mlp_out'), or use "
                "node_attribution, which takes hooks anywhere"
            )


def on_one_metric(clean: Side, corrupted: Side) -> tuple[Side, Side]:
    """Both sides with the metric of the clean canvas, applied to logits of p(x_0), guided if the clean run was."""
    clean = clean.through_head()
    return clean, replace(corrupted, reading=clean.reading)


def require_same_positions(clean: Side, corrupted: Side) -> None:
    """Raise a `ValueError` unless the two inputs have prompt, masks and padding at the same positions."""
    if clean.extent != corrupted.extent:
        raise ValueError(
            f"the clean input has {clean.n_pos} positions and the corrupted one {corrupted.n_pos}: edges connect equal "
            "positions, so give both the same length"
        )
    sides = (clean, corrupted)
    real = [torch.ones_like(side.tokens).bool() if side.real is None else side.real for side in sides]
    if bool((differs := (real[0] != real[1]).any(dim=1)).any()):
        row = int(differs.nonzero()[0])
        raise ValueError(
            f"row {row} has {int(real[0][row].sum())} tokens without padding in the clean input and "
            f"{int(real[1][row].sum())} in the corrupted one: edges connect equal positions, so pad both alike"
        )
    if clean.reading is UNREAD:
        raise ValueError(
            "the two trajectories were given their prompts at different positions, so the rows of the metric mean "
            "something else in each, and edges connect equal positions: take prompts with equally many tokens"
        )


def joined(by_step: Iterable[tuple[Tensor, Tensor, Tensor]], steps: Sequence[int] | None) -> tuple[Tensor, ...]:
    """The scores and both metrics with an axis of steps, or without steps, those of the single pair of inputs."""
    stacked = [torch.stack(values) for values in zip(*by_step, strict=True)]
    return tuple(stacked if steps is not None else (values[0] for values in stacked))


def _membership(groups: Sequence[str]) -> Float[Tensor, "entry member"]:
    """1 where a part belongs to a group, with a column for each group."""
    names = list(dict.fromkeys(groups))
    return torch.tensor([[float(name == group) for name in names] for group in groups], dtype=torch.float64)


def _mover(moves: Sequence[tuple[slice, int, Tensor]]) -> Hook:
    """A hook that moves the output of one writer in each copy of the rows."""

    def move(activation: Tensor, hook: Any) -> Tensor:
        moved = activation.clone()
        for rows, head, step in moves:
            by_part(moved)[rows, :, head] += step.to(moved.device)
        return moved

    return move


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which differences and gradients are multiplied and added: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
