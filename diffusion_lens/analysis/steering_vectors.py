"""Steering vectors as differences of means, one for each denoising step, and the positions whose states are read.

The vector of a hook point is the mean activation over positive inputs minus the mean over negative ones (contrastive
activation addition, Rimsky et al. 2024, arXiv 2312.06681; difference in means, Marks and Tegmark 2023, arXiv
2310.06824):

    v = 1/|P| Σ_P h - 1/|N| Σ_N h

P and N are the selected positions of all rows of a group, and every position counts the same. Over trajectories, there
is a vector v_t for each step t, from the states at that step. The difference of one group's means at two steps,
`positive[name][s] - positive[name][t]`, steers from step t towards step s (Rulli et al. 2026, arXiv 2607.01774). Only
sums are kept, not activations.

Positions are selected by name or number, here and in `probes`:

    all         every position that contains a token or [MASK]
    masked      positions that contain [MASK]; under uniform noise those that the step may write
    unmasked    positions that contain a token
    predicting  rows whose logits predict a [MASK]; where the text grows, the row that predicts the next token
    answer      rows whose logits predict the tokens of an answer, for queries and facts
    indices     tokens of a row by number, without padding; negative numbers count from the row's last token, on a
                growing text from the last one that has been reached

Only "predicting", "answer" and negative indices mean the same on a diffusion model and on its AR baseline, whose text
has no masked positions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, SupportsFloat

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.engine.inputs import ForwardPass, Inputs, Readable, passes_of, readable_points
from diffusion_lens.denoising.cache import resolve_steps
from diffusion_lens.hooks.names import Hook, NamesFilter, nearest
from diffusion_lens.interventions import Indices, at_steps, by_step, steer, while_masked, while_predicting
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance
from diffusion_lens.records.schema import require_indices
from diffusion_lens.settings import Whole, at_least, plain_number, whole_numbers
from diffusion_lens.settings.figures import styled

_GROUPS = ("positive", "negative")
_MOST_COMPONENTS = 12  # of a single vector that are drawn
NAMED = ("all", "masked", "unmasked", "predicting", "answer")
Positions = str | Whole | Sequence[Whole]


@dataclass(frozen=True, eq=False)
class SteeringVectors(PicturedResult, Saved):
    """Differences of means at some hook points, by denoising step where the inputs were trajectories.

    `vectors[name]` is Float[*step ...], where "..." are the axes of the hook point after its positions, such as
    d_model. A step at which a group has no selected position is NaN.

    Columns of the data frame: step (of trajectories), point, norm, n_positive, n_negative.

    Attributes:
        positive, negative: Mean activation of each group, by hook point, with the same axes.
        n_positive, n_negative: Int[*step], number of positions of each mean.
        record: Hook points, positions, steps, number of steps of the runs, inputs, model, hash of the weights, hooks,
            versions.
    """

    KIND = "steering vectors"
    SHOWS = "the differences between the mean activations of two groups"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"steps": list[int] | None, "n_steps": int | None}
    AXES = (("*step", "steps"),)

    positive: dict[str, Tensor]
    negative: dict[str, Tensor]
    n_positive: Int[Tensor, "*step"]
    n_negative: Int[Tensor, "*step"]
    record: dict[str, Any]

    def _check(self) -> None:
        shapes = [{name: mean.shape for name, mean in group.items()} for group in (self.positive, self.negative)]
        if shapes[0] != shapes[1] or any(
            shape[: self.n_positive.dim()] != self.n_positive.shape for shape in shapes[0].values()
        ):
            raise ValueError("the means of both groups need the same hook points, axes and steps")
        if self.steps is not None:
            require_indices("steps", self.steps, self.record["n_steps"])

    @property
    def names(self) -> tuple[str, ...]:
        """The hook points."""
        return tuple(self.positive)

    @property
    def steps(self) -> tuple[int, ...] | None:
        """The step of each vector; `None` for one vector without a step."""
        return None if self.record["steps"] is None else tuple(self.record["steps"])

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.positive:
            raise KeyError(f"there is no vector of {name!r}; nearest are: {nearest(name, self.names)}")
        return self.positive[name] - self.negative[name]

    @property
    def norm(self) -> dict[str, Float[Tensor, "*step"]]:
        """Euclidean norm of each vector, by hook point."""
        return {name: self._flat(name).norm(dim=-1) for name in self.names}

    def cosine(self, other: "SteeringVectors") -> dict[str, Float[Tensor, "*step"]]:
        """Cosine of each vector with the vector of the same hook point and step in another result.

        A result without steps is compared with every step of the other. Only hook points of both are compared.

        Raises:
            ValueError: The results have no hook point in common, or different steps.
        """
        common = [name for name in self.names if name in other.positive]
        if not common:
            raise ValueError(f"the vectors have no hook point in common: {self.names} and {other.names}")
        if self.steps is not None and other.steps is not None:
            runs = [(result.steps, result.record["n_steps"]) for result in (self, other)]
            if runs[0] != runs[1]:
                raise ValueError(
                    f"the vectors are of steps {list(self.steps)} of {runs[0][1]} and {list(other.steps)} of "
                    f"{runs[1][1]}; compare vectors of the same steps"
                )
        return {name: torch.cosine_similarity(self._flat(name), other._flat(name), dim=-1) for name in common}

    def hooks(
        self,
        scale: SupportsFloat = 1.0,
        steps: Whole | Iterable[Whole] | None = None,
        positions: Indices | str = None,
        names: str | Iterable[str] | None = None,
    ) -> list[tuple[str, Hook]]:
        """Hooks that add the vectors, for `run_with_hooks`, `denoise`, `replay` and `model.hooks`.

        Vectors by step add at each step the vector of this step, and act in the loop only, in runs of as many steps as
        the vectors were computed from. A vector without steps acts in every forward pass, or with `steps` at these
        steps of the loop. Under guidance both branches are steered; `on_branch` restricts a hook to one.

        Args:
            scale: Factor of the vectors.
            steps: Steps at which to steer, negative ones from the end; by default all that the vectors have.
            positions: Positions as in `interventions.steer`, "masked" (`while_masked`), or "predicting", the rows whose
                logits predict a [MASK] or, on a growing text, the next token (`while_predicting`); by default all.
            names: Hook points; by default all that have a vector.

        Raises:
            KeyError: There is no vector of a hook point.
            ValueError: A step without a vector, or at which a group had no selected position.
        """
        factor = plain_number("scale", scale)
        chosen = self.names if names is None else (names,) if isinstance(names, str) else tuple(names)
        if isinstance(positions, str) and positions not in ("masked", "predicting"):
            raise ValueError(
                f"positions={positions!r}; it must be 'masked', 'predicting', indices, a slice, or None for all"
            )
        selected: Any = None if isinstance(positions, str) else positions
        hooks = []
        for name in chosen:
            vector = self[name]
            if self.steps is None:
                self._require_means(name, [], vector)
                hook_fn = steer(vector, factor, selected)
                hook_fn = hook_fn if steps is None else at_steps(hook_fn, steps)
            else:
                rows = self._rows(steps)
                self._require_means(name, list(rows), vector[list(rows.values())])
                of_steps = {step: steer(vector[row], factor, selected) for step, row in rows.items()}
                hook_fn = by_step(of_steps, self.record["n_steps"])
            if positions == "predicting":
                hook_fn = while_predicting(hook_fn, self.record["readout"])
            hooks.append((name, while_masked(hook_fn) if positions == "masked" else hook_fn))
        return hooks

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The norm of each vector, by step or, without steps, by hook point; of a single vector the components in which
        the groups differ most, with the mean of each group. Returns the matplotlib axes."""
        norms = torch.stack([self.norm[name] for name in self.names])
        labels = [short_name(name) for name in self.names]
        if norms.numel() == 1:
            return self._components(ax, title or f"Difference of means at {labels[0]} (norm {float(norms):.3g})")
        title = title or "Difference of means"
        if self.steps is None:
            return plots.labelled_lines(norms[None], ["norm"], labels, "hook point", "norm", title, ax)
        steps = [str(step) for step in self.steps]
        return plots.labelled_lines(norms, labels, steps, "denoising step", "norm", title, ax)

    def _shows(self) -> str:
        if sum(norm.numel() for norm in self.norm.values()) == 1:
            return f"the {_MOST_COMPONENTS} components in which the mean activations of two groups differ most"
        along = "hook point" if self.steps is None else "denoising step"
        return f"the norm of the difference between the mean activations of two groups, by {along}"

    def _components(self, ax: Any, title: str) -> Any:
        """The largest components of the only vector, the largest at the top."""
        (name,) = self.names
        of_groups = [group[name].reshape(-1).float() for group in (self.positive, self.negative)]
        difference = of_groups[0] - of_groups[1]
        largest = difference.abs().argsort(descending=True, stable=True)[:_MOST_COMPONENTS]
        values = {"positive": of_groups[0][largest], "negative": of_groups[1][largest]}
        return plots.paired_bars(values, [f"component {i}" for i in largest.tolist()], "mean activation", ax, title)

    def _table(self) -> Table:
        steps = {} if self.steps is None else {"step": self.steps}
        values = {
            "norm": torch.stack([self.norm[name] for name in self.names], dim=-1),
            "n_positive": self.n_positive[..., None],
            "n_negative": self.n_negative[..., None],
        }
        return Table.of_cells({**steps, "point": self.names}, values)

    def __repr__(self) -> str:
        steps = "" if self.steps is None else f", {len(self.steps)} steps of {self.record['n_steps']}"
        return f"SteeringVectors({len(self.names)} hook points{steps}, positions {self.record['positions']!r})"

    def _flat(self, name: str) -> Tensor:
        return self[name].flatten(self.n_positive.dim())

    def _rows(self, steps: Whole | Iterable[Whole] | None) -> Mapping[int, int]:
        assert self.steps is not None
        row_of = {step: row for row, step in enumerate(self.steps)}
        if steps is None:
            return row_of
        selected = sorted(resolve_steps(steps, self.record["n_steps"]))
        if missing := [step for step in selected if step not in row_of]:
            raise ValueError(f"there are no vectors of the steps {missing}; there are those of {list(self.steps)}")
        return {step: row_of[step] for step in selected}

    def _require_means(self, name: str, steps: list[int], vectors: Tensor) -> None:
        finite = vectors.reshape(max(1, len(steps)), -1).isfinite().all(dim=1)
        if bool(finite.all()):
            return
        if not steps:
            raise ValueError(f"the vector of {name!r} is not finite: the activations of a group contain inf or NaN")
        empty = [step for step, ok in zip(steps, finite.tolist(), strict=True) if not ok]
        rest = [step for step, ok in zip(steps, finite.tolist(), strict=True) if ok]
        raise ValueError(
            f"there is no vector of {name!r} at the steps {empty}, where a group has no selected position "
            f"(positions={self.record['positions']!r}) or an activation is not finite: give steps={rest}"
        )


