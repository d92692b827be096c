"""The probabilities of an answer on the canvases of a denoising run, from runs that canvases may share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.causal_tracing.restored_runs import AnswerRuns
from diffusion_lens.analysis.causal_tracing.shared_canvases import CanvasRuns, StepCanvas
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.shapes import Tokens


@dataclass(frozen=True, eq=False)
class AnswerCanvas:
    """A canvas, and the answer that is read from it at the steps that show it to the network.

    Attributes:
        steps: Steps.
        canvas: The canvas; the rows that are read are those of open tokens.
        clean_answer: The answer as it is read in the clean run.
        answer: The answer as it is read in the corrupted run.
        open_tokens: Index in the answer of each token that some row still has to write. The others count 1 or 0,
            whatever the network says.
    """

    steps: list[int]
    canvas: StepCanvas
    clean_answer: Answer
    answer: Answer
    open_tokens: list[int]

    @classmethod
    def of(cls, run: TracedTrajectory, steps: list[int], free: Trajectory | None, n_rows: int) -> "AnswerCanvas":
        """The canvas of these steps.

        Args:
            free: The corrupted runs, if their canvases are read.
            n_rows: Number of samples.
        """
        clean = run.canvas(steps[0])[None]
        clean_answer, corrupted = run.reading(steps[0], clean), corrupted_canvases(run, steps[0], free, n_rows)
        read = [run.canvas(step)[None] for step in steps]
        read += [] if free is None else [corrupted_canvases(run, step, free, n_rows) for step in steps]
        open_tokens = run.settled(torch.cat(read)).isnan().any(dim=0).nonzero().flatten().tolist()
        rows = clean_answer.rows.tolist()
        return cls(
            steps=steps,
            canvas=StepCanvas(steps[0], clean, corrupted, [rows[token] for token in open_tokens]),
            clean_answer=clean_answer,
            answer=clean_answer if free is None else run.reading(steps[0], corrupted),
            open_tokens=open_tokens,
        )


@dataclass(frozen=True, eq=False)
class ScoredStep:
    """The probabilities of the answer's tokens at one step.

    Attributes:
        grid: Float[pos layer sample selected], those of every cell; NaN at positions that are not on the canvas.
        clean: Float[selected], those of the clean run.
        corrupted: Float[sample selected], those of the corrupted run.
    """

    grid: Float[Tensor, "pos layer sample selected"]
    clean: Float[Tensor, "selected"]
    corrupted: Float[Tensor, "sample selected"]


def scored_steps(
    run: TracedTrajectory,
    runs: CanvasRuns,
    canvases: Sequence[AnswerCanvas],
    positions: Sequence[int],
    free: Trajectory | None,
) -> dict[int, ScoredStep]:
    """The probabilities of the canvases at each of their steps.

    Args:
        canvases: The answer on each canvas of `runs`; further ones are not used.
        positions: Positions to restore.
        free: The corrupted runs, if their canvases are read.
    """
    # 1. Score the cells of all canvases.
    canvases = canvases[: len(runs.canvases)]
    on_canvas = {step: set(run.on_canvas(step)) for each in canvases for step in each.steps}
    reached = [[pos for pos in positions if any(pos in on_canvas[step] for step in each.steps)] for each in canvases]
    tokens = [(canvases[index], canvases[index].open_tokens[row]) for index, row in runs.read]
    answers = AnswerRuns(
        runs.restored,
        clean_answer=_joined([(each.clean_answer, token) for each, token in tokens]),
        answer=_joined([(each.answer, token) for each, token in tokens]),
    )
    cells = runs.cells(reached)
    scores = dict(zip(cells, answers.grid(cells), strict=True))

    # 2. Tokens already revealed count 1 or 0, at each step of a canvas.
    settled = {}
    for each, places, columns in zip(canvases, runs.places, runs.columns, strict=True):
        # The column of a token that is not open is never used.
        by_token = [0] * len(each.answer.tokens)
        for token, column in zip(each.open_tokens, columns, strict=True):
            by_token[token] = column
        clean_scores, corrupted_scores = answers.clean_scores[:, by_token], answers.corrupted_scores[:, by_token]
        absent = corrupted_scores.new_full((len(runs.restored.spans), *corrupted_scores.shape), torch.nan).cpu()
        for step in each.steps:
            clean = replace(each.clean_answer, settled=run.settled(run.canvas(step)[None]))
            rows = corrupted_canvases(run, step, free, answers.samples)
            answer = replace(each.answer, settled=run.settled(rows))
            grid = [
                answer.settle(scores[places[position]][..., by_token]) if position in on_canvas[step] else absent
                for position in positions
            ]
            settled[step] = ScoredStep(
                torch.stack(grid), clean.settle(clean_scores)[0].cpu(), answer.settle(corrupted_scores).cpu()
            )
    return settled


def corrupted_canvases(run: TracedTrajectory, step: int, free: Trajectory | None, n_rows: int) -> Tokens:
    """The canvases of the corrupted run before a step, one row per sample: those of `free`, or the clean run's."""
    if free is None:
        return run.canvas(step)[None].expand(n_rows, -1)
    return free.canvases[step - free.first_step]


def _joined(chosen: Sequence[tuple[Answer, int]]) -> Answer:
    """One answer of these tokens of several."""
    answer = chosen[0][0]
    if [token for _, token in chosen] == list(range(len(answer.tokens))) and all(each is answer for each, _ in chosen):
        return answer
    tokens = torch.stack([each.tokens[token] for each, token in chosen])
    return replace(
        answer,
        tokens=tokens,
        rows=torch.arange(len(chosen), device=tokens.device),
        head=replace(answer.head, present=_columns([(each.head.present, token) for each, token in chosen])),
        unconditional=_columns([(each.unconditional, token) for each, token in chosen]),
    )


def _columns(chosen: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """These columns of tensors [#sample selected ...], side by side; `None` if there are none."""
    columns = [tensor[:, column] for tensor, column in chosen if tensor is not None]
    return torch.stack(torch.broadcast_tensors(*columns), dim=1) if columns else None
