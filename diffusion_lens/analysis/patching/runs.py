"""The activations that can be patched, the two sides of a patch grid, and the scores of cells patched between them.

The sides are a clean and a corrupted run. A sweep goes over one activation, under TransformerLens's name.

Attribution patching (Nanda 2023, "Attribution Patching: Activation Patching At Industrial Scale"): to first order,
patching a state a into the corrupted run changes the metric M by

    (a_clean - a_corrupted) · dM/da, the gradient taken at the corrupted run.

One forward pass of the clean input, and one forward and one backward pass of the corrupted one, estimate every cell of
every site at once. The estimate is less accurate the more nonlinear M is between the two runs. So the cells with the
largest estimates are also patched exactly, and the result contains the differences.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.engine.batching import reserved
from diffusion_lens.analysis.engine.inputs import as_batch
from diffusion_lens.analysis.engine.kept_run import (
    Cell,
    CellBudget,
    CellRuns,
    KeptRun,
    NetworkInput,
    Patch,
    reaches_a_row,
    stream_entering,
)
from diffusion_lens.analysis.engine.layout import Queries, as_queries
from diffusion_lens.analysis.patching.metrics import UNREAD, AnswerProbabilities, AnswerProbability, Reading
from diffusion_lens.analysis.patching.result import EstimateError
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.hooks.step import StepState
from diffusion_lens.model.config import DiffusionConfig, reached
from diffusion_lens.model.inputs import check_attention_mask, check_tokens
from diffusion_lens.model.noise import HeadAt
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.plots import readable
from diffusion_lens.settings import Whole, one_of, pick_indices

PositionOrPair = Whole | tuple[Whole, Whole]
Neurons = Iterable[Whole | Sequence[Whole]] | None
CellPositions = str | Iterable[PositionOrPair | list[Whole] | list[tuple[Whole, Whole]]] | None
PositionPairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Site:
    """One kind of activation, by TransformerLens's short name."""

    name: str
    point: str  # hook point within a block
    heads: str | None = None  # the axis of heads, "query" or "key/value"; `None` where a position has one state
    heads_first: bool = False  # whether the activation is [batch head query key] and not [batch pos ...]
    ends_block: bool = False  # whether nothing of its block is left to run after it
    is_local: bool = True  # whether what follows in its block reads a position's state at that position only
    has_neurons: bool = False  # whether the entries of a position's state are neurons, which can be patched alone

    @property
    def moves_to_block_end(self) -> bool:
        """Whether one pass of a block gives the stream after it for the patch of each position alone."""
        return self.is_local and self.heads is None and not self.ends_block

    def hook_point(self, layer: int) -> str:
        """Full name of its hook point in a block."""
        return f"blocks.{layer}.{self.point}"

    def pick_heads(self, heads: Iterable[Whole] | None, cfg: DiffusionConfig) -> list[int] | None:
        """Heads to sweep; `None` for a site without heads."""
        if self.heads is None:
            return None
        n_heads = cfg.n_heads if self.heads == "query" else cfg.n_key_value_heads or cfg.n_heads
        return pick_indices(f"{self.name} heads", heads, n_heads)

    def pick_neurons(self, neurons: Neurons, cfg: DiffusionConfig) -> list[list[int]] | None:
        """The neurons of each cell; `None` for a site without neurons, and where whole states are patched."""
        if neurons is None or not self.has_neurons:
            return None
        assert cfg.d_mlp is not None
        groups = [list(each) if isinstance(each, Sequence) else [each] for each in neurons]
        return [pick_indices(f"{self.name} neurons", group, cfg.d_mlp) for group in groups]

    def with_positions_first(self, activation: Tensor) -> Tensor:
        """A view with the axes [batch pos ...] or [batch pos head ...]."""
        return activation.transpose(1, 2) if self.heads_first else activation