@begins_run
@torch.no_grad()
def difference_of_means(
    model: DiffusionTransformer,
    positive: Readable,
    negative: Readable,
    names_filter: NamesFilter,
    *,
    positions: Positions = "all",
    steps: Whole | Iterable[Whole] | None = None,
    batch_size: Whole = 16,
    attention_mask: tuple[Tensor | None, Tensor | None] = (None, None),
    progress: bool = False,
) -> SteeringVectors:
    """The mean activation of positive inputs minus that of negative inputs, at each hook point and step.

    The caller's hooks inside the network act while the states are read. Without hooks, steps with the same canvas share
    a forward pass; a causal model takes a single one. Under guidance the states are those of the conditional branch.

    Args:
        model: Model of either variant.
        positive, negative: The two groups: a list of trajectories, or a trajectory of several rows, for vectors by
            step; texts, queries, facts or Int[batch pos] tokens for one vector. The numbers of rows may differ.
        names_filter: Hook points [batch pos ...]: a name, names or a predicate.
        positions: Positions that are averaged, as in the table above (`steering_vectors`).
        steps: Steps of the trajectories, negative ones from the end; by default all.
        batch_size: Number of texts or queries in a pass.
        attention_mask: Of positive and of negative tokens, [batch pos], 1 at real tokens, 0 at padding.
        progress: Whether to show a progress bar.

    Raises:
        KeyError: There is no such hook point.
        ValueError: A hook point without positions, inputs of two kinds or of different steps, or a group in which no
            position is selected.
    """
    chosen, size = check_positions(positions), at_least(1, "batch_size", batch_size)
    names = readable_points(model, names_filter)
    given = zip(_GROUPS, (positive, negative), attention_mask, strict=True)
    groups = {name: Inputs.of(model, each, attention_mask=mask, batch_size=size) for name, each, mask in given}
    n_steps = {name: group.n_steps for name, group in groups.items()}
    if len(set(n_steps.values())) > 1:
        raise ValueError(f"both groups need the same kind of input and number of steps; the steps are {n_steps}")
    picked = groups["positive"].pick_steps(steps)
    groups["negative"].pick_steps(picked)
    indices = None if picked is None else sorted(picked)

    means, counts = {}, {}
    for name, group in groups.items():
        sums = _Sums(names, 1 if indices is None else len(indices))
        passes = passes_of(group, indices)
        for one in tqdm(passes, desc=f"means of the {name} inputs", unit="pass", disable=not progress):
            one.read.run(sums.hooks({i: one.on_read(select(canvas, chosen)) for i, canvas in one.served.items()}))
        if not any(sums.counts):
            raise nothing_selected(model, positions, f"{name} inputs")
        means[name], counts[name] = sums.means(by_step=indices is not None)
    record = {
        "names": names,
        "positions": chosen,
        "steps": indices,
        "n_steps": n_steps["positive"],
        "readout": model.cfg.readout,
        "inputs": {name: group.describe() for name, group in groups.items()},
        **provenance(model, model.cfg),
    }
    return SteeringVectors(means["positive"], means["negative"], counts["positive"], counts["negative"], record)


