"""The logits of a step in which a state was restored, and the branches that continue from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.causal_tracing.branches import Branches
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restored_runs import RunPair
from diffusion_lens.analysis.causal_tracing.shared_canvases import CanvasRuns, StepCanvas
from diffusion_lens.analysis.kept_run import NetworkInput
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory
from diffusion_lens.denoising.predictor import guide
from diffusion_lens.denoising.step_hooks import on_branch
from diffusion_lens.denoising.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class RestoredStep:
    """A step of the corrupted runs in which states are restored.

    Attributes:
        step: Index of the step.
        canvas: Its canvases, and the rows that predict the positions.
        positions: Positions at which the loop may propose a token.
        scale: Weight of guidance; 0 without.
        unconditional: Float[sample selected d_vocab_out], logits of the unconditional branch of guidance.
    """

    step: int
    canvas: StepCanvas
    positions: list[int]
    scale: float
    unconditional: Float[Tensor, "sample selected d_vocab_out"] | None

    @classmethod
    def of(cls, run: TracedTrajectory, corrupted: Trajectory, step: int) -> "RestoredStep":
        """A step of these corrupted runs."""
        canvases = corrupted.canvases[step - corrupted.first_step]
        positions = run.state(step, canvases).masked.any(dim=0).nonzero().flatten().tolist()
        # On a causal canvas the loop proposes a token for the next position only.
        positions = positions[:1] if run.model.cfg.grows else positions
        rows, scale = run.rows(step, canvases, positions), run.trajectory.record["cfg_scale"]
        canvas = StepCanvas(step, run.canvas(step)[None], canvases, rows)
        return cls(step, canvas, positions, scale, run.unconditional(step, canvases, rows) if scale else None)

    def guided(
        self, logits: Float[Tensor, "batch selected d_vocab_out"]
    ) -> Float[Tensor, "batch selected d_vocab_out"]:
        """The logits after guidance, of copies of all samples."""
        if self.unconditional is None:
            return logits
        conditional = logits.unflatten(0, (-1, len(self.unconditional)))
        return guide(conditional, self.unconditional.expand_as(conditional), self.scale).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class BegunBranches:
    """The branches of cells whose steps share runs, each by its number in `Branches`.

    Attributes:
        branches: All branches.
        steps: The steps.
        runs: Their runs.
    """

    branches: Branches
    steps: Sequence[RestoredStep]
    runs: CanvasRuns

    @property
    def unchanged(self) -> Float[Tensor, "sample step"]:
        """The numbers without a restored state, those of the corrupted runs."""
        samples = torch.arange(self.runs.restored.samples, dtype=torch.float64)
        return samples[:, None].repeat(1, len(self.steps))

    def measure(
        self, logits: Float[Tensor, "batch selected d_vocab_out"], computed: Int[Tensor, "selected"]
    ) -> Float[Tensor, "cell sample step"]:
        """For each cell, sample and step, the number of the branch that begins with these logits."""
        n_samples, corrupted = self.runs.restored.samples, self.runs.restored.corrupted.logits
        numbers = self.unchanged.repeat(len(logits) // n_samples, 1, 1)
        index = {column: i for i, column in enumerate(computed.tolist())}
        for i, (step, columns) in enumerate(zip(self.steps, self.runs.columns, strict=True)):
            changed = [at for at, column in enumerate(columns) if column in index]
            if not changed:
                continue
            of_step = corrupted[:, list(columns)].repeat(len(numbers), 1, 1)
            of_step[:, changed] = logits[:, [index[columns[at]] for at in changed]]
            begun = self.branches.begin(step.step, step.guided(of_step), step.positions)
            numbers[:, :, i] = torch.tensor(begun, dtype=numbers.dtype).view(-1, n_samples)
        return numbers


class Replays:
    """The corrupted denoising runs before one step. Branches start there, with one state restored in that step.

    The step itself is a restored pass on the branch's own canvases, so it is computed from the restored layer on. The
    loop takes its logits, guided if the run is, and continues with the later steps.
    """

    def __init__(self, run: TracedTrajectory, corruption: Corruption, corrupted: Trajectory, step: int) -> None:
        self.run, self.corruption, self.before = run, corruption, corrupted.from_step(step)
        self.restored = RestoredStep.of(run, corrupted, step)

    def pair(self) -> RunPair:
        """The inputs of the clean and the corrupted run at the step."""
        run, model, canvas = self.run, self.run.model, self.restored.canvas
        return RunPair(
            clean=NetworkInput(model, run.seen(canvas.clean), canvas.rows, step=run.state(canvas.step, canvas.clean)),
            corrupted=NetworkInput(
                model,
                model.cfg.readable(canvas.corrupted),
                canvas.rows,
                step=run.state(canvas.step, canvas.corrupted),
                hooks=self.corruption.hooks(model, run.query),
            ),
            subject=run.query.subject,
        )

    def endings(
        self, logits: Float[Tensor, "batch selected d_vocab_out"], computed: Int[Tensor, "selected"]
    ) -> Float[Tensor, "cell sample answer"]:
        """For each answer token, 1 if the branch whose step has these logits ends with it, else 0."""
        samples, model, query = self.corruption.rows, self.run.model, self.run.query
        n_cells = len(logits) // samples
        hooks = [
            (name, on_branch(hook, "conditional")) for name, hook in self.corruption.hooks(model, query, runs=n_cells)
        ]
        before, positions = self.before.repeat(n_cells), self.restored.positions
        finished = before.replay_from_logits(model, self.restored.guided(logits), positions, hooks)
        return self.run.written(finished).view(n_cells, samples, -1).float()
