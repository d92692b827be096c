"""Attribution within one denoising step: averaged Jacobians of each part of the network between two runs.

The residual stream before a part is a sum of what the earlier parts wrote: the embedding, the attention heads and the
MLPs, with biases that are the same in both runs. Let x be the stream of the clean run before a part f (the attention
of a block, an MLP, or final norm and unembedding with the objective), and x' that of the corrupted run. For a direction
g at its output, the fundamental theorem of calculus says, with all norms inside f,

    g · (f(x) - f(x')) = Σ_i Ḡ_i · (x_i - x'_i),    Ḡ_i = ∫_0^1 ∂(g · f)/∂x_i at x' + a (x - x') da

and x_i - x'_i is the sum of the differences u_i - u'_i of all writers u before f. So the edge from writer u at position
i into f has the weight

    w(u@i → f) = Ḡ_i · (u_i - u'_i)

and the edges into a part add up to its effect g · (f(x) - f(x')), but for the error of the quadrature. The direction at
a writer is the sum of the Ḡ_i of all parts after it, that at the objective is 1. So the effect of a node is the sum of
its outgoing edges exactly, and of its incoming edges up to the quadrature, and the effects of all embeddings add up to
the difference of the objective. This is integrated gradients (Sundararajan et al. 2017, arXiv 1703.01365) of each part
by itself, along its own straight path, with the averaged Jacobian in place of DeepLIFT's multiplier (Shrikumar et al.
2017, arXiv 1704.02685). EAP-IG (Hanna et al. 2024, arXiv 2403.17806) integrates the whole network along the line
between the two embeddings; there what flows into a node is not what flows out of it.

The integral is a sum over m Gauss-Legendre points a. One pass computes them all: before each part, the stream of each
copy of the canvas is replaced by x' + a (x - x'), so that all parts are local functions of one pass. The error falls
exponentially with m, more slowly where attention or a norm turns sharply on the way. Every part must have a derivative
along its path: where a router chooses other experts, the sum is off by the jump.

A part may be frozen. Let f~ be the part with its attention pattern, or the scale of its norm, held at the mean of both
runs, whatever it reads. Then

    g · (f(x) - f(x')) = g · (f~(x) - f~(x')) + error

of which the first term is passed back as above, and the second stays in an error node of the head, the MLP or the
objective, so that the sums stay as they are. For a pattern A with values v this is, exactly,

    A v - A' v' = (A + A')/2 · (v - v') + (A - A') · (v + v')/2

and for the factor s of a norm s x - s' x' = (s + s')/2 · (x - x') + (s - s') · (x + x')/2. So an edge says what was
copied to where a head looks in both runs, and the error that it looks elsewhere, or that the stream is longer
(circuit-tracer holds both at those of its one run: Ameisen et al. 2025).

Under guidance, the conditional and the unconditional pass are branches of one step, and the objective is a function of
the logits of both along their common path.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.circuits.attribution import wider
from diffusion_lens.analysis.circuits.graph import Graph
from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary
from diffusion_lens.analysis.engine.batching import reserved
from diffusion_lens.analysis.engine.kept_run import NetworkInput
from diffusion_lens.analysis.graphs.features import MLPChange, Parts, read_point, share_masked
from diffusion_lens.denoising.predictor import guide
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.names import Hook, attn_out, mlp_out, resid_post, resid_pre
from diffusion_lens.hooks.step import BRANCHES
from diffusion_lens.model.config import reached
from diffusion_lens.model.inputs import check_tokens
from diffusion_lens.model.layers import Linear, beside
from diffusion_lens.model.noise import HeadAt
from diffusion_lens.model.transformer import DiffusionTransformer

KINDS = ("token", "embed", "head", "mlp", "decision", "target", "error", "feature")  # of nodes
LEAST_MARGIN = 0.1  # difference of an objective between two runs, in nats, below which there is nothing to explain


class Objective(NamedTuple):
    """A number read from the logits of p(x_0) of one position: a logit, a log-probability, or a margin over `other`."""

    position: int
    token: int
    other: int = -1
    measure: str = "logit"

    def of(self, logits: Float[Tensor, "sample d_vocab_out"]) -> Float[Tensor, "sample"]:
        """Its value for each copy."""
        wide = logits.to(wider(logits.dtype))
        if self.measure == "log_probability":
            return wide.log_softmax(dim=-1)[:, self.token]
        return wide[:, self.token] - wide[:, self.other] if self.measure == "margin" else wide[:, self.token]


class StepRun:
    """One step of one run: the inputs of its branches, and the meaning of their logits."""

    def __init__(
        self,
        model: DiffusionTransformer,
        trajectory: Trajectory,
        step: int,
        positions: Sequence[int],
        n_reached: int = 0,
    ) -> None:
        self.model, self.scale, self.step = model, float(trajectory.record["cfg_scale"]), step
        state = trajectory.state_at(step, model.cfg.device)
        self.canvas, self.given = state.tokens, state.given
        self.positions = torch.tensor(positions, device=self.canvas.device)
        self.column = {position: i for i, position in enumerate(positions)}  # of the logits
        rows = model.readout.rows(self.positions)
        if state.block is not None:
            rows = state.block.rows(rows, self.positions, torch.zeros_like(self.positions))
        n_pos = self.canvas.shape[1]
        n_reached = max(n_reached, int(reached(self.canvas[0]).nonzero().max()) + 1, int(rows.max()) + 1)
        n_pos = n_pos if model.is_hooked else min(n_pos, n_reached - 1 + (model.cfg.block_size or 1))
        canvases = [self.canvas, self.canvas.masked_fill(state.given, trajectory.blank)]
        self.branches = [
            NetworkInput(
                model,
                check_tokens(model.cfg.readable(canvas[:, :n_pos]), model.cfg),
                rows.tolist(),
                None,
                replace(state, branch=branch),
            )
            for branch, canvas in zip(BRANCHES[: 2 if self.scale else 1], canvases, strict=False)
        ]

    @property
    def n_pos(self) -> int:
        """Number of positions that the network reads."""
        return self.branches[0].n_pos

    def values(
        self,
        logits: Sequence[Float[Tensor, "sample selected d_vocab_out"]],
        objectives: Sequence[Objective],
        canvas: Tensor | None = None,
    ) -> Float[Tensor, "target sample"]:
        """The objectives of copies of the step, from the network's outputs in each branch.

        Args:
            canvas: Tokens that the head reads in place of those of this step.
        """
        clean = self.clean_logits(logits, canvas)
        return torch.stack([one.of(clean[:, self.column[one.position]]) for one in objectives])

    def clean_logits(
        self, logits: Sequence[Float[Tensor, "sample selected d_vocab_out"]], canvas: Tensor | None = None
    ) -> Float[Tensor, "sample selected d_vocab_out"]:
        """The logits of p(x_0) at `positions`, from the network's outputs in each branch."""
        joined = logits[0] if len(logits) == 1 else guide(logits[0], logits[1], self.scale)
        present = (self.canvas if canvas is None else canvas)[:, self.positions]
        with self.model.clock.at(self.branches[0].step):
            return HeadAt.of(self.model, present).clean_logits(joined)