PATCH_SITES = {
    site.name: site
    for site in (
        Site("resid_pre", "hook_resid_pre", is_local=False),
        Site("resid_mid", "hook_resid_mid"),
        Site("resid_post", "hook_resid_post", ends_block=True),
        Site("attn_out", "hook_attn_out"),
        Site("mlp_out", "hook_mlp_out"),
        Site("q", "attn.hook_q", "query"),
        Site("k", "attn.hook_k", "key/value", is_local=False),
        Site("v", "attn.hook_v", "key/value", is_local=False),
        Site("z", "attn.hook_z", "query"),
        Site("post", "mlp.hook_post", has_neurons=True),
        Site("pattern", "attn.hook_pattern", "query", heads_first=True),
    )
}


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one layer, as a list of entries: each patches one clean state into one corrupted position.

    The entries of a cell are patched together. A cell without entries has no position in this run.
    """

    shape: tuple[int, ...]  # number of cells along each axis within a layer: positions, if they are swept, and units
    cell: Int[Tensor, "entry"]  # flat index into `shape`; ascending
    source: Int[Tensor, "entry"]  # position in the clean run
    target: Int[Tensor, "entry"]  # position in the corrupted run
    unit: Int[Tensor, "entry"] | None  # head or neuron; `None` where the whole state of a position is patched

    @property
    def n(self) -> int:
        """Number of cells."""
        return math.prod(self.shape)

    @property
    def present(self) -> Bool[Tensor, "cell"]:
        """Which cells have a position in this run."""
        return torch.isin(torch.arange(self.n, device=self.cell.device), self.cell)

    def pick(self, selected: Int[Tensor, "cell"]) -> "Cells":
        """The selected cells (ascending), renumbered from 0."""
        entries = torch.isin(self.cell, selected)
        source, target = self.source[entries], self.target[entries]
        unit = None if self.unit is None else self.unit[entries]
        return Cells((len(selected),), torch.searchsorted(selected, self.cell[entries]), source, target, unit)

    def from_clean(self, activation: Float[Tensor, "batch pos ..."]) -> Float[Tensor, "entry batch ..."]:
        """The state that each entry takes from the clean run."""
        return self._states(activation, self.source)

    def from_corrupted(self, activation: Float[Tensor, "batch pos ..."]) -> Float[Tensor, "entry batch ..."]:
        """The state that each entry replaces in the corrupted run."""
        return self._states(activation, self.target)

    def _states(self, activation: Tensor, positions: Int[Tensor, "entry"]) -> Tensor:
        at = (positions,) if self.unit is None else (positions, self.unit)
        # Blocks may be on several devices.
        return activation.to(positions.device)[(slice(None), *at)].transpose(0, 1)


@dataclass(frozen=True)
class Sweep:
    """One site over layers, positions, and heads or neurons."""

    site: Site
    layers: list[int]
    groups: list[PositionPairs]  # one for each cell
    all_together: bool  # whether the only group has all positions, so that the grid has no axis of positions
    heads: list[int] | None  # `None` for a site without heads
    neurons: list[list[int]] | None = None  # those of each cell; `None` where whole states are patched

    @property
    def coordinates(self) -> dict[str, list[Any]]:
        """The coordinates along each axis of the grid; those of "pos" are positions or [clean, corrupted] pairs."""
        positions = [
            # One number where one position is patched into the same position.
            group[0][0] if len(group) == 1 and group[0][0] == group[0][1] else [list(pair) for pair in group]
            for group in self.groups
        ]
        by_axis: dict[str, list[Any] | None] = {
            "layer": self.layers,
            "pos": None if self.all_together else positions,
            "head": self.heads,
        }
        if self.neurons is not None:
            by_axis["neuron"] = [group[0] if len(group) == 1 else group for group in self.neurons]
        return {axis: coordinates for axis, coordinates in by_axis.items() if coordinates is not None}

    def cells(self, n_clean: int, n_corrupted: int, device: str | torch.device | None) -> Cells:
        """The cells of a layer, with heads or neurons as the last axis, without positions beyond those of both runs."""
        units = self.neurons or [[head] for head in self.heads or [0]]
        table = [
            (cell, source, target, unit)
            for cell, (group, of_cell) in enumerate(product(self.groups, units))
            for source, target in group
            if source < n_clean and target < n_corrupted
            for unit in of_cell
        ]
        cell, source, target, unit = torch.tensor(table, dtype=torch.long, device=device).view(-1, 4).unbind(1)
        shape = tuple(len(coordinates) for axis, coordinates in self.coordinates.items() if axis != "layer")
        return Cells(shape, cell, source, target, None if self.heads is None and self.neurons is None else unit)


def resolve_sites(sites: str | Sequence[str]) -> list[Site]:
    """The sites of these names."""
    names, check = [sites] if isinstance(sites, str) else list(sites), one_of(*PATCH_SITES)
    if not names:
        raise ValueError(f"no site was given; they are {', '.join(PATCH_SITES)}")
    for name in names:
        own = name.rpartition(".")[-1].removeprefix("hook_")
        if name not in PATCH_SITES and own in PATCH_SITES:
            raise ValueError(
                f"site {name!r} is the name of a hook point: its site is {own!r}, in the layers of layers="
            )
    return [PATCH_SITES[check("site", name)] for name in names]


def resolve_groups(positions: CellPositions, n_clean: int, n_corrupted: int) -> list[PositionPairs]:
    """The (clean position, corrupted position) pairs of each cell; for "all", one group of all pairs."""
    if positions is None or isinstance(positions, str):
        if positions not in (None, "all"):
            raise ValueError(f"positions={positions!r}; it must be None (each one), 'all' (together), or a list")
        if n_clean != n_corrupted:
            raise ValueError(
                f"the clean run has {n_clean} positions and the corrupted run {n_corrupted}: pair them by hand with "
                "positions=[(clean_position, corrupted_position), ...]"
            )
        everywhere = [(position, position) for position in range(n_corrupted)]
        return [everywhere] if positions == "all" else [[pair] for pair in everywhere]
    positions = list(positions)
    entries = [entry if isinstance(entry, list) else [entry] for entry in positions]
    if not all(entries) or not entries:
        raise ValueError(f"positions={positions} has no entry, or an empty one; give at least one position per cell")
    groups = [[_pair(given, n_clean, n_corrupted) for given in entry] for entry in entries]
    if len({frozenset(group) for group in groups}) < len(groups):
        raise ValueError(f"positions={positions} contains duplicates; give each once")
    if any(len({target for _, target in group}) < len(group) for group in groups):
        raise ValueError(f"positions={positions} patches a position twice in one cell; give it one state")
    return groups


def _pair(given: PositionOrPair, n_clean: int, n_corrupted: int) -> tuple[int, int]:
    source, target = given if isinstance(given, tuple) else (given, given)
    clean = pick_indices("positions in the clean run", [source], n_clean)
    return clean[0], pick_indices("positions in the corrupted run", [target], n_corrupted)[0]


Given = str | Sequence[str] | Tensor | Queries


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a pair: a model, its input, and the metric of its logits. The network may read more than the canvas:
    an answer that has not been reached or, when the caller has hooks inside the network, the whole sequence."""

    model: DiffusionTransformer
    tokens: Tokens
    real: PosMask | None  # false at padding; `None` where there is none
    reading: Reading  # metric and its rows; `UNREAD` if those rows have another meaning on this side
    n_canvas: int  # number of positions of the canvas
    queries: Sequence[Query] = ()  # those of the rows, if the input is queries or facts
    unprompted: Tokens | None = None  # canvas with the given positions masked, for guidance
    cfg_scale: float = 0.0  # weight of guidance; 0 without it, or if the metric itself applies it
    step: StepState | None = None  # as hooks read it; `None` outside the loop

    @classmethod
    def of(cls, model: DiffusionTransformer, prompt: Given, reading: Reading) -> "Side":
        """The side that reads texts, tokens, queries or facts."""
        queries: list[Query] = []
        if isinstance(prompt, Tensor):
            tokens = check_tokens(prompt, model.cfg)
            # Passes that start from a residual stream cannot infer the padding from tokens.
            real = model.padding.real(tokens)
        elif isinstance(prompt, Query | Fact) or not all(isinstance(each, str) for each in prompt):
            queries = as_queries(model, cast(Queries, prompt))
            tokens, real = as_batch(model, queries)
            tokens = check_tokens(tokens, model.cfg)
        else:
            tokens, real = model.tokenize(cast(Sequence[str], prompt))
            real = None if real is None or bool(real.all()) else real
        return cls(model, tokens, real, reading, tokens.shape[1], queries)

    @classmethod
    def at_step(cls, model: DiffusionTransformer, trajectory: Trajectory, step: int, reading: Reading) -> "Side":
        """The canvas before a step, up to the last position that any row has reached, and the metric of this canvas.

        The caller's hooks see the whole sequence, as in the loop. The metric sees the canvas only.
        """
        state = trajectory.state_at(step, model.cfg.device)
        canvas, real = state.tokens, trajectory.real.to(model.cfg.device)
        n_canvas = int((reached(canvas) & real).any(dim=0).nonzero().max()) + 1
        whole, metric = canvas.shape[1], reading.function
        n_shown = whole if model.is_hooked else min(whole, _with_block(model, n_canvas))
        if isinstance(metric, AnswerProbabilities):
            raise ValueError(
                f"with steps=, p(answer) is read of one fact, and the metric has {len(metric.of_rows)}: give each fact "
                "a grid of its own"
            )
        if isinstance(metric, AnswerProbability):
            run = metric.traced(model, trajectory)
            n_shown = min(whole, max(n_shown, _with_block(model, int(metric.rows.max()) + 1)))
            reading = replace(reading, function=replace(metric, answer=run.answer(step, canvas)))
            seen = check_tokens(run.seen(canvas)[:, :n_shown], model.cfg)
            return cls(model, seen, None, reading, n_canvas, step=state)
        tokens = check_tokens(model.cfg.readable(canvas[:, :n_shown]), model.cfg)
        return cls(
            model,
            tokens,
            check_attention_mask(real[:, :n_shown], len(tokens), n_shown, tokens.device),
            reading.within(n_canvas) if n_canvas < n_shown else reading,
            n_canvas,
            unprompted=tokens.masked_fill(state.given[:, :n_shown], trajectory.blank),
            cfg_scale=trajectory.record["cfg_scale"],
            step=state,
        )

    @property
    def input(self) -> NetworkInput:
        """Input of this side's forward pass."""
        return NetworkInput(self.model, self.tokens, self.reading.rows, self.real, self.step)

    def through_head(self) -> "Side":
        """This side with its metric applied to what its head's output means: logits whose softmax is p(x_0), guided if
        its run was. The probability of an answer reads the head itself."""
        if self.reading is UNREAD or isinstance(self.reading.function, AnswerProbability | AnswerProbabilities):
            return self
        rows, present = self.reading.rows, None
        if self.model.head.needs_canvas:  # the token at each position that the metric's rows predict
            positions = torch.arange(self.n_pos, device=self.tokens.device)
            by_row = positions.scatter(0, self.model.readout.rows(positions), positions)
            present = self.tokens[:, by_row if rows is None else by_row[rows]]
        with self.model.clock.at(self.step):
            reading = self.reading.through(HeadAt.of(self.model, present))
        if self.cfg_scale:
            with self.model.clock.at(self.step and replace(self.step, branch="unconditional")):
                unconditional = self.model(self.unprompted, attention_mask=self.real, logits_at=rows)
            reading = reading.guided(unconditional, self.cfg_scale)
        return replace(self, reading=reading)

    @property
    def n_pos(self) -> int:
        """Number of positions that the network reads."""
        return self.tokens.shape[1]

    @property
    def extent(self) -> tuple[int, int]:
        """Number of positions that the network reads, and how many of them belong to the canvas."""
        return self.n_pos, self.n_canvas

    def word(self, position: int) -> str:
        """The text at a position of the first row, as a label."""
        return readable(self.model.words([int(self.tokens[0, position])])[0])


