"""What a graph keeps: the clean run with every node outside the graph replaced, at its step and position.

In the pass of a step, each head (before the output projection) and each MLP that is no node of the graph at a position
writes its output of the corrupted run there (or the mean of its outputs over positions, or 0), and each embedding that
is no node is that of the corrupted canvas; everything else is live. Of an MLP with a transcoder, each feature is live
or replaced by itself, and the error is that of the clean run or replaced. The kept share of an objective q, the target
or a decision of the graph, is

    (q - q') / (q_clean - q')

with q' in the pass in which everything is replaced, which is that of the corrupted run for corrupted outputs. Random
graphs have as many nodes of each kind at each step as the graph, at random parts and positions that the network reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.circuits.graph import Graph, by_part
from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary
from diffusion_lens.analysis.engine.batching import proposal_bytes, reserved, row_bytes
from diffusion_lens.analysis.graphs.features import MLPInGraph, read_point, share_masked, transcoders_of_graph
from diffusion_lens.analysis.graphs.within_step import (
    LEAST_MARGIN,
    Objective,
    StepRun,
    require_same_steps,
    step_runs,
    word_instead,
)
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_architecture
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.names import mlp_out, resid_pre
from diffusion_lens.hooks.step import BRANCHES
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import run_of
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance, shown_model
from diffusion_lens.settings import Whole, at_least, check_seed, one_of
from diffusion_lens.settings.figures import styled


@dataclass(frozen=True, eq=False, repr=False)
class GraphFaithfulness(PicturedResult, Saved):
    """What a graph and random graphs of its size keep of the target and of its decisions.

    Columns of the data frame: objective (its number), graph ("graph", or "random 0" and so on), step, position, token,
    value, share.

    Attributes:
        steps: Int[target], step of each objective, the target first.
        positions, tokens: Int[target], position and token that each is about.
        clean, replaced: Float[target], the objective in the clean run, and with every node replaced.
        values: Float[target member], the objective with the graph, and with each random graph; of a free run the target
            alone, `replaced` too, where each of these runs proposes the token that it writes there: at the step of the
            target, or before, if it has written the position by then.
        n_nodes: Number of nodes of the graph that can be replaced: embeddings, heads, MLPs, features and their errors.
        n_all: Number of all that could be, at the steps of the graph and the positions that the network reads there.
        wrote: Whether the run with the graph, and with each random graph, has written the target's token by the step of
            the target; of forced canvases, whether it is the likeliest there.
        record: Settings, model, hash of the weights, hooks, versions.
    """

    KIND: ClassVar[str] = "graph faithfulness"
    SHOWS: ClassVar[str] = "the share of the target and of each decision that a graph of a run keeps, and random graphs"

    steps: Int[Tensor, "target"]
    positions: Int[Tensor, "target"]
    tokens: Int[Tensor, "target"]
    clean: Float[Tensor, "target"]
    replaced: Float[Tensor, "target"]
    values: Float[Tensor, "target member"]
    n_nodes: int
    n_all: int
    wrote: list[bool]
    record: dict[str, Any] = field(repr=False)

    @property
    def shares(self) -> Float[Tensor, "target member"]:
        """The kept share of each objective, not bounded by 0 and 1; NaN of one that differs by less than 0.1 between
        the clean run and that with every node replaced."""
        change = (self.clean - self.replaced)[:, None]
        return ((self.values - self.replaced[:, None]) / change).masked_fill(change.abs() < LEAST_MARGIN, torch.nan)

    @property
    def share(self) -> float:
        """The share of the target that the graph keeps."""
        return float(self.shares[0, 0])

    @property
    def random(self) -> Float[Tensor, "member"]:
        """The share of the target that each random graph keeps."""
        return self.shares[0, 1:]

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The kept share of each objective, by step; returns the matplotlib axes."""
        order = self.steps.sort(stable=True).indices
        labels = [f"step {int(self.steps[i])}, position {int(self.positions[i])}" for i in order]
        shares = self.shares[order]
        rows, names = [shares[:, 0]], ["graph"]
        if shares.shape[1] > 1:
            rows, names = [*rows, shares[:, 1:].mean(dim=1)], [*names, "random graphs"]
        return plots.labelled_lines(
            torch.stack(rows), names, labels, "objective", "share kept", title or "What the graph keeps", ax
        )

    def _table(self) -> Table:
        names = ["graph", *(f"random {i}" for i in range(self.values.shape[1] - 1))]
        columns = {name: getattr(self, f"{name}s")[:, None] for name in ("step", "position", "token")}
        return Table.of_cells(
            {"objective": range(len(self.steps)), "graph": names},
            {**columns, "value": self.values, "share": self.shares},
        )

    def __repr__(self) -> str:
        n = self.values.shape[1] - 1
        chance = f", {n} random ones {float(self.random.mean()):.2f}" if n else ""
        size = f"{self.n_nodes} of {self.n_all} nodes"
        return f"GraphFaithfulness({shown_model(self.record)}, {size} keep {self.share:.2f}{chance})"