def check_positions(positions: Positions) -> str | list[int]:
    """A name, or indices as plain numbers.

    Raises:
        ValueError: An unknown name, no index, or the same index twice.
        TypeError: An index is not a whole number.
    """
    if isinstance(positions, str):
        if positions not in NAMED:
            raise ValueError(
                f"positions={positions!r}, nearest is {nearest(positions, NAMED, 1)!r}; it must be one of "
                f"{', '.join(map(repr, NAMED))}, or indices"
            )
        return positions
    numbers = whole_numbers("positions", positions)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"positions={numbers}; give at least one index, and each once")
    return numbers


def select(read: ForwardPass, positions: str | list[int]) -> PosMask:
    """Bool[batch pos], the selected positions of a pass.

    Raises:
        ValueError: An index outside a row, or "answer" for inputs without answers.
    """
    if isinstance(positions, str):
        if positions == "unmasked":
            return read.present & ~read.masked
        of_name = {"all": "present", "masked": "masked", "predicting": "predicting", "answer": "answer_rows"}
        selected: Tensor = getattr(read, of_name[positions])
        return selected
    present = read.present
    shortest = int(read.real.sum(dim=1).min())
    if outside := [index for index in positions if not -shortest <= index < shortest]:
        raise ValueError(f"positions={outside} are outside the shortest row, which has {shortest} tokens")
    number, n_present = present.cumsum(dim=1) - 1, present.sum(dim=1, keepdim=True)
    chosen = torch.zeros_like(present)
    for index in positions:
        chosen |= number == (index if index >= 0 else n_present + index)
    return chosen & present


