"""How far states move: from step to step, from layer to layer, and cached ones from those of the present canvas.

State drift compares keys, values and the outputs of attention and MLP at the same position in consecutive steps, by
their cosine and by the relative distance

    ‖x_after - x_before‖ / ‖x_after‖

(dKV-Cache, Ma et al. 2025, arXiv 2505.15781; dLLM-Cache, Liu et al. 2025, arXiv 2506.06295; Elastic-Cache, Nguyen-Tri
et al. 2025, arXiv 2510.14973). A cache that holds states over a step pays for it with this drift.

Layer cosines compare the residual stream before and after each block (Goel et al. 2026, arXiv 2603.07475). A block that
hardly turns the stream can be skipped: `interventions.skip_layers` does it, in runs and in measures of recall.

Cache drift compares keys and values that a run holds in its cache with exact ones. Where later positions cannot change
earlier ones, on a causal model or in the filled blocks of one that writes block after block, a cache is exact. With
full attention every key and value depends on the whole canvas from the second layer on, and a cache holds those of an
earlier one (`approximate_cache` of `samplers.threshold`; Wu et al. 2025, Fast-dLLM, arXiv 2505.22618). The drift of a
step and layer is the relative distance over all positions at which later passes read the cache. The exact ones are of a
forward pass over the canvas that the step read, without a cache. Where a step computes everything again, it is 0.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.engine.by_step import ByStep, ReadCanvases, Reading
from diffusion_lens.analysis.engine.inputs import Readable, SharedPass
from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.loop import run_loop
from diffusion_lens.denoising.predictor import Predictor
from diffusion_lens.denoising.same_network import canvas_provenance
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.names import Hook, mlp_out, resid_post, resid_pre, shared_out
from diffusion_lens.hooks.step import StepState
from diffusion_lens.model.attention import HeldCache
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance, texts_of
from diffusion_lens.settings import Whole, one_of
from diffusion_lens.settings.figures import styled

# The states that are compared, and where they pass.
STATES = {"keys": "attn.hook_rot_k", "values": "attn.hook_v", "attention": "hook_attn_out", "mlp": "hook_mlp_out"}
GROUPS = ("masked", "masked again", "just written", "written", "prompt")

_BYTES_COMPARED = 24  # of a number of two states: both and their product, in float64


@dataclass(frozen=True, eq=False)
class StateDrift(ByStep):
    """How states at the same position differ between consecutive steps of `steps`, by layer.

    Entry i of an axis of transitions compares the steps i and i + 1. Columns of the data frame: step (the later one),
    layer, batch, pos, token (of the later step), group, cosine_keys, distance_keys, cosine_values, distance_values,
    cosine_attention, distance_attention, cosine_mlp, distance_mlp; a row for each position that both canvases have.

    Attributes:
        cosines: Cosine of the states of both steps, Float[transition layer batch pos] by kind: "keys", "values",
            "attention" and "mlp" (what a block's attention and MLP add to the stream, with a shared expert). Heads are
            joined to one vector. NaN where a canvas has no token, and where a state is 0.
        distances: Relative distance by kind, with the same axes; infinite where only the later state is 0.
        canvases: The canvases that were read.
        record: Steps, layers, trajectory, model, hash of the weights, hooks, versions.
    """

    KIND = "state drift"
    SHOWS = "the cosine between states of consecutive denoising steps, by layer"

    cosines: dict[str, Float[Tensor, "transition layer batch pos"]]
    distances: dict[str, Float[Tensor, "transition layer batch pos"]]
    canvases: ReadCanvases
    record: dict[str, Any]

    def _check(self) -> None:
        n_steps, batch, pos = self.canvases.tokens.shape
        for name, by_kind in (("cosines", self.cosines), ("distances", self.distances)):
            for kind, values in by_kind.items():
                if values.shape != (n_steps - 1, len(self.layers), batch, pos):
                    raise ValueError(f"{name}[{kind!r}] is {list(values.shape)}, which is not that of the canvases")

    @property
    def groups(self) -> dict[str, Bool[Tensor, "transition batch pos"]]:
        """Positions of both canvases by group: "masked" contains [MASK] in both, or under uniform noise a token that
        may change and did not; "masked again" only in the later one; "just written" where another token changed;
        "prompt" and "written" where a given or another token stayed."""
        tokens, masked, present = self.canvases.tokens, self.canvases.masked, self.canvases.present
        both = present[:-1] & present[1:]
        again = both & ~masked[:-1] & masked[1:]
        changed = both & (tokens[:-1] != tokens[1:]) & ~again
        kept, blank = both & ~changed & ~again, masked[1:]
        prompt = kept & ~blank & self.canvases.given
        in_order = (kept & blank, again, changed, kept & ~blank & ~prompt, prompt)
        return dict(zip(GROUPS, in_order, strict=True))

    def mean(
        self, what: str = "values", group: str | None = None, measure: str = "cosine"
    ) -> Float[Tensor, "transition layer"]:
        """Mean "cosine" or "distance" of one kind of state over the positions of a group, or all; NaN without any."""
        one_of("cosine", "distance")("measure", measure)
        values = (self.cosines if measure == "cosine" else self.distances)[one_of(*STATES)("what", what)]
        if group is not None:
            chosen = self.groups[one_of(*GROUPS)("group", group)]
            values = values.masked_fill(~chosen[:, None], torch.nan)
        means: Tensor = values.flatten(2).nanmean(dim=2)
        return means

    @styled
    def plot(self, what: str = "values", group: str | None = None, ax: Any = None, title: str | None = None) -> Any:
        """Mean cosine of one kind of state by layer and step; returns the matplotlib axes."""
        means, of_group = self.mean(what, group), "" if group is None else f", {group} positions"
        assert self.steps is not None
        return plots.labelled_map(
            means.mT,
            rows=[f"layer {layer}" for layer in self.layers],
            layers=self.steps[1:],
            xlabel="denoising step, compared with the one before",
            hue="viridis",
            limits=(float(means.nan_to_num(nan=1.0).min()), 1.0),
            bar="cosine",
            title=title or f"Drift of the {what}{of_group}",
            ax=ax,
        )

    def _table(self) -> Table:
        batch, n_pos = self.canvases.final.shape
        assert self.steps is not None
        axes = {"step": self.steps[1:], "layer": self.layers, "batch": range(batch), "pos": range(n_pos)}
        names = torch.zeros(self.canvases.tokens[1:].shape, dtype=torch.long)
        for number, chosen in enumerate(self.groups.values(), 1):
            names[chosen] = number
        values = {
            "token": texts_of(self.canvases.tokens[1:, None], self.canvases.words),
            "group": texts_of(names[:, None], dict(enumerate(("", *GROUPS)))),
        }
        for kind in STATES:
            values |= {f"cosine_{kind}": self.cosines[kind], f"distance_{kind}": self.distances[kind]}
        shown = (names > 0)[:, None].expand(-1, len(self.layers), -1, -1)
        return Table.of_cells(axes, values, most="distance_values").where(shown.numpy())

    def __repr__(self) -> str:
        words = ", ".join(f"{kind} {float(self.mean(kind).nanmean()):.3f}" for kind in STATES)
        return f"StateDrift({self._extent}, mean cosines: {words})"


@begins_run
@torch.no_grad()
def state_drift(
    model: DiffusionTransformer,
    trajectory: Trajectory,
    *,
    steps: Whole | Iterable[Whole] | None = None,
    layers: Iterable[Whole] | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> StateDrift:
    """How keys, values and the outputs of attention and MLP change from step to step, by layer and position.

    The caller's hooks act. Steps with the same canvas share a forward pass where nothing is hooked. Under guidance it
    is the conditional branch. Keys are rotated, as a cache holds them; a rotation changes neither measure.

    Args:
        model: Model of either variant.
        trajectory: The run.
        steps: Two steps or more, each compared with the one before it in ascending order; by default all.
        layers: Layers, negative ones from the end; by default all.
        max_bytes: Most memory for the result, the states of one step, and one forward pass.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A step or layer that does not exist, fewer than two steps, or a budget that is too small.
    """
    reading = Reading.of(model, trajectory, steps, layers)
    assert reading.steps is not None
    if reading.n_steps < 2:
        raise ValueError(f"steps={reading.steps} has nothing to compare: give two steps or more of the run")
    cells, d_model = reading.batch * reading.pos, model.cfg.d_model
    widths = [model.blocks[layer].attn.k.out_features for layer in reading.layers]
    # The result; the states of the step before; and the comparison of two states.
    of_result = 4 * 2 * len(STATES) * (reading.n_steps - 1) * len(reading.layers)
    of_states = 2 * (sum(widths) + d_model * len(reading.layers)) * model.cfg.dtype.itemsize
    n_bytes = cells * (of_result + of_states + _BYTES_COMPARED * max(d_model, *widths))
    advice = "give fewer steps, layers or rows"
    reading.require_memory(n_bytes, max_bytes, "the drift takes", advice, explicit=False)
    shape = (reading.n_steps - 1, len(reading.layers), reading.batch, reading.pos)
    cosines, distances = ({kind: torch.full(shape, torch.nan) for kind in STATES} for _ in range(2))
    earlier: dict[tuple[str, int], Tensor] = {}
    present: dict[int, PosMask] = {}

    def reduce(one: SharedPass) -> None:
        present.update({index: canvas.present.cpu() for index, canvas in one.served.items()})

        of_chosen: dict[int, Tensor] = {}  # what the chosen experts add, until the shared one adds its part

        def compare(kind: str, layer: int, state: Tensor, hook: Any) -> None:
            now = state.flatten(2)
            for index in sorted(one.served):
                if index:
                    before = now if index - 1 in one.served else earlier[kind, layer]
                    n_both = min(before.shape[1], now.shape[1])
                    both = (present[index - 1] & present[index])[:, :n_both]
                    measures = _cosine_and_distance(before[:, :n_both], now[:, :n_both])
                    for into, values in zip((cosines, distances), measures, strict=True):
                        into[kind][index - 1, layer, :, :n_both] = values.float().cpu().masked_fill(~both, torch.nan)
            earlier[kind, layer] = now

        def hold(layer: int, state: Tensor, hook: Any) -> None:
            of_chosen[layer] = state

        def join(layer: int, state: Tensor, hook: Any) -> None:
            compare("mlp", layer, of_chosen.pop(layer) + state, hook)

        readers: list[tuple[str, Hook]] = []
        for i, layer in enumerate(reading.layers):
            readers += [(f"blocks.{layer}.{point}", partial(compare, kind, i)) for kind, point in STATES.items()]
            if (shared := shared_out(layer)) in model.hook_dict:
                readers[-1:] = [(mlp_out(layer), partial(hold, i)), (shared, partial(join, i))]
        one.read.run(readers)

    canvases = reading.read(reduce, "state drift", progress)
    return StateDrift(cosines, distances, canvases, reading.record())


@dataclass(frozen=True, eq=False)
class LayerCosines(ByStep):
    """The cosine of the residual stream before and after each block, by step and position.

    Without steps, the tensor has no axis of steps. Columns of the data frame: step (of a trajectory), layer, batch,
    pos, token, masked, cosine; a row for each position with a token or [MASK].

    Attributes:
        cosine: Float[*step layer batch pos]; NaN at padding and where the text has not been reached.
        canvases: The canvases that were read.
        record: Steps, layers, inputs, model, hash of the weights, hooks, versions.
    """

    KIND = "layer cosines"
    SHOWS = "by layer the cosine of the residual stream before and after each block"

    cosine: Float[Tensor, "*step layer batch pos"]
    canvases: ReadCanvases
    record: dict[str, Any]

    def mean(self, group: str | None = None) -> Float[Tensor, "*step layer"]:
        """Mean over the positions of a group, "masked", "prompt" or "written", or all; NaN without any."""
        values = self.cosine
        if group is not None:
            groups = self.canvases.groups
            values = values.masked_fill(~groups[one_of(*groups)("group", group)][..., None, :, :], torch.nan)
        means: Tensor = values.flatten(-2).nanmean(dim=-1)
        return means

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """Mean cosine by layer, over steps and rows, one line for each group of positions; returns the axes."""
        groups = [group for group, where in self.canvases.groups.items() if bool(where.any())]
        means = [self.mean(group) if self.steps is None else self.mean(group).nanmean(dim=0) for group in groups]
        return plots.labelled_lines(
            torch.stack(means),
            groups,
            [str(layer) for layer in self.layers],
            "layer",
            "cosine of the stream before and after",
            title or "How far a block turns the residual stream",
            ax,
        )

    def _table(self) -> Table:
        batch, n_pos = self.canvases.final.shape
        axes = {**self._step_axis(), "layer": self.layers, "batch": range(batch), "pos": range(n_pos)}
        canvases = {name: getattr(self.canvases, name)[..., None, :, :] for name in ("tokens", "masked", "present")}
        values = {
            "token": texts_of(canvases["tokens"], self.canvases.words),
            "masked": canvases["masked"],
            "cosine": self.cosine,
        }
        return Table.of_cells(axes, values).where(canvases["present"].expand_as(self.cosine).numpy())

    def __repr__(self) -> str:
        by_layer = self.cosine.flatten(-2).movedim(-2, 0).flatten(1).nanmean(dim=1)
        most = int(by_layer.nan_to_num(nan=-1.0).argmax())
        return f"LayerCosines({self._extent}, highest around layer {self.layers[most]}: {float(by_layer[most]):.3f})"


@begins_run
@torch.no_grad()
def layer_cosines(
    model: DiffusionTransformer,
    inputs: Readable,
    *,
    steps: Whole | Iterable[Whole] | None = None,
    layers: Iterable[Whole] | None = None,
    attention_mask: Tensor | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> LayerCosines:
    """The cosine of the residual stream before and after each block, at every position and step.

    The caller's hooks act. Under guidance it is the conditional branch.

    Args:
        model: Model of either variant.
        inputs: A trajectory, or texts, Int[batch pos] tokens, queries or facts for a single pass without a step.
        steps: Steps of the trajectory, negative ones from the end; by default all.
        layers: Layers, negative ones from the end; by default all.
        attention_mask: [batch pos], 1 at real tokens, 0 at the padding of tokens.
        max_bytes: Most memory for the result and for one forward pass.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A step or layer that does not exist, steps without a trajectory, or a budget that is too small.
    """
    reading = Reading.of(model, inputs, steps, layers, attention_mask)
    shape = (reading.n_steps, len(reading.layers), reading.batch, reading.pos)
    n_bytes = 4 * math.prod(shape) + reading.batch * reading.pos * model.cfg.d_model * _BYTES_COMPARED
    advice = "give fewer steps, layers or rows"
    reading.require_memory(n_bytes, max_bytes, "the cosines take", advice, explicit=False)
    cosine, entered = torch.full(shape, torch.nan), {}

    def reduce(one: SharedPass) -> None:
        def enter(stream: Tensor, hook: Any) -> None:
            entered["stream"] = stream

        def leave(layer: int, stream: Tensor, hook: Any) -> None:
            cosines, _ = _cosine_and_distance(entered.pop("stream"), stream)
            for indices, present in one.by_reach():
                inside = cosines.masked_fill(~present.to(cosines.device), torch.nan)
                cosine[indices, layer, :, : stream.shape[1]] = inside.cpu().float()

        before = [(resid_pre(layer), enter) for layer in reading.layers]
        after = [(resid_post(layer), partial(leave, i)) for i, layer in enumerate(reading.layers)]
        one.read.run([*before, *after])

    canvases = reading.read(reduce, "layer cosines", progress)
    return LayerCosines(reading.without_steps(cosine), canvases, reading.record())


@dataclass(frozen=True, eq=False)
class CacheDrift(PicturedResult, Saved):
    """The relative distance of cached keys and values from exact ones, by step and layer.

    Columns of the data frame: step, layer, keys, values, n_held.

    Attributes:
        keys: Float[step layer], drift of the keys. The first layer has none: its keys and values depend on their own
            token alone.
        values: Float[step layer], drift of the values.
        n_held: Int[step], number of positions that the cache holds, in all rows together.
        record: Steps, approximate cache ("prefix", "dual", or `None` for an exact one), trajectory, model, hash of the
            weights, hooks, versions.
    """

    KIND = "cache drift"
    SHOWS = "by layer and denoising step how far cached keys or values are from exact ones"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"steps": list[int], "approximate_cache": str | None}
    AXES = (("step", "steps"),)

    keys: Float[Tensor, "step layer"]
    values: Float[Tensor, "step layer"]
    n_held: Int[Tensor, "step"]
    record: dict[str, Any]

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with a forward pass after which the cache holds something."""
        return tuple(self.record["steps"])

    @styled
    def plot(self, what: str = "keys", ax: Any = None, title: str | None = None) -> Any:
        """The drift of the "keys" or "values" by layer and step; returns the matplotlib axes."""
        drift: Tensor = getattr(self, one_of("keys", "values")("what", what))
        kind = self.record["approximate_cache"]
        return plots.labelled_map(
            drift.mT,
            rows=[f"layer {layer}" for layer in range(drift.shape[1])],
            layers=self.steps,
            xlabel="denoising step",
            hue="Purples",
            limits=(0.0, float(drift.max())),
            bar="drift",
            title=title or f"Drift of the {what} in the {'exact' if kind is None else kind} cache",
            ax=ax,
        )

    def _table(self) -> Table:
        axes = {"step": self.steps, "layer": range(self.keys.shape[1])}
        n_held = self.n_held[:, None].expand_as(self.keys)
        return Table.of_cells(axes, {"keys": self.keys, "values": self.values, "n_held": n_held}, most="keys")

    def __repr__(self) -> str:
        largest = ", ".join(f"{name} up to {float(getattr(self, name).max()):.3g}" for name in ("keys", "values"))
        return f"CacheDrift({len(self.steps)} steps, {self.keys.shape[1]} layers, {largest})"


@begins_run
@torch.no_grad()
def cache_drift(model: DiffusionTransformer, trajectory: Trajectory) -> CacheDrift:
    """How far the keys and values that a run holds in its cache are from exact ones, by step and layer.

    The run is taken again with its cache, on its recorded canvases (a forced replay), with a second pass at each step.

    Args:
        model: Model that wrote the trajectory.
        trajectory: Run with an approximate cache, or of a model that writes block after block or next tokens, which has
            an exact one.

    Raises:
        ValueError: The run has no cache, or its cache never holds anything, as while something is hooked on a model
            with an exact one.
    """
    run = trajectory.started(model, forced=True)
    if run.predictor.held() is None:
        raise ValueError(
            f"a run of {model.cfg.model_name!r} with these settings has no key/value cache, so nothing drifts: denoise "
            "with samplers.threshold(approximate_cache='prefix') or 'dual'"
        )
    measured = run.predictor = _Measured(run.predictor, model, run.canvas)
    run_loop(run, trajectory.first_step)
    if not measured.drift:
        raise ValueError(
            "the cache of this run holds nothing after any step: one block is written, rows are padded, or something "
            "is hooked"
        )
    distances, steps = torch.stack(list(measured.drift.values())), list(measured.drift)
    record = {
        "steps": steps,
        "approximate_cache": run.sampler.approximate_cache,
        "trajectory": canvas_provenance(trajectory.record),
        **provenance(model, model.cfg),
    }
    return CacheDrift(distances[:, 0], distances[:, 1], torch.tensor([measured.n_held[step] for step in steps]), record)


class _Measured(Predictor):
    """Another predictor, whose cache is compared with the keys and values of a pass without one after each step.

    Attributes:
        drift: Float[2 layer] by step, of the keys and of the values.
        n_held: Number of positions that are held, by step.
    """

    def __init__(self, inner: Predictor, model: DiffusionTransformer, canvas: Canvas) -> None:
        self.inner, self.model, self.canvas = inner, model, canvas
        self.drift: dict[int, Tensor] = {}
        self.n_held: dict[int, int] = {}

    def __call__(self, state: StepState, positions: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        logits = self.inner(state, positions)
        held = self.inner.held()
        assert held is not None
        layers, where = held
        if not bool(where.any()):
            return logits
        exact = HeldCache(self.model.cfg.n_layers)
        tokens = self.model.cfg.readable(state.tokens)
        self.model.forward(tokens, attention_mask=self.canvas.real, past_kv_cache=exact, return_type=None)
        pairs = [
            [(getattr(each, name), getattr(own, name)) for each, own in zip(layers, exact.layers, strict=True)]
            for name in ("keys", "values")
        ]
        self.drift[state.index] = torch.tensor(
            [[_held_distance(*pair, where) for pair in of_kind] for of_kind in pairs]
        )
        self.n_held[state.index] = int(where.sum())
        return logits


def _relative_distance(was: Float[Tensor, "*rest d"], now: Float[Tensor, "*rest d"]) -> Float[Tensor, "*rest"]:
    """The length of the difference by that of what is now, for vectors along the last axis; 0 where both are 0."""
    difference = (was - now).norm(dim=-1)
    distance: Tensor = torch.where(difference == 0, difference, difference / now.norm(dim=-1))
    return distance


def _cosine_and_distance(was: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine, NaN where a vector is 0, and relative distance of vectors along the last axis."""
    was, now = was.to(now.device).double(), now.double()
    cosine = (was * now).sum(dim=-1) / (was.norm(dim=-1) * now.norm(dim=-1))
    return cosine, _relative_distance(was, now)


def _held_distance(
    held: Float[Tensor, "batch key kv_head d_head"], exact: Float[Tensor, "batch pos kv_head d_head"], where: PosMask
) -> float:
    """The relative distance of keys or values over some of the positions that `held` begins with."""
    n_pos = held.shape[1]
    inside = where[:, :n_pos].to(held.device)
    was, now = (x[inside].double().flatten() for x in (held, exact[:, :n_pos]))
    return float(_relative_distance(was, now))
