"""Where attention goes in a denoising run, by step: retrieval heads, norms and angles of queries and keys, rollout.

A retrieval head attends, in the row that predicts a token, to a place of the prompt that contains this token (Wu et al.
2024, arXiv 2404.15574). The score of a head is the share of the tokens that a run wrote for which the position with
most of its attention, in the step that wrote them, is such a place.

The score of query i and key j before the softmax is a product of norms and of the cosine of their angle,

    q_i·k_j / √d = ‖q_i‖ ‖k_j‖ cos θ_ij / √d.

Positions that receive most of the attention, the floating positions, can have it by longer keys or by their direction
(Dai et al. 2026, Attention Floating, arXiv 2601.07894, section on QK). `qk_decomposition` averages the three quantities
over the queries that see a key, and compares floating positions with all others.

The rollout (Abnar and Zuidema 2020, arXiv 2005.00928) follows attention through layers, as if heads were averaged and
each residual connection carried half of a state:

    R_l = (A_l + I) / 2 · R_(l-1),   R_(-1) = I.

Row i of R_l says from which positions the state of position i after layer l is mixed. With regions, such as documents,
each pattern is first summed over pairs of regions and its rows are normalised (Dai et al.); the order matters.

Patterns, queries and keys are reduced inside hooks, and never kept. Padding, and positions that a text has not reached,
are neither queries nor keys.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.engine.by_step import ByStep, ReadCanvases, Reading
from diffusion_lens.analysis.engine.inputs import Readable, SharedPass
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.names import Hook
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import Table, texts_of
from diffusion_lens.settings import Whole, at_least, not_negative, pick_indices
from diffusion_lens.settings.figures import styled

QUANTITIES = ("scores", "cosines", "norms")
_TINY = torch.finfo(torch.float32).tiny
Region = Bool[Tensor, "batch pos"] | Iterable[Whole]


@dataclass(frozen=True, eq=False)
class RetrievalHeads(ByStep):
    """Which heads attend to the prompt's copies of the tokens that a run writes, in the step that writes them.

    Columns of the data frame: layer, head (from 0), batch, pos, step, token, n_places, retrieved, attention; a row for
    each head and each written token that occurs in the source.

    Attributes:
        retrieved: Bool[layer head batch pos], whether the position with most attention contains the token that is then
            written; false where there is nothing to retrieve.
        attention: Float[layer head batch pos], attention to all places of the source that contain the token; NaN where
            there is none.
        n_places: Int[batch pos], number of these places; 0 where the model wrote no token in the steps, or where it
            does not occur in the source.
        revealed_at: Int[batch pos], as in the trajectory.
        source: Bool[batch pos], positions from which tokens may be retrieved.
        tokens: Int[batch pos], the final canvas.
        words: Text of every id that occurs.
        record: Steps that wrote tokens, layers, inputs, model, hash of the weights, hooks, versions.
    """

    KIND = "retrieval heads"
    SHOWS = "by layer and head how often a head attends most to the prompt's copies of the token that a step writes"
    AXES = (("layer", "layers"),)

    retrieved: Bool[Tensor, "layer head batch pos"]
    attention: Float[Tensor, "layer head batch pos"]
    n_places: Int[Tensor, "batch pos"]
    revealed_at: Int[Tensor, "batch pos"]
    source: PosMask
    tokens: Tokens
    words: dict[int, str]
    record: dict[str, Any]

    @property
    def retrievable(self) -> PosMask:
        """Bool[batch pos], written tokens that occur in the source."""
        return self.n_places > 0

    @property
    def score(self) -> Float[Tensor, "layer head"]:
        """Share of the retrievable tokens that a head retrieves."""
        return self.retrieved.sum(dim=(2, 3)) / self.retrievable.sum()

    @property
    def by_step(self) -> Float[Tensor, "step layer head"]:
        """The same of the tokens of each of the `steps`; NaN where none is retrievable."""
        written = torch.stack([self.retrievable & (self.revealed_at == step) for step in self.steps or ()])
        return torch.stack([self.retrieved[..., one].sum(dim=-1) / one.sum() for one in written])

    @property
    def needle_score(self) -> Float[Tensor, "layer head batch"]:
        """The score of the code of Wu et al., for a source that the run should write out: retrieved tokens by tokens of
        the source; NaN in rows without a source. In the paper both are sets; here a token that the run writes n times
        counts n times, so that the score may exceed 1."""
        return self.retrieved.sum(dim=-1) / self.source.sum(dim=-1)

    def top(self, most: Whole = 10) -> list[tuple[int, int, float]]:
        """Layer, head and score of the heads with the highest scores."""
        score = self.score
        order = score.flatten().argsort(descending=True, stable=True)[: at_least(1, "most", most)].tolist()
        cells = [divmod(index, score.shape[1]) for index in order]
        return [(self.layers[layer], head, float(score[layer, head])) for layer, head in cells]

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The score by layer and head; returns the matplotlib axes."""
        score = self.score
        return plots.labelled_map(
            score,
            rows=[f"layer {layer}" for layer in self.layers],
            layers=range(score.shape[1]),
            xlabel="head",
            hue="YlOrRd",
            limits=(0.0, float(score.max())),
            bar="score",
            title=title or "Retrieval heads",
            ax=ax,
        )

    def _table(self) -> Table:
        n_heads, batch, n_pos = self.retrieved.shape[1:]
        axes = {"layer": self.layers, "head": range(n_heads), "batch": range(batch), "pos": range(n_pos)}
        values = {
            "step": self.revealed_at,
            "token": texts_of(self.tokens, self.words),
            "n_places": self.n_places,
            "retrieved": self.retrieved,
            "attention": self.attention,
        }
        shown = self.retrievable.expand_as(self.retrieved)
        return Table.of_cells(axes, values, most="attention").where(shown.numpy())

    def __repr__(self) -> str:
        layer, head, score = self.top(1)[0]
        n, best = int(self.retrievable.sum()), f"layer {layer}, head {head} retrieves {score:.0%}"
        return f"RetrievalHeads({n} retrievable tokens, {len(self.layers)} layers, {best})"