def nothing_selected(model: DiffusionTransformer, positions: Positions, where: str) -> ValueError:
    """The error for positions that none of the inputs has."""
    reason = "" if model.cfg.has_mask else f", because {model.cfg.model_name!r} has no [MASK]"
    return ValueError(
        f"positions={positions!r} selects no position of the {where}{reason if positions == 'masked' else ''}: "
        "'predicting' selects the rows that predict the next tokens on every model, 'all' every token"
    )


def short_name(name: str) -> str:
    """The name of a hook point as a label: "blocks.3.hook_resid_post" is "3 resid_post"."""
    return name.removeprefix("blocks.").replace(".", " ").replace("hook_", "")


class _Sums:
    """Sums of activations over selected positions, by hook point and step; `n` is the number of steps."""

    def __init__(self, names: Sequence[str], n: int) -> None:
        self.names = names
        self.counts = [0] * n
        self._sums: list[dict[str, Tensor]] = [{} for _ in range(n)]

    def hooks(self, selected: Mapping[int, PosMask]) -> list[tuple[str, Hook]]:
        """Hooks of a pass that add the positions that are selected at each of its steps."""
        for index, of_step in selected.items():
            self.counts[index] += int(of_step.sum())

        def add(activation: Tensor, hook: Any) -> None:
            wide = torch.promote_types(activation.dtype, torch.float32)
            for index, of_step in selected.items():
                sums = self._sums[index]
                total = activation[of_step.to(activation.device)].to(wide).sum(dim=0).double().cpu()
                sums[hook.name] = sums[hook.name] + total if hook.name in sums else total

        return [(name, add) for name in self.names]

    def means(self, by_step: bool) -> tuple[dict[str, Tensor], Tensor]:
        """The mean at each hook point and the numbers of positions, with an axis of steps if there are any; NaN where
        nothing was selected."""
        means = {}
        for name in self.names:
            each = [sums[name] / count for sums, count in zip(self._sums, self.counts, strict=True)]
            means[name] = torch.stack(each).float() if by_step else each[0].float()
        return means, torch.tensor(self.counts if by_step else self.counts[0])
