"""Graphs of the runs of many facts, averaged: through which parts, at which words and steps, do their answers pass?

Each fact is denoised, and its run is compared with that of another fact (`run_graph`), drawn by seed from those with
the same words around another subject, as many tokens, and another target. The target is one token of the fact's answer,
whether or not the run writes it, and M its logit or log-probability.

Two facts share no positions and no steps. What they share is a node (role, step, part):

    role   that of the position (`causal_tracing.average_result`), or "readout", whatever its role besides: the position
           whose output predicts the target, its own, or the one before it on a causal model and others that shift
    step   "target", the step at which the target is read, or "earlier", all steps before it
    part   a head, an MLP, "token", "embed", "decision" or "error", as in `RunGraph`

The effect e of a fact's node is the sum of the effects of all nodes of its graph at such positions and steps, in both
branches of guidance; it is 0 where there are none. Of the facts only these sums are kept. The share of a node is

    share = Σ_facts e / Σ_facts (M - M')

so that the shares of tokens and errors add up to 1, to the error of the quadrature. It is a ratio of sums, not a mean
of ratios, in which a fact that its prompt hardly changes would count most. Where M - M' is below 0.1 on average, as of
reverse questions to a causal model, there is nothing to share out: shares are NaN, and effects are not.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.causal_tracing.average_result import ROLES, token_roles
from diffusion_lens.analysis.circuits.graph import Graph
from diffusion_lens.analysis.engine.layout import CanvasLayout, UsableFacts
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory
from diffusion_lens.analysis.graphs.run_graph import GraphSettings, run_graph
from diffusion_lens.analysis.graphs.within_step import LEAST_MARGIN
from diffusion_lens.analysis.over_facts.executor import Executes
from diffusion_lens.analysis.over_facts.folder import Shard, fact_seed
from diffusion_lens.analysis.over_facts.intervals import FEWEST, mean_interval
from diffusion_lens.analysis.over_facts.study import FactResult, FactsJob, LoopSettings, Study, StudyResult
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import Saved, Table, one_line, provenance, shown_model
from diffusion_lens.settings import (
    Whole,
    at_least,
    check_level,
    check_seed,
    fields_of,
    one_of,
    setting,
    takes,
    whole_number,
)
from diffusion_lens.settings.figures import styled

NODE_ROLES = (*ROLES, "readout")
STEPS = ("earlier", "target")
_FIRST, _LAST = ("error", "token", "embed"), ("decision",)  # parts before and behind the heads and MLPs
_TOGETHER = 2**10  # nodes whose intervals are computed together
_DRAWS = 100  # resamples that are computed together
_OF_GRAPHS = cast(Any, fields_of(GraphSettings))


@dataclass(frozen=True)
class AverageGraphSettings(CanvasLayout):
    """What is decomposed of each fact's run, and how finely."""

    answer_token: int = setting(
        0,
        "Index of the target among the answer's tokens; negative numbers count from the end.",
        whole_number,
    )
    metric: str = setting(
        "log_probability",
        'Number read at the target: the "log_probability" of its token, or its "logit".',
        one_of("log_probability", "logit"),
    )
    canvas: str = copy(_OF_GRAPHS["canvas"])
    points: int = copy(_OF_GRAPHS["points"])
    loop: LoopSettings | None = setting(
        None, "Settings of the loop that writes the answers; by default those of `denoise`.", option=False
    )
    seed: int = setting(0, "Seed by which the other fact is drawn, and of the intervals.", check_seed)

    @property
    def used_loop(self) -> LoopSettings:
        """Settings of the loop."""
        return self.loop or LoopSettings()

    def query_of(self, model: DiffusionTransformer, fact: Fact) -> Query:
        """A fact on its canvas; a `ValueError` if it has to be set aside."""
        query = self.query(model, fact, self.used_loop.check)
        if not -len(query.answer_tokens) <= self.answer_token < len(query.answer_tokens):
            raise ValueError(f"answer_token={self.answer_token}, but the answer has {len(query.answer_tokens)} tokens")
        return query


