"""Directions of the residual stream: how far the states of a run lie along one, and weights that never write it.

With d the direction of length 1, the projection of a state x is x · d. `projection` computes it at each hook point,
step and position; the products are taken in hooks, so that no state is kept.

A direction is removed from a model either by a hook wherever a part writes to the stream,
`interventions.ablate_direction`, or once and for all in the weights (Arditi et al. 2024, arXiv 2406.11717, section 4).
`orthogonalize` is an edit of every matrix that writes,

    W' = W - d dᵀ W,        b' = b - d dᵀ b,

the embedding, learned positions, output projections of attention and down-projections of MLPs and experts. Both give
the same logits where the stream is the sum of what the parts write. `writes_to_stream` selects the hook points:

    model.run_with_hooks(tokens, fwd_hooks=[(writes_to_stream, ablate_direction(d))])
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.engine.inputs import Inputs, Readable, passes_of, readable_points, sha256_of
from diffusion_lens.analysis.steering_vectors import short_name
from diffusion_lens.denoising.cache import activation_shape
from diffusion_lens.hooks.names import NamesFilter, resid_post, resid_pre
from diffusion_lens.interventions import unit_vector
from diffusion_lens.model.inputs import require_sum
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.model.weights import Edit
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance
from diffusion_lens.records.schema import require_indices
from diffusion_lens.settings import Whole, checked_arguments, whole_number
from diffusion_lens.settings.figures import styled

_TABLES = ("embed.weight", "pos_embed.weight")  # with a row for each vector that they write
_WRITERS = (".attn.o.weight", ".attn.o.bias", ".down.weight", ".down.bias")  # of a block, its experts included


@checked_arguments
def writes_to_stream(name: str) -> bool:
    """Whether a hook point is where a part of the network writes to the residual stream."""
    return name in ("hook_embed", "hook_pos_embed") or name.endswith(
        (".hook_attn_out", ".hook_mlp_out", ".hook_shared_out")
    )


@dataclass(frozen=True, eq=False)
class Projection(PicturedResult, Saved):
    """The projection of states on a direction, by step (of trajectories), hook point, row and position.

    Columns of the data frame: step (of trajectories), point, batch, pos, masked, projection; padding and positions that
    a text has not reached are left out.

    Attributes:
        values: Float[*step point batch pos], x · d with d of length 1, in the units of the activation; NaN at padding
            and at positions that a text has not reached.
        masked: Bool[*step batch pos], positions that contain [MASK]; under uniform noise those that the step may write.
        direction: Float[d], the direction of length 1.
        record: Hook points, steps, number of steps of the runs, inputs, model, hash of the weights, hooks, versions.
    """

    KIND = "projection"
    SHOWS = "the projection of states on a direction, by hook point"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"names": list[str], "steps": list[int] | None, "n_steps": int | None}
    AXES = (("*step", "steps"), ("point", "names"))

    values: Float[Tensor, "*step point batch pos"]
    masked: Bool[Tensor, "*step batch pos"]
    direction: Float[Tensor, "d"]
    record: dict[str, Any]

    def _check(self) -> None:
        if self.steps is not None:
            require_indices("steps", self.steps, self.record["n_steps"])

    @property
    def names(self) -> tuple[str, ...]:
        """The hook points."""
        return tuple(self.record["names"])

    @property
    def steps(self) -> tuple[int, ...] | None:
        """The step of each entry of `step`; `None` (and no such axis) if the inputs were no trajectories."""
        return None if self.record["steps"] is None else tuple(self.record["steps"])

    def mean(self, masked: bool | None = None) -> Float[Tensor, "*step point"]:
        """The mean over rows and positions: all, those that are masked, or the others; NaN of none."""
        if masked is None:
            return self.values.nanmean(dim=(-2, -1))
        chosen = (self.masked == masked).unsqueeze(-3).expand_as(self.values)
        return self.values.masked_fill(~chosen, torch.nan).nanmean(dim=(-2, -1))

    @styled
    def plot(self, row: Whole | None = None, point: str | None = None, ax: Any = None, title: str | None = None) -> Any:
        """Draw the mean over all positions, by hook point and step; returns the matplotlib axes.

        Args:
            row: Row of the batch, to draw each of its positions instead of the mean.
            point: Hook point of this picture; by default the last one. Used with `row` and steps.

        Raises:
            ValueError: There is no such row or hook point.
        """
        labels = [short_name(name) for name in self.names]
        if row is None:
            values = self.mean()
            if self.steps is None:
                return plots.labelled_lines(
                    values[None], ["mean"], labels, "hook point", "projection", title or "Projection", ax
                )
            return self._map(values.mT, labels, title or "Mean projection", ax)
        number, n_rows = whole_number("row", row), self.values.shape[-2]
        if not -n_rows <= number < n_rows:
            raise ValueError(f"row={number}; there are {n_rows} rows")
        if (chosen := point or self.names[-1]) not in self.names:
            raise ValueError(f"point={chosen!r}; the hook points are {', '.join(self.names)}")
        positions = [f"position {pos}" for pos in range(self.values.shape[-1])]
        if self.steps is None:
            values = self.values[:, number]
            return plots.labelled_lines(values, labels, positions, "", "projection", title or f"Row {number}", ax)
        values = self.values[:, self.names.index(chosen), number]
        return self._map(values.mT, positions, title or f"Projection at {chosen}", ax)

    def _map(self, values: Float[Tensor, "entry step"], rows: list[str], title: str, ax: Any) -> Any:
        known = values[values.isfinite()]
        highest = float(known.abs().max()) if len(known) else 1.0
        return plots.labelled_map(
            values,
            rows=rows,
            layers=self.steps or (),
            xlabel="denoising step",
            hue="RdBu_r",
            limits=(-highest, highest),
            bar="projection",
            title=title,
            ax=ax,
        )

    def _table(self) -> Table:
        steps = {} if self.steps is None else {"step": self.steps}
        n_rows, n_pos = self.values.shape[-2:]
        axes = {**steps, "point": self.names, "batch": range(n_rows), "pos": range(n_pos)}
        masked = self.masked.unsqueeze(-3).expand_as(self.values)
        table = Table.of_cells(axes, {"masked": masked, "projection": self.values}, most="projection")
        return table.where(self.values.flatten().isfinite())

    def __repr__(self) -> str:
        steps = "" if self.steps is None else f", {len(self.steps)} steps of {self.record['n_steps']}"
        rows, positions = self.values.shape[-2:]
        return f"Projection({len(self.names)} hook points{steps}, {rows} rows of {positions} positions)"


@begins_run
@torch.no_grad()
def projection(
    model: DiffusionTransformer,
    inputs: Readable,
    direction: Float[Tensor, "d"],
    names_filter: NamesFilter = None,
    *,
    steps: Whole | Iterable[Whole] | None = None,
    attention_mask: Tensor | None = None,
    max_bytes: int = 2**31,
) -> Projection:
    """The projection of states on a direction, at each hook point, row and position, and each step of trajectories.

    The caller's hooks inside the network act while the states are read. Without hooks, steps with the same canvas share
    a forward pass; a causal model takes a single one. Under guidance the states are those of the conditional branch.

    Args:
        model: Model that reads the states.
        inputs: Trajectories, or texts, queries, facts or Int[batch pos] tokens, which have no step.
        direction: Vector along the last axis of the hook points, such as a steering vector; its length does not matter.
        names_filter: Hook points [batch pos d]: a name, names or a predicate; by default the residual stream before
            the first block and after every block.
        steps: Steps of the trajectories, negative ones from the end; by default all.
        attention_mask: [batch pos], 1 at real tokens, 0 at the padding of tokens.
        max_bytes: Most memory for the result.

    Raises:
        KeyError: There is no such hook point.
        ValueError: A direction of another size or without length, a hook point with another last axis, inputs of two
            kinds or of different steps, or a result that is larger than the budget.
    """
    unit, blocks = unit_vector(direction).cpu(), range(model.cfg.n_layers)
    names = readable_points(model, [resid_pre(0), *map(resid_post, blocks)] if names_filter is None else names_filter)
    for name in names:
        if (widths := list(activation_shape(name, model.cfg, 1, 1)[2:])) != [len(unit)]:
            raise ValueError(f"the direction has {len(unit)} entries, and a state at {name!r} is {widths}")
    given = Inputs.of(model, inputs, attention_mask=attention_mask)
    picked = given.pick_steps(steps)
    canvases = [run.tokens for run in given.trajectories] or [read.tokens for read in given.rows]
    first_rows = [sum(len(tokens) for tokens in canvases[:index]) for index in range(len(canvases))]
    n_rows, n_pos = sum(map(len, canvases)), max(tokens.shape[1] for tokens in canvases)
    shape = (1 if picked is None else len(picked), len(names), n_rows, n_pos)
    if (needed := 4 * torch.Size(shape).numel()) > max_bytes:
        raise ValueError(
            f"the projections of {len(names)} hook points on {shape[0]} canvases of {n_rows} rows take {needed:,} "
            f"bytes, but max_bytes is {max_bytes:,}: give fewer hook points (names_filter), steps or rows, or a larger "
            "max_bytes"
        )
    values = torch.full(shape, torch.nan)
    masked = torch.zeros(shape[0], n_rows, n_pos, dtype=torch.bool)
    for one in passes_of(given, picked):
        first = first_rows[one.run]

        def project(activation: Tensor, hook: Any, first: int = first, one: Any = one) -> None:
            wide = activation.to(torch.promote_types(activation.dtype, torch.float32))
            along = (wide @ unit.to(wide.device, wide.dtype)).cpu().float()
            for index, canvas in one.served.items():
                inside = one.on_read(canvas.present).cpu()
                place = values[index, names.index(hook.name), first : first + len(along), : along.shape[1]]
                place[inside] = along[inside]

        one.read.run([(name, project) for name in names])
        for index, canvas in one.served.items():
            rows, width = canvas.tokens.shape
            masked[index, first : first + rows, :width] = canvas.masked.cpu()
    record = {
        "names": names,
        "steps": picked,
        "n_steps": given.n_steps,
        "inputs": given.describe(),
        **provenance(model, model.cfg),
    }
    by_step = slice(None) if picked is not None else 0
    return Projection(values[by_step], masked[by_step], unit, record)


class Orthogonalization(Edit):
    """An edit that removes a direction from every weight that writes to the stream, applied and taken off like every
    `Edit`: `with orthogonalize(model, direction): ...`. Both versions of these weights are in the CPU's memory."""

    def __init__(self, model: DiffusionTransformer, direction: Float[Tensor, "d_model"]) -> None:
        self.model = model
        self.direction = unit_vector(direction).cpu()

    @property
    def layers(self) -> list[int]:
        return list(range(self.model.cfg.n_layers))

    @property
    def weights(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if name in _TABLES or name.endswith(_WRITERS)]

    def update_of(self, name: str) -> Tensor:
        weight = self.weight_named(name).detach().cpu().double()
        rows = weight if name in _TABLES else weight.T if weight.dim() == 2 else weight[None]
        along = self.direction.double()
        update = -torch.outer(rows @ along / along.square().sum(), along)
        return update if name in _TABLES else update.T if weight.dim() == 2 else update[0]

    def describe(self) -> dict[str, Any]:
        """The hash of the direction that the edit removes."""
        return {"orthogonal_to": sha256_of([self.direction])}


