"""The nodes of a graph chosen by measurement, beginning with those of the largest influence.

Influence is a sum along paths, one at a time; nodes whose effects cancel, or that act only together, get a wrong rank.
So measure: with everything outside the graph replaced (`faithful`), the loss of a graph is

    L = Σ_o |A_o| · |1 - share_o| / Σ_o |A_o|

over the target and the decisions o of the graph, with their effects A_o, on average over corrupted runs. A difference
below 0.1 counts as 0.1 in a share, so that a decision that hardly differs has little weight. In each step,

1. every node u has a gate g_u from its replacement (0) to its live output (1). One backward pass through the step with
   the graph gives ∂L/∂g_u of all nodes: to first order, what adding a node gains, and what leaving one out costs. These
   are the gates of pruning by gradients (Michel et al. 2019, arXiv 1905.10650).
2. The nodes outside that promise most are exchanged with the nodes inside that cost least, each pair by itself, and L
   is measured. The best exchange is made.

This is repeated until no exchange lowers L by `LEAST_GAIN`: a local search, which fits the runs that it measures. So
measure its graph with others, too (`replace` of `RunGraph.faithfulness`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary
from diffusion_lens.analysis.engine.batching import reserved
from diffusion_lens.analysis.graphs.faithful import Ablated, require_difference
from diffusion_lens.analysis.graphs.within_step import LEAST_MARGIN
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import run_of

LEAST_GAIN = 1e-3  # what an exchange must take from the loss


def refined(
    graph: Any,
    begin: Any,
    inside: Bool[Tensor, "node"],
    model: DiffusionTransformer,
    runs: Sequence[str | Trajectory],
    features: Sequence[SparseDictionary],
    n_candidates: int,
    max_bytes: int,
) -> Bool[Tensor, "node"]:
    """The nodes of `graph` after the exchanges, as many in each step as are inside at the beginning.

    Args:
        begin: The graph of the nodes that are inside at the beginning.
        runs: What replaces, as in `RunGraph.faithfulness`.
    """
    with torch.inference_mode(False), torch.no_grad(), run_of(model):
        against = [Ablated(begin, model, run, features, 0, 0, max_bytes // len(runs)) for run in runs]
        nodes, kept = Ablated(graph, model, "corrupted", features, 0, 0, max_bytes).places, inside.clone()
        for step in against[0].members:
            losses = [_Loss(one, step) for one in against if step in one.objectives]
            if losses:
                places = torch.tensor([place for at, *place in nodes if at == step])
                numbers = torch.tensor([number for (at, *_), number in nodes.items() if at == step])
                kept[numbers] = _exchanged(losses, places, inside[numbers], n_candidates)
    return kept


class _Loss:
    """How much the objectives of a step differ from those of the clean run, for graphs of some of its nodes."""

    def __init__(self, ablated: Ablated, step: int) -> None:
        numbered = ablated.objectives[step]
        self.ablated, self.objectives = ablated, [objective for _, objective in numbered]
        self.clean, self.replacements = ablated.replacements(step, ablated.positions(step))
        effects = ablated.run.effect[[number for number, _ in numbered]].abs()
        self.shape = ablated.members[step][:, 0].shape
        given = self.clean.branches[0]
        parts = given.graph_bytes + 3 * given.stored_bytes(ablated.graph.node_points)
        needed = len(self.clean.branches) * reserved(given.model.cfg, parts, of_graph=True)
        if needed > ablated.max_bytes:
            raise ValueError(
                f"max_bytes={ablated.max_bytes:,} is too small: a pass with gradients takes {needed:,} bytes"
            )
        whole = self._values([given.run(()).logits for given in self.clean.branches])
        nothing = self._values(self._logits(torch.zeros(self.shape)[:, None]))
        for (number, _), *values in zip(numbered, whole[:, 0].tolist(), nothing[:, 0].tolist(), strict=True):
            if ablated.run.kinds[number] == "target":
                require_difference(*values)
        self.whole, self.weights = (
            whole,
            effects[:, None] / effects.sum() / (whole - nothing).abs().clamp(min=LEAST_MARGIN),
        )

    def _logits(self, members: Float[Tensor, "branch member pos writer"]) -> list[Tensor]:
        return self.ablated.logits(self.clean, self.replacements, members)

    def _values(self, logits: list[Tensor]) -> Float[Tensor, "target member"]:
        return self.clean.values(logits, self.objectives).double().cpu()

    def of(self, members: Float[Tensor, "branch member pos writer"]) -> Float[Tensor, "member"]:
        """The loss of each graph."""
        total: Tensor = (self.weights * (self.whole - self._values(self._logits(members))).abs()).sum(dim=0)
        return total


def _exchanged(
    losses: Sequence[_Loss], places: Shaped[Tensor, "node axis"], inside: Bool[Tensor, "node"], n_candidates: int
) -> Bool[Tensor, "node"]:
    """Which of the nodes at these places (branch, position, writer) make the loss least, as many as are inside."""
    branch, position, writer = places.T

    def loss_of(graphs: Shaped[Tensor, "member node"]) -> Float[Tensor, "member"]:
        members = torch.zeros(losses[0].shape[0], len(graphs), *losses[0].shape[1:])
        members[branch, :, position, writer] = graphs.T.to(members)
        return torch.stack([loss.of(members) for loss in losses]).mean(dim=0)

    at_once = min(loss.ablated.at_once for loss in losses)
    least, n = float(loss_of(inside[None])), min(n_candidates, int(inside.sum()), int((~inside).sum()))
    while n:
        gates = inside.float()[None].requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(loss_of(gates).sum(), gates)
        outside = slope[0].masked_fill(inside, torch.inf)
        costly = slope[0].masked_fill(~inside, -torch.inf)
        pairs = torch.cartesian_prod(outside.topk(n, largest=False).indices, costly.topk(n).indices).view(-1, 2)
        found = torch.cat([loss_of(_swapped(inside, part)) for part in torch.split(pairs, at_once)])
        if not float(found.min()) <= least - LEAST_GAIN:  # also of NaN
            break
        inside, least = _swapped(inside, pairs[found.argmin()][None])[0], float(found.min())
    return inside


def _swapped(inside: Bool[Tensor, "node"], pairs: Int[Tensor, "member axis"]) -> Bool[Tensor, "member node"]:
    """Graphs in which the first node of a pair is inside and the second outside."""
    return inside.repeat(len(pairs), 1).scatter(1, pairs, torch.tensor([[True, False]]).expand_as(pairs))
