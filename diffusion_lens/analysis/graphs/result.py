"""`RunGraph`: nodes and edges over the steps of a run, to be read, pruned, drawn, tested and exported.

Pruning follows the effect through the edges. Let every source (a given token, an error) carry its whole effect. A node
v with the kept sources S(v) of its edges then retains the share

    r(v) = Σ_{u in S(v)} w(u → v) r(u) / Σ_u w(u → v)

of its own, and r of the target is the share of M - M' that flows along paths inside the graph alone. Nodes are ranked
by their influence on the target along absolute edges,

    I(target) = 1,    I(u) = Σ_v |w(u → v)| / Σ_u' |w(u' → v)| · I(v)

(Ameisen et al. 2025, "Circuit Tracing", transformer-circuits.pub), because a node whose effects cancel may be needed
all the same. r is not monotone: it is above 1 where what is left out works against the target. So `prune(share)` keeps
the shortest beginning of this list from which on r of the target stays within 1 - share of 1. A graph that is pruned
again to the same share stays as it is: influence and inflow are those of the whole graph.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary
from diffusion_lens.analysis.graphs import circuit_tracer
from diffusion_lens.analysis.graphs.faithful import GraphFaithfulness, measured
from diffusion_lens.analysis.graphs.interventions import GraphInterventions, intervened
from diffusion_lens.analysis.graphs.refine import refined
from diffusion_lens.analysis.graphs.within_step import KINDS, Objective
from diffusion_lens.denoising.same_network import canvas_provenance
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import PicturedResult, Saved, Table, shown_model
from diffusion_lens.settings import Real, Whole, at_least, checked_arguments, plain_number
from diffusion_lens.settings.figures import styled
from weight_conversion import write_json

_COLUMNS = (
    *("step", "kind", "layer", "head", "feature", "position", "branch", "token", "other"),
    *("effect", "inflow", "influence"),
)
_EVERY = 256  # sizes up to which each is tried when a graph is pruned; larger ones grow by a 20th


@dataclass(frozen=True, eq=False)
class RunGraph(PicturedResult, Saved):
    """Nodes and edges over the steps of a run; `run_graph` says what they mean.

    Columns of the data frame: name, word, other_word (at the position, in the clean and the corrupted run), step, kind,
    layer, head, feature, position, branch, token, other, effect, inflow, influence; a row for each node.

    Attributes:
        step: Int[node], denoising step.
        kind: Int[node], index of `KINDS`: a given token as a step reads it, the embedding of a position that the run
            writes, a head, an MLP (of one with a transcoder, the features that are no nodes), the decision that writes
            a token, the target, an error (with a layer, what a transcoder lacks of its MLP, or what a frozen part does
            not pass back), or a feature.
        layer, head, feature: Int[node], -1 where the node has none.
        position: Int[node], position on the canvas.
        branch: Int[node], 1 in the unconditional branch of guidance.
        token, other: Int[node], the token of a given or written position, a decision or the target in the clean run,
            and that of the corrupted run; -1 where there is none.
        effect: Float[node], share of M - M' that passes the node, in units of M.
        inflow: Float[node], sum of all edges into the node, kept or not; NaN where they were not computed. Tokens and
            errors have none, and repeat their effect.
        influence: Float[node], share of the absolute flow into the target that passes the node, by the edges that were
            computed.
        source, target: Int[edge], the nodes that an edge connects.
        weight: Float[edge], share of M - M' that passes the edge.
        decision: Bool[edge], whether it leads from a decision to a later step.
        feature_nodes: Int[feature axis], step, branch, layer, position and number of each feature that is a node before
            the graph is pruned. The node of its MLP is the sum of all others.
        within: Float[entry statistic], of each step that has nodes its index, the sum of the effects of its embeddings
            and of the errors of transcoders, and the difference of its objectives.
        clean, corrupted: M and M'.
        words: Text of every id that occurs.
        runs: The clean and the corrupted run.
        record: Settings, target and its step, passes, number of writers of a step, model, hash of the weights, hooks,
            versions.
    """

    KIND: ClassVar[str] = "run graph"
    SHOWS: ClassVar[str] = "the parts, by step and layer, through which the difference between two runs passes"
    ENTRIES: ClassVar[Mapping[str, Any]] = {
        "target": tuple[int, int],
        "target_step": int,
        "n_layers": int,
        "n_heads": int,
        "features": dict[str, str],
        "passes": int,
        "copies": int,
    }

    step: Int[Tensor, "node"]
    kind: Int[Tensor, "node"]
    layer: Int[Tensor, "node"]
    head: Int[Tensor, "node"]
    feature: Int[Tensor, "node"]
    position: Int[Tensor, "node"]
    branch: Int[Tensor, "node"]
    token: Int[Tensor, "node"]
    other: Int[Tensor, "node"]
    effect: Float[Tensor, "node"]
    inflow: Float[Tensor, "node"]
    influence: Float[Tensor, "node"]
    source: Int[Tensor, "edge"]
    target: Int[Tensor, "edge"]
    weight: Float[Tensor, "edge"]
    decision: Bool[Tensor, "edge"]
    feature_nodes: Int[Tensor, "feature axis"]
    within: Float[Tensor, "entry statistic"]
    clean: float
    corrupted: float
    words: dict[int, str]
    runs: dict[str, Trajectory]
    record: dict[str, Any] = field(repr=False)

    def _check(self) -> None:
        if self.runs.keys() != {"clean", "corrupted"}:
            raise ValueError(f"runs={sorted(self.runs)}; they are clean and corrupted")
        for ends in (self.source, self.target):
            if len(ends) and not (int(ends.min()) >= 0 and int(ends.max()) < len(self.step)):
                raise ValueError("an edge names a node that the graph lacks")
        if len(self.kind) and not (int(self.kind.min()) >= 0 and int(self.kind.max()) < len(KINDS)):
            raise ValueError(f"a node is of no kind; they are {list(KINDS)}")
        if int((self.kind == KINDS.index("target")).sum()) != 1:
            raise ValueError("the graph has not exactly one target")

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self.step)

    @cached_property
    def kinds(self) -> list[str]:
        """Kind of each node."""
        return [KINDS[kind] for kind in self.kind.tolist()]

    @property
    def names(self) -> list[str]:
        """Name of each node's part: "a3.h0", "m1", feature "m1.f120", "m1.error" of a transcoder or of a frozen norm,
        "a3.h0.error" of a frozen pattern, or its kind."""
        of_part = {"head": "a{0}.h{1}", "mlp": "m{0}", "feature": "m{0}.f{2}", "error": "m{0}.error"}
        parts = zip(self.kinds, self.layer.tolist(), self.head.tolist(), self.feature.tolist(), strict=True)
        named = []
        for kind, *part in parts:
            name = "a{0}.h{1}.error" if kind == "error" and part[1] >= 0 else of_part.get(kind, kind)
            named.append(kind if part[0] < 0 else name.format(*part))
        return named

    @cached_property
    def objectives(self) -> dict[int, Objective]:
        """What the target and each decision are measured by, by the numbers of their nodes."""
        found = {}
        for i, kind in enumerate(self.kinds):
            if kind in ("target", "decision"):
                position, token, other = (int(column[i]) for column in (self.position, self.token, self.other))
                measure = "margin" if other >= 0 else "log_probability"
                measure = self.record["metric"] if kind == "target" else measure
                found[i] = Objective(position, token, other, measure)
        return found

    @property
    def nodes(self) -> Any:
        """The nodes as a `pandas.DataFrame`, those with the largest absolute effects first: name, word (that of the
        position in the clean run at this step), other word (in the corrupted run), and the attributes of the class."""
        frame = self._table().frame()
        return frame.sort_values("effect", key=abs, ascending=False, kind="stable")

    @property
    def edges(self) -> Any:
        """The edges as a `pandas.DataFrame`, the largest first: source and target (index of `nodes`), their names,
        steps and positions, weight, kind ("stream" or "decision")."""
        names = np.array(self.names, dtype=object)
        columns: dict[str, Any] = {"source": self.source, "target": self.target}
        for end in ("source", "target"):
            at = columns[end]
            columns |= {
                f"{end}_name": names[at.numpy()].tolist(),
                f"{end}_step": self.step[at],
                f"{end}_position": self.position[at],
            }
        kinds = ["decision" if each else "stream" for each in self.decision.tolist()]
        frame = Table({**columns, "weight": self.weight, "kind": kinds}).frame()
        return frame.sort_values("weight", key=abs, ascending=False, kind="stable")

    @property
    def error(self) -> float:
        """|M - M' - (effects of given tokens + errors)| / |M - M'|; NaN where M = M'. A pruned graph lacks some of
        these, and raises a ValueError."""
        if self._is_pruned:
            raise ValueError("this graph is pruned, and effects add up in the whole one: ask that for its error")
        ends = sum(float(self.effect[self.kind == KINDS.index(kind)].sum()) for kind in ("token", "error"))
        return self._share(self.clean - self.corrupted - ends)

    @property
    def step_error(self) -> float:
        """The largest error of a step: what the effects of its embeddings and transcoders' errors lack of its
        objectives, as a share of |M - M'|; NaN where M = M'."""
        return self._share(float((self.within[:, 1] - self.within[:, 2]).abs().max()))

    def _share(self, amount: float) -> float:
        change = abs(self.clean - self.corrupted)
        return abs(amount) / change if change else math.nan

    @property
    def _is_pruned(self) -> bool:
        return not {"share", "refined", "only_step"}.isdisjoint(self.record)

    def _require_change(self) -> None:
        """Refuse a graph of nothing."""
        if self.clean == self.corrupted:
            raise ValueError(
                f"the target has the value {self.clean:.4g} in both runs, and there is no difference to share out: "
                "give run_graph another prompt or target"
            )

    @property
    def cost(self) -> dict[str, int]:
        """Number of passes, and of copies of a canvas in them."""
        return {name: int(self.record[name]) for name in ("passes", "copies")}

    @property
    def retained(self) -> float:
        """Share of M - M' that flows along paths inside the graph alone; NaN where M = M'."""
        return math.nan if self.clean == self.corrupted else float(self._retained([len(self)])[0])

    @checked_arguments
    def prune(self, share: Real = 1, *, most: Whole | None = None) -> "RunGraph":
        """The graph of the nodes with the largest influence, as few as retain this share of M - M', and the edges
        between them; of all nodes with edges, if these do not retain it. The target is kept.

        Args:
            share: Share of M - M' to retain, and as near to 1 from above: with 0.9, from 0.9 to 1.1, also by all
                larger graphs (of those that are tried: every size up to 256, then each 5% larger).
            most: Number of nodes at most, beside the target, whatever they retain.

        Raises:
            ValueError: The share is not between 0 and 1, the number not positive, or M = M'.
        """
        self._require_change()
        if not 0 < (number := plain_number("share", share)) <= 1:
            raise ValueError(f"share={number}; it must be above 0, and at most 1")
        ranks, sizes = self._ranks(), self._sizes()
        off = ((1 - self._retained(sizes)).abs() > 1 - number).tolist()
        size = min((size for i, size in enumerate(sizes) if not any(off[i:])), default=sizes[-1])
        if most is not None:
            size = min(size, at_least(1, "most", most) + 1)
        return self._of_nodes(ranks < size, {"share": number})

    @checked_arguments
    def refine(
        self,
        model: DiffusionTransformer,
        most: Whole,
        corrupted: Sequence[Trajectory] = (),
        *,
        features: Sequence[SparseDictionary] = (),
        candidates: Whole = 16,
        max_bytes: Whole = 2**30,
    ) -> "RunGraph":
        """`prune(most=most)` with nodes exchanged until those inside keep as much as they can of what is measured.

        The nodes are chosen by the measurements of `faithfulness` themselves (see `graphs.refine`), so that its share
        says how few nodes suffice, and no longer tests a prediction. Test with corrupted runs that are not given here.

        Args:
            model: Model of the run.
            most: Number of nodes at most, beside the target. Only nodes with computed edges are exchanged.
            corrupted: Other corrupted runs of the same steps and given positions; the graph then fits all at once, and
                others better. In each, the target must differ from that of the clean run.
            features: The transcoders of the graph.
            candidates: Number n of nodes outside and of nodes inside that are tried. A round takes, for each step and
                corrupted run, a pass with gradients and n² copies of the canvas.
            max_bytes: Memory to use in addition to the weights, an equal part for each corrupted run.

        Raises:
            ValueError: As `faithfulness`.
        """
        self._require_change()
        with_edges = self._of_nodes(~self.inflow.isnan(), {})
        inside = with_edges._ranks() <= at_least(1, "most", most)
        begin, n = with_edges._of_nodes(inside, {}), at_least(1, "candidates", candidates)
        kept = refined(with_edges, begin, inside, model, ["corrupted", *corrupted], features, n, int(max_bytes))
        return with_edges._of_nodes(kept, {"refined": [canvas_provenance(run.record) for run in corrupted]})

    @checked_arguments
    def faithfulness(
        self,
        model: DiffusionTransformer,
        replace: str | Trajectory = "corrupted",
        *,
        features: Sequence[SparseDictionary] = (),
        canvas: str = "forced",
        n_random: Whole = 10,
        seed: Whole = 0,
        max_bytes: Whole = 2**30,
    ) -> GraphFaithfulness:
        """What is left of M - M' if all nodes outside the graph are replaced in the clean run, each at its step and
        position.

        Args:
            model: Model of the run.
            replace: What replaces it: its "corrupted" output, the "mean" of its outputs over the positions of the
                corrupted canvas, normal "noise" with their mean and standard deviation, or "zero". Embeddings outside
                the graph are always the corrupted ones. Or another corrupted run, as `run_graph` takes it: its outputs
                and embeddings, and margins over the words that it writes; of several rows the mean, and the margins of
                this graph.
            features: The transcoders of the graph.
            canvas: With "forced" each step reads the clean canvas, so that the target and every decision of the graph
                is measured by itself. With "free", the run is taken again, and each step reads what the steps before
                it wrote, until the step of the target. What has no effect on the target with the clean canvases is no
                part of the graph, and replaced. So other positions may be written otherwise, or in another order, and
                even a whole graph, which keeps 1 with "forced", may then write another target. The target is read at
                its step, or at that in which the graph's run writes the position, if this is before.
            n_random: Number of random graphs, with as many nodes of each kind at each step.
            seed: Seed of these, and of the noise.
            max_bytes: Memory to use in addition to the weights.

        Raises:
            ValueError: Another model, other transcoders, an unknown setting, a run with other given positions or
                settings, or one that writes the target's token (of a margin), a target that everything replaced leaves
                as it is (`canvas="forced"`), M = M', or a budget that is too small.
        """
        self._require_change()
        return measured(self, model, replace, features, canvas, n_random, seed, max_bytes)

    @checked_arguments
    def interventions(
        self,
        model: DiffusionTransformer,
        nodes: Iterable[Whole] | None = None,
        scales: Sequence[Real] = (0.0, -1.0),
        *,
        features: Sequence[SparseDictionary] = (),
        max_bytes: Whole = 2**30,
    ) -> GraphInterventions:
        """Scale the difference of nodes between the runs, one at a time: what later steps write by the graph, and what
        they write.

        Args:
            model: Model of the run.
            nodes: Numbers of tokens, embeddings, heads, MLPs or features (the index of `nodes`). By default the 32 with
                the largest absolute effects.
            scales: Factors of a node's difference: 1 is the clean run, 0 the output of the corrupted one.
            features: The transcoders of the graph.
            max_bytes: Memory to use in addition to the weights.

        Raises:
            ValueError: The graph is pruned, a node has no output, the model or the transcoders are others, M = M', or
                the budget is too small.
        """
        self._require_change()
        return intervened(self, model, nodes, scales, features, max_bytes)

    @checked_arguments
    def to_json(self, path: str | Path, step: Whole | None = None) -> Path:
        """Write the graph in the JSON of circuit-tracer, for its viewer and Neuronpedia's; returns the path.

        Layers are unrolled over the steps, each of which has an embedding, its layers and its logits. Heads are shown
        as transcoder features of their layer, since the format knows no other kind that has a layer.

        Args:
            path: File to write, ending in .json.
            step: One step alone.

        Raises:
            ValueError: The graph has no nodes at this step.
        """
        target = Path(path)
        if target.suffix != ".json":
            raise ValueError(f"{target} should end in .json")
        shown = self if step is None else self._of_nodes(self.step.eq(int(step)), {"only_step": int(step)})
        if not len(shown):
            raise ValueError(f"step {step} has no nodes; the graph has {sorted(set(self.step.tolist()))}")
        write_json(circuit_tracer.as_graph(shown, target.stem)[0], target)
        return target

    @styled
    def plot(self, ax: Any = None, title: str | None = None, most: Whole = 200) -> Any:
        """Steps from top to bottom, layers from left to right, and in each step positions from top to bottom: a dot for
        each node, as large as its effect, lines for edges, heavy ones for decisions. Returns the matplotlib axes.

        Args:
            most: Number of edges to draw at most, those with the largest absolute weights; decisions are in addition.
        """
        return plots.run_graph(
            self._drawn(),
            [(int(s), int(t), float(w), bool(d)) for s, t, w, d in self._largest(int(most))],
            title=title or f"How {self._quoted()} was written",
            ax=ax,
        )

    def _drawn(self) -> list[dict[str, Any]]:
        """What a figure shows of each node."""
        n_layers = int(self.record["n_layers"])
        steps = sorted(set(self.step.tolist()))
        across = {"token": -1.0, "embed": -1.0, "decision": float(n_layers), "target": float(n_layers)}
        # Features stand behind their MLP, each at its own place.
        inside = 0.5 * (self.head < 0) + 0.4 * self.feature.clamp(min=0) / self.feature.max().clamp(min=1)
        drawn = []
        for i, name in enumerate(self.names):
            kind, layer = self.kinds[i], int(self.layer[i])
            read = int(self.runs["clean"].canvases[self._canvas(int(self.step[i])), 0, int(self.position[i])])
            drawn.append(
                {
                    "name": name,
                    "kind": kind,
                    "x": -1.6 if (kind, layer) == ("error", -1) else across.get(kind, layer + float(inside[i])),
                    "step": steps.index(int(self.step[i])),
                    "label": int(self.step[i]),
                    "position": int(self.position[i]),
                    "read": self.runs["clean"].words[read],
                    "word": self.words.get(int(self.token[i]), ""),
                    "effect": float(self.effect[i]),
                }
            )
        return drawn

    def _largest(self, most: int) -> Iterable[tuple[Any, Any, Any, Any]]:
        stream = torch.where(self.decision, 0.0, self.weight.abs())
        kept = self.decision.clone()
        kept[stream.topk(min(most, len(stream))).indices] = True
        columns = (each[kept].tolist() for each in (self.source, self.target, self.weight, self.decision))
        return zip(*columns, strict=True)

    def _canvas(self, step: int) -> int:
        return step - self.runs["clean"].first_step

    def _quoted(self) -> str:
        """The target as a text in quotes."""
        return repr(plots.readable(self.words[self.record["target"][1]]))

    def _ranks(self) -> Int[Tensor, "node"]:
        """Rank of each node by influence, 0 the target; nodes without computed edges come last."""
        size = self.influence.masked_fill(self.inflow.isnan(), -1.0)
        size[self.kind == KINDS.index("target")] = math.inf
        order = size.sort(descending=True, stable=True).indices
        return torch.empty_like(order).scatter(0, order, torch.arange(len(order)))

    def _sizes(self) -> list[int]:
        """The numbers of nodes that are tried."""
        with_edges = int((~self.inflow.isnan()).sum())
        sizes, size = list(range(1, min(with_edges, _EVERY) + 1)), _EVERY
        while (size := size + size // 20) < with_edges:
            sizes.append(size)
        return sizes if sizes[-1] == with_edges else [*sizes, with_edges]

    def _retained(self, sizes: Iterable[int]) -> Float[Tensor, "entry"]:
        """r of the target in the graphs of so many nodes."""
        ranks, sizes = self._ranks(), torch.tensor(list(sizes))
        member = (ranks[:, None] < sizes).double()
        kept = member.clone()
        kinds = [KINDS.index(kind) for kind in ("token", "error")]
        into = self._into()
        for node in self._in_order():
            if int(self.kind[node]) in kinds:
                continue
            of_node = into.get(node, [])
            flow = self.weight[of_node] @ kept[self.source[of_node]] if of_node else torch.zeros(len(sizes)).double()
            inflow = float(self.inflow[node])
            kept[node] = member[node] * flow / inflow if inflow and not math.isnan(inflow) else 0.0
        return kept[int((self.kind == KINDS.index("target")).nonzero())]

    def with_influence(self) -> "RunGraph":
        """The same graph, with the influence of each node by its edges."""
        flow, total = self.weight.abs(), torch.zeros(len(self), dtype=torch.float64)
        total.index_add_(0, self.target, flow)
        influence = (self.kind == KINDS.index("target")).double()
        into = self._into()
        for node in reversed(self._in_order()):
            if node in into and float(total[node]):
                edges = into[node]
                influence.index_add_(0, self.source[edges], flow[edges] / total[node] * influence[node])
        return replace(self, influence=influence)

    def _into(self) -> dict[int, list[int]]:
        """The edges into each node."""
        into: dict[int, list[int]] = {}
        for edge, end in enumerate(self.target.tolist()):
            into.setdefault(end, []).append(edge)
        return into

    def _in_order(self) -> list[int]:
        """The nodes, each after the sources of its edges."""
        last = self.layer.max() + 1
        place = {"error": -2, "token": -1, "embed": -1, "decision": int(last), "target": int(last)}
        keys = [
            (int(step), place.get(kind, layer), kind in ("mlp", "feature"))
            for step, kind, layer in zip(self.step.tolist(), self.kinds, self.layer.tolist(), strict=True)
        ]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def _of_nodes(self, kept: Bool[Tensor, "node"], more: Mapping[str, Any]) -> "RunGraph":
        """The graph of some nodes, and the edges between them."""
        number = torch.full((len(self),), -1, dtype=torch.long)
        number[kept] = torch.arange(int(kept.sum()))
        inside = kept[self.source] & kept[self.target]
        changed: dict[str, Any] = {name: getattr(self, name)[kept] for name in _COLUMNS}
        changed |= {name: getattr(self, name)[inside] for name in ("weight", "decision")}
        changed |= {name: number[getattr(self, name)[inside]] for name in ("source", "target")}
        return replace(self, **changed, record={**self.record, **more})

    def _table(self) -> Table:
        at = [self._canvas(step) for step in self.step.tolist()]
        words = {}
        for name, run in self.runs.items():
            tokens = run.canvases[at, 0, self.position.tolist()].tolist()
            words["word" if name == "clean" else "other_word"] = [run.words[token] for token in tokens]
        values = {name: getattr(self, name) for name in _COLUMNS}
        return Table({"name": self.names, **words, **values, "kind": self.kinds}, most="effect")

    def __repr__(self) -> str:
        size = f"{len(self)} nodes, {len(self.source)} edges, {len(set(self.step.tolist()))} steps"
        cut = ", refined" if "refined" in self.record else ""
        return f"RunGraph({shown_model(self.record)}, {self._quoted()}, {size}{cut})"
