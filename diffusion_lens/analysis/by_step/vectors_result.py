"""The result of `difference_of_means`: steering vectors, and the hooks that add them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.denoising.cache import resolve_steps
from diffusion_lens.denoising.step_hooks import at_steps, by_step, while_masked, while_predicting
from diffusion_lens.display import PicturedResult, Table
from diffusion_lens.hook_names import Hook, nearest
from diffusion_lens.interventions import Indices, steer
from diffusion_lens.records import load_result, save_result
from diffusion_lens.settings import Whole, plain_number

_GROUPS = ("positive", "negative")


@dataclass(frozen=True, eq=False)
class SteeringVectors(PicturedResult):
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

    positive: dict[str, Tensor]
    negative: dict[str, Tensor]
    n_positive: Int[Tensor, "*step"]
    n_negative: Int[Tensor, "*step"]
    record: dict[str, Any]

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

    def cosine_between_steps(self, name: str) -> Float[Tensor, "step step"]:
        """Cosine of the vectors of one hook point at every pair of steps.

        Raises:
            ValueError: The vectors have no steps.
        """
        if self.steps is None:
            raise ValueError("these vectors have no steps; compute them from trajectories, model.denoise(...)")
        flat = self._flat(name)
        unit = flat / flat.norm(dim=-1, keepdim=True)
        cosines: Tensor = unit @ unit.mT
        return cosines

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

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        tensors = {f"{group}/{name}": x for group in _GROUPS for name, x in getattr(self, group).items()}
        counts = {"n_positive": self.n_positive, "n_negative": self.n_negative}
        return save_result(path, "steering vectors", {**tensors, **counts}, {"record": self.record})

    @classmethod
    def load(cls, path: str | Path) -> "SteeringVectors":
        """Read what `save` wrote."""
        tensors, saved = load_result(path, "steering vectors")
        means: dict[str, dict[str, Tensor]] = {
            group: {name: tensors[f"{group}/{name}"] for name in saved["record"]["names"]} for group in _GROUPS
        }
        return cls(**means, n_positive=tensors["n_positive"], n_negative=tensors["n_negative"], record=saved["record"])

    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The norm of each vector, by step or, without steps, by hook point; returns the matplotlib axes."""
        norms = torch.stack([self.norm[name] for name in self.names])
        labels = [short_name(name) for name in self.names]
        title = title or "Difference of means"
        if self.steps is None:
            return plots.labelled_lines(norms[None], ["norm"], labels, "hook point", "norm", title, ax)
        steps = [str(step) for step in self.steps]
        return plots.labelled_lines(norms, labels, steps, "denoising step", "norm", title, ax)

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
        """Float[*step d], the vectors of one hook point as rows."""
        return self[name].flatten(self.n_positive.dim())

    def _rows(self, steps: Whole | Iterable[Whole] | None) -> Mapping[int, int]:
        """The row of each selected step."""
        assert self.steps is not None
        row_of = {step: row for row, step in enumerate(self.steps)}
        if steps is None:
            return row_of
        selected = sorted(resolve_steps(steps, self.record["n_steps"]))
        if missing := [step for step in selected if step not in row_of]:
            raise ValueError(f"there are no vectors of the steps {missing}; there are those of {list(self.steps)}")
        return {step: row_of[step] for step in selected}

    def _require_means(self, name: str, steps: list[int], vectors: Tensor) -> None:
        """Raise a `ValueError` if a vector is not finite."""
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


def short_name(name: str) -> str:
    """The name of a hook point as a label: "blocks.3.hook_resid_post" is "3 resid_post"."""
    return name.removeprefix("blocks.").replace(".", " ").replace("hook_", "")
