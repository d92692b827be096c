"""Metrics of a patching sweep: one number from the logits of some rows.

At a denoising step the logits are those of the step's own canvas. Of an answer, only the tokens that are still masked
are read. A token that has been revealed counts 1 if it is the answer's and 0 if it is another. A causal model reads the
answer where it has not been reached (`analysis.engine.trajectory`).

Under guidance every metric reads guided logits. States are patched in the conditional branch. The unconditional branch
sees no prompt, so it is the same for every cell.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.engine.answer import Answer
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory
from diffusion_lens.denoising.predictor import guide
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts.fact import Query
from diffusion_lens.model.noise import HeadAt
from diffusion_lens.model.transformer import DiffusionTransformer

Metric = Callable[[Tensor], Any]


@runtime_checkable
class RowMetric(Protocol):
    """A metric that states which rows of the logits it reads."""

    @property
    def rows(self) -> Int[Tensor, "selected"]: ...

    def __call__(self, logits: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class AnswerProbability:
    """The metric p(answer), mean over the batch.

    Attributes:
        query: Query whose answer is read.
        answer: Its tokens, and the rows of the logits that predict them.
        text: The answer in words.
        reads: How the model for which it was made reads logits (`how_logits_are_read`).
    """

    query: Query
    answer: Answer
    text: str
    reads: tuple[Any, ...]

    @classmethod
    def of(cls, model: DiffusionTransformer, query: Query) -> "AnswerProbability":
        """The metric of a query on a model, in the time of `Answer.of`."""
        text = "".join(model.words(query.answer_tokens))
        return cls(query, Answer.of(model, query), text, how_logits_are_read(model))

    @property
    def name(self) -> str:
        """The name in records."""
        return f"p({self.text!r})"

    @property
    def rows(self) -> Int[Tensor, "selected"]:
        """Rows of the logits that predict the answer."""
        return self.answer.rows

    def __call__(self, logits: Float[Tensor, "batch selected d_vocab_out"]) -> Float[Tensor, ""]:
        return self.answer.probabilities(logits, len(logits)).prod(dim=2).mean()

    def traced(self, model: DiffusionTransformer, trajectory: Trajectory) -> TracedTrajectory:
        """A trajectory from which the answer is read. Its prompt may differ from the query's."""
        given = trajectory.given[0].nonzero().flatten().tolist()
        if in_prompt := [position for position in self.query.answer_positions if position in given]:
            raise ValueError(
                f"the answer positions {in_prompt} are part of the trajectory's prompt, so the model does not predict "
                "them: denoise a prompt that ends before the answer"
            )
        return TracedTrajectory.of(model, replace(self.query, tokens=trajectory.prompt[0]), trajectory)


@dataclass(frozen=True, eq=False)
class AnswerProbabilities:
    """The metric p(answer) of a batch in which each row has a query of its own, mean over the rows."""

    of_rows: tuple[AnswerProbability, ...]

    @property
    def name(self) -> str:
        """The name in records."""
        texts = list(dict.fromkeys(each.name for each in self.of_rows))
        return texts[0] if len(texts) == 1 else "p(the answer of each row)"

    @property
    def rows(self) -> Int[Tensor, "selected"]:
        """Rows of the logits that predict some answer."""
        rows: Tensor = torch.cat([each.rows for each in self.of_rows]).unique()
        return rows

    def __call__(self, logits: Float[Tensor, "batch selected d_vocab_out"]) -> Float[Tensor, ""]:
        if len(logits) != len(self.of_rows):
            raise ValueError(
                f"{len(logits)} rows are patched, and the metric has {len(self.of_rows)} answers: one each"
            )
        own = [torch.searchsorted(self.rows, each.rows) for each in self.of_rows]
        by_row = [each(row[None, rows]) for each, row, rows in zip(self.of_rows, logits, own, strict=True)]
        mean: Tensor = torch.stack(by_row).mean()
        return mean


def how_logits_are_read(model: DiffusionTransformer) -> tuple[Any, ...]:
    """What decides which probability a row of logits gives: the row of a token, the head, the noise, and the tokens."""
    cfg = model.cfg
    return cfg.readout, cfg.head, str(cfg.noise), str(cfg.schedule), cfg.d_vocab_out, cfg.has_mask