def measured(
    graph: Any,
    model: DiffusionTransformer,
    replace: str | Trajectory,
    features: Sequence[SparseDictionary],
    canvas: str,
    n_random: Whole,
    seed: Whole,
    max_bytes: Whole,
) -> GraphFaithfulness:
    """`RunGraph.faithfulness`."""
    one_of("forced", "free")("canvas", canvas)
    n_random, seed = at_least(0, "n_random", n_random), check_seed("seed", seed)
    with torch.inference_mode(False), torch.no_grad(), run_of(model):
        ablated = Ablated(graph, model, replace, features, n_random, int(seed), int(max_bytes))
        found = ablated.forced() if canvas == "forced" else ablated.free()
        of_run = canvas_provenance(replace.record) if isinstance(replace, Trajectory) else replace
        settings = {"replace": of_run, "canvas": canvas, "n_random": n_random, "seed": int(seed)}
        settings["target"] = graph.record["target"]
        return GraphFaithfulness(**found, record={**settings, **provenance(model, model.cfg)})


class _Replacement(NamedTuple):
    """What replaces the parts of a branch, by hook point."""

    outputs: dict[str, Float[Tensor, "pos writer d"]]
    mlps: dict[str, MLPInGraph]


class Ablated:
    """Passes of the clean run with the nodes outside of several graphs replaced: the graph, random ones, and none."""

    def __init__(
        self,
        graph: Any,
        model: DiffusionTransformer,
        replace: str | Trajectory,
        features: Sequence[SparseDictionary],
        n_random: int,
        seed: int,
        max_bytes: int,
    ) -> None:
        clean, corrupted = graph.runs["clean"], graph.runs["corrupted"]
        if isinstance(replace, str):
            one_of("corrupted", "mean", "zero", "noise")("replace", replace)
        self.how, other = (replace, corrupted) if isinstance(replace, str) else ("corrupted", replace)
        for run in (clean, other):
            require_same_architecture(run.record, model)
        require_same_steps(clean, other)
        transcoders = transcoders_of_graph(graph.record, model, features)
        self.run, self.model, self.max_bytes = graph, model, max_bytes
        self.runs = [clean, *(other.row(i) for i in range(len(other)))]
        self.graph, self.n, self.transcoders = Graph.of(model.cfg), 2 + n_random, transcoders
        self.n_branches = 2 if clean.record["cfg_scale"] else 1
        self.n_pos = clean.tokens.shape[1]
        self.objectives = self._objectives(other if other is not corrupted and len(other) == 1 else None)
        generator, self.noise = (torch.Generator().manual_seed(seed) for _ in range(2))
        # By step: by branch, graph, position and part. Parts are the writers, errors of MLPs with a transcoder, and the
        # features that were nodes of the whole graph, each of which is a part at its own position.
        self.members: dict[int, Tensor] = {}
        self.places: dict[tuple[int, int, int, int], int] = {}  # node at each step, branch, position and part
        self.n_nodes = self.n_all = 0
        names = ("step", "branch", "position", "layer", "head", "feature")
        per_layer, featured = self.graph.n_heads + 1, list(transcoders)
        columns = zip(*(getattr(graph, name).tolist() for name in names), strict=True)
        for number, (kind, (step, branch, position, layer, head, feature)) in enumerate(
            zip(graph.kinds, columns, strict=True)
        ):
            if step not in self.members:
                self.members[step] = self._none(step)
            if kind in ("token", "embed"):
                part = 0
            elif kind in ("head", "mlp"):
                part = 1 + layer * per_layer + (head if kind == "head" else self.graph.n_heads)
            elif kind == "error" and head < 0 and layer in transcoders:
                part = self.graph.n_writers + featured.index(layer)
            elif kind == "feature":
                wanted = torch.tensor([branch, layer, position, feature])
                place = (self._features(step) == wanted).all(dim=1).nonzero()
                part = self.graph.n_writers + len(featured) + int(place)
            else:
                continue
            self.members[step][branch, 0, position, part] = True
            self.places[step, branch, position, part] = number
        of_writers = [0, *([1] * self.graph.n_heads + [2]) * self.graph.n_layers, *[3] * len(featured)]
        for step, of_step in self.members.items():
            exists = torch.ones(self.n_branches, self.n_pos, of_step.shape[-1], dtype=torch.bool)
            exists[:, :, len(of_writers) :] = False
            exists[:, step_runs(model, self.runs, step, self.positions(step))[0].n_pos :] = False
            for part, (branch, _, position, _) in enumerate(self._features(step).tolist(), len(of_writers)):
                exists[branch, position, part] = True
            kinds = torch.tensor([*of_writers, *[4] * (of_step.shape[-1] - len(of_writers))])
            self.n_nodes += int(of_step[:, 0].sum())
            self.n_all += int(exists.sum())
            for branch, there in zip(of_step, exists, strict=True):
                for of_kind in (kinds == number for number in range(5)):
                    cells = (there & of_kind).nonzero()
                    n_kind = int((branch[0] & of_kind).sum())
                    for member in branch[1:-1]:
                        positions, parts = cells[torch.randperm(len(cells), generator=generator)[:n_kind]].T
                        member[positions, parts] = True

    def _features(self, step: int) -> Int[Tensor, "entry axis"]:
        """Branch, layer, position and number of the features that were nodes of the whole graph at a step."""
        rows: Tensor = self.run.feature_nodes
        return rows[rows[:, 0] == step, 1:]

    def _none(self, step: int) -> Bool[Tensor, "branch member pos writer"]:
        """Graphs without nodes at a step."""
        n_parts = self.graph.n_writers + len(self.transcoders) + len(self._features(step))
        return torch.zeros(self.n_branches, self.n, self.n_pos, n_parts, dtype=torch.bool)

    def _objectives(self, against: Trajectory | None) -> dict[int, list[tuple[int, Objective]]]:
        """The target and the decisions of each step with the numbers of their nodes; margins are over what the run
        `against` writes, where it is given."""
        wanted: dict[int, list[tuple[int, Objective]]] = {}
        for i, objective in self.run.objectives.items():
            if objective.measure == "margin" and against is not None:
                other = word_instead(self.model, against, objective.position, objective.token)
                objective = objective._replace(other=other)
                if other < 0 and self.run.kinds[i] == "target":
                    raise ValueError(
                        f"this run writes no other token at position {objective.position} than the target, so there is "
                        'no margin: give a run with another answer, or take a graph with metric="logit"'
                    )
            if objective.measure != "margin" or objective.other >= 0:
                wanted.setdefault(int(self.run.step[i]), []).append((i, objective))
        return wanted

    def positions(self, step: int) -> list[int]:
        """The positions that the objectives of a step are about."""
        target = self.run.record["target"][0]
        return sorted({objective.position for _, objective in self.objectives.get(step, ())} or {target})

    def replacements(self, step: int, positions: list[int], n_reached: int = 0) -> tuple[StepRun, list[_Replacement]]:
        """The clean step, and what replaces each part in each branch."""
        runs = step_runs(self.model, self.runs, step, positions, n_reached)
        of_mlps = {name for layer in self.transcoders for name in (read_point(layer), mlp_out(layer))}
        found = []
        for branch, (own, *others) in enumerate(zip(*(run.branches for run in runs), strict=True)):
            wrote = [given.run({*self.graph.node_points, *of_mlps}, given.embed()).activations for given in others]
            outputs = {name: _mean([by_part(each[name])[0] for each in wrote]) for name in self.graph.node_points}
            outputs |= {name: self._instead(value) for name, value in outputs.items() if name != "hook_embed"}
            clean = own.run(of_mlps).activations if of_mlps else {}
            mlps, rows = {}, self._features(step)
            for place, (layer, transcoder) in enumerate(self.transcoders.items(), self.graph.n_writers):
                at = (rows[:, :2] == torch.tensor([branch, layer])).all(dim=1).nonzero().flatten()
                read, mlp, share = read_point(layer), mlp_out(layer), share_masked(own)
                encoded = [
                    transcoder.encode(each[read][0].to(transcoder.W_enc), share_masked(given))
                    for each, given in zip(wrote, others, strict=True)
                ]
                mlps[mlp] = MLPInGraph(
                    transcoder,
                    share,
                    (clean[read][0], clean[mlp][0]),
                    (self._instead(_mean(encoded)), outputs[mlp][:, 0]),
                    (rows[at, 2], rows[at, 3]),
                    [place, *(self.graph.n_writers + len(self.transcoders) + at).tolist()],
                )
            found.append(_Replacement(outputs, mlps))
        given = runs[0].branches[0]
        of_features, of_largest = self._feature_bytes(given.n_pos)
        kept = len(found) * (given.stored_bytes(self.graph.node_points) + of_features)
        kept += (len(self.runs) - 2) * kept // len(found) + self._none(step).numel()
        one = reserved(self.model.cfg, row_bytes(self.model.cfg, given.n_pos, len(positions)))
        one += 4 * of_largest + 4 * self._none(step)[:, 0].numel()
        self.at_once = (self.max_bytes - kept) // one
        if self.at_once < 1:
            raise ValueError(f"max_bytes={self.max_bytes:,} is too small: one graph takes {kept + one:,} bytes")
        return runs[0], found

    def _feature_bytes(self, n_pos: int) -> tuple[int, int]:
        """Bytes of the features at these positions, of all transcoders and of the largest one."""
        sizes = [0, *(4 * n_pos * len(one.b_enc) for one in self.transcoders.values())]
        return sum(sizes), max(sizes)

    def _instead(self, outputs: Float[Tensor, "pos *rest"]) -> Float[Tensor, "pos *rest"]:
        """What replaces outputs of the corrupted run."""
        if self.how == "corrupted":
            return outputs
        if self.how == "zero":
            return torch.zeros_like(outputs)
        mean = outputs.mean(dim=0, keepdim=True).expand_as(outputs)
        if self.how == "mean":
            return mean
        drawn = torch.randn(outputs.shape, generator=self.noise).to(outputs)
        return mean + outputs.std(dim=0, correction=0) * drawn

    def _hooks(self, members: Tensor, replacement: _Replacement) -> list[tuple[str, Any]]:
        """Hooks that replace what is not in the graphs, Shaped[member pos part], one after the other."""
        names = [resid_pre(0), *map(read_point, self.transcoders), *list(self.graph.node_points)[1:]]
        return [(name, partial(self._replaced, members=members, replacement=replacement)) for name in names]

    def _replaced(self, activation: Tensor, hook: Any, members: Tensor, replacement: _Replacement) -> Tensor | None:
        """An activation with what is not in the graphs replaced: 0 is the replacement, 1 the live output, exactly."""
        name = "hook_embed" if hook.name == resid_pre(0) else hook.name
        if name not in self.graph.node_points:
            self.read = activation
            return None
        writers = self.graph.node_points[name]
        n_pos = activation.shape[1]
        members = members[:, :n_pos].to(activation)
        if (mlp := replacement.mlps.get(name)) is not None:
            return mlp.output(self.read, members, members[:, :, writers.start]).to(activation)
        kept = members[:, :, writers.start : writers.stop, None]
        other = replacement.outputs[name][:n_pos].to(activation)
        patched = torch.lerp(other, by_part(activation), kept)
        return patched if activation.dim() == 4 else patched[:, :, 0]

    def forced(self) -> dict[str, Any]:
        """Every objective of the graph, on the clean canvas of its step."""
        rows: list[tuple[int, int, Objective, float, Tensor]] = []
        wrote: list[bool] = []
        target = self.run.kinds.index("target")
        for step, numbered in self.objectives.items():
            objectives = [objective for _, objective in numbered]
            clean, replacements = self.replacements(step, self.positions(step))
            logits = self.logits(clean, replacements, self.members[step])
            values = clean.values(logits, objectives).double().cpu()
            clean_values = clean.values([given.run(()).logits for given in clean.branches], objectives).double().cpu()
            for row, (i, objective) in enumerate(numbered):
                rows.append((int(i != target), step, objective, float(clean_values[row, 0]), values[row]))
                if i == target:
                    require_difference(rows[-1][3], float(values[row, -1]))
                    wrote = self._likeliest(clean, logits, objective)
        rows.sort(key=lambda row: row[:2])
        values = torch.stack([row[4] for row in rows])
        return {
            "steps": torch.tensor([row[1] for row in rows]),
            "positions": torch.tensor([row[2].position for row in rows]),
            "tokens": torch.tensor([row[2].token for row in rows]),
            "clean": torch.tensor([row[3] for row in rows], dtype=torch.float64),
            "replaced": values[:, -1],
            "values": values[:, :-1],
            "n_nodes": self.n_nodes,
            "n_all": self.n_all,
            "wrote": wrote[:-1],
        }

    def logits(
        self, clean: StepRun, replacements: Sequence[_Replacement], members: Tensor
    ) -> list[Float[Tensor, "member selected d_vocab_out"]]:
        """The logits of each branch with each graph, Shaped[branch member pos part]."""
        found = []
        for given, replacement, of_branch in zip(clean.branches, replacements, members, strict=True):
            embedded, parts = given.embed(), []
            for part in of_branch.split(self.at_once):
                stream = embedded.expand(len(part), -1, -1)
                with given.at_step(len(part)), self.model.hooks(fwd_hooks=self._hooks(part, replacement)):
                    parts.append(self.model(stream, start_at_layer=0, logits_at=given.rows))
            found.append(torch.cat(parts))
        return found

    def _likeliest(self, clean: StepRun, logits: list[Tensor], objective: Objective) -> list[bool]:
        """Whether the target's token is the likeliest in each copy."""
        found = clean.clean_logits(logits)[:, clean.column[objective.position]].cpu()
        forbidden = ~self.model.cfg.writable(torch.arange(found.shape[-1]))
        likeliest: list[bool] = found.masked_fill(forbidden, -torch.inf).argmax(dim=-1).eq(objective.token).tolist()
        return likeliest

    def free(self) -> dict[str, Any]:
        """The target in runs that are taken again, each step under its own replacements."""
        run, record = self.run.runs["clean"], self.run.record
        (position, token), last = record["target"], int(record["target_step"])
        objective = next(one for i, one in self.objectives[last] if self.run.kinds[i] == "target")
        first, n_pos = run.first_step, self.n_pos
        members_at = {step: self.members.get(step, self._none(step)).clone() for step in range(first, last + 1)}
        for of_step in members_at.values():  # what the graphs have written is read as it is
            of_step[..., 0] |= ~run.given[0].cpu()
        network = StepRun(self.model, run, last, [position], n_pos).branches[0]
        of_features, of_largest = self._feature_bytes(n_pos)
        of_pass = network.stored_bytes(self.graph.node_points) + of_features
        kept = (last + 1 - first) * self.n_branches * of_pass
        kept += 3 * sum(of_step.numel() for of_step in members_at.values())
        one = reserved(self.model.cfg, row_bytes(self.model.cfg, n_pos, n_pos) * self.n_branches) + 4 * of_largest
        n_written, is_sampled = n_pos - int(run.given.sum()), run.record["temperature"] > 0
        one += proposal_bytes(self.model.cfg, n_written, self.n_branches, is_sampled)
        if (needed := kept + self.n * one) > self.max_bytes:
            raise ValueError(
                f"max_bytes={self.max_bytes:,} is too small: the runs of {self.n} graphs take {needed:,} bytes; give "
                "fewer random graphs (n_random=) or more bytes"
            )
        by_step = {step: self.replacements(step, [position], n_pos)[1] for step in range(first, last + 1)}

        def replaced(activation: Tensor, hook: Any) -> Tensor | None:
            if hook.step.index > last:
                return None
            branch = BRANCHES.index(hook.step.branch)
            return self._replaced(
                activation, hook, members_at[hook.step.index][branch], by_step[hook.step.index][branch]
            )

        names = [name for name, _ in self._hooks(members_at[last], by_step[last][0])]
        again = run.repeat(self.n).replay(self.model, canvas="free", fwd_hooks=[(name, replaced) for name in names])
        # The target is read on the canvases that the graphs have written, at the last step that may write it.
        values = []
        for member in range(self.n):
            of_graph = again.row(member)
            at = last if _open_until(run, position, last) < last else _open_until(of_graph, position, last)
            own = StepRun(self.model, of_graph, at, [position])
            logits = self.logits(own, by_step[at], members_at[at][:, member : member + 1])
            values.append(float(own.values(logits, [objective])[0, 0]))
        clean = StepRun(self.model, run, last, [position])
        clean_logits = [of_branch.run(()).logits for of_branch in clean.branches]
        found = torch.tensor([values], dtype=torch.float64)
        return {
            "steps": torch.tensor([last]),
            "positions": torch.tensor([position]),
            "tokens": torch.tensor([token]),
            "clean": clean.values(clean_logits, [objective])[:, 0].double().cpu(),
            "replaced": found[:, -1],
            "values": found[:, :-1],
            "n_nodes": self.n_nodes,
            "n_all": self.n_all,
            "wrote": (again.canvases[last + 1 - first, :-1, position] == token).tolist(),
        }


def _open_until(run: Trajectory, position: int, last: int) -> int:
    """The last step, up to this one, in which a run of one row may write a position."""
    may_write = run.is_open(run.canvases[: last + 1 - run.first_step])[:, 0, position].nonzero()
    return run.first_step + int(may_write.max()) if len(may_write) else run.first_step


def require_difference(clean: float, replaced: float) -> None:
    """Refuse a replacement that leaves the target as it is."""
    if abs(clean - replaced) < LEAST_MARGIN:
        raise ValueError(
            f"the target is {clean:.4g} in the clean run and {replaced:.4g} with every node replaced, so there is no "
            "difference for a graph to keep: replace by a run with another answer"
        )


def _mean(outputs: Sequence[Tensor]) -> Tensor:
    """The mean of the outputs of several runs."""
    return outputs[0] if len(outputs) == 1 else torch.stack(list(outputs)).mean(dim=0)