def step_runs(
    model: DiffusionTransformer,
    runs: Sequence[Trajectory],
    step: int,
    positions: Sequence[int],
    n_reached: int = 0,
) -> list[StepRun]:
    """A step of several runs, read up to the last position that one of them has reached."""
    found = [StepRun(model, run, step, positions, n_reached) for run in runs]
    most = max(one.n_pos for one in found)
    return [
        one if one.n_pos == most else StepRun(model, run, step, positions, most)
        for one, run in zip(found, runs, strict=True)
    ]


def require_same_steps(clean: Trajectory, other: Trajectory) -> None:
    """Refuse a run with other steps or settings than the seeds, or one that was given tokens at other positions."""
    for name in ("sampler", "cfg_scale", "temperature"):
        if (value := clean.record[name]) != (another := other.record[name]):
            raise ValueError(
                f"the clean run was denoised with {name}={value!r}, and the corrupted one with {another!r}, so that "
                f"they differ not only in what they read: denoise both with the same {name}"
            )
    same_steps = (other.first_step, other.record["times"]) == (clean.first_step, clean.record["times"])
    if other.canvases.shape[::2] != clean.canvases.shape[::2] or not same_steps:
        raise ValueError(
            f"the clean run has {clean.n_steps} steps of {clean.tokens.shape[1]} positions from step "
            f"{clean.first_step} on, and the corrupted one {other.n_steps} of {other.tokens.shape[1]} from step "
            f"{other.first_step} on: denoise both with the same length, steps and sampler"
        )
    require_same_given(clean, other.given)