def _stored_points(past_points: Sequence[str], sweeps: Sequence[Sweep], method: str) -> tuple[set[str], set[str]]:
    """The hook points at which the clean run stores activations, and those at which the corrupted run does."""
    points = {sweep.site.hook_point(layer) for sweep in sweeps for layer in sweep.layers}
    entrances = {stream_entering(layer + sweep.site.ends_block) for sweep in sweeps for layer in sweep.layers}
    entrances |= {stream_entering(i + 1) for sweep in sweeps if sweep.site.moves_to_block_end for i in sweep.layers}
    embedding = {"hook_embed"} if method == "attribution" else set()  # The gradients' pass starts there.
    return points, points | entrances | set(past_points) | embedding


def cell_budgets(
    clean: Side, corrupted: Side, sweeps: Sequence[Sweep], method: str, max_bytes: int
) -> dict[str, CellBudget]:
    """The memory for the cells of each site; a `ValueError` if `max_bytes` does not suffice for both runs and one cell
    of each, or for the backward pass of "attribution"."""
    given = corrupted.input
    points, names = _stored_points(given.past_points, sweeps, method)
    kept_bytes = clean.input.stored_bytes(points) + given.stored_bytes(names) + given.kept_bytes(0)
    kept_bytes += given.stored_bytes(points) if method == "attribution" else 0  # gradients
    kept_bytes += given.stream_bytes * max(len(s.layers) * s.site.moves_to_block_end for s in sweeps)
    budgets = {s.site.name: CellBudget.of(given, kept_bytes, max_bytes, explicit=s.site.heads_first) for s in sweeps}
    graph_bytes = reserved(corrupted.model.cfg, given.graph_bytes, of_graph=True)
    if method == "attribution" and (needed := kept_bytes + graph_bytes) > max_bytes:
        raise ValueError(
            f"max_bytes={max_bytes:,} is too small: the backward pass of method='attribution' takes {needed:,} bytes "
            "with what is kept beside it; method='exact' needs none"
        )
    return budgets


