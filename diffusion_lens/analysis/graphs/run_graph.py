"""The graph of a whole run: which parts, at which positions and steps, made the difference between two runs?

The clean run has the canvases c_0 ... c_T, the corrupted run c'_0 ... c'_T, of the same steps, sampler and given
positions, but with another prompt. M is a logit at the step that reveals the target, M' the same number on the
corrupted canvas. The graph divides M - M' among the given tokens, by way of all parts of all steps.

**Within a step** it is integrated gradients of each part (`within_step`).

**Between steps.** At step t the embedding of a written position i has the effect A, because a decision wrote w there in
the clean run and w' in the corrupted one. It was taken at the last step s at which both canvases had i masked; under
uniform noise, where every step writes every position, at the step before t. The greedy choice follows the sign of the
margin d = logit_s[i, w] - logit_s[i, w'], positive in the clean run and negative (d') in the corrupted one. So A is
passed on to step s in proportion (the rescale rule of DeepLIFT), as the effect of the objective

    q_s = A / (d - d') · d

whose difference between the runs is A. Where only one of the runs has written i by t, they differ in the order, and d
is the log-probability of the token that was written, if the sampler ranked i by it in both runs. Effects of one
decision on several later steps add up.

**Errors** stay in nodes of their own, so that nothing is hidden. An effect A stays in a node "error" where no decision
explains it:

- a margin has not the sign of what its run wrote (the token was drawn at random), or d and d' differ by less than 0.1
  or against the order;
- one run has not reached the position at step s, or the runs begin with different canvases;
- they differ in the order, and chance or a fixed order chose the positions: at a temperature above 0, with a sampler
  that draws them or ranks by another score, or where a run wrote another part of the canvas at step s;
- a run masked i again after step s. Samplers draw what they mask again, and what one run then writes there has no
  counterpart in the other.

So does the part of M - M' that comes from the head itself, where the logits of p(x_0) depend on the tokens that are
present (log scores under uniform noise).

Then over all steps

    M - M' = Σ effects of the given tokens + Σ error nodes

up to the error of the quadrature, `RunGraph.error`. That a discrete choice follows its margin is an assumption: the
margin decides at temperature 0. How sure the choice was does not matter for what is written, so that the proportional
rule is one of several that are complete. `RunGraph.faithfulness` measures what the graph keeps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.circuits.attribution import require_plain_stream
from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary, warn_of_other_weights
from diffusion_lens.analysis.graphs.features import digests, transcoders_of
from diffusion_lens.analysis.graphs.result import RunGraph
from diffusion_lens.analysis.graphs.within_step import (
    KINDS,
    LEAST_MARGIN,
    Objective,
    StepGraph,
    StepRun,
    Swept,
    require_same_given,
    require_same_steps,
    step_runs,
    word_instead,
)
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_architecture, warn_of_another_network
from diffusion_lens.denoising.sampler import PositionNoise
from diffusion_lens.denoising.samplers import SAMPLERS, sampler_from
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.config import reached
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import provenance
from diffusion_lens.settings import Settings, Whole, at_least, one_of, setting, takes, warn_user, whole_number

MOST_ERROR = 0.05  # share of M - M' that effects may lack without a warning


@dataclass(frozen=True)
class GraphSettings(Settings):
    """What a graph of a run decomposes, and how finely."""

    metric: str = setting(
        "logit",
        'Number read at the target: the "logit" of its token, its "log_probability", or its "margin" over the token '
        "that the corrupted run writes there.",
        one_of("logit", "log_probability", "margin"),
    )
    step: int | None = setting(
        None,
        "Step at which the target is read. Default: the one that reveals it in the clean run.",
        partial(at_least, 0),
    )
    canvas: str = setting(
        "free",
        '"free": the corrupted run writes its own tokens. "forced": it reads those of the clean run, so that only '
        "given tokens differ, and no decision leads from step to step.",
        one_of("free", "forced"),
    )
    points: int = setting(16, "Number of quadrature points of each path.", partial(at_least, 1))
    nodes_per_step: int = setting(
        64,
        "Number of heads, MLPs, features and errors of each step, those with the largest absolute effects, whose "
        "edges are computed; embeddings and decisions are in addition. As many features of a transcoder are nodes in "
        "a step.",
        partial(at_least, 0),
    )
    max_bytes: int = setting(2**30, "Memory to use in addition to the weights.", partial(at_least, 1))
    frozen: str = setting(
        "nothing",
        'What parts hold at the mean of both runs where they pass differences on: "nothing", attention "patterns", or '
        '"patterns and norms" (`within_step`). The rest stays in error nodes of heads, MLPs and objectives.',
        one_of("nothing", "patterns", "patterns and norms"),
    )


@takes(GraphSettings)
@begins_run
@torch.inference_mode(False)
@torch.no_grad()
def run_graph(
    model: DiffusionTransformer,
    trajectory: Trajectory,
    target: Whole | tuple[Whole, Whole | str],
    corrupted: Trajectory | str | Tensor,
    *,
    features: Sequence[SparseDictionary] = (),
    settings: GraphSettings,
    progress: bool = False,
) -> Any:
    """The graph of what made a run write its target, against a corrupted run.

    Args:
        model: Model of the run, of either variant.
        trajectory: The clean run: one row without padding.
        target: Position, or (position, token); the token is an id or a text, by default the one that the run wrote.
        corrupted: Another run with the same given positions and the same settings but for its seeds; or its prompt, as
            a text or as tokens Int[pos], from which it is then run with the settings and seeds of the clean one.
        features: Transcoders of MLPs of the model, whose features are then nodes (see `graphs.features`).

    Returns:
        A `RunGraph`. Its cost is, for each step that has a part in it and each branch of guidance, two passes, one over
        a copy of the canvas for each quadrature point, and a backward pass through that.

    Raises:
        ValueError: The runs have several rows, padding, or different given positions or settings; the target is given
            or never written; both runs write the same token, for the metric "margin"; parts of the model write other
            sums than the graph's, or a hook of the caller is between parts (as in `edge_attribution`); the network is
            conditioned on its own prediction; a dictionary is no transcoder of an MLP; or the budget is too small.

    Warns:
        UserWarning: A trajectory was written by another checkpoint, or with other hooks, weights, modules or dtype; or
            a transcoder was trained on other weights; or the effects lack more than 5% of M - M' (`RunGraph.error`).
    """
    require_plain_stream(model)
    transcoders = transcoders_of(model, features)
    if trajectory.handed is not None:
        raise ValueError(
            "this run hands its predictions on from step to step, which the graph does not follow: take one step with "
            "edge_attribution"
        )
    clean = _one_row(model, trajectory, "trajectory")
    other = _corrupted_run(model, clean, corrupted, settings.canvas)
    if torch.equal(clean.canvases, other.canvases):
        raise ValueError("both runs have the same canvases, and there is no difference to explain: give another prompt")
    warn_of_another_network({"clean trajectory": (clean.record, model), "corrupted trajectory": (other.record, model)})
    for one in transcoders.values():
        warn_of_other_weights(model, one)
    step, objective = _target_of(model, clean, other, target, settings)
    builder = _Builder(model, clean, other, transcoders, settings)
    builder.pending[step] = {objective: _Pending(1.0, None)}
    last_first = range(step, clean.first_step - 1, -1)
    for at in tqdm(last_first, desc="graph", unit="step", disable=not progress):
        builder.add_step(at)
    record = {
        **settings.describe(),
        "target": [objective.position, objective.token],
        "other": objective.other,
        "target_step": step,
        "passes": builder.passes,
        "copies": builder.copies,
        "n_layers": model.cfg.n_layers,
        "n_heads": model.cfg.n_heads,
        "features": digests(transcoders),
        "trajectory": {"clean": canvas_provenance(clean.record), "corrupted": canvas_provenance(other.record)},
        **provenance(model, model.cfg),
    }
    graph = builder.result(record)
    if graph.error > MOST_ERROR:
        warn_user(
            f"with points={settings.points} the effects of this graph lack more than {MOST_ERROR:.0%} of M - M' (see "
            "`RunGraph.error`): give more points=, or compute in float32"
        )
    return graph


def _one_row(model: DiffusionTransformer, run: Trajectory, name: str) -> Trajectory:
    """The run without what the graph does not read, after its checks."""
    require_same_architecture(run.record, model)
    if len(run) != 1 or not bool(run.real.all()):
        padding = "" if run.real.all() else " with padding"
        raise ValueError(f"{name} has {len(run)} rows{padding}; take one without padding, such as {name}.row(0)")
    return replace(run, recorded=None)


def _corrupted_run(
    model: DiffusionTransformer, clean: Trajectory, corrupted: Trajectory | str | Tensor, canvas: str
) -> Trajectory:
    """The corrupted run, with the given positions and steps of the clean one."""
    if isinstance(corrupted, Trajectory):
        other = _one_row(model, corrupted, "corrupted")
        require_same_steps(clean, other)
        prompt = other.prompt
    else:
        laid_out = lay_out(
            model,
            corrupted[None] if isinstance(corrupted, Tensor) and corrupted.dim() == 1 else corrupted,
            clean.tokens.shape[1],
        )
        require_same_given(clean, laid_out.given.to(clean.given.device))
        prompt = laid_out.tokens.to(clean.tokens.device)
    if isinstance(corrupted, Trajectory) and canvas == "free":
        return other
    swapped: Tensor = torch.where(clean.given, prompt, clean.tokens)
    run = replace(
        clean,
        tokens=swapped,
        canvases=torch.where(clean.given, prompt, clean.canvases),
        prompt=torch.where(clean.given, prompt, clean.prompt),
        words={
            **clean.words,
            **dict(zip(ids := sorted(set(swapped.flatten().tolist())), model.words(ids), strict=True)),
        },
    )
    return replace(run.replay(model, canvas="free"), recorded=None) if canvas == "free" else run


def _target_of(
    model: DiffusionTransformer,
    clean: Trajectory,
    other: Trajectory,
    target: Whole | tuple[Whole, Whole | str],
    settings: GraphSettings,
) -> tuple[int, Objective]:
    """The step at which the target is read, and what is read."""
    given_position, given_token = target if isinstance(target, tuple) else (target, None)
    position, n_pos = whole_number("target", given_position), clean.tokens.shape[1]
    if not 0 <= position < n_pos or bool(clean.given[0, position]):
        raise ValueError(
            f"target={position} is no position that the run writes; it has {n_pos}, of which some are given"
        )
    if given_token is None:
        token = int(clean.tokens[0, position])
    else:
        token = (
            model.to_single_token(given_token) if isinstance(given_token, str) else whole_number("target", given_token)
        )
    if not bool(model.cfg.writable(torch.tensor([token])).all()):
        raise ValueError(f"target: the model cannot write token {token}; give the id of one that it can write")
    step = int(clean.revealed_at[0, position]) if settings.step is None else settings.step
    if not clean.first_step <= step < clean.first_step + clean.n_steps:
        raise ValueError(
            f"the target at position {position} is read at step {step}, and the run has the steps {clean.first_step} "
            f"to {clean.first_step + clean.n_steps - 1}: give a step= of it, or a position that it reveals"
        )
    instead = word_instead(model, other, position, token) if settings.metric == "margin" else -1
    if settings.metric == "margin" and instead < 0:
        raise ValueError(
            f"the corrupted run writes no other token at position {position} than token {token}, so there is no "
            'margin: give metric="logit", or a prompt with another answer and canvas="free"'
        )
    return step, Objective(position, token, instead, settings.metric)


class _Pending(NamedTuple):
    """What an objective of a step is to pass on: an effect, and the nodes of later steps that have it."""

    effect: float
    nodes: list[tuple[int, float]] | None  # `None` of the target itself
    sign: int = 1  # of the difference between the runs that explains the decision

    def explained_by(self, objective: Objective, clean: float, corrupted: float) -> bool:
        """Whether the value of a decision differs between the runs as what they wrote does."""
        chose = objective.measure != "margin" or clean > 0 > corrupted
        return chose and self.sign * (clean - corrupted) >= LEAST_MARGIN


class _Builder:
    """Adds the steps of a graph, from the last to the first."""

    def __init__(
        self,
        model: DiffusionTransformer,
        clean: Trajectory,
        corrupted: Trajectory,
        transcoders: Mapping[int, SparseDictionary],
        settings: GraphSettings,
    ) -> None:
        self.model, self.clean, self.corrupted, self.settings = model, clean, corrupted, settings
        self.transcoders = transcoders
        self.pending: dict[int, dict[Objective, _Pending]] = {}
        self.nodes: list[tuple[int, ...]] = []
        self.effects: list[float] = []
        self.inflows: list[float] = []
        self.edges: list[tuple[Tensor, Tensor, Tensor, bool]] = []
        self.passes = self.copies = 0
        self.errors: list[list[float]] = []
        self.masked = [run.is_masked(run.canvases[:, 0]) for run in (clean, corrupted)]
        self.ranked: dict[int, Tensor] = {}  # positions ranked by probability in both runs, by step
        self.ends = (0.0, 0.0)

    def _node(
        self,
        step: int,
        kind: str,
        position: int,
        effect: float,
        inflow: float,
        *,
        layer: int = -1,
        head: int = -1,
        feature: int = -1,
        branch: int = 0,
        token: int = -1,
        other: int = -1,
    ) -> int:
        self.nodes.append((step, KINDS.index(kind), layer, head, feature, position, branch, token, other))
        self.effects.append(effect)
        self.inflows.append(inflow)
        return len(self.nodes) - 1

    def _edge(self, source: int, target: int, weight: float, decision: bool) -> None:
        one = torch.tensor([source]), torch.tensor([target]), torch.tensor([weight], dtype=torch.float64)
        self.edges.append((*one, decision))

    def add_step(self, step: int) -> None:
        """Add the nodes and edges of a step, and what its written tokens pass on to earlier steps."""
        wanted = self.pending.pop(step, {})
        if not wanted:
            return
        # 1. Both runs, and the objectives that they decide.
        positions = sorted({objective.position for objective in wanted})
        runs = step_runs(self.model, (self.clean, self.corrupted), step, positions)
        settings = self.settings
        graph = StepGraph(
            runs[0],
            runs[1],
            list(wanted),
            settings.points,
            self.transcoders,
            settings.nodes_per_step,
            settings.frozen,
            settings.max_bytes,
        )
        self.passes += 3 * len(graph.change)
        self.copies += (2 + len(graph.at)) * len(graph.change)
        changed = (graph.clean_values - graph.corrupted_values).tolist()
        ends = zip(graph.clean_values.tolist(), graph.corrupted_values.tolist(), strict=True)
        kept = [
            pending.nodes is None or pending.explained_by(objective, *values)
            for (objective, pending), values in zip(wanted.items(), ends, strict=True)
        ]
        for decides, (objective, pending) in zip(kept, wanted.items(), strict=True):
            if not decides:
                self._leave(step, objective, pending)
        coefficients = torch.tensor(
            [
                0.0 if not decides else 1.0 if pending.nodes is None else pending.effect / change
                for decides, pending, change in zip(kept, wanted.values(), changed, strict=True)
            ],
            dtype=torch.float64,
        )
        if not any(kept):
            return

        # 2. The effects of all nodes of the step.
        swept = graph.sweep(coefficients)
        effects = [one.effect for one in swept]
        ids = self._add_nodes(step, runs, swept)

        # 3. The edges into the objectives, and on from them to later steps.
        chosen = self._chosen(effects)
        for i, (objective, pending) in enumerate(wanted.items()):
            if not kept[i]:
                continue
            effect, into = float(coefficients[i]) * changed[i], graph.into_objective(i)
            of_head = float(coefficients[i] * graph.head_change[i])
            inflow = sum(float(one.sum(dtype=torch.float64)) for one in into) + of_head
            kind = "target" if pending.nodes is None else "decision"
            own = self._node(
                step, kind, objective.position, effect, inflow, token=objective.token, other=objective.other
            )
            if pending.nodes is None:
                self.ends = float(graph.clean_values[i]), float(graph.corrupted_values[i])
            for node, passed in pending.nodes or ():
                self._edge(own, node, passed, True)
            if of_head:
                self._edge(self._node(step, "error", objective.position, of_head, of_head), own, of_head, False)
            for branch, table in enumerate(into):
                self._add_edges(table, ids[branch], chosen[branch], own)

        # 4. The edges into the chosen heads, MLPs and features.
        for branch, places in enumerate(chosen):
            for position, writer, table in graph.into_nodes(branch, places):
                own = int(ids[branch][position, writer])
                self.inflows[own] = float(table.sum(dtype=torch.float64))
                self._add_edges(table, ids[branch], places, own)
            self._add_errors(step, branch, swept[branch], ids[branch], places)
        within = sum(
            float(one.effect[:, one.sources].sum(dtype=torch.float64) + one.error.sum(dtype=torch.float64))
            for one in swept
        )
        total = float((coefficients * (graph.clean_values - graph.corrupted_values - graph.head_change)).sum())
        self.errors.append([float(step), within, total])

        # 5. What the embeddings of written tokens pass on.
        for branch, effect in enumerate(effects):
            for position in effect[:, 0].nonzero().flatten().tolist():
                if not bool(self.clean.given[0, position]):
                    self._pass_on(step, position, int(ids[branch][position, 0]))

    def _leave(self, step: int, objective: Objective, pending: _Pending) -> None:
        """Keep effects in an error node of their own."""
        own = self._node(
            step,
            "error",
            objective.position,
            pending.effect,
            pending.effect,
            token=objective.token,
            other=objective.other,
        )
        for node, passed in pending.nodes or ():
            self._edge(own, node, passed, True)

    def _add_errors(self, step: int, branch: int, swept: Swept, ids: Tensor, chosen: Tensor) -> None:
        """Nodes for what frozen heads and MLPs do not pass back; of an MLP with a transcoder, its error node."""
        of_mlps = {
            (position, column.layer): int(ids[position, writer])
            for writer, column in enumerate(swept.columns)
            if column.kind == "error"
            for position in range(len(ids))
            if ids[position, writer] >= 0
        }
        for position, writer in swept.error.nonzero().tolist():
            column, left = swept.columns[writer], float(swept.error[position, writer])
            own = of_mlps.get((position, column.layer)) if column.kind != "head" else None
            if own is None:
                own = self._node(step, "error", position, 0.0, 0.0, layer=column.layer, head=column.head, branch=branch)
                if column.kind != "head":
                    of_mlps[position, column.layer] = own
            self.effects[own] += left
            self.inflows[own] += left
            if chosen[position, writer]:
                target = int(ids[position, writer])
                self.inflows[target] += left
                self._edge(own, target, left, False)

    def _add_nodes(self, step: int, runs: Sequence[StepRun], swept: Sequence[Swept]) -> list[Int[Tensor, "pos writer"]]:
        """Nodes for all parts with an effect; their numbers, -1 for those without."""
        given, canvases = self.clean.given[0], [run.canvas[0].tolist() for run in runs]
        tables = []
        for branch, (columns, features, _, effect, *_) in enumerate(swept):
            ids = torch.full(effect.shape, -1, dtype=torch.long)
            for position, writer in effect.nonzero().tolist():
                kind, layer, head, _ = columns[writer]
                tokens = [-1, -1]
                if kind == "embed":
                    kind = "token" if bool(given[position]) else "embed"
                    tokens = [each[position] for each in canvases]
                value = float(effect[position, writer])
                ids[position, writer] = self._node(
                    step,
                    kind,
                    position,
                    value,
                    value if kind in ("token", "error") else float("nan"),
                    layer=layer,
                    head=head,
                    feature=int(features[position, writer]),
                    branch=branch,
                    token=tokens[0],
                    other=tokens[1],
                )
            tables.append(ids)
        return tables

    def _chosen(self, effects: Sequence[Tensor]) -> list[Tensor]:
        """The embeddings with an effect and the parts with the largest ones, Bool[pos writer] by branch."""
        sizes = [effect.abs().cpu() for effect in effects]
        parts = torch.cat([size[:, 1:].flatten() for size in sizes])
        best = torch.zeros(len(parts), dtype=torch.bool)
        best[parts.topk(min(self.settings.nodes_per_step, int((parts > 0).sum()))).indices] = True
        of_branches = best.split([size[:, 1:].numel() for size in sizes])
        return [
            torch.cat([size[:, :1] > 0, of_branch.view(len(size), -1)], dim=1)
            for size, of_branch in zip(sizes, of_branches, strict=True)
        ]

    def _add_edges(self, table: Tensor, ids: Tensor, chosen: Tensor, target: int) -> None:
        """The edges from chosen nodes of a branch, of these weights."""
        table = table.cpu()
        sources = chosen & (table != 0)
        self.edges.append((ids[sources], torch.full((int(sources.sum()),), target), table[sources].double(), False))

    def _pass_on(self, step: int, position: int, node: int) -> None:
        """Ask the decision that wrote a token, or leave its effect in an error node."""
        effect = self.effects[node]
        self.inflows[node] = effect
        found = self._decision(step, position)
        if found is None:
            index = step - self.clean.first_step
            token, other = (int(run.canvases[index, 0, position]) for run in (self.clean, self.corrupted))
            self._leave(step, Objective(position, token, other), _Pending(effect, [(node, effect)]))
            return
        at, objective, sign = found
        before = self.pending.setdefault(at, {}).get(objective, _Pending(0.0, []))
        self.pending[at][objective] = _Pending(before.effect + effect, [*(before.nodes or ()), (node, effect)], sign)

    def _decision(self, step: int, position: int) -> tuple[int, Objective, int] | None:
        """The step that made the runs differ at a position, what it decided by, and the sign that explains it."""
        index = step - self.clean.first_step
        if self.clean.uniform_noise:
            at = index - 1
        else:
            both = (self.masked[0] & self.masked[1])[:index, position].nonzero()
            at = int(both.max()) if len(both) else -1
        if at < 0:
            return None
        runs = (self.clean, self.corrupted)
        tokens = [int(run.canvases[index, 0, position]) for run in runs]
        reaches = [bool(reached(run.canvases[at, 0, position])) for run in runs]
        contents = [
            run.canvases[at : index + 1, 0, position].masked_fill(masked[at : index + 1, position], -1)
            for run, masked in zip(runs, self.masked, strict=True)
        ]
        written = [not bool(masked[index, position]) for masked in self.masked]
        can_write = self.model.cfg.writable(torch.tensor(tokens).clamp(min=0)).tolist()
        if (
            reaches[0] != reaches[1]
            or not any(written)
            or any(int((each.diff() != 0).sum()) > 1 for each in contents)  # masked again, or written over by a hook
            or not all(c for w, c in zip(written, can_write, strict=True) if w)
        ):
            return None
        step_of = at + self.clean.first_step
        if all(written):
            return step_of, Objective(position, tokens[0], tokens[1], "margin"), 1
        if step_of not in self.ranked:
            self.ranked[step_of] = _ranked(self.clean, step_of) & _ranked(self.corrupted, step_of)
        if not bool(self.ranked[step_of][position]):
            return None
        token = tokens[0] if written[0] else tokens[1]
        return step_of, Objective(position, token, -1, "log_probability"), 1 if written[0] else -1

    def result(self, record: dict[str, Any]) -> RunGraph:
        """The graph."""
        columns = torch.tensor(self.nodes, dtype=torch.long).T
        names = ("step", "kind", "layer", "head", "feature", "position", "branch", "token", "other")
        sources, ends, weights, decides = zip(*self.edges, strict=True)
        decision = [torch.full(one.shape, is_decision) for one, is_decision in zip(ends, decides, strict=True)]
        tokens = {*columns[7].tolist(), *columns[8].tolist()} - {-1}
        words = {**self.corrupted.words, **self.clean.words}
        missing = sorted(tokens - words.keys())
        words |= dict(zip(missing, self.model.words(missing), strict=True))
        is_feature = columns[1] == KINDS.index("feature")
        graph = RunGraph(
            **dict(zip(names, columns, strict=True)),
            feature_nodes=columns[[0, 6, 2, 5, 4]][:, is_feature].T,
            effect=torch.tensor(self.effects, dtype=torch.float64),
            inflow=torch.tensor(self.inflows, dtype=torch.float64),
            influence=torch.zeros(len(self.effects), dtype=torch.float64),
            source=torch.cat(sources),
            target=torch.cat(ends),
            weight=torch.cat(weights),
            decision=torch.cat(decision),
            within=torch.tensor(self.errors, dtype=torch.float64),
            clean=self.ends[0],
            corrupted=self.ends[1],
            words=words,
            runs={"clean": self.clean, "corrupted": self.corrupted},
            record=record,
        )
        return graph.with_influence()


def _ranked(run: Trajectory, step: int) -> Bool[Tensor, "pos"]:
    """The positions among which a step chose by probability alone, if it revealed fewer."""
    sampler, state = run.record["sampler"], run.state_at(step)
    if run.record["temperature"] or sampler["name"] not in SAMPLERS:
        return torch.zeros_like(state.masked[0])
    sampler = sampler_from(sampler)
    confidence = state.given.double().masked_fill(run.is_masked(state.tokens) | state.given, float("nan"))
    noise = PositionNoise(run.record["seeds"], torch.arange(confidence.shape[1])[None])
    plan = sampler.plan(state, noise, confidence)
    chooses = int(plan.positions.sum()) > int(plan.counts.sum())
    return plan.positions[0] & (chooses and plan.jitter is None and sampler.proposal.is_plain)