def require_same_given(clean: Trajectory, given: Bool[Tensor, "batch pos"]) -> None:
    """Refuse other given positions than those of the clean run."""
    if not torch.equal(given, clean.given.expand_as(given)):
        n_clean, n_other = int(clean.given.sum()), int(given.sum(dim=1).max())
        raise ValueError(
            f"the clean run was given {n_clean} tokens and the corrupted one {n_other}, or at other positions: edges "
            "connect equal positions, so take prompts of equally many tokens"
        )


def word_instead(model: DiffusionTransformer, run: Trajectory, position: int, token: int) -> int:
    """The token that a run writes at a position in place of this one, -1 if it writes no other."""
    written = int(run.tokens[0, position])
    return written if written != token and bool(model.cfg.writable(torch.tensor([written])).all()) else -1


class Column(NamedTuple):
    """What a column of writers is: its kind of node, layer, head, and the number of parts that a pass runs before."""

    kind: str
    layer: int
    head: int
    order: int


class Swept(NamedTuple):
    """What the sweep leaves of one branch.

    Its writers are those of `circuits.graph.Graph`, and after them the error of each MLP with a transcoder and the
    features that are nodes. Such an MLP itself is then the sum of its other features.
    """

    columns: list[Column]
    features: Int[Tensor, "pos writer"]  # number of the feature, -1 where there is none
    change: Float[Tensor, "pos writer d_model"]  # of what each wrote, between the runs
    effect: Float[Tensor, "pos writer"]
    at_mlp_in: dict[int, Float[Tensor, "pos d_model"]]  # Ḡ of an MLP or feature, which read their own position only
    at_z: dict[int, Float[Tensor, "pos head d_head"]]  # direction at the mixed values of each attention, by layer
    error: Float[Tensor, "pos writer"]  # of the effect, what is frozen does not pass back

    @property
    def sources(self) -> list[int]:
        """The writers that pass nothing on: embedding and errors."""
        return [i for i, column in enumerate(self.columns) if column.kind in ("embed", "error")]