def require_own_model(metric: Metric, model: DiffusionTransformer) -> None:
    """Raise a `ValueError` if the metric of an answer reads the logits of another kind of model."""
    of_rows = metric.of_rows if isinstance(metric, AnswerProbabilities) else (metric,)
    if any(isinstance(each, AnswerProbability) and each.reads != how_logits_are_read(model) for each in of_rows):
        raise ValueError(
            f"the metric was not made for {model.cfg.model_name!r}, whose corrupted run is patched, and reads other "
            "rows or another kind of logits: make it with answer_probability(model, query) of this model"
        )


def require_own_rows(
    metric: AnswerProbability | AnswerProbabilities, clean: Sequence[Query], corrupted: Sequence[Query]
) -> None:
    """Raise a `ValueError` if a row, clean and corrupted, has neither the canvas nor the answer that its metric has."""
    of_rows = metric.of_rows if isinstance(metric, AnswerProbabilities) else [metric] * len(clean)
    for i, (own, *pair) in enumerate(zip(of_rows, clean, corrupted, strict=False)):
        if not any(_share_canvas_or_answer(own.query, each) for each in pair):
            raise ValueError(
                f"row {i} has neither the canvas nor the answer of the metric's fact: give answer_probability the "
                "clean or the corrupted facts, in the order of the rows"
            )


def _share_canvas_or_answer(one: Query, other: Query) -> bool:
    answer = attrgetter("answer_positions", "answer_tokens")
    return torch.equal(one.tokens.cpu(), other.tokens.cpu()) or answer(one) == answer(other)


@dataclass(frozen=True)
class Reading:
    """A function from logits [batch selected d_vocab_out] to one number, and the rows that it reads; `None` for all."""

    function: Metric
    rows: list[int] | None

    @classmethod
    def of(cls, metric: Metric, logits_at: Sequence[int] | Tensor | None) -> "Reading":
        """A metric with its own rows, or with the rows in `logits_at`."""
        if isinstance(metric, RowMetric):
            if logits_at is not None:
                raise ValueError("the metric has its own rows: leave out logits_at=")
            logits_at = metric.rows
        rows = None if logits_at is None else torch.as_tensor(logits_at)
        if rows is not None and (rows.dim() != 1 or not rows.numel() or rows.dtype not in (torch.int64, torch.int32)):
            raise ValueError(f"logits_at is {rows.dtype} {list(rows.shape)}; it must be a list of rows")
        return cls(metric, None if rows is None else rows.tolist())

    def __call__(self, logits: Float[Tensor, "batch selected d_vocab_out"]) -> Tensor:
        value = self.function(logits)
        if not isinstance(value, Tensor | float | int) or torch.as_tensor(value).dim():
            returned = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"the metric returned {returned}; it must return one number, a scalar tensor, for one cell's logits "
                f"{list(logits.shape)}: take the mean over the batch, or select one entry"
            )
        return torch.as_tensor(value)

    @property
    def name(self) -> str:
        """Name of the metric, of its function, or of its class."""
        named = getattr(self.function, "name", None) or getattr(self.function, "__name__", None)
        return str(named or type(self.function).__name__)

    def within(self, n_pos: int) -> "Reading":
        """This reading with non-negative rows, for a network that reads beyond the `n_pos` positions of a canvas."""
        rows = list(range(n_pos)) if self.rows is None else self.rows
        if outside := [row for row in rows if not -n_pos <= row < n_pos]:
            raise ValueError(f"logits_at={outside}, but the canvas has rows 0 to {n_pos - 1}")
        return replace(self, rows=[row % n_pos for row in rows]) if rows else self

    def through(self, head: HeadAt) -> "Reading":
        """This metric applied to logits whose softmax is p(x_0), from the output of a head."""
        return Reading(lambda output: self.function(head.clean_logits(output)), self.rows)

    def guided(self, unconditional: Float[Tensor, "batch selected d_vocab_out"], scale: float) -> "Reading":
        """This metric applied to guided logits."""
        return Reading(lambda logits: self.function(guide(logits, unconditional, scale)), self.rows)


# The reading of a run whose rows have another meaning.
UNREAD = Reading(lambda logits: math.nan, [])