@dataclass(frozen=True, eq=False)
class FactGraph(FactResult, Saved):
    """One fact's graph, summed by node (role, step, part).

    Attributes:
        effects: Float[role step node], share of M - M' that passes the node, in units of M.
        clean, corrupted: M and M'.
        passes: Forward passes of both runs and of the graph.
    """

    KIND: ClassVar[str] = "graph of a fact"

    effects: Float[Tensor, "role step node"]
    clean: float
    corrupted: float
    passes: int

    __repr__ = one_line


@dataclass(frozen=True, repr=False)
class GraphOverlap:
    """How alike two averages of graphs are, beside chance.

    Attributes:
        shared: Number of the strongest nodes of one that are among the strongest of the other.
        most: Number of strongest nodes of each.
        n_nodes: Number of nodes in all.
        by_chance: The mean of the hypergeometric distribution, most² / n_nodes: what two random choices of nodes share.
        correlation: Pearson's correlation of the effects of all nodes.
        shared_range, correlation_range: Their ranges over resamples of the facts.
        shuffled_range, shuffled_correlation: The same where the nodes of the other average are shuffled among those of
            one kind and layer, so that as many of these are strong: with another role or another head.
    """

    shared: int
    most: int
    n_nodes: int
    by_chance: float
    correlation: float
    shared_range: tuple[float, float]
    correlation_range: tuple[float, float]
    shuffled_range: tuple[float, float]
    shuffled_correlation: tuple[float, float]

    def __repr__(self) -> str:
        shared, shuffled = ("{:.0f} to {:.0f}".format(*each) for each in (self.shared_range, self.shuffled_range))
        r, other_r = ("{:.2f} to {:.2f}".format(*each) for each in (self.correlation_range, self.shuffled_correlation))
        count = f"{self.shared} of {self.most} ({shared}), by chance {self.by_chance:.1f}, shuffled {shuffled}"
        return f"GraphOverlap({count}; correlation {self.correlation:.2f} ({r}), shuffled {other_r})"