@begins_run
@torch.no_grad()
def retrieval_heads(
    model: DiffusionTransformer,
    trajectory: Trajectory,
    *,
    source: Region | None = None,
    steps: Whole | Iterable[Whole] | None = None,
    layers: Iterable[Whole] | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> RetrievalHeads:
    """Which heads attend, in the row that predicts a token, to a place of the prompt that contains it.

    Steps that wrote no token take no forward pass. The caller's hooks act. Under guidance it is the conditional branch.
    Under uniform noise a token counts as written in the last step that changed it.

    Args:
        model: Model of either variant.
        trajectory: A run whose prompt contains tokens that it writes again, such as a passage with the answer.
        source: Bool[batch pos], or indices that hold for all rows: from where tokens may be retrieved, such as a
            needle. By default the prompt. The position that is written is never its own source.
        steps: Steps whose tokens count, negative ones from the end; by default all.
        layers: Layers, negative ones from the end; by default all.
        max_bytes: Most memory for the result and for one forward pass.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A step, layer or position that does not exist, steps that wrote nothing, a run none of whose tokens
            occurs in the source, or a budget that is too small.
    """
    chosen = Reading.of(model, trajectory, steps, layers)
    assert chosen.steps is not None
    places = _region("source", trajectory.given if source is None else source, (chosen.batch, chosen.pos))
    revealed_at = trajectory.revealed_at.cpu()
    # What hooks wrote into the canvas that a step reads is revealed at this step too, but not masked there.
    written_at = {s: (revealed_at == s) & trajectory.state_at(s, "cpu").masked for s in chosen.steps}
    writing = [step for step, written in written_at.items() if bool(written.any())]
    if not writing:
        raise ValueError(
            f"the run wrote no token in the steps {chosen.steps}: give steps at which `trajectory.revealed_at` has "
            "tokens, or leave steps= out"
        )
    reading = replace(chosen, steps=writing)
    n_layers, n_heads, shape = len(reading.layers), model.cfg.n_heads, (reading.batch, reading.pos)
    n_bytes = reading.batch * reading.pos * (5 * n_layers * n_heads + 24)
    reading.require_memory(n_bytes, max_bytes, "the retrieval heads take", "give fewer layers, or fewer rows")

    retrieved = torch.zeros(n_layers, n_heads, *shape, dtype=torch.bool)
    attention = torch.full((n_layers, n_heads, *shape), torch.nan)
    n_places = torch.zeros(shape, dtype=torch.long)
    tokens = trajectory.tokens.cpu()

    def reduce(one: SharedPass) -> None:
        written = {}
        for index, canvas in one.served.items():
            at = written_at[writing[index]]
            row, pos = at.nonzero(as_tuple=True)
            block = None if canvas.step is None else canvas.step.block
            _, query = model.readout.locate(at.to(canvas.tokens.device), canvas.real, block)
            found = (canvas.tokens.cpu()[row] == tokens[row, pos, None]) & (canvas.present.cpu() & places)[row]
            found[torch.arange(len(pos)), pos] = False
            n_places[row, pos] = found.sum(dim=1)
            some = found.any(dim=1)
            written[index] = (row[some], pos[some], query.cpu()[some], found[some])

        def of_pattern(layer: int, pattern: Tensor, hook: Any) -> None:
            for row, pos, query, found in written.values():
                device, n_key = pattern.device, pattern.shape[-1]
                attended = pattern[row.to(device), :, query.to(device)].float().cpu()  # [selected head key]
                copies = found[:, None, :n_key].expand_as(attended)
                most = copies.gather(2, attended.argmax(dim=2, keepdim=True))[..., 0]
                retrieved[layer, :, row, pos] = most.T
                attention[layer, :, row, pos] = (attended * copies).sum(dim=2).T

        one.read.run(_at_patterns(reading.layers, of_pattern))

    canvases = reading.read(reduce, "retrieval heads", progress)
    if not bool(n_places.any()):
        raise ValueError(
            "no token that the run wrote occurs in the source, so that no head can retrieve one: give a run whose "
            "prompt contains what it writes, such as a passage with the answer, or other positions as source="
        )
    return RetrievalHeads(
        retrieved=retrieved,
        attention=attention,
        n_places=n_places,
        revealed_at=revealed_at,
        source=places,
        tokens=tokens,
        words=canvases.words,
        record=reading.record(),
    )


@dataclass(frozen=True, eq=False)
class QKDecomposition(ByStep):
    """Attention scores of keys as products of norms and cosines, averaged over the queries that see a key.

    Without steps, the tensors have no axis of steps. `dataclasses.replace(result, epsilon=...)` applies another
    threshold.

    Columns of the data frame: step (of a trajectory), layer, head (from 0), batch, pos, token, scores, cosines, norms,
    excess, floating.

    Attributes:
        scores: Float[*step layer head batch pos], mean of q·k / √d, as before the softmax; NaN at padding, where the
            text has not been reached, and where hooks let no query see the key. Biases of positions are left out.
        cosines: Float[*step layer head batch pos], mean cosine of query and key.
        norms: Float[*step layer head batch pos], mean of ‖q‖ ‖k‖ / √d.
        excess: Float[*step layer head batch pos], the attention that a key receives beyond equal attention of all
            queries that see it, in multiples of equal attention, as in `AttentionSinks`.
        epsilon: By how many standard deviations of the `excess` a floating position exceeds its mean.
        canvases: The canvases that were read.
        record: Steps, layers, inputs, model, hash of the weights, hooks, versions.
    """

    KIND = "QK decomposition"
    SHOWS = (
        "by layer how far the attention scores, cosines and norms of floating positions are above those of others, in"
        " standard deviations"
    )

    scores: Float[Tensor, "*step layer head batch pos"]
    cosines: Float[Tensor, "*step layer head batch pos"]
    norms: Float[Tensor, "*step layer head batch pos"]
    excess: Float[Tensor, "*step layer head batch pos"]
    epsilon: float
    canvases: ReadCanvases
    record: dict[str, Any]

    @property
    def floating(self) -> Bool[Tensor, "*step layer head batch pos"]:
        """Positions whose excess is above its mean by more than ε standard deviations; the largest one if there is
        none (Dai et al. 2026)."""
        spread, mean = _deviation(self.excess), self.excess.nanmean(dim=-1, keepdim=True)
        above = self.excess.nan_to_num(nan=-torch.inf) > mean + self.epsilon * spread
        largest = self.excess.nan_to_num(nan=-torch.inf).argmax(dim=-1, keepdim=True)
        top = torch.zeros_like(above).scatter(-1, largest, True) & ~self.excess.isnan()
        return torch.where(above.any(dim=-1, keepdim=True), above, top)

    @property
    def advantage(self) -> dict[str, Float[Tensor, "*step layer head batch"]]:
        """By how many standard deviations the mean of the floating positions exceeds that of all others, for "scores",
        "cosines" and "norms"; NaN if all positions have the same value."""
        floating, results = self.floating, {}
        for name in QUANTITIES:
            values: Tensor = getattr(self, name)
            own, others = (values.masked_fill(where, torch.nan).nanmean(dim=-1) for where in (~floating, floating))
            results[name] = (own - others) / _deviation(values)[..., 0]
        return results

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The advantage of floating positions by layer, mean over steps, heads and rows; returns the axes."""
        means = []
        for values in self.advantage.values():
            by_layer = values[None] if self.steps is None else values
            finite = by_layer.masked_fill(~by_layer.isfinite(), torch.nan)
            means.append(finite.movedim(1, 0).flatten(1).nanmean(dim=1))
        return plots.labelled_lines(
            torch.stack(means),
            ["score q·k", "cosine", "norms ‖q‖‖k‖"],
            [str(layer) for layer in self.layers],
            "layer",
            "standard deviations",
            title or "What sets floating positions apart from others",
            ax,
        )

    def _table(self) -> Table:
        n_heads, batch, n_pos = self.scores.shape[-3:]
        cells = {"layer": self.layers, "head": range(n_heads), "batch": range(batch), "pos": range(n_pos)}
        values = {
            "token": texts_of(self.canvases.tokens[..., None, None, :, :], self.canvases.words),
            **{name: getattr(self, name) for name in (*QUANTITIES, "excess", "floating")},
        }
        return Table.of_cells({**self._step_axis(), **cells}, values, most="excess")

    def __repr__(self) -> str:
        means = [values[values.isfinite()].mean() for values in self.advantage.values()]
        words = ", ".join(f"{name} {float(mean):+.2f}" for name, mean in zip(QUANTITIES, means, strict=True))
        return f"QKDecomposition({self._extent}, floating positions: {words} sd)"


@begins_run
@torch.no_grad()
def qk_decomposition(
    model: DiffusionTransformer,
    inputs: Readable,
    *,
    epsilon: float = 3.0,
    steps: Whole | Iterable[Whole] | None = None,
    layers: Iterable[Whole] | None = None,
    attention_mask: Tensor | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> QKDecomposition:
    """Attention scores as products of norms and cosines of queries and keys, by step, layer, head and key.

    Queries and keys are those that meet: rotated, normed and scaled as in the network. The caller's hooks act. Under
    guidance it is the conditional branch.

    Args:
        model: Model of either variant.
        inputs: A trajectory, or texts, Int[batch pos] tokens, queries or facts for a single pass without a step.
        epsilon: ε, in standard deviations.
        steps: Steps of the trajectory, negative ones from the end; by default all.
        layers: Layers, negative ones from the end; by default all.
        attention_mask: [batch pos], 1 at real tokens, 0 at the padding of tokens.
        max_bytes: Most memory for the result and for one forward pass.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A step or layer that does not exist, steps without a trajectory, or a budget that is too small.
    """
    threshold = not_negative("epsilon", epsilon, "every position above the mean")
    reading = Reading.of(model, inputs, steps, layers, attention_mask)
    n_heads, batch, pos = model.cfg.n_heads, reading.batch, reading.pos
    # Four means; in a pass, which queries see which keys, shares of them, and six vectors of each head.
    in_a_pass = 13 * pos + 24 * model.cfg.d_head
    n_bytes = batch * n_heads * pos * (16 * reading.n_steps * len(reading.layers) + in_a_pass)
    advice = "give fewer steps or layers, or fewer rows"
    reading.require_memory(n_bytes, max_bytes, "the decomposition takes", advice)
    names = (*QUANTITIES, "excess")
    shape = (reading.n_steps, len(reading.layers), n_heads, batch, pos)
    tensors = {name: torch.full(shape, torch.nan) for name in names}

    def reduce(one: SharedPass) -> None:
        groups, met = one.by_reach(), dict[str, Tensor]()

        def keep(name: str, activation: Tensor, hook: Any) -> None:
            met[name] = activation.to(torch.promote_types(activation.dtype, torch.float32)).transpose(1, 2)

        def see(scores: Tensor, hook: Any) -> None:
            met["seen"] = scores > -torch.inf  # [batch head query key]

        def average(layer: int, pattern: Tensor, hook: Any) -> None:
            q, seen = met["q"], met["seen"]
            k = met["k"].repeat_interleave(q.shape[1] // met["k"].shape[1], dim=1)
            divisor = model.blocks[reading.layers[layer]].attn.divisor
            lengths = [x.norm(dim=-1, keepdim=True) for x in (q, k)]
            units = [x / length.clamp(min=1e-12) for x, length in zip((q, k), lengths, strict=True)]
            for indices, present in groups:
                real = present.to(seen.device)
                pairs = (seen & real[:, None, :, None] & real[:, None, None, :]).to(q.dtype)
                n_queries, shares = pairs.sum(dim=2)[..., None], pairs / pairs.sum(dim=3, keepdim=True).clamp(min=1)
                # A mean of products with one key is the product with a mean of queries.
                means = {
                    "scores": ((pairs.mT @ q / n_queries) * k).sum(dim=-1) / divisor,
                    "cosines": ((pairs.mT @ units[0] / n_queries) * units[1]).sum(dim=-1),
                    "norms": ((pairs.mT @ lengths[0] / n_queries) * lengths[1])[..., 0] / divisor,
                    "excess": (pattern * pairs).sum(dim=2) - shares.sum(dim=2),
                }
                empty = n_queries[..., 0] == 0
                for name, mean in means.items():
                    values = mean.masked_fill(empty, torch.nan).transpose(0, 1).cpu().float()
                    tensors[name][indices, layer, ..., : seen.shape[-1]] = values

        readers: dict[str, Hook] = {
            "hook_rot_k": partial(keep, "k"),
            "hook_rot_q": partial(keep, "q"),
            "hook_attn_scores": see,
        }
        points = [(f"blocks.{layer}.attn.{name}", read) for layer in reading.layers for name, read in readers.items()]
        one.read.run([*points, *_at_patterns(reading.layers, average)])

    canvases = reading.read(reduce, "QK decomposition", progress)
    means = {name: reading.without_steps(x) for name, x in tensors.items()}
    return QKDecomposition(**means, epsilon=threshold, canvases=canvases, record=reading.record())


@dataclass(frozen=True, eq=False)
class AttentionRollout(ByStep):
    """From which positions, or regions, states are mixed after some layers, by attention and residual connections.

    Without steps, the tensor has no axis of steps.

    Columns of the data frame: step (of a trajectory), layer, batch, query, key (numbers of positions or names of
    regions), rollout.

    Attributes:
        rollout: Float[*step layer batch query key], the mixture of each query after a layer; the values of a query add
            up to 1. Queries and keys are positions, or regions. NaN at padding, where the text has not been reached,
            and at regions without a token.
        regions: Names of the regions; `None` for positions.
        canvases: The canvases that were read.
        record: Steps, layers, inputs, model, hash of the weights, hooks, versions.
    """

    KIND = "attention rollout"
    SHOWS = (
        "how much of each position the states of each other position contain after the attention of several layers "
        "and the residual connections"
    )

    rollout: Float[Tensor, "*step layer batch query key"]
    regions: list[str] | None
    canvases: ReadCanvases
    record: dict[str, Any]

    def _check(self) -> None:
        size = self.canvases.final.shape[1] if self.regions is None else len(self.regions)
        if self.rollout.shape[-2:] != (size, size):
            raise ValueError(f"rollout is {list(self.rollout.shape)}, but there are {size} positions or regions")

    @styled
    def plot(
        self, layer: Whole = -1, step: Whole = -1, row: Whole = 0, ax: Any = None, title: str | None = None
    ) -> Any:
        """The rollout of one row after one of the `layers`, at one of the `steps`, queries down and keys across;
        returns the matplotlib axes. Negative numbers count from the end of those that were read."""
        by_step = self.rollout[None] if self.steps is None else self.rollout
        of_layer, of_step = self._index("layer", layer), self._index("step", step)
        (of_row,) = pick_indices("row", [row], by_step.shape[2])
        values = by_step[of_step, of_layer, of_row]
        labels = self.canvases.labels(of_row) if self.regions is None else list(map(plots.readable, self.regions))
        at_step = "" if self.steps is None else f", step {self.steps[of_step]}"
        return plots.labelled_map(
            values,
            rows=labels,
            layers=range(len(labels)) if self.regions is None else labels,
            xlabel="position that is attended to" if self.regions is None else "region that is attended to",
            hue="Blues",
            limits=(0.0, float(values.nan_to_num().max())),
            bar="share",
            title=title or f"Attention rollout after layer {self.layers[of_layer]}{at_step}",
            ax=ax,
        )

    def _table(self) -> Table:
        size, batch = self.rollout.shape[-1], self.rollout.shape[-3]
        places = range(size) if self.regions is None else self.regions
        axes = {"layer": self.layers, "batch": range(batch), "query": places, "key": places}
        return Table.of_cells({**self._step_axis(), **axes}, {"rollout": self.rollout}, most="rollout")

    def __repr__(self) -> str:
        among = f"{self.rollout.shape[-1]} positions" if self.regions is None else f"regions {', '.join(self.regions)}"
        return f"AttentionRollout({self._extent}, {among})"


@begins_run
@torch.no_grad()
def attention_rollout(
    model: DiffusionTransformer,
    inputs: Readable,
    *,
    regions: Mapping[str, Region] | None = None,
    steps: Whole | Iterable[Whole] | None = None,
    layers: Iterable[Whole] | None = (-1,),
    attention_mask: Tensor | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> AttentionRollout:
    """Attention followed through the layers: from where the state of each position is mixed, by step.

    The patterns of all layers up to the last of `layers` are read, as means over heads. The caller's hooks act. Under
    guidance it is the conditional branch.

    Args:
        model: Model of either variant.
        inputs: A trajectory, or texts, Int[batch pos] tokens, queries or facts for a single pass without a step.
        regions: Regions by name, in order, each Bool[batch pos] or indices that hold for all rows; positions in none of
            them are left out. By default every position is its own region.
        steps: Steps of the trajectory, negative ones from the end; by default all.
        layers: Layers after which the rollout is kept; by default the last, `None` for all.
        attention_mask: [batch pos], 1 at real tokens, 0 at the padding of tokens.
        max_bytes: Most memory for the result and for one forward pass.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A step, layer or position that does not exist, a position in two regions, steps without a
            trajectory, or a budget that is too small.
    """
    reading = Reading.of(model, inputs, steps, layers, attention_mask)
    batch, pos, n_kept = reading.batch, reading.pos, len(reading.layers)
    pools = None
    if regions is not None:
        if not regions:
            raise ValueError("regions is empty: give a region or more, or leave regions= out to have every position")
        named = [_region(f"regions[{name!r}]", region, (batch, pos)) for name, region in regions.items()]
        pools = torch.stack(named, dim=1)
        if bool((pools.sum(dim=1) > 1).any()):
            where = (pools.sum(dim=1) > 1).nonzero()[0].tolist()
            raise ValueError(f"position {where[1]} of row {where[0]} is in two regions; give each position to one")
    size = pos if pools is None else pools.shape[1]
    # Beside the result: the products of the canvases that share a pass, and three matrices of one of them.
    n_bytes = 4 * batch * size * size * (reading.n_steps * (n_kept + 1) + 3) + 8 * batch * pos * pos
    advice = "give fewer steps, layers or rows, or regions="
    reading.require_memory(n_bytes, max_bytes, "the rollout takes", advice)
    rollout = torch.full((reading.n_steps, n_kept, batch, size, size), torch.nan)
    depth, kept = range(max(reading.layers) + 1), {layer: i for i, layer in enumerate(reading.layers)}

    def reduce(one: SharedPass) -> None:
        groups, products = one.by_reach(), dict[int, Tensor]()

        def follow(layer: int, pattern: Tensor, hook: Any) -> None:
            mean = pattern.float().mean(dim=1)
            for number, (indices, present) in enumerate(groups):
                inside = present.to(mean.device)
                if pools is None:
                    filled, summed = inside, mean * (inside[:, :, None] & inside[:, None, :])
                else:
                    pool = pools[..., : inside.shape[1]].to(mean.device) & inside[:, None]
                    filled, summed = pool.any(dim=-1), pool.float() @ mean @ pool.float().mT
                shares = summed / summed.sum(dim=-1, keepdim=True).clamp(min=_TINY)
                # A region none of whose queries attends to a region keeps its own state alone.
                mixed = shares + torch.eye(filled.shape[1], device=mean.device)
                mixed = mixed / mixed.sum(dim=-1, keepdim=True)
                products[number] = mixed @ products[number].to(mean.device) if layer else mixed
                if layer in kept:
                    n, outside = filled.shape[1], ~(filled[:, :, None] & filled[:, None, :])
                    rollout[indices, kept[layer], :, :n, :n] = products[number].masked_fill(outside, torch.nan).cpu()

        one.read.run(_at_patterns(depth, follow))

    canvases = reading.read(reduce, "attention rollout", progress)
    return AttentionRollout(
        reading.without_steps(rollout), None if regions is None else list(regions), canvases, reading.record()
    )


def _at_patterns(layers: Iterable[int], reduce: Hook) -> list[tuple[str, Hook]]:
    """Hooks that call `reduce(i, pattern, hook)` at the pattern of the i-th of some layers."""
    return [(f"blocks.{layer}.attn.hook_pattern", partial(reduce, i)) for i, layer in enumerate(layers)]


def _deviation(values: Float[Tensor, "*rest pos"]) -> Float[Tensor, "*rest 1"]:
    """The standard deviation over the positions that have a value; NaN where it is rounding noise."""
    spread = (values - values.nanmean(dim=-1, keepdim=True)).square().nanmean(dim=-1, keepdim=True).sqrt()
    return spread.masked_fill(spread <= 1e-5 * values.abs().nan_to_num().amax(dim=-1, keepdim=True), torch.nan)


def _region(name: str, region: Region, shape: tuple[int, int]) -> PosMask:
    """Bool[batch pos] on the CPU, positions that a caller gives as a mask, or as indices that hold for all rows."""
    if isinstance(region, Tensor) and region.dtype == torch.bool:
        if region.shape != shape:
            raise ValueError(f"{name} is Bool{list(region.shape)}; the canvases are {list(shape)} [batch pos]")
        if not bool(region.any()):
            raise ValueError(f"{name} is false everywhere: give a position or more")
        return region.cpu()
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, pick_indices(name, region, shape[1])] = True
    return mask
