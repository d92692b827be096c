"""The temporal indirect effect: does one state at one denoising step decide the final text?

Each sample of the corrupted run is denoised freely and usually loses the answer. A branch starts before step k. In this
step only, one state is restored to its value in the clean run at step k. Then the loop continues, corrupted, to its
end. The score is the share of samples whose final text contains the answer. The temporal indirect effect is that share
minus the share of the corrupted runs.

Only final tokens count here. A state without an effect may still change the probabilities of its step
(`trace_trajectory`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.causal_tracing.branches import Branches
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.restored_runs import RestoredRuns
from diffusion_lens.analysis.causal_tracing.restored_steps import BegunBranches, Replays, RestoredStep
from diffusion_lens.analysis.causal_tracing.shared_canvases import can_share_beginnings, run_canvases
from diffusion_lens.analysis.selection import Selection
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory, check_steps
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_network
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.display import Result, Table, shaped
from diffusion_lens.facts import Fact, Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields
from diffusion_lens.settings import Real, Whole


@dataclass(frozen=True, eq=False, repr=False)
class TemporalEffect(Result):
    """The effect of one state at one step on the final text.

    Columns of the data frame: step, pos, layer, token, score, indirect_effect.

    Attributes:
        scores: Float[step pos layer], share of samples that end with the answer when that state is restored at that
            step; NaN at positions that a causal model has not reached yet.
        token_scores: Float[step pos layer selected], share of samples that end with each token of the answer.
        clean: Value 1 if the clean run ends with the answer, else 0.
        corrupted: Share of the corrupted runs that end with the answer.
        steps: Step of each grid.
        positions: Position of each row of the grids.
        layers: Layer of each column of the grids.
        str_tokens: Text at each position of the clean run's final canvas.
        subject: First position of the subject and one past the last.
        record: Record of the same form as that of `TrajectoryTrace`.
    """

    scores: Float[Tensor, "step pos layer"]
    token_scores: Float[Tensor, "step pos layer selected"]
    clean: float
    corrupted: float
    steps: list[int]
    positions: list[int]
    layers: list[int]
    str_tokens: list[str]
    subject: tuple[int, int]
    record: dict[str, Any]

    @property
    def indirect_effect(self) -> Float[Tensor, "step pos layer"]:
        """Rise of the share when a state is restored: scores - corrupted."""
        return self.scores - self.corrupted

    def _table(self) -> Table:
        return Table.of_cells(
            {"step": self.steps, "pos": self.positions, "layer": self.layers},
            {
                "token": shaped([self.str_tokens[pos] for pos in self.positions], -1, 1),
                "score": self.scores,
                "indirect_effect": self.indirect_effect,
            },
            most="indirect_effect",
        )

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "temporal effect", self)

    @classmethod
    def load(cls, path: str | Path) -> "TemporalEffect":
        """Read what `save` wrote."""
        return load_fields(path, "temporal effect", cls)


@begins_run
def temporal_effect(
    model: DiffusionTransformer,
    fact_or_query: Fact | Query,
    steps: Iterable[Whole] | None = None,
    *,
    trajectory: Trajectory | None = None,
    kind: str | Restoration = "resid",
    window: Whole = 10,
    noise: Real | None = None,
    samples: Whole = 10,
    seed: Whole = 1,
    corruption: str | Corruption = "gaussian",
    swap: Query | Iterable[Whole] | None = None,
    positions: Iterable[Whole] | None = None,
    layers: Iterable[Whole] | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> TemporalEffect:
    """Restore each state at each step alone, and count the samples whose final text contains the answer.

    `restore_in_loop` takes the settings as objects: a `Restoration`, a `Corruption` and a `Selection`.

    Every sample of every cell is denoised from its step to the end: on a large model, select `steps`, `positions` and
    `layers`.

    Args:
        steps: Steps at which states are restored; by default all up to the one that reveals the answer's last token.
        trajectory: Clean run, as in `trace_trajectory`, written with the hooks, weights and modules that the model has
            now, because its final text is compared with the model's corrupted runs.

    The other arguments are those of `causal_trace`.

    Raises:
        ValueError: `trace_trajectory` would refuse an argument, or the trajectory was written by another checkpoint or
            with other hooks, weights or modules.

    Warns:
        UserWarning: The trajectory begins on a canvas that another network wrote (a free replay from a later step).
            The corrupted runs begin on it too, so the scores are those of this network alone.
    """
    return restore_in_loop(
        TracedTrajectory.of(model, fact_or_query, trajectory),
        steps,
        Restoration.of(kind, window),
        Corruption.of(corruption, noise, samples, seed, swap),
        Selection(positions, layers),
        max_bytes=max_bytes,
        progress=progress,
    )


@begins_run
@torch.no_grad()
def restore_in_loop(
    run: TracedTrajectory,
    steps: Iterable[Whole] | None,
    restoration: Restoration,
    corruption: Corruption,
    selection: Selection | None = None,
    *,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> TemporalEffect:
    """Restore states of one run at single steps, like `temporal_effect`, with settings given as objects.

    Args:
        run: Clean run and its query, `TracedTrajectory.of(model, query, trajectory)`.
        steps: Steps at which states are restored; `None` selects all up to the one that reveals the answer's last
            token.
        restoration: States that each cell restores; nothing may be severed.
        corruption: Corruption of the subject.
        selection: Positions and layers of the cells; by default all.
        max_bytes: Memory to use in addition to the weights.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The same as in `temporal_effect`.

    Warns:
        UserWarning: The same as in `temporal_effect`.
    """
    # 1. Check the settings, and denoise the corrupted runs.
    model = run.model
    if restoration.severed:
        raise ValueError("temporal_effect cannot sever outputs; give a Restoration with severed=None")
    require_same_network(run.trajectory.record, model, "temporal_effect")
    run.require_loop_memory(corruption, max_bytes)
    corrupted = run.corrupted(corruption)
    selected_steps = check_steps(run, range(corrupted.first_step, run.last_step + 1) if steps is None else steps)
    positions, layers = (selection or Selection()).within(run.n_pos, model.cfg.n_layers)

    # 2. At each step, restore every cell and denoise to the end.
    shape = len(selected_steps), len(positions), len(layers), corruption.rows, len(run.query.answer_tokens)
    grid = _Grid(run, restoration, corruption, positions, layers, max_bytes, torch.full(shape, torch.nan))
    with tqdm(total=len(selected_steps), desc="temporal effect", unit="step", disable=not progress) as bar:
        if model.is_hooked or model.loop_is_hooked:
            # Hooks may act by row of the batch and see every step, so each branch is a run of its own.
            grid.fill_by_replays(corrupted, selected_steps, bar)
        else:
            grid.fill(corrupted, selected_steps, bar)
    by_sample = grid.by_sample

    # 3. Average over the samples; a sample counts if it ends with all tokens of the answer.
    return TemporalEffect(
        scores=by_sample.prod(dim=4).mean(dim=3),
        token_scores=by_sample.mean(dim=3),
        clean=float(run.wrote_the_answer),
        corrupted=run.written(corrupted).all(dim=1).float().mean().item(),
        steps=selected_steps,
        positions=positions,
        layers=layers,
        str_tokens=model.words(run.trajectory.tokens[0].tolist()),
        subject=run.query.subject,
        record={
            **run.trajectory.record,
            **restoration.describe(),
            **corruption.describe(),
            "answer": model.words(run.query.answer_tokens),
            **provenance(model, model.cfg),
            "trajectory": canvas_provenance(run.trajectory.record),
        },
    )


@dataclass(frozen=True, eq=False)
class _Grid:
    """The cells of all steps.

    Attributes:
        run, restoration, corruption, positions, layers, max_bytes: The settings.
        by_sample: Float[step pos layer sample selected], filled by the methods: for each token of the answer, whether
            a sample ends with it.
    """

    run: TracedTrajectory
    restoration: Restoration
    corruption: Corruption
    positions: list[int]
    layers: list[int]
    max_bytes: int
    by_sample: Float[Tensor, "step pos layer sample selected"]

    def fill(self, corrupted: Trajectory, steps: Sequence[int], bar: Any) -> None:
        """Restore the states of all steps, then continue each distinct branch once."""
        run, branches = self.run, Branches(self.run, self.corruption, corrupted, self.max_bytes)
        numbers = torch.full(self.by_sample.shape[:4], -1)
        # A state that is restored in a step that reveals nothing changes nothing.
        revealing = [step for step in steps if corrupted.from_step(step).started(run.model).reveals_at(step)]
        for step in set(steps) - set(revealing):
            numbers[steps.index(step), self._on_canvas(step)] = torch.arange(len(corrupted))
            bar.update()
        restored_steps = [RestoredStep.of(run, corrupted, step) for step in revealing]
        shares = can_share_beginnings(run)
        bundles = [restored_steps] if shares and restored_steps else [[each] for each in restored_steps]
        # The logits of cells are completed by those of the corrupted runs, and guided.
        budget = self.max_bytes, run.proposal_bytes(copies=3)
        for bundle in bundles:
            canvases = [each.canvas for each in bundle]
            for runs in run_canvases(run, canvases, self.restoration, self.corruption, self.layers, budget):
                members = bundle[runs.first : runs.first + len(runs.canvases)]
                on_canvas = [self._on_canvas(each.step) for each in members]
                cells = runs.cells([[self.positions[i] for i in chosen] for chosen in on_canvas])
                begun = BegunBranches(branches, members, runs)
                of_cells = dict(zip(cells, runs.restored.grid(cells, begun.measure, begun.unchanged), strict=True))
                for i, (each, places, chosen) in enumerate(zip(members, runs.places, on_canvas, strict=True)):
                    for at in chosen:
                        of_cell = of_cells[places[self.positions[at]]][..., i]
                        numbers[steps.index(each.step), at] = of_cell.long()
                        bar.update(len(members))
                if run.model.cfg.grows:
                    branches.finish(runs.restored.corrupted)
                del runs, begun  # their activations are freed before the next runs
        branches.finish()
        reached = numbers >= 0
        texts = branches.texts(numbers[reached].tolist())[:, list(run.query.answer_positions)].cpu()
        self.by_sample[reached] = (texts == torch.tensor(run.query.answer_tokens)).float()

    def fill_by_replays(self, corrupted: Trajectory, steps: Sequence[int], bar: Any) -> None:
        """Denoise every branch of every cell, in whole copies of the samples."""
        run = self.run
        for i, step in enumerate(steps):
            on_canvas = self._on_canvas(step)
            replays = Replays(run, self.corruption, corrupted, step)
            restored = RestoredRuns(
                replays.pair(), self.restoration, self.layers, self.max_bytes, run.loop_row_bytes(copies=3)
            )
            chosen = [self.positions[index] for index in on_canvas]
            self.by_sample[i, on_canvas] = restored.grid(chosen, replays.endings, run.written(corrupted).float())
            bar.update()

    def _on_canvas(self, step: int) -> list[int]:
        """Indices of the positions that are on the canvas of a step."""
        reached = set(self.run.on_canvas(step))
        return [index for index, position in enumerate(self.positions) if position in reached]