@dataclass(frozen=True, eq=False, repr=False)
class AverageRunGraph(StudyResult[FactGraph]):
    """The graphs of many facts by node (role, step, part), and their average.

    Columns of the data frame: role, step, part, effect, low, high (mean over the facts, with the ends of its interval),
    share, share_low, share_high, facts (number of those with an effect there); a row for each node with an effect.

    Attributes:
        effects: Float[fact role step node], effect of each node of `NODE_ROLES`, `STEPS` and `parts`.
        clean, corrupted: Float[fact], M and M'.
        passes: Int[fact], forward passes of both runs and of the graph.
        ids: The fact of each row.
        parts: Name of each part: "error", "token", "embed", "a0.h0", "m0", ..., "decision".
        record: Settings, all facts of the study by id, the fact that corrupts each (`corrupted_by`), those `set_aside`,
            model, weights' hash, versions.
    """

    KIND: ClassVar[str] = "average run graph"
    SHOWS: ClassVar[str] = "the average effect of each part, by role of its position and step, on the answers of facts"
    ENTRIES: ClassVar[Mapping[str, Any]] = {
        **StudyResult.ENTRIES,
        "corrupted_by": dict[str, str],
        "parts": list[str],
        "seed": int,
        "model": str,
    }
    FACT_FILE: ClassVar[type[Any]] = FactGraph

    effects: Float[Tensor, "fact role step node"]
    clean: Float[Tensor, "fact"]
    corrupted: Float[Tensor, "fact"]
    passes: Int[Tensor, "fact"]
    ids: list[str]
    parts: list[str]
    record: dict[str, Any]

    def _axes(self) -> Iterable[tuple[str, Any]]:
        return (("fact", self.ids), ("role", NODE_ROLES), ("step", STEPS), ("node", self.parts))

    @classmethod
    def of(cls, results: Mapping[str, FactGraph], record: dict[str, Any]) -> "AverageRunGraph":
        """One result from the graphs of some facts of a study."""
        graphs, parts = list(results.values()), record["parts"]
        nothing = torch.empty(0, len(NODE_ROLES), len(STEPS), len(parts), dtype=torch.float64)
        return cls(
            effects=torch.stack([each.effects for each in graphs]) if graphs else nothing,
            clean=torch.tensor([each.clean for each in graphs], dtype=torch.float64),
            corrupted=torch.tensor([each.corrupted for each in graphs], dtype=torch.float64),
            passes=torch.tensor([each.passes for each in graphs], dtype=torch.long),
            ids=list(results),
            parts=parts,
            record=record,
        )

    def by_fact(self) -> dict[str, FactGraph]:
        """The inverse of `of`."""
        columns = (self.effects, self.clean.tolist(), self.corrupted.tolist(), self.passes.tolist())
        return {fact_id: FactGraph(*row) for fact_id, *row in zip(self.ids, *columns, strict=True)}

    @property
    def changes(self) -> Float[Tensor, "fact"]:
        """M - M' of each fact."""
        return self.clean - self.corrupted

    @property
    def errors(self) -> Float[Tensor, "fact"]:
        """What tokens and errors lack of M - M', in units of M: the error of the quadrature."""
        ends = [self.parts.index(name) for name in ("token", "error")]
        return self.changes - self.effects[..., ends].sum(dim=(1, 2, 3))

    @property
    def effect(self) -> Float[Tensor, "role step node"]:
        """Mean effect over facts."""
        return self.effects.mean(dim=0)

    @property
    def share(self) -> Float[Tensor, "role step node"]:
        """Sum of the effects over the sum of M - M'; NaN where M - M' is below 0.1 on average."""
        return self.effect / (self.changes.mean() if self._has_change else math.nan)

    def effect_interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of the confidence intervals of `effect`, which resample persons; NaN for fewer than four."""
        return self._interval(level, None)

    def share_interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of the confidence intervals of `share`, which resample persons, with the effects and the M - M' of their
        facts; NaN where that is NaN, or where the M - M' of a resample have a sum of 0 or less."""
        return self._interval(level, self.changes)

    def change_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Ends of the confidence interval of the mean M - M', which resamples persons."""
        low, high = mean_interval(self.changes, self.clusters, level, self.record["seed"])
        return float(low), float(high)

    @property
    def _has_change(self) -> bool:
        return bool(self.changes.mean() >= LEAST_MARGIN)

    def _interval(self, level: float, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        occurs = (self.effects != 0).any(dim=0)
        arguments = (self.clusters, check_level(level), self.record["seed"])
        parts = self.effects[:, occurs].split(_TOGETHER, dim=1)
        ends = [torch.stack(mean_interval(part, *arguments, weights=weights)) for part in parts]
        both = self.effects.new_zeros(2, *occurs.shape)
        both[:, occurs] = torch.cat(ends, dim=1)
        low, high = both if weights is None or self._has_change else both * math.nan
        return low, high

    def overlap(
        self,
        other: "AverageRunGraph",
        most: Whole = 20,
        *,
        heads: bool = True,
        level: float = 0.95,
        resamples: Whole = 1000,
        seed: Whole = 0,
    ) -> GraphOverlap:
        """How many of their strongest nodes two averages share, beside chance.

        Nodes are here (role, head or MLP), over all steps, with an effect in one of the averages; the strongest have
        the largest absolute mean effects. Resamples draw persons, and if both averages have the same persons, the same
        of both. They are noisier than the facts, so that they share fewer nodes: the range is no confidence interval.

        Args:
            other: Average of a model with as many layers and heads.
            most: Number of strongest nodes of each.
            heads: Whether each head is a node. Otherwise the heads of a layer are one: models that were trained apart
                do not number them alike.
            level: Share of the resamples, or shuffled averages, that is inside a range.
            resamples: Number of resamples, and of shuffled averages.
            seed: Seed of both.

        Raises:
            ValueError: The averages have other parts, no facts, or no more nodes than `most`.
        """
        if self.parts != other.parts:
            raise ValueError(
                f"the averages have {len(self.parts)} and {len(other.parts)} parts: take models with as many layers "
                "and heads"
            )
        count, n_draws = at_least(1, "most", most), at_least(1, "resamples", resamples)
        nodes = list(self.parts if heads else map(_layer_of, self.parts))
        of_network = [name for name in dict.fromkeys(nodes) if name not in (*_FIRST, *_LAST)]
        both = [_joined(each.effects.sum(dim=2), nodes, of_network).flatten(1) for each in (self, other)]
        known = torch.stack([(each != 0).any(dim=0) for each in both]).any(dim=0)
        if (n_nodes := int(known.sum())) <= count or not self.ids or not other.ids:
            raise ValueError(f"most={count}, and the averages have {n_nodes} nodes with an effect: give fewer")
        both = [each[:, known] for each in both]
        means = [each.mean(dim=0, keepdim=True) for each in both]

        # Resamples of the persons, and the other average with its nodes shuffled within each kind and layer.
        layers = list(map(_layer_of, of_network))
        group = torch.tensor([layers.index(layer) for layer in layers]).repeat(len(NODE_ROLES))[known]
        in_order = means[0][:, group.argsort(stable=True)]
        same = set(self.clusters) == set(other.clusters)
        counts = [_counts(self, n_draws, int(seed)), _counts(other, n_draws, int(seed) if same else [int(seed), 1])]
        generator = torch.Generator().manual_seed(check_seed("seed", seed))
        resampled, shuffled = [], []
        for pair in zip(*(each.split(_DRAWS) for each in counts), strict=True):
            resampled.append(_alike(pair[0] @ both[0], pair[1] @ both[1], count))
            keys = torch.rand(len(pair[0]), n_nodes, generator=generator, dtype=torch.float64)
            moved = means[1][0, (group + keys).argsort(dim=1)]
            shuffled.append(_alike(in_order.expand_as(moved), moved, count))
        tail = (1 - check_level(level)) / 2
        ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
        ranges, by_shuffling = (
            torch.cat(draws, dim=1).quantile(ends, dim=1, interpolation="nearest").T for draws in (resampled, shuffled)
        )
        if min(len(set(each.clusters)) for each in (self, other)) < FEWEST:
            ranges = ranges * math.nan
        shared, correlation = _alike(means[0], means[1], count)[:, 0].tolist()
        return GraphOverlap(
            int(shared), count, n_nodes, count**2 / n_nodes, correlation, *map(_pair, (*ranges, *by_shuffling))
        )

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """Mean effects: a row for each role at the earlier steps and at the target's, layers across, with the heads of
        a layer added up. Returns the matplotlib axes.

        Raises:
            ValueError: No node has an effect.
        """
        layers = list(map(_layer_of, self.parts))
        columns = list(dict.fromkeys(layers))
        by_layer = _joined(self.effect, layers, columns).nan_to_num()
        rows = [
            (f"{role}, {step} step{'s' * (step == 'earlier')}", by_layer[r, s])
            for s, step in enumerate(STEPS)
            for r, role in enumerate(NODE_ROLES)
            if bool(by_layer[r, s].any())
        ]
        if not rows:
            raise ValueError(f"there is no average to plot: {len(self.ids)} facts have no effect in any node")
        values = torch.stack([each for _, each in rows])
        bound = float(values.abs().max())
        return plots.labelled_map(
            values,
            rows=[name for name, _ in rows],
            layers=columns,
            xlabel="part: attention (a), MLP (m)",
            hue="RdBu",
            limits=(-bound, bound),
            bar="nats" if self.record["metric"] == "log_probability" else "logits",
            title=title
            or f"{shown_model(self.record)}: {len(self.ids)} facts, M - M' {float(self.changes.mean()):.1f}",
            ax=ax,
        )

    def _table(self) -> Table:
        names = ("effect", "low", "high", "share", "share_low", "share_high", "facts")
        n_facts = (self.effects != 0).sum(dim=0)
        values = (self.effect, *self.effect_interval(), self.share, *self.share_interval(), n_facts)
        axes = {"role": NODE_ROLES, "step": STEPS, "part": self.parts}
        return Table.of_cells(axes, dict(zip(names, values, strict=True)), most="effect").where(n_facts > 0)

    def __repr__(self) -> str:
        n_nodes = int((self.effects != 0).any(dim=0).sum())
        aside = f", {len(self.set_aside)} set aside" if self.set_aside else ""
        return f"AverageRunGraph({shown_model(self.record)}, {len(self.ids)} facts{aside}, {n_nodes} nodes)"


@takes(AverageGraphSettings)
@begins_run
def average_run_graph(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    settings: AverageGraphSettings,
    *,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    max_bytes: int = 2**30,
    progress: bool = False,
    executor: Executes | None = None,
) -> AverageRunGraph:
    """Average the graphs of the runs of many facts, each against the run of another fact.

    Args:
        model: Model of either variant.
        facts: Facts with common templates, of which each needs another with as many tokens.
        settings: What is decomposed of each run.
        out: Folder for one file per fact. A call that finds facts there computes only the others.
        shard: (i, n) or "i/n": compute the facts i, i + n, i + 2n, ... only; `AverageRunGraph.merge` joins the shards,
            bit for bit what one process gives on the same machine.
        max_bytes: Memory to use in addition to the weights.
        executor: `concurrent.futures.Executor`, or `Workers`, that computes the facts; by default this process does.

    Raises:
        ValueError: A setting is out of range, two facts have one id, the folder contains another study, `run_graph`
            refuses the model, or the model can be queried for none of the facts. A single fact that it cannot be
            queried for, or that has no other fact, is set aside, with the reason in `AverageRunGraph.set_aside`.
    """
    settings = replace(settings, length=settings.on(model).length)
    laid_out = UsableFacts.of(facts, partial(settings.query_of, model))
    usable = UsableFacts.of(list(laid_out.facts.values()), _drawing(laid_out, settings))
    usable = replace(usable, set_aside={**laid_out.set_aside, **usable.set_aside})
    record = {
        **settings.describe(),
        "loop": settings.used_loop.describe_on(model.cfg),
        "parts": _parts(model),
        "corrupted_by": usable.prepared,
        **usable.describe(),
        **provenance(model, model.cfg),
    }
    queries = laid_out.prepared
    inputs = {fact_id: (queries[fact_id], _prompt(queries[other])) for fact_id, other in usable.prepared.items()}
    compute = partial(graph_facts, settings=settings, max_bytes=max_bytes)
    study = Study(model, record, [[fact_id] for fact_id in inputs], FactsJob(inputs, compute))
    return study.collect(AverageRunGraph, out, shard, progress, executor)


def _drawing(laid_out: UsableFacts[Query], settings: AverageGraphSettings) -> Callable[[Fact], str]:
    """The function that draws the fact that corrupts another, by id; a `ValueError` if there is none."""
    shapes, groups = dict[str, Any](), dict[Any, list[str]]()
    for fact_id, fact in sorted(laid_out.facts.items()):
        start, stop = fact.subject_characters(settings.occurrence)
        shapes[fact_id] = fact.prompt[:start], fact.prompt[stop:], len(_prompt(laid_out.prepared[fact_id]))
        groups.setdefault(shapes[fact_id], []).append(fact_id)

    def differs(fact: Fact, other: str) -> bool:
        one, two = (laid_out.prepared[each].answer_tokens for each in (fact.id, other))
        at = settings.answer_token
        return laid_out.facts[other].subject != fact.subject and one[at] != two[at]

    def draw(fact: Fact) -> str:
        fitting = [other for other in groups[shapes[fact.id]] if differs(fact, other)]
        if not fitting:
            raise ValueError(
                f"no other fact has the words of {fact.prompt!r} around another subject, {shapes[fact.id][2]} tokens "
                f"and another token as answer_token={settings.answer_token}: give more facts of this template"
            )
        return fitting[fact_seed(settings.seed, fact.id) % len(fitting)]

    return draw


def _prompt(query: Query) -> Int[Tensor, "pos"]:
    return query.tokens[: min(query.answer_positions)]


def graph_facts(
    model: DiffusionTransformer,
    inputs: Mapping[str, tuple[Query, Tensor]],
    settings: AverageGraphSettings,
    max_bytes: int,
) -> list[FactGraph]:
    """The graphs of some facts, of which each has its query and the prompt of another fact."""
    return [_graph_of(model, fact_id, *given, settings, max_bytes) for fact_id, given in inputs.items()]


def _graph_of(
    model: DiffusionTransformer,
    fact_id: str,
    query: Query,
    other: Int[Tensor, "pos"],
    settings: AverageGraphSettings,
    max_bytes: int,
) -> FactGraph:
    # 1. The run of the fact, and its graph.
    length = max(len(query.tokens), max(query.answer_positions) + 1)
    loop = settings.used_loop.for_facts([fact_id], model.cfg)
    run = denoise(model, lay_out(model, _prompt(query)[None], length), loop)
    position, token = (each[settings.answer_token] for each in (query.answer_positions, query.answer_tokens))
    of_graph = {name: getattr(settings, name) for name in ("metric", "canvas", "points")}
    graph = run_graph(model, run, (position, token), other, **of_graph, nodes_per_step=0, max_bytes=max_bytes)

    # 2. The effects by role of the position, step and part.
    traced, step = TracedTrajectory(model, query, run), int(graph.record["target_step"])
    roles = token_roles(query) + ["answer"] * (length - len(query.tokens))
    roles[traced.rows(step, traced.canvas(step)[None], [position])[0]] = "readout"
    parts = _parts(model)
    effects = torch.zeros(len(NODE_ROLES), len(STEPS), len(parts), dtype=torch.float64)
    nodes = (graph.names, graph.position.tolist(), graph.step.tolist(), graph.effect.tolist())
    for name, at, at_step, effect in zip(*nodes, strict=True):
        if name != "target":
            effects[NODE_ROLES.index(roles[at]), int(at_step == step), parts.index(name)] += effect
    runs = graph.runs.values() if settings.canvas == "free" else [run]
    passes = graph.cost["passes"] + sum(int(each.record["forward_passes"]) for each in runs)
    return FactGraph(effects, graph.clean, graph.corrupted, passes)


def _parts(model: DiffusionTransformer) -> list[str]:
    """Names of the parts, in the order of an average."""
    return [*_FIRST, *Graph.of(model.cfg).writers[1:], *_LAST]


def _layer_of(part: str) -> str:
    """The attention of a head, and otherwise the part itself."""
    return part.split(".")[0]


def _joined(
    effects: Float[Tensor, "*rest node"], names: Sequence[str], kept: Sequence[str]
) -> Float[Tensor, "*rest top"]:
    """The sums of the effects of the parts with one name, for each name that is kept."""
    return torch.stack([effects[..., [name == own for own in names]].sum(dim=-1) for name in kept], dim=-1)


def _counts(average: AverageRunGraph, n_draws: int, seed: int | list[int]) -> Float[Tensor, "resample fact"]:
    """How often each resample of the persons contains each fact."""
    names = sorted(set(average.clusters))
    drawn = np.random.default_rng(seed).multinomial(len(names), [1 / len(names)] * len(names), size=n_draws)
    return torch.from_numpy(drawn[:, [names.index(name) for name in average.clusters]]).double()


def _pair(ends: Float[Tensor, "2"]) -> tuple[float, float]:
    low, high = ends.tolist()
    return low, high


def _alike(
    one: Float[Tensor, "resample cell"], other: Float[Tensor, "resample cell"], most: int
) -> Float[Tensor, "statistic resample"]:
    """How many of the strongest cells each pair of rows shares, and the correlation of all."""
    firsts = [torch.zeros_like(each).scatter(1, each.abs().topk(most).indices, 1) for each in (one, other)]
    a, b = (each - each.mean(dim=1, keepdim=True) for each in (one, other))
    correlation = (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1))
    return torch.stack([(firsts[0] * firsts[1]).sum(dim=1), correlation])
