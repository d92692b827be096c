"""Interventions on the nodes of a graph: what the graph predicts that the run writes then, and what it writes.

An intervention scales the difference that a node has between the runs. At its step, position and branch, its output u
of the clean run (u' of the corrupted one) becomes

    u' + scale · (u - u')

so that 1 is the clean run and 0 the corrupted output. This is the test of Ameisen et al. 2025 ("Circuit Tracing",
transformer-circuits.pub) and Lindsey et al. 2025 ("On the Biology of a Large Language Model"), over steps.

**Within a step**, the graph predicts that an objective q, the margin of a decision or the target, changes in proportion
to the share of its difference that passes the node:

    q(scale) - q = (scale - 1) · F(u → q) / A(q) · (q - q')

A is the effect of a node, and F the flow along the edges w, which divides at each node v as the effect of v does:

    F(u → q) = Σ_v w(u → v) F(v → q) / A(v) + r(u) |A(q)| / Σ_p |A(p)|,    r(u) = A(u) - Σ_v w(u → v)

The rest r leaves u for heads and MLPs whose edges were not computed (`nodes_per_step`), and is divided among the
objectives p of the step by their effects. So the flows from u add up to A(u), and where a step has one objective, all
of A(u) flows there, without any assumption about edges. Frozen parts have no flow through what they hold.

**Between steps.** A decision whose margin stays positive writes the token of the clean run, at the same step. One whose
margin becomes negative writes that of the corrupted run, at the step of that run, if it is not before this one; then
all later steps embed that token, so that they lose the whole effect of this embedding, not a share. What is decided by
the order (by a log-probability, where one of the runs has not written yet), by a random number or by other positions is
not predicted, and taken to be as in the clean run. So is the token of a target that is no margin.

**Then the run is made**: the clean run is replayed freely, all interventions as copies of one batch, and every
objective is read at its step, whatever canvas that has by then. A feature is scaled in what its MLP writes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.circuits.graph import Graph
from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary
from diffusion_lens.analysis.engine.batching import proposal_bytes, reserved, row_bytes
from diffusion_lens.analysis.engine.kept_run import KeptRun
from diffusion_lens.analysis.graphs.features import MLPChange, read_point, share_masked, transcoders_of_graph
from diffusion_lens.analysis.graphs.within_step import KINDS, step_runs
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_architecture
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.names import mlp_out
from diffusion_lens.hooks.step import BRANCHES
from diffusion_lens.model.noise import HeadAt
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import run_of
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance, shown_model, texts_of
from diffusion_lens.settings import Real, Whole, at_least, plain_number, whole_numbers
from diffusion_lens.settings.figures import styled

_SCALED = ("token", "embed", "head", "mlp", "feature")  # kinds of nodes that have an output
_MOST = 32  # nodes by default


@dataclass(frozen=True, eq=False, repr=False)
class GraphInterventions(PicturedResult, Saved):
    """What a graph predicts of interventions on its nodes, and what these runs wrote.

    Columns of the data frame: intervention, objective (their numbers; a row for each objective at or after the step of
    each intervention), name, node, node_step, node_position, scale, branch, step, position, word and written_at
    (of the clean run), predicted_change and measured_change (of the objective), predicted_word, predicted_step,
    measured_word, measured_step, word_changes and step_changes (from the clean run, by the prediction or in the run).

    Attributes:
        nodes: Int[entry], node of the graph.
        names: Its name.
        node_steps, node_positions, branches: Int[entry], its step, position and branch.
        scales: Float[entry], factor of its difference.
        steps, positions: Int[target], step and position of the target and each decision, in the order of steps.
        clean, corrupted: Float[target], its value in both runs.
        tokens, written_at: Int[target], the token that the clean run writes there, and the step of this.
        predicted, measured: Float[entry target], its value under the intervention; measured is NaN where the run
            proposes no token there at this step, because it has written one before.
        predicted_tokens, predicted_steps: Int[entry target], what is written there and when; -1 where the graph does
            not predict this.
        measured_tokens, measured_steps: Int[entry target], what the run wrote there and when, under uniform noise in
            this step.
        words: Text of every id that occurs.
        record: Settings, model, hash of the weights, hooks, versions.
    """

    KIND: ClassVar[str] = "graph interventions"
    SHOWS: ClassVar[str] = "changes of decisions and the target that a graph of a run predicts, and those of the run"

    nodes: Int[Tensor, "entry"]
    names: list[str]
    node_steps: Int[Tensor, "entry"]
    node_positions: Int[Tensor, "entry"]
    branches: Int[Tensor, "entry"]
    scales: Float[Tensor, "entry"]
    steps: Int[Tensor, "target"]
    positions: Int[Tensor, "target"]
    clean: Float[Tensor, "target"]
    corrupted: Float[Tensor, "target"]
    tokens: Int[Tensor, "target"]
    written_at: Int[Tensor, "target"]
    predicted: Float[Tensor, "entry target"]
    measured: Float[Tensor, "entry target"]
    predicted_tokens: Int[Tensor, "entry target"]
    predicted_steps: Int[Tensor, "entry target"]
    measured_tokens: Int[Tensor, "entry target"]
    measured_steps: Int[Tensor, "entry target"]
    words: dict[int, str]
    record: dict[str, Any] = field(repr=False)

    def _axes(self) -> Iterable[tuple[str, Any]]:
        return (("entry", self.names),)

    def __len__(self) -> int:
        """Number of interventions."""
        return len(self.nodes)

    @property
    def hits(self) -> Any:
        """A `pandas.DataFrame` with the share of predictions that are right: whether the word of the clean run is kept,
        which word is written, at which step, and word and step. Rows are "all" predicted words, those where another
        "word" is predicted or written, and those where another "step" is; for the graph, and for the prediction that
        nothing changes."""
        import pandas as pd

        told, (words, steps) = self._later & (self.predicted_steps >= 0), self._changes
        clean = self.tokens.expand_as(self.measured_tokens), self.written_at.expand_as(self.measured_steps)
        predictions = {"graph": (self.predicted_tokens, self.predicted_steps), "nothing changes": clean}
        rows = {}
        for change, part in {"all": told, "word": told & words, "step": told & steps}.items():
            for by, (tokens, at) in predictions.items():
                word, step = tokens == self.measured_tokens, at == self.measured_steps
                kept = (tokens == self.tokens) == (self.measured_tokens == self.tokens)
                right = {"kept": kept, "word": word, "step": step, "both": word & step}
                shares = {name: float(each[part].double().mean()) for name, each in right.items()}
                rows[change, by] = {"n": int(part.sum()), **shares}
        return pd.DataFrame.from_dict(rows, orient="index")

    @property
    def explained(self) -> float:
        """Share of the squared changes of the objectives that the prediction explains: 1 if all are as predicted, 0 for
        the prediction that nothing changes; not bounded below."""
        read = self._later & ~self.measured.isnan()
        missed, change = (self.measured - self.predicted)[read], (self.measured - self.clean)[read]
        return 1 - float((missed**2).sum() / (change**2).sum())

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """Predicted and measured change of each objective, by whether it is read at the step of the intervention or
        later; returns the matplotlib axes."""
        changes = torch.stack([self.predicted - self.clean, self.measured - self.clean], dim=-1)
        same_step = self.steps == self.node_steps[:, None]
        cells = {"step of the node": changes[same_step], "later step": changes[self._later & ~same_step]}
        return plots.predicted_changes(cells, title or "Interventions, predicted and made", ax)

    @property
    def _later(self) -> Bool[Tensor, "entry target"]:
        """The objectives that an intervention may change."""
        return self.steps >= self.node_steps[:, None]

    @property
    def _changes(self) -> tuple[Bool[Tensor, "entry target"], Bool[Tensor, "entry target"]]:
        """Whether the word, and whether its step, differs from the clean run, by the prediction or in the run."""
        told = self.predicted_steps >= 0
        words = (told & (self.predicted_tokens != self.tokens)) | (self.measured_tokens != self.tokens)
        steps = (told & (self.predicted_steps != self.written_at)) | (self.measured_steps != self.written_at)
        return words, steps

    def _table(self) -> Table:
        values: dict[str, Any] = {"name": np.asarray(self.names, object)[:, None]}
        values |= {
            name[:-1]: getattr(self, name)[:, None] for name in ("nodes", "node_steps", "node_positions", "scales")
        }
        values |= {"branch": self.branches[:, None], "step": self.steps, "position": self.positions}
        values |= {"word": texts_of(self.tokens, self.words), "written_at": self.written_at}
        for name in ("predicted", "measured"):
            values[f"{name}_change"] = getattr(self, name) - self.clean
            values[f"{name}_word"] = texts_of(getattr(self, f"{name}_tokens"), self.words)
            values[f"{name}_step"] = getattr(self, f"{name}_steps")
        values["word_changes"], values["step_changes"] = self._changes
        table = Table.of_cells({"intervention": range(len(self)), "objective": range(len(self.steps))}, values)
        return table.where(self._later)

    def __repr__(self) -> str:
        hits = self.hits.loc["word", "graph"]
        right = round(hits.n * hits.word) if hits.n else 0
        size = f"{len(self)} interventions, {right} of {hits.n:.0f} changes of words predicted"
        return f"GraphInterventions({shown_model(self.record)}, {size}, R² {self.explained:.2f})"


def intervened(
    graph: Any,
    model: DiffusionTransformer,
    nodes: Iterable[Whole] | None,
    scales: Sequence[Real],
    features: Sequence[SparseDictionary],
    max_bytes: Whole,
) -> GraphInterventions:
    """`RunGraph.interventions`."""
    writes = torch.isin(graph.kind, torch.tensor([KINDS.index(kind) for kind in _SCALED]))
    if nodes is None:
        order = graph.effect.abs().where(writes, -1).sort(descending=True, stable=True).indices
        chosen = order[: min(_MOST, int(writes.sum()))].tolist()
    else:
        chosen = whole_numbers("nodes", nodes)
    factors = [plain_number("scales", scale) for scale in scales]
    if not chosen or not factors:
        raise ValueError(f"nodes={chosen} and scales={factors}: give at least one of each")
    for node in chosen:
        if not 0 <= node < len(graph) or not writes[node]:
            what = f"of the kind {graph.names[node]}" if 0 <= node < len(graph) else f"none of {len(graph)}"
            raise ValueError(
                f"node {node} is {what}; give tokens, embeddings, heads, MLPs or features by their numbers"
            )
    if graph._is_pruned:
        raise ValueError("this graph is pruned, and a prediction takes all decisions: give nodes of the whole graph")
    for run in graph.runs.values():
        require_same_architecture(run.record, model)
    transcoders = transcoders_of_graph(graph.record, model, features)
    with torch.inference_mode(False), torch.no_grad(), run_of(model):
        made = [(node, factor) for node in chosen for factor in factors]
        return _Interventions(graph, model, made, transcoders, at_least(1, "max_bytes", max_bytes)).result()


class _Interventions:
    """The objectives of a graph in both runs, its predictions, and the runs."""

    def __init__(
        self,
        graph: Any,
        model: DiffusionTransformer,
        made: list[tuple[int, float]],
        transcoders: Mapping[int, SparseDictionary],
        max_bytes: int,
    ) -> None:
        self.graph, self.model, self.transcoders, self.max_bytes = graph, model, transcoders, max_bytes
        self.clean, self.corrupted, self.made = graph.runs["clean"], graph.runs["corrupted"], made
        self.ends = sorted(graph.objectives, key=lambda i: int(graph.step[i]))
        self.steps, self.positions = graph.step[self.ends], graph.position[self.ends]
        self.objectives = [graph.objectives[i] for i in self.ends]
        self.points = {node: self._point_of(node) for node, _ in made}
        self.changes: dict[int, Tensor] = {}  # of the nodes' outputs
        self.values = torch.zeros(2, len(self.ends), dtype=torch.float64)  # of the objectives, in both runs
        self._require_memory()
        for step in sorted(set(self.steps.tolist())):
            self._read(step)

    def _point_of(self, node: int) -> tuple[str, tuple[int, ...]]:
        """Hook point of a node's output, and its place there."""
        layer, position, kind = int(self.graph.layer[node]), int(self.graph.position[node]), self.graph.kinds[node]
        if kind == "head":
            return f"blocks.{layer}.attn.hook_z", (position, int(self.graph.head[node]))
        return "hook_embed" if layer < 0 else mlp_out(layer), (position,)

    def _require_memory(self) -> None:
        """Set the number of interventions in a batch."""
        cfg, n_pos, record = self.model.cfg, self.clean.tokens.shape[1], self.clean.record
        n_branches = 2 if record["cfg_scale"] else 1
        network = step_runs(self.model, (self.clean, self.corrupted), int(self.steps[-1]), [int(self.positions[-1])])[0]
        points = [*Graph.of(cfg).node_points, *map(read_point, self.transcoders)]
        kept = 2 * n_branches * network.branches[0].stored_bytes(points)
        sampled = bool(record["temperature"]) or cfg.uniform_noise
        row = n_branches * row_bytes(cfg, n_pos, n_pos) + proposal_bytes(cfg, n_pos, n_branches + 1, sampled)
        one = reserved(cfg, row)
        self.at_once = min(len(self.made), (self.max_bytes - kept) // one)
        if self.at_once < 1:
            raise ValueError(f"max_bytes={self.max_bytes:,} is too small: one intervention takes {kept + one:,} bytes")
        sampler = self.clean.started(self.model).sampler
        if sampler.keeps_prediction and not sampler.has_times_of_rows:
            self.at_once = 1  # the times of its steps depend on all rows of a batch

    def _read(self, step: int) -> None:
        """The objectives of a step in both runs, and the changes of its nodes."""
        here = (self.steps == step).nonzero().flatten().tolist()
        objectives = [self.objectives[i] for i in here]
        runs = step_runs(
            self.model, (self.clean, self.corrupted), step, sorted({objective.position for objective in objectives})
        )
        nodes = [node for node in self.points if int(self.graph.step[node]) == step]
        names = {*(self.points[node][0] for node in nodes), *map(read_point, self.transcoders)}
        kept = [[given.run(names, given.embed()) for given in run.branches] for run in runs]
        for i, (run, of_run) in enumerate(zip(runs, kept, strict=True)):
            self.values[i, here] = run.values([each.logits for each in of_run], objectives)[:, 0].double().cpu()
        for node in nodes:
            branch = int(self.graph.branch[node])
            self.changes[node] = self._change(node, kept[0][branch], kept[1][branch])

    def _change(self, node: int, clean: KeptRun, corrupted: KeptRun) -> Float[Tensor, "d"]:
        """The difference of a node's output between the runs; of a feature, that of what its MLP writes."""
        name, place = self.points[node]
        change: Tensor = clean.activations[name][(0, *place)] - corrupted.activations[name][(0, *place)]
        layer, kind = int(self.graph.layer[node]), self.graph.kinds[node]
        if kind == "head" or layer not in self.transcoders:
            return change
        read = [run.activations[read_point(layer)][0, list(place)] for run in (clean, corrupted)]
        shares = share_masked(clean.input), share_masked(corrupted.input)
        transcoder = self.transcoders[layer]
        features = MLPChange(transcoder, (read[0], read[1]), shares, change[None]).features()[0][0]
        if kind == "feature":
            feature = int(self.graph.feature[node])
            return features[feature] * transcoder.W_dec[feature]
        same = torch.tensor([int(getattr(self.graph, axis)[node]) for axis in ("step", "branch", "layer", "position")])
        features[self.graph.feature_nodes[(self.graph.feature_nodes[:, :4] == same).all(dim=1), 4]] = 0
        return features @ transcoder.W_dec

    def shares(self) -> Float[Tensor, "node target"]:
        """F(u → q) / A(q): the share of each objective's difference that passes each node of its step."""
        graph, effect = self.graph, self.graph.effect
        own, unit = effect[self.ends], torch.zeros(len(graph), len(self.ends), dtype=torch.float64)
        of_step = torch.where(graph.step[:, None] == self.steps, own.abs(), 0.0)
        of_step /= of_step.sum(dim=1, keepdim=True).clamp(min=torch.finfo(own.dtype).tiny)
        out: dict[int, list[int]] = {}
        for edge in (~graph.decision).nonzero().flatten().tolist():
            out.setdefault(int(graph.source[edge]), []).append(edge)
        for node in reversed(graph._in_order()):
            if node in self.ends:
                unit[node, self.ends.index(node)] = 1.0
                continue
            edges = out.get(node, [])
            passed = graph.weight[edges] @ unit[graph.target[edges]]
            unit[node] = (passed + (effect[node] - graph.weight[edges].sum()) * of_step[node]) / effect[node]
        return torch.where(own == 0, 0.0, unit * effect[:, None] / own)

    def result(self) -> GraphInterventions:
        """The predictions and the runs."""
        graph, nodes = self.graph, torch.tensor([node for node, _ in self.made])
        tokens, written_at = (each[0] for each in self._written(self.clean))
        predicted, measured = self._predict(), self._make()
        ids = sorted({*tokens.tolist(), *predicted[1].flatten().tolist(), *measured[1].flatten().tolist()} - {-1})
        record = {
            "target": graph.record["target"],
            "scales": list(dict.fromkeys(scale for _, scale in self.made)),
            "trajectory": {name: canvas_provenance(run.record) for name, run in graph.runs.items()},
            **provenance(self.model, self.model.cfg),
        }
        names = ("", "_tokens", "_steps")
        return GraphInterventions(
            nodes=nodes,
            names=[graph.names[node] for node in nodes.tolist()],
            node_steps=graph.step[nodes],
            node_positions=graph.position[nodes],
            branches=graph.branch[nodes],
            scales=torch.tensor([scale for _, scale in self.made], dtype=torch.float64),
            steps=self.steps,
            positions=self.positions,
            clean=self.values[0],
            corrupted=self.values[1],
            tokens=tokens,
            written_at=written_at,
            **{f"predicted{name}": value for name, value in zip(names, predicted, strict=True)},
            **{f"measured{name}": value for name, value in zip(names, measured, strict=True)},
            words=dict(zip(ids, self.model.words(ids), strict=True)),
            record=record,
        )

    def _written(self, run: Trajectory) -> tuple[Int[Tensor, "batch target"], Int[Tensor, "batch target"]]:
        """The token that each row writes at the position of each objective, and the step of this."""
        if not run.uniform_noise:
            return run.tokens[:, self.positions].cpu(), run.revealed_at[:, self.positions].cpu()
        after = run.canvases[self.steps + 1 - run.first_step, :, self.positions]
        return after.T.cpu(), self.steps.expand(len(run), -1)

    def _predict(self) -> tuple[Tensor, Tensor, Tensor]:
        """Value, token and step of each objective [entry target], from the graph."""
        graph, shares, difference = self.graph, self.shares(), self.values[0] - self.values[1]
        (tokens, steps), (others, at) = (
            [each[0] for each in self._written(run)] for run in (self.clean, self.corrupted)
        )
        decides = [
            each.measure == "margin" and clean > 0 and written == [each.token, each.other]
            for each, clean, *written in zip(
                self.objectives, self.values[0].tolist(), tokens.tolist(), others.tolist(), strict=True
            )
        ]
        told = torch.tensor(decides)
        flips = torch.zeros(len(self.made), len(self.ends), dtype=torch.bool)
        values = torch.empty_like(flips, dtype=torch.float64)
        for row, (node, scale) in enumerate(self.made):
            moved = (scale - 1) * shares[node]
            for i, end in enumerate(self.ends):
                values[row, i] = self.values[0, i] + moved[i] * difference[i]
                if decides[i] and values[row, i] < 0:
                    flips[row, i] = True
                    moved = moved - shares[graph.target[graph.decision & (graph.source == end)]].sum(dim=0)
        predicted = torch.where(flips, others, tokens), torch.where(flips, at.maximum(self.steps), steps)
        return values, predicted[0].masked_fill(~told, -1), predicted[1].masked_fill(~told, -1)

    def _make(self) -> tuple[Tensor, Tensor, Tensor]:
        """Value, token and step of each objective [entry target], in the runs."""
        found: list[tuple[Tensor, ...]] = []
        for made in (self.made[i : i + self.at_once] for i in range(0, len(self.made), self.at_once)):
            values = torch.full((len(made), len(self.ends)), torch.nan, dtype=torch.float64)
            again = self.clean.repeat(len(made)).replay(
                self.model,
                canvas="free",
                fwd_hooks=[*self._scaling(made), ("denoise.hook_logits", self._reader(values))],
            )
            found.append((values, *self._written(again)))
        values, tokens, steps = map(torch.cat, zip(*found, strict=True))
        return values, tokens, steps

    def _scaling(self, made: Sequence[tuple[int, float]]) -> list[tuple[str, Any]]:
        """Hooks that scale one node in each row."""
        cells: dict[str, dict[tuple[int, str], list[tuple[tuple[int, ...], Tensor]]]] = {}
        for row, (node, scale) in enumerate(made):
            name, place = self.points[node]
            at = int(self.graph.step[node]), BRANCHES[int(self.graph.branch[node])]
            of_point = cells.setdefault("blocks.0.hook_resid_pre" if name == "hook_embed" else name, {})
            of_point.setdefault(at, []).append(((row, *place), (scale - 1) * self.changes[node]))

        def scaled(activation: Tensor, hook: Any) -> Tensor | None:
            found = cells[hook.name].get((hook.step.index, hook.step.branch))
            if found is None:
                return None
            # Up to this node the pass is that of the clean run, and so is its output.
            changed = activation.clone()
            for place, change in found:
                changed[place] += change.to(changed)
            return changed

        return [(name, scaled) for name in cells]

    def _reader(self, values: Float[Tensor, "entry target"]) -> Any:
        """A hook that reads the objectives of each step, where the run proposes tokens."""

        def read(logits: Tensor, hook: Any) -> None:
            for i in (self.steps == hook.step.index).nonzero().flatten().tolist():
                objective = self.objectives[i]
                output = logits[:, objective.position]
                head = HeadAt.of(self.model, hook.step.tokens[:, [objective.position]])
                value = objective.of(head.clean_logits(output[:, None])[:, 0]).double()
                values[:, i] = value.masked_fill(~output.any(dim=-1), torch.nan).cpu()

        return read