@dataclass(frozen=True, eq=False)
class SidePair:
    """Both sides of a grid, each computed once."""

    side: Side  # model, canvas and metric of the corrupted run
    clean: Mapping[str, Tensor]  # activations of the clean run, by hook point
    corrupted: KeptRun
    gradients: Mapping[str, Tensor]  # of the metric in the corrupted run, by hook point; empty for the exact method
    clean_score: float  # NaN if the metric's rows have another meaning there
    corrupted_score: float
    budgets: Mapping[str, CellBudget]  # by name of the site

    @classmethod
    def of(
        cls, clean: Side, corrupted: Side, sweeps: Sequence[Sweep], method: str, budgets: Mapping[str, CellBudget]
    ) -> "SidePair":
        """Compute both sides."""
        points, names = _stored_points(corrupted.input.past_points, sweeps, method)
        clean, corrupted = clean.through_head(), corrupted.through_head()
        clean_run, gradients = clean.input.run(points), dict[str, Tensor]()
        if method == "attribution":
            run, gradients = _run_with_gradients(corrupted, names, points)
        else:
            run = corrupted.input.run(names)
        device = corrupted.model.cfg.device
        return cls(
            side=corrupted,
            clean={name: clean_run.activations[name].to(device) for name in points},
            corrupted=run,
            gradients=gradients,
            clean_score=float(clean.reading(clean_run.logits.to(device))),
            corrupted_score=float(corrupted.reading(run.logits)),
            budgets=budgets,
        )

    @property
    def _score_dtype(self) -> torch.dtype:
        return torch.promote_types(self.corrupted.logits.dtype, torch.float32)

    def states(self, site: Site, layer: int) -> tuple[Tensor, Tensor]:
        """A site's clean and corrupted activation, [batch pos ...]."""
        name = site.hook_point(layer)
        clean, corrupted = (site.with_positions_first(run[name]) for run in (self.clean, self.corrupted.activations))
        if clean.shape[2:] != corrupted.shape[2:]:
            raise ValueError(
                f"{name} is {list(self.clean[name].shape)} in the clean run and "
                f"{list(self.corrupted.activations[name].shape)} in the corrupted one: states can be patched only "
                "between models of the same width"
            )
        return clean, corrupted

    def patched_scores(
        self, site: Site, selected: Sequence[tuple[int, Cells]], progress: str | None = None
    ) -> list[Float[Tensor, "cell"]]:
        """The metric of the corrupted run with each of these cells of each layer patched in turn; NaN for a cell
        without a position."""
        unchanged = torch.tensor(self.corrupted_score, dtype=self._score_dtype)
        engine = CellRuns(self.corrupted, self._measure, unchanged, self.budgets[site.name])
        cells = [cell for layer, of_layer in selected for cell in self._cells(site, layer, of_layer)]
        scores = engine.scores(cells, progress).split([of_layer.n for _, of_layer in selected])
        return [
            of_layer_scores.masked_fill(~of_layer.present.cpu(), math.nan)
            for of_layer_scores, (_, of_layer) in zip(scores, selected, strict=True)
        ]

    def _cells(self, site: Site, layer: int, cells: Cells) -> list[Cell]:
        """The cells of a layer. A cell whose state is the same in both runs, or that has no position, has no patch."""
        clean, corrupted = self.states(site, layer)
        differs = (cells.from_clean(clean) != cells.from_corrupted(corrupted)).flatten(1).any(dim=1)
        changed = cells.cell[differs].unique()
        units = torch.zeros_like(cells.cell) if cells.unit is None else cells.unit
        entries: dict[int, list[tuple[int, int, int]]] = {}
        table = torch.stack([cells.cell, cells.source, cells.target, units], dim=1)
        for index, *entry in table[torch.isin(cells.cell, changed)].tolist():
            entries.setdefault(index, []).append(tuple(entry))

        def patch(index: int) -> Patch:
            source, target, of_cell = zip(*entries[index], strict=True)
            return Patch(
                block=layer,
                point=site.hook_point(layer),
                states=clean,
                source=source,
                target=target,
                units=None if cells.unit is None else of_cell,
                heads_first=site.heads_first,
                is_local=site.is_local,
            )

        enters = layer + site.ends_block
        at_site = [Cell(enters, (patch(index),) if index in entries else ()) for index in range(cells.n)]
        moves = site.moves_to_block_end and cells.unit is None and not self.corrupted.input.is_hooked
        return _moved_to_block_end(self.corrupted, layer, at_site) if moves else at_site

    def _measure(
        self, logits: Float[Tensor, "batch selected d_vocab_out"], computed: Int[Tensor, "selected"]
    ) -> Float[Tensor, "cell"]:
        """The metric of each copy; logits that were not computed are taken from the corrupted run."""
        if len(computed) < self.corrupted.logits.shape[1]:
            all_logits = self.corrupted.logits.repeat(len(logits) // len(self.corrupted.logits), 1, 1)
            all_logits[:, computed] = logits
            logits = all_logits
        scores = [float(self.side.reading(copy)) for copy in logits.split(len(self.side.tokens))]
        return torch.tensor(scores, dtype=self._score_dtype)


def sweep_exactly(pair: SidePair, sweep: Sweep, cells: Cells, progress: bool) -> Float[Tensor, "layer *cell"]:
    """The score of every cell of a site, each patched in a forward pass."""
    title = f"patch {sweep.site.name}" if progress else None
    scores = pair.patched_scores(sweep.site, [(layer, cells) for layer in sweep.layers], title)
    return torch.stack(scores).view(len(sweep.layers), *cells.shape)


def _run_with_gradients(side: Side, names: Iterable[str], points: Collection[str]) -> tuple[KeptRun, dict[str, Tensor]]:
    """A pass with the activations at `names` stored, and the metric's gradient at some of them, `points`.

    Only activations are differentiated: no parameter gets a gradient, whether it is frozen or not.
    """
    given = side.input
    embedded = given.embed()
    with torch.enable_grad():
        run = given.run(names, embedded.clone().requires_grad_())
        score = side.reading(run.logits)
        if not score.requires_grad:
            raise ValueError(
                "method='attribution' needs the metric's gradient, and it has none: compute the metric from the logits "
                "with torch, without .item(), .detach() or argmax"
            )
        with given.at_step():
            gradients = torch.autograd.grad(score, [run.activations[name] for name in points])
    states = {name: state.detach() for name, state in run.activations.items()}
    return KeptRun(given, states, run.logits.detach()), dict(zip(points, gradients, strict=True))


def sweep_by_gradient(
    pair: SidePair, sweep: Sweep, cells: Cells, check: int
) -> tuple[Float[Tensor, "layer *cell"], EstimateError | None]:
    """The estimated score of every cell of a site, and the error of the `check` largest estimates."""
    # 1. Estimate every cell from the gradients.
    site, layers = sweep.site, sweep.layers
    effects = torch.stack([_estimated_effects(pair, site, layer, cells) for layer in layers])
    scores = (pair.corrupted_score + effects).view(len(layers), *cells.shape)

    # 2. Patch the cells with the largest estimates exactly.
    flat = effects.flatten()
    largest = flat.abs().nan_to_num(nan=-1).topk(min(check, len(flat))).indices.sort().values
    largest = largest[~flat[largest].isnan()]
    if not len(largest):
        return scores, None
    selected = [
        (layer, cells.pick((largest[largest // cells.n == index] % cells.n).to(cells.cell.device)))
        for index, layer in enumerate(layers)
    ]
    exact = pair.patched_scores(site, selected)
    indices = torch.stack(torch.unravel_index(largest, scores.shape), dim=1)
    return scores, EstimateError(indices, flat[largest], torch.cat(exact) - pair.corrupted_score)


def _estimated_effects(pair: SidePair, site: Site, layer: int, cells: Cells) -> Float[Tensor, "cell"]:
    """The first-order effect of each cell of a layer; NaN for a cell without a position."""
    clean, corrupted = pair.states(site, layer)
    gradient = cells.from_corrupted(site.with_positions_first(pair.gradients[site.hook_point(layer)]))
    wide = torch.promote_types(gradient.dtype, torch.float32)
    change = cells.from_clean(clean).to(wide) - cells.from_corrupted(corrupted).to(wide)
    terms = (change * gradient.to(wide)).flatten(1).sum(dim=1)
    effects = terms.new_zeros(cells.n).index_add(0, cells.cell, terms)
    return effects.masked_fill(~cells.present, math.nan).cpu()


def _moved_to_block_end(run: KeptRun, layer: int, cells: Sequence[Cell]) -> list[Cell]:
    """Cells of one layer, each with at most one patch at the same hook point, that enter after their block.

    Their patch is local: what a block does with such a state at a position does not depend on the other positions'
    states there. So one pass of the block in which every position is patched gives the stream after it at each position
    when that one alone is patched. Cells are returned as they are where two of them write different states at one.
    """
    patches = [patch for cell in cells if reaches_a_row(run.input, cell) for patch in cell.patches]
    sources: dict[int, int] = {}
    for patch in patches:
        for source, target in zip(patch.source, patch.target, strict=True):
            if sources.setdefault(target, source) != source:
                return list(cells)
    if not patches:
        return list(cells)

    def write(activation: Tensor, hook: Any) -> Tensor:
        written = activation.clone()
        written[:, list(sources)] = patches[0].states[:, list(sources.values())].to(activation.dtype)
        return written

    after = run.resume(run.stream(layer), range(layer, layer + 1), hooks=[(patches[0].point, write)])

    def moved(patch: Patch) -> Patch:
        return replace(patch, point=stream_entering(layer + 1), states=after, source=patch.target)

    return [
        replace(cell, entry=layer + 1, patches=tuple(map(moved, cell.patches)))
        if reaches_a_row(run.input, cell)
        else replace(cell, patches=())
        for cell in cells
    ]


def _with_block(model: DiffusionTransformer, n_pos: int) -> int:
    """A number of positions after which nothing changes the first `n_pos`: the block of the last one ends before it."""
    return n_pos - 1 + (model.cfg.block_size or 1)