class StepGraph:
    """The nodes and edges of one step for some objectives, of two runs.

    A node of a branch is (position, writer), with the writers of `circuits.graph.Graph`.

    Args:
        objectives: What the last part computes; `coefficients` of `sweep` weigh them.
        points: Number m of quadrature points.
        transcoders: Transcoders of MLPs, by block.
        n_features: Number of features of each at most that are nodes.
        frozen: What parts hold at the mean of both runs: "nothing", "patterns", or "patterns and norms".
        max_bytes: Memory to use in addition to the weights.
    """

    def __init__(
        self,
        clean: StepRun,
        corrupted: StepRun,
        objectives: Sequence[Objective],
        points: int,
        transcoders: Mapping[int, SparseDictionary],
        n_features: int,
        frozen: str,
        max_bytes: int,
    ) -> None:
        self.clean, self.corrupted, self.objectives = clean, corrupted, list(objectives)
        self.transcoders, self.n_features = transcoders, n_features
        self.model, self.graph = clean.model, Graph.of(clean.model.cfg)
        self.n_layers = self.model.cfg.n_layers
        at, weights = np.polynomial.legendre.leggauss(points)
        layers = range(self.n_layers)
        self.patterns = [f"blocks.{layer}.attn.hook_pattern" for layer in layers] if frozen != "nothing" else []
        norms = [f"blocks.{layer}.{norm}" for layer in layers for norm in ("ln1", "ln2")] + ["ln_final"]
        self.scales = [f"{norm}.hook_scale" for norm in norms] if frozen == "patterns and norms" else []
        ends = [0.0, 1.0] if self.patterns else []  # corrupted and clean, where the frozen parts differ from the runs'
        self.at = torch.tensor([*((at + 1) / 2), *ends])
        self.weights = torch.tensor([*(weights / 2), *(0.0 for _ in ends)])
        self._require_memory(max_bytes)

        # 1. Both runs: the difference of what each part wrote, and the streams before each part.
        self.streams: list[tuple[list[Tensor], ...]] = []
        self.change: list[Float[Tensor, "pos writer d_model"]] = []
        self.mlps: list[dict[int, MLPChange]] = []
        self.held: list[dict[str, Tensor]] = []
        logits: list[tuple[Tensor, ...]] = []
        with torch.no_grad(), self.model.optional_hooks(use_attn_result=True):
            for pair in zip(clean.branches, corrupted.branches, strict=True):
                wrote, streams, read, held, outputs = zip(*map(self._kept, pair), strict=True)
                mean = {name: (held[0][name] + held[1][name]) / 2 for name in held[0]}
                self.held.append({name: 1 / mean[name] if name in self.scales else mean[name] for name in mean})
                change = wrote[0].to(wider(wrote[0].dtype)) - wrote[1]
                shares = share_masked(pair[0]), share_masked(pair[1])
                self.mlps.append(
                    {
                        layer: MLPChange(one, (read[0][layer], read[1][layer]), shares, change[:, self._mlp(layer)])
                        for layer, one in transcoders.items()
                    }
                )
                self.change.append(change)
                self.streams.append(streams)
                logits.append(outputs)

        # 2. The objectives in both runs; the head of the corrupted run may mean something else.
        by_run = [[pair[i] for pair in logits] for i in range(2)]
        self.clean_values = clean.values(by_run[0], self.objectives)[:, 0].double().cpu()
        self.corrupted_values = corrupted.values(by_run[1], self.objectives)[:, 0].double().cpu()
        under_clean_head = corrupted.values(by_run[1], self.objectives, clean.canvas)[:, 0].double().cpu()
        self.head_change = under_clean_head - self.corrupted_values

    @property
    def _leaf_points(self) -> list[str]:
        """The hook points of the streams before the parts: attention and MLP of each block, then the final norm."""
        mids = [f"blocks.{layer}.hook_resid_mid" for layer in range(self.n_layers)]
        pairs = zip((resid_pre(layer) for layer in range(self.n_layers)), mids, strict=True)
        return [*(name for pair in pairs for name in pair), resid_post(self.n_layers - 1)]

    def _kept(
        self, given: NetworkInput
    ) -> tuple[Float[Tensor, "pos writer d_model"], list[Tensor], dict[int, Tensor], dict[str, Tensor], Tensor]:
        """What each part of a run wrote, the streams before each part, what transcoders read, patterns and factors of
        norms to be frozen, and the logits."""
        points = {layer: read_point(layer) for layer in self.transcoders}
        frozen = {*self.patterns, *self.scales}
        run = given.run({*self.graph.writer_points, *self._leaf_points, *points.values(), *frozen}, given.embed())
        streams = [run.activations[name][0] for name in self._leaf_points]
        read = {layer: run.activations[name][0] for layer, name in points.items()}
        held = {name: 1 / run.activations[name] if name in self.scales else run.activations[name] for name in frozen}
        return self.graph.written(run.activations)[0], streams, read, held, run.logits

    def _require_memory(self, max_bytes: int) -> None:
        """Refuse a budget that does not hold the graphs of all points, the streams and the changes at once."""
        given, cfg = self.clean.branches[0], self.model.cfg
        size = cfg.dtype.itemsize
        leaves = (2 * self.n_layers + 1) * given.stream_bytes
        changes = self.graph.n_writers * given.stream_bytes * (max(size, 4) // size + 2)
        if self.transcoders:  # a second table of changes, with a column for each feature; tables of all features
            of_nodes = len(self.transcoders) * (self.n_features + 2) * 2 * given.n_pos * cfg.d_model
            most = max(len(one.b_enc) for one in self.transcoders.values())
            changes += (self.graph.n_writers * cfg.d_model + 8 * most) * given.n_pos * 4 + of_nodes * 4
        # Beside the graph: the leaves, the outputs of attention and MLP, mixed values, and gradients on their way.
        widths = cfg.d_model + (cfg.n_heads + 2 * self.graph.n_key_value_heads) * cfg.d_head  # of projections
        tensors = (
            given.graph_bytes
            + self.n_layers * given.n_pos * widths * size
            + leaves
            + (3 * self.n_layers + 4) * given.stream_bytes
        )
        if self.patterns:  # those of both runs, their mean; explicit attention beside the products that keep the mean
            pairs = cfg.n_heads * given.n_pos**2 * max(size, 4)
            changes, tensors = changes + 3 * self.n_layers * pairs, tensors + (self.n_layers + 6) * pairs
        one = reserved(cfg, tensors, of_graph=True)
        needed = len(self.clean.branches) * (len(self.at) * one + 2 * leaves + changes)
        if needed > max_bytes:
            raise ValueError(
                f"max_bytes={max_bytes:,} is too small: a step takes {needed:,} bytes with points={len(self.at)}; give "
                "fewer points or more bytes"
            )

    def sweep(self, coefficients: Float[Tensor, "target"]) -> list[Swept]:
        """The effect of every node of each branch on the weighted sum of the objectives."""
        with torch.enable_grad():
            passes = [_LeafPass(self, branch) for branch in range(len(self.change))]
            values = self.clean.values([one.logits for one in passes], self.objectives)
            totals = ((values * self.weights.to(values)).sum(dim=1) * coefficients.to(values)).unbind()
        if self.scales:
            passed = (values[:, -1] - values[:, -2]).detach().double().cpu()
            self.head_change = self.clean_values - self.corrupted_values - passed
        finals = [one.leaves[-1] for one in passes]
        # The direction at the final stream, by objective and branch.
        at_final = torch.stack([torch.stack(self._summed(finals, total)) for total in totals])
        self.at_final, self._passes = at_final.to(self.change[0].device), passes
        self.swept = [self._back(branch) for branch in range(len(passes))]
        return self.swept

    def _back(self, branch: int) -> Swept:
        """From the last part of a branch to the first."""
        direction, change, of_branch = self.at_final[:, branch].sum(dim=0), self.change[branch], self._passes[branch]
        effect, at_mlp_in, at_z = change.new_zeros(change.shape[:2]), {}, {}
        error = torch.zeros_like(effect)
        columns = [
            Column("embed", -1, -1, 0),
            *(
                Column("mlp", layer, -1, 2 * layer + 2)
                if head == self.graph.n_heads
                else Column("head", layer, head, 2 * layer + 1)
                for layer in range(self.n_layers)
                for head in range(self.graph.n_heads + 1)
            ),
        ]
        divided: dict[int, tuple[Parts, Tensor, Tensor]] = {}
        for layer in reversed(range(self.n_layers)):
            heads, mlp = self.graph.writer_points[f"blocks.{layer}.attn.hook_result"], self._mlp(layer)
            if layer in self.transcoders:
                parts = self.mlps[branch][layer].parts(direction, self.n_features)
                of_parts = torch.einsum("pnd,pd->pn", parts.written, direction)
                left = torch.zeros_like(of_parts)
                if self.scales:
                    passed = torch.einsum("pnd,pd->pn", parts.toward, of_branch.passed(read_point(layer), direction))
                    left[:, :-1] = of_parts[:, :-1] - passed
                divided[mlp], error[:, mlp] = (parts, of_parts, left), left[:, 0]
                into = [of_branch.read(layer, toward) for toward in parts.toward.unbind(dim=1)]
                effect[:, mlp], at_mlp_in[mlp] = of_parts[:, 0], into[0]
                at_mlp_in |= dict(enumerate(into[1:], len(columns)))
                kinds = ["feature"] * (len(into) - 1) + ["error"]
                columns += [Column(kind, layer, -1, 2 * layer + 2) for kind in kinds]
                direction = direction + torch.stack(into).sum(dim=0)
            else:
                effect[:, mlp] = (change[:, mlp] * direction).sum(dim=-1)
                if self.scales:
                    error[:, mlp] = effect[:, mlp] - (of_branch.passed(mlp_out(layer), direction) * direction).sum(
                        dim=-1
                    )
                at_mlp_in[mlp] = of_branch.mlp(layer, direction)
                direction = direction + at_mlp_in[mlp]
            of_heads = slice(heads.start, heads.stop)
            effect[:, of_heads] = torch.einsum("phd,pd->ph", change[:, of_heads], direction)
            at_z[layer] = of_branch.output(layer, direction)
            if self.patterns:
                passed = of_branch.passed(f"blocks.{layer}.attn.hook_z", direction)
                error[:, of_heads] = effect[:, of_heads] - (at_z[layer] * passed).sum(dim=-1)
            direction = direction + of_branch.attention(layer, at_z[layer])
        effect[:, 0] = (change[:, 0] * direction).sum(dim=-1)
        features = torch.full(effect.shape, -1)
        if divided:
            change = torch.cat([change, *(parts.written[:, 1:] for parts, *_ in divided.values())], dim=1)
            effect = torch.cat([effect, *(of_parts[:, 1:] for _, of_parts, _ in divided.values())], dim=1)
            features = torch.cat([features, *(parts.numbers[:, 1:] for parts, *_ in divided.values())], dim=1)
            error = torch.cat([error, *(left[:, 1:] for *_, left in divided.values())], dim=1)
            for mlp, (parts, *_) in divided.items():
                change[:, mlp] = parts.written[:, 0]
        return Swept(columns, features, change, effect, at_mlp_in, at_z, error)

    def into_objective(self, index: int) -> list[Float[Tensor, "pos writer"]]:
        """The edges from every node of each branch into an objective, times its coefficient."""
        pairs = zip(self.swept, self.at_final[index], strict=True)
        return [torch.einsum("pwd,pd->pw", swept.change, direction) for swept, direction in pairs]

    def into_nodes(
        self, branch: int, chosen: Bool[Tensor, "pos writer"]
    ) -> Iterator[tuple[int, int, Float[Tensor, "pos writer"]]]:
        """Position and writer of each chosen node that reads, and the edges from every node of the branch into it."""
        swept, heads = self.swept[branch], dict[int, list[tuple[int, int]]]()
        order = torch.tensor([column.order for column in swept.columns], device=swept.change.device)
        for position, writer in chosen.nonzero().tolist():
            kind, layer, head, own = swept.columns[writer]
            if kind == "head":
                heads.setdefault(layer, []).append((position, head))
            elif kind not in ("embed", "error"):
                edges, direction = swept.change.new_zeros(swept.change.shape[:2]), swept.at_mlp_in[writer]
                edges[position] = swept.change[position] @ direction[position] * (order < own)
                yield position, writer, edges
        for layer, nodes in heads.items():
            for (position, head), direction in self._passes[branch].heads(layer, swept.at_z[layer], nodes):
                writer = self._mlp(layer) - self.graph.n_heads + head
                edges = torch.einsum("pwd,pd->pw", swept.change, direction)
                yield position, writer, edges * (order < swept.columns[writer].order)

    def _mlp(self, layer: int) -> int:
        return (layer + 1) * (self.graph.n_heads + 1)

    @staticmethod
    def _summed(leaves: Iterable[Tensor], total: Tensor) -> list[Float[Tensor, "pos d_model"]]:
        """The gradient at each leaf, summed over the copies."""
        found = torch.autograd.grad(total, list(leaves), retain_graph=True, materialize_grads=True)
        return [gradient.to(wider(gradient.dtype)).sum(dim=0) for gradient in found]


class _LeafPass:
    """A pass over copies of a canvas in which every part reads a stream of its own, a point of its path."""

    def __init__(self, step: StepGraph, branch: int) -> None:
        given, (clean, corrupted) = step.clean.branches[branch], step.streams[branch]
        self.weights, held = step.weights, step.held[branch]
        self.leaves = []
        for x, other in zip(clean, corrupted, strict=True):
            wide = wider(x.dtype)
            at = step.at.to(device=x.device, dtype=wide)[:, None, None]
            self.leaves.append((other.to(wide) + at * (x.to(wide) - other)).to(x.dtype).requires_grad_())
        by_name = dict(zip(step._leaf_points, self.leaves, strict=True))
        self.outputs: dict[str, Tensor] = {}
        self.z: dict[str, Tensor] = {}

        def replaced(activation: Tensor, hook: Any) -> Tensor:
            return by_name[hook.name]

        def kept(activation: Tensor, hook: Any) -> None:
            self.outputs[hook.name] = activation

        def cut(activation: Tensor, hook: Any) -> Tensor:
            self.outputs[hook.name] = activation
            self.z[hook.name] = activation.detach().requires_grad_()
            return self.z[hook.name]

        layers = range(step.n_layers)

        def frozen(activation: Tensor, hook: Any) -> Tensor:
            return held[hook.name].expand_as(activation)

        hooks: list[tuple[str, Hook]] = [(name, replaced) for name in by_name]
        hooks += [(name, frozen) for name in held]
        hooks += [(f"blocks.{layer}.attn.hook_z", cut) for layer in layers]
        hooks += [(name(layer), kept) for layer in layers for name in (attn_out, mlp_out)]
        hooks += [(read_point(layer), kept) for layer in step.transcoders]
        self.attentions = [block.attn for block in step.model.blocks]
        self.projected: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}

        def kept_projection(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.projected[module] = inputs[0], output

        with ExitStack() as stack:
            for attention in self.attentions:
                for module in (attention.q, attention.k, attention.v):
                    stack.callback(module.register_forward_hook(kept_projection).remove)
            stack.enter_context(given.at_step(len(step.at)))
            stack.enter_context(step.model.hooks(fwd_hooks=hooks))
            self.logits: Tensor = step.model(
                self.leaves[0].detach(), start_at_layer=0, attention_mask=None, logits_at=given.rows
            )

    def passed(self, name: str, like: Tensor) -> Tensor:
        """The difference of an output between both runs where parts are frozen."""
        clean, corrupted = self.outputs[name].detach()[-1], self.outputs[name].detach()[-2]
        return clean.to(like) - corrupted.to(like)

    def mlp(self, layer: int, direction: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos d_model"]:
        """Ḡ of an MLP, for a direction at its output."""
        return self._pulled(self.outputs[mlp_out(layer)], self.leaves[2 * layer + 1], direction)

    def read(self, layer: int, direction: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos d_model"]:
        """Ḡ of the norm that a transcoder reads, for a direction at its output."""
        return self._pulled(self.outputs[read_point(layer)], self.leaves[2 * layer + 1], direction)

    def attention(self, layer: int, direction: Float[Tensor, "pos head d_head"]) -> Float[Tensor, "pos d_model"]:
        """Ḡ of an attention, for a direction at its mixed values."""
        return self._pulled(self.outputs[f"blocks.{layer}.attn.hook_z"], self.leaves[2 * layer], direction)

    def heads(
        self, layer: int, at_z: Float[Tensor, "pos head d_head"], nodes: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[tuple[int, int], Float[Tensor, "pos d_model"]]]:
        """Ḡ of single heads at single positions, as `attention` has it.

        Heads have queries, keys and values of their own, so that one backward pass from the mixed values to these is
        for one node of each key/value head. From there on a node has few columns of the projections to multiply by.
        """
        attn = self.attentions[layer]
        modules = (attn.q, attn.k, attn.v)
        size, z, leaf = attn.d_head, self.outputs[f"blocks.{layer}.attn.hook_z"], self.leaves[2 * layer]
        if not z.requires_grad or any(type(one) is not Linear or one not in self.projected for one in modules):
            for (
                position,
                head,
            ) in nodes:  # other modules than those that are known to be linear, or copies of the stream
                own = torch.zeros_like(at_z)
                own[position, head] = at_z[position, head]
                yield (position, head), self.attention(layer, own)
            return
        read, wrote = self.projected[attn.q][0], [self.projected[one][1] for one in modules]
        n_shared = attn.q.out_features // attn.k.out_features
        waiting = list(nodes)
        while waiting:
            together = {head // n_shared: (position, head) for position, head in waiting}
            waiting = [node for node in waiting if node not in together.values()]
            own = torch.zeros_like(at_z)
            for position, head in together.values():
                own[position, head] = at_z[position, head]
            gradients = torch.autograd.grad(z, wrote, self._weighted(own, z), retain_graph=True, materialize_grads=True)
            for shared, (position, head) in together.items():
                into, row = torch.zeros_like(read), slice(position, position + 1)
                for module, gradient, index, rows in zip(
                    modules, gradients, (head, shared, shared), (row, slice(None), slice(None)), strict=True
                ):
                    columns = slice(index * size, (index + 1) * size)
                    into[:, rows] += gradient[:, rows, columns] @ beside(module.weight, gradient)[columns]
                (found,) = torch.autograd.grad(read, leaf, into, retain_graph=True)
                yield (position, head), found.to(at_z).sum(dim=0)

    def output(self, layer: int, direction: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos head d_head"]:
        """The direction at the mixed values, of which the output of an attention is a linear function."""
        return self._pulled(self.outputs[attn_out(layer)], self.z[f"blocks.{layer}.attn.hook_z"], direction)

    def _pulled(self, output: Tensor, leaf: Tensor, direction: Tensor) -> Tensor:
        """The average over the path of a direction times the Jacobian of an output by a leaf."""
        wide = wider(leaf.dtype)
        if not output.requires_grad:  # a hook wrote the output
            return torch.zeros(leaf.shape[1:], dtype=wide, device=leaf.device)
        (gradient,) = torch.autograd.grad(
            output, leaf, self._weighted(direction, output), retain_graph=True, materialize_grads=True
        )
        return gradient.to(device=direction.device, dtype=wide).sum(dim=0)

    def _weighted(self, direction: Tensor, output: Tensor) -> Tensor:
        """A direction at an output, for each point of the path."""
        weights = self.weights.to(direction).view(-1, *[1] * direction.dim())
        return (weights * direction).to(device=output.device, dtype=output.dtype)
