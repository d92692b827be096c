"""Commitment: when does a run make up its mind?

A position is committed at the first step from which the likeliest token is the one that is finally written, at every
later step that still predicts it. Between this step and the one that writes it, the network knew the token and did not
say it: the lead. An answer is settled at a step if all of its tokens that are still masked have their final token as
the likeliest. Li et al. 2025, Diffusion Language Models Know the Answer Before Decoding (arXiv 2508.19982), find that
answers are often settled after half of the steps.

Their decoding, Prophet, stops as soon as the answer is clear, and writes the likeliest token at every masked position.
It is clear if the gap between the two largest logits, which is log p(first) - log p(second), is on average over the
answer at least a threshold τ, which falls with the progress (step + 1) / n_steps:

    below 0.33    7.5            from 0.33 to below 0.67    5.0            from 0.67 on    2.5

`Commitment.early_commit` says at which step a run would have stopped, and whether its text would have been the same.
The gap is that of the masked positions of the answer. The authors' code (`generate_earlyexit.py` of pixeli99/Prophet)
also counts positions that are written, of which nothing is predicted here, and [MASK] among the two tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.beliefs.runs import Answer, Read, Runs, answer_of, stacked, title_of
from diffusion_lens.denoising.predictions import NOTHING, Predictions
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.records.results import PicturedResult, Saved, Table, shown_model, texts_of
from diffusion_lens.settings import Real, checked_arguments, not_negative, one_of
from diffusion_lens.settings.figures import styled

PROPHET = (7.5, 5.0, 2.5)
_PHASES = (0.33, 0.67)


class EarlyCommit(NamedTuple):
    """Where a run would have stopped by Prophet's criterion.

    Attributes:
        step: Int[batch], the step that would have been the last; -1 where the criterion is never met.
        same_text: Bool[batch], whether the text would have been the same; true where the run does not stop early.
        same_answer: Bool[batch], the same of the answer.
    """

    step: Int[Tensor, "batch"]
    same_text: Bool[Tensor, "batch"]
    same_answer: Bool[Tensor, "batch"]


@dataclass(frozen=True, eq=False)
class Commitment(PicturedResult, Saved):
    """The step at which each position, and the answer of each row, is committed.

    Columns of the data frame: batch, pos, token, first_at, committed_at, revealed_at, lead, flips, stability; a row for
    each position that was predicted.

    Attributes:
        committed_at: Int[batch pos], the first step from which the likeliest token is the written one; -1 where the
            last prediction is another token, and where nothing was predicted.
        first_at: Int[batch pos], the first step at which the likeliest token is the written one; -1 if there is none.
        revealed_at: Int[batch pos], the step that wrote the token, as in `Trajectory`.
        flips: Int[batch pos], how often the likeliest token changed from one prediction to the next.
        stability: Float[batch pos], the share of the predictions after `first_at` that agree with the written token; 1
            if there are none, NaN without a first one.
        predicted: Bool[batch pos], the positions that were predicted at any step.
        written: Int[batch pos], the final canvas; -1 beyond the end of a row.
        settled: Bool[step batch], whether the text would be the same if all likeliest tokens were written at this step.
            A token that is written at this step, and is masked again later, counts as another one.
        answer_settled: Bool[step batch], the same of the answer.
        gap: Float[step batch], mean of log p(first) - log p(second) over the masked positions of the answer, in nats;
            NaN if there are none, or one token was recorded.
        remaining_entropy: Float[step batch], sum of the entropies of all predictions of a step, in nats.
        n_steps: Int[batch], number of steps of the run of each row.
        steps: Index of each step.
        words: Text of every id that occurs.
        record: Number of runs, positions of the answer, and the network that wrote the runs.
    """

    KIND = "commitment"
    SHOWS = (
        "by denoising step the share of positions that are committed and written, and of rows whose answer is committed"
    )
    AXES = (("step", "steps"),)

    committed_at: Int[Tensor, "batch pos"]
    first_at: Int[Tensor, "batch pos"]
    revealed_at: Int[Tensor, "batch pos"]
    flips: Int[Tensor, "batch pos"]
    stability: Float[Tensor, "batch pos"]
    predicted: Bool[Tensor, "batch pos"]
    written: Tokens
    settled: Bool[Tensor, "step batch"]
    answer_settled: Bool[Tensor, "step batch"]
    gap: Float[Tensor, "step batch"]
    remaining_entropy: Float[Tensor, "step batch"]
    n_steps: Int[Tensor, "batch"]
    steps: list[int]
    words: dict[int, str]
    record: dict[str, Any]

    def _check(self) -> None:
        if unknown := set(self.written[self.predicted].tolist()) - self.words.keys():
            raise ValueError(f"words lacks the token {min(unknown)}")

    @property
    def lead(self) -> Float[Tensor, "batch pos"]:
        """Number of steps between the commitment of a position and the step that wrote it: 0 where the token was
        written before, as by chance under uniform noise, and NaN where one of the two is missing."""
        known = (self.committed_at >= 0) & (self.revealed_at >= 0)
        return torch.where(known, (self.revealed_at - self.committed_at).clamp(min=0).float(), torch.nan)

    @property
    def answer_first_at(self) -> Int[Tensor, "batch"]:
        """The first step at which the answer of each row is settled; -1 if there is none."""
        return self._step_of(self.answer_settled)

    @property
    def answer_committed_at(self) -> Int[Tensor, "batch"]:
        """The first step from which the answer of each row is settled at every step; -1 if there is none."""
        return self._step_of(self.answer_settled.flip(0).cumprod(dim=0).flip(0).bool())

    def early_commit(self, thresholds: Sequence[Real] = PROPHET) -> EarlyCommit:
        """Where Prophet would have stopped, and whether it would have written the same.

        Args:
            thresholds: τ in nats in the first, second and last third of the steps.

        Raises:
            ValueError: There are not three thresholds, or the runs recorded no probabilities of two tokens.
        """
        if len(thresholds) != len(PROPHET):
            raise ValueError(f"thresholds={list(thresholds)}; give three, of the first, second and last third")
        levels = torch.tensor([not_negative("thresholds", each) for each in thresholds])
        if bool(self.gap.isnan().all()):
            raise ValueError("the gap needs the probabilities of two tokens: denoise with predictions=2 or more")
        progress = (torch.tensor(self.steps, dtype=torch.float64)[:, None] + 1) / self.n_steps
        limit = levels[torch.bucketize(progress, torch.tensor(_PHASES, dtype=torch.float64), right=True)]
        clear = self.gap >= limit  # never where it is NaN
        stops, place = clear.any(dim=0), clear.int().argmax(dim=0)[None]
        same = [(~stops | each.gather(0, place)[0]) for each in (self.settled, self.answer_settled)]
        return EarlyCommit(self._step_of(clear), *same)

    @styled
    def plot(self, show: str = "commitment", ax: Any = None, title: str | None = None) -> Any:
        """Curves by step; returns the matplotlib axes.

        Args:
            show: "commitment", the shares of positions that are committed and written, and of rows whose answer is
                committed; or "entropy", the remaining entropy, mean over rows.
        """
        one_of("commitment", "entropy")("show", show)
        if show == "entropy":
            values, labels = self.remaining_entropy.nanmean(dim=1)[None], ["remaining entropy"]
            ylabel, said = "nats", "entropy that remains"
        else:
            steps = torch.tensor(self.steps)[:, None]
            written = (self.revealed_at <= steps[..., None]) & (self.revealed_at >= 0)
            committed = (self.committed_at <= steps[..., None]) & (self.committed_at >= 0)
            answers = (self.answer_committed_at <= steps) & (self.answer_committed_at >= 0)
            shares = [each[:, self.predicted].float().mean(dim=1) for each in (committed, written)]
            values, labels = torch.stack([*shares, answers.float().mean(dim=1)]), ["committed", "written", "answers"]
            ylabel, said = "share", "when it makes up its mind"
        columns = list(map(str, self.steps))
        return plots.labelled_lines(
            values, labels, columns, "denoising step", ylabel, title or title_of(self.record, said), ax
        )

    def _step_of(self, true: Bool[Tensor, "step batch"]) -> Int[Tensor, "batch"]:
        """The first step at which this is true in each row; -1 if there is none."""
        return torch.where(true.any(dim=0), torch.tensor(self.steps)[true.int().argmax(dim=0)], NOTHING)

    def _table(self) -> Table:
        axes = {"batch": range(len(self.written)), "pos": range(self.written.shape[1])}
        names = ("first_at", "committed_at", "revealed_at", "lead", "flips", "stability")
        values = {name: getattr(self, name) for name in names}
        return Table.of_cells(axes, {"token": texts_of(self.written, self.words), **values}).where(self.predicted)

    def __repr__(self) -> str:
        lead = float(self.lead.nanmedian())
        size = f"{len(self.written)} rows, {int(self.predicted.sum())} positions"
        return f"Commitment({shown_model(self.record)}, {size}, median lead {lead:g} steps)"


@checked_arguments
def commitment(runs: Runs, *, answer: Answer | None = None) -> Commitment:
    """The step from which each position of runs, and the answer of each row, is what will be written.

    Args:
        runs: A trajectory with predictions, its `predictions`, or several, such as those of `Predictions.stream`, which
            are read one after the other.
        answer: Positions of the answer in every row, or Bool[batch pos] with the rows of all runs one after the other;
            by default all positions that were predicted.

    Raises:
        ValueError: A run has no predictions or no predicted tokens, two were written by different networks, or a
            position of the answer was given.
    """
    read, parts, by_step = Read(runs), list[dict[str, Tensor]](), list[tuple[list[int], dict[str, Tensor]]]()
    n_steps: list[Tensor] = []
    for predictions in read:
        answers = answer_of(answer, predictions, read.n_rows)
        parts.append(_by_position(predictions))
        own = predictions.n_steps
        n_steps.append(torch.full((len(predictions),), predictions.steps[-1] + 1) if own is None else own)
        by_step.append((predictions.steps, _by_step(predictions, answers)))
    if isinstance(answer, Tensor) and answer.dtype == torch.bool:
        read.require_rows("answer", answer)
    fills: dict[str, Any] = {"predicted": False, "flips": 0, "stability": torch.nan}
    tables = {name: stacked([part[name] for part in parts], fills.get(name, NOTHING)) for name in parts[0]}
    steps = sorted({step for own, _ in by_step for step in own})
    ended = {"settled": True, "answer_settled": True, "gap": torch.nan, "remaining_entropy": 0.0}
    return Commitment(
        **tables,
        **{
            name: torch.cat([_on(steps, own, each[name], value) for own, each in by_step], dim=1)
            for name, value in ended.items()
        },
        n_steps=torch.cat(n_steps),
        steps=steps,
        words=read.words,
        record=read.record(),
    )


def _by_position(predictions: Predictions) -> dict[str, Tensor]:
    """What is known of each position of a run."""
    masked, likeliest, steps = predictions.masked, predictions.likeliest, torch.tensor(predictions.steps)
    agrees = masked & (likeliest == predictions.written)
    places = torch.arange(len(steps))[:, None, None]
    last_wrong = torch.where(masked & ~agrees, places, -1).amax(dim=0)
    first = torch.where(agrees, places, len(steps)).amin(dim=0)
    committed = torch.where(agrees & (places > last_wrong), places, len(steps)).amin(dim=0)
    after = masked & (places > first)
    n_after = after.sum(dim=0)
    stability = torch.where(n_after > 0, (agrees & after).sum(dim=0) / n_after, 1.0)
    flips, before = torch.zeros_like(first), torch.full_like(first, NOTHING)
    for now, open_now in zip(likeliest, masked, strict=True):
        flips += open_now & (before != NOTHING) & (now != before)
        before = torch.where(open_now, now, before)
    with_none = torch.cat([steps, torch.tensor([NOTHING])])
    return {
        "committed_at": with_none[committed],
        "first_at": with_none[first],
        "revealed_at": predictions.revealed_at,
        "flips": flips,
        "stability": stability.masked_fill(first == len(steps), torch.nan),
        "predicted": masked.any(dim=0),
        "written": predictions.written,
    }


def _by_step(predictions: Predictions, answer: Bool[Tensor, "batch pos"]) -> dict[str, Tensor]:
    """What is known of each step of a run."""
    masked = predictions.masked
    other = masked & (predictions.likeliest != predictions.written)
    # What a position without prediction contains at a step is known unless a later step predicts it.
    later = masked.flip(0).cumsum(dim=0).flip(0) > 0
    other |= ~masked & later
    gap = torch.full(masked.shape[:2], torch.nan)
    if predictions.top_k > 1:
        p = predictions.probabilities.float()
        gaps = (p[..., 0].log() - p[..., 1].log()).where(masked & answer, 0.0)
        gap = gaps.sum(dim=2) / (masked & answer).sum(dim=2)
    return {
        "settled": ~other.any(dim=2),
        "answer_settled": ~(other & answer).any(dim=2),
        "gap": gap,
        "remaining_entropy": predictions.remaining_entropy,
    }


def _on(steps: list[int], own: list[int], table: Tensor, ended: Any) -> Tensor:
    """A table by step on the steps of all runs: nothing is known before its own, and `ended` holds after them."""
    whole = table.new_full((len(steps), table.shape[1]), torch.nan if table.is_floating_point() else False)
    whole[[step > own[-1] for step in steps]] = ended
    whole[[steps.index(step) for step in own]] = table
    return whole