@checked_arguments
def orthogonalize(model: DiffusionTransformer, direction: Float[Tensor, "d_model"]) -> Orthogonalization:
    """The edit after which no part of the model writes along a direction (Arditi et al. 2024, arXiv 2406.11717).

    `with orthogonalize(model, d): ...` or `orthogonalize(model, d).apply()`; then `model.export_hf(folder)` and
    `model.save_pretrained(folder)` write the edited model.

    Args:
        model: Model whose weights are edited.
        direction: Direction of the residual stream; its length does not matter.

    Raises:
        ValueError: The direction has another size or no length; something follows what the parts write, a gate of the
            time, a norm or a factor; or the embedding is also the head, which reads the stream.
    """
    cfg = model.cfg
    if len(direction) != cfg.d_model:
        raise ValueError(
            f"the direction has {len(direction)} entries, and the stream of {cfg.model_name!r} {cfg.d_model}"
        )
    require_sum(cfg, "orthogonal weights keep a direction out of a stream that is the sum of what they write")
    if cfg.time_conditioning:
        raise ValueError(
            f"each part of {cfg.model_name!r} writes through a gate that depends on the time, so no one weight keeps a "
            "direction out of the stream: hook it, fwd_hooks=[(writes_to_stream, ablate_direction(direction))]"
        )
    if cfg.tied:
        raise ValueError(
            f"the embedding of {cfg.model_name!r} is also its head, which reads the stream and would change too: edit "
            "a copy in which they are two matrices, HookedDiffusionTransformer(DiffusionConfig.from_architecture("
            "dataclasses.replace(model.cfg.architecture, tied=False)), model.tokenizer, "
            "tensors=model.state_dict().items())"
        )
    return Orthogonalization(model, direction)
