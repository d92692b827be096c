"""What a sweep measures: a number from the logits of some rows, at a step those of the step's own canvas.

A step's canvas poses a question of its own. Of an answer only the tokens still open are read; those already revealed
count 1 where they are the answer's, 0 where not; a causal model is shown the answer where it has not been reached
(`analysis.traced_trajectory`). Under guidance every metric reads guided logits. States are patched in the conditional
branch; the other sees no prompt, and is the same for every cell.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory
from diffusion_lens.denoising.predictor import guide
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Query
from diffusion_lens.model.transformer import DiffusionTransformer

Metric = Callable[[Tensor], Any]


@runtime_checkable
class RowMetric(Protocol):
    """A metric that says itself which rows of the logits it reads."""

    @property
    def rows(self) -> Int[Tensor, "selected"]: ...

    def __call__(self, logits: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class AnswerProbability:
    """The metric p(answer), mean over the batch.

    Attributes:
        query: whose answer, and where it stands.
        answer: the rows where it is read, and how its probability follows from their logits.
    """

    query: Query
    answer: Answer

    @property
    def rows(self) -> Int[Tensor, "selected"]:
        """Rows of the logits."""
        return self.answer.rows

    def __call__(self, logits: Float[Tensor, "batch selected d_vocab_out"]) -> Float[Tensor, ""]:
        return self.answer.probabilities(logits, len(logits)).prod(dim=2).mean()

    def asked_of(self, model: DiffusionTransformer, trajectory: Trajectory) -> TracedTrajectory:
        """A run that the answer is asked of; its prompt may be another than the query's.

        Raises:
            ValueError: a trajectory of another model, of several rows, padded, or without open places for the answer.
        """
        given = trajectory.given[0].nonzero().flatten().tolist()
        if held := [place for place in self.query.answer_positions if place in given]:
            raise ValueError(f"the trajectory's prompt holds the answer's places {held}: there is nothing to ask")
        prompt = trajectory.tokens[0].masked_fill(~trajectory.given[0], trajectory.record["blank"])
        return TracedTrajectory.of(model, replace(self.query, tokens=prompt), trajectory)


@dataclass(frozen=True)
class Reading:
    """What is measured: a function of the logits, and the rows that it is shown (`None`: all)."""

    function: Metric
    rows: list[int] | None

    @classmethod
    def of(cls, metric: Metric, logits_at: Sequence[int] | Tensor | None) -> "Reading":
        """The metric with its own rows, or with those given."""
        if isinstance(metric, RowMetric):
            if logits_at is not None:
                raise ValueError("the metric brings its own rows, so logits_at= must be left out")
            logits_at = metric.rows
        rows = None if logits_at is None else torch.as_tensor(logits_at)
        if rows is not None and (rows.dim() != 1 or not rows.numel() or rows.dtype not in (torch.int64, torch.int32)):
            raise ValueError(f"logits_at is {rows.dtype} {list(rows.shape)}; it must be a list of rows")
        return cls(metric, None if rows is None else rows.tolist())

    def __call__(self, logits: Float[Tensor, "batch selected d_vocab_out"]) -> Tensor:
        value = self.function(logits)
        if not isinstance(value, Tensor | float | int) or torch.as_tensor(value).dim():
            given = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"the metric returned {given}; it must return one number, a scalar tensor, for one cell's logits "
                f"{list(logits.shape)}: take the mean over the batch, or pick an entry"
            )
        return torch.as_tensor(value)

    def within(self, n_pos: int) -> "Reading":
        """The same rows where the network is shown more than the `n_pos` places that they are counted in."""
        rows = list(range(n_pos)) if self.rows is None else self.rows
        if outside := [row for row in rows if not -n_pos <= row < n_pos]:
            raise ValueError(f"logits_at={outside}, but the canvas has rows 0 to {n_pos - 1}")
        return replace(self, rows=[row % n_pos for row in rows]) if rows else self

    def guided(self, unconditional: Float[Tensor, "batch selected d_vocab_out"], scale: float) -> "Reading":
        """The same function of guided logits."""
        return Reading(lambda logits: self.function(guide(logits, unconditional, scale)), self.rows)


# Of a run whose rows mean something else.
UNREAD = Reading(lambda logits: math.nan, [])
