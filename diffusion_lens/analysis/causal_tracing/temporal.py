"""The temporal indirect effect: does one state at one denoising step decide the final text?

Each sample of the corrupted run is denoised freely and usually loses the answer. A branch starts before step k. In this
step only, one state is restored to its value in the clean run at step k. Then the loop continues, corrupted, to its
end. The score is the share of samples whose final text contains the answer. The temporal indirect effect is that share
minus the share of the corrupted runs.

Only final tokens count here. A state without an effect may still change the probabilities of its step
(`trace_trajectory`).

After the restored step a branch is a corrupted run like any other: what it writes depends on its canvas, its sample of
the noise and the step. Most branches become the corrupted run itself or another branch, so they are compared after
every step, and the loop goes on with the distinct ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.causal_tracing.trace import RestoredRuns, TraceSettings, share_of_total
from diffusion_lens.analysis.causal_tracing.trajectory import (
    CanvasRuns,
    StepCanvas,
    conditional_hooks,
    corrupted_run,
    record_of_run,
    require_loop_memory,
    run_canvases,
    run_together,
)
from diffusion_lens.analysis.engine.answer import guided_copies
from diffusion_lens.analysis.engine.batching import in_batches, rows_at_once
from diffusion_lens.analysis.engine.kept_run import KeptRun, Measure, NetworkInput, keys_and_values
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory, check_steps
from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.loop import LoopRows, Run, run_loop
from diffusion_lens.denoising.predictor import Cached, Conditional, Predictor, guide
from diffusion_lens.denoising.same_network import require_same_network
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.hooks.step import StepState
from diffusion_lens.model.attention import LayerKeyValues
from diffusion_lens.model.hook_points import hooked_modules
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, shaped, shown_model
from diffusion_lens.records.schema import require_indices
from diffusion_lens.settings import Whole, pick_indices, takes, whole_number
from diffusion_lens.settings.figures import styled


@dataclass(frozen=True, eq=False, repr=False)
class TemporalEffect(PicturedResult, Saved):
    """The effect of one state at one step on the final text.

    Columns of the data frame: step, pos, layer, token, score, indirect_effect.

    Attributes:
        scores: Float[step pos layer], share of samples that end with the answer when that state is restored at that
            step; NaN at positions that a causal model has not reached yet.
        token_scores: Float[step pos layer selected], share of samples that end with each token of the answer.
        clean: Value 1 if the clean run ends with the answer, else 0.
        corrupted: Share of the corrupted runs that end with the answer.
        str_tokens: Text at each position of the clean run's final canvas.
        steps, positions, layers, subject, record: Those of `TrajectoryTrace`.
    """

    KIND = "temporal effect"
    SHOWS = (
        "the share of runs that end with the answer when one state is restored at one denoising step, by position "
        "and layer"
    )
    AXES = (("step", "steps"), ("pos", "positions"), ("layer", "layers"))

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

    def _check(self) -> None:
        require_indices("positions", self.positions, len(self.str_tokens))

    @property
    def indirect_effect(self) -> Float[Tensor, "step pos layer"]:
        """Rise of the share when a state is restored: scores - corrupted."""
        return self.scores - self.corrupted

    @property
    def normalized_effect(self) -> Float[Tensor, "step pos layer"]:
        """Share of the total effect, clean - corrupted, that a state restored at one step recovers; NaN where that is
        below 0.01."""
        return share_of_total(self.indirect_effect, torch.tensor(self.clean - self.corrupted))

    @styled
    def plot(self, step: Whole | None = None, ax: Any = None, title: str | None = None) -> Any:
        """The heat map of one step, on a colour scale that all steps share; returns the matplotlib axes.

        Args:
            step: One of the steps; by default that at which a restored state has the largest effect.
        """
        if step is None:
            index = int(self.indirect_effect.nan_to_num().flatten(1).amax(dim=1).argmax())
        else:
            index = self.steps.index(whole_number("step", step)) if step in self.steps else -1
        if index < 0:
            raise ValueError(f"step={step} is not one of the steps {self.steps}")
        return plots.heat_map(
            self.scores[index],
            str_tokens=self.str_tokens,
            subject=self.subject,
            positions=self.positions,
            layers=self.layers,
            kind=self.record["kind"],
            answer=self.record["answer"],
            limits=(self.corrupted, float(self.scores.nan_to_num().max())),
            title=title or f"{shown_model(self.record)}: share with the answer, restored at step {self.steps[index]}",
            ax=ax,
        )

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


@takes(TraceSettings)
@begins_run
@torch.no_grad()
def temporal_effect(
    model: DiffusionTransformer,
    fact_or_query: Fact | Query,
    steps: Iterable[Whole] | None = None,
    *,
    trajectory: Trajectory | None = None,
    settings: TraceSettings,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> TemporalEffect:
    """Restore each state at each step alone, and count the samples whose final text contains the answer.

    Every sample of every cell is denoised from its step to the end: on a large model, select `steps`, `positions` and
    `layers`.

    Args:
        model, fact_or_query, max_bytes, progress: The same as in `causal_trace`.
        steps: Steps at which states are restored; by default all up to the one that reveals the answer's last token.
        trajectory: Clean run, as in `trace_trajectory`, written with the hooks, weights and modules that the model has
            now, because its final text is compared with the model's corrupted runs.
        settings: What is corrupted and restored. Severed outputs keep their corrupted values in the step in which the
            state is restored.

    Raises:
        ValueError: `trace_trajectory` would refuse an argument, or the trajectory was written by another checkpoint or
            with other hooks, weights or modules.

    Warns:
        UserWarning: The trajectory begins on a canvas that another network wrote (a free replay from a later step).
            The corrupted runs begin on it too, so the scores are those of this network alone.
    """
    # 1. Check the settings, and denoise the corrupted runs.
    run = TracedTrajectory.of(model, fact_or_query, trajectory)
    settings = settings.with_noise(model, [run.query])
    require_same_network(run.trajectory.record, model, "temporal_effect")
    require_loop_memory(run, settings, max_bytes)
    corrupted = corrupted_run(run, settings)
    selected_steps = check_steps(run, range(corrupted.first_step, run.last_step + 1) if steps is None else steps)
    sampler = corrupted.started(model).sampler
    if lacking := [step for step in selected_steps if corrupted.from_step(step).lacks_confidence(sampler)]:
        raise ValueError(
            f"no run can branch off at the steps {lacking}: the sampler {sampler.name!r} reads the confidence of the "
            "canvas's tokens, which is not recorded of those that were masked again or replaced later. Give "
            f"steps={[step for step in selected_steps if step not in lacking]}, or a trajectory of another sampler"
        )
    positions = pick_indices("positions", settings.positions, run.n_pos)
    layers = pick_indices("layers", settings.layers, model.cfg.n_layers)

    # 2. At each step, restore every cell and denoise to the end.
    shape = len(selected_steps), len(positions), len(layers), settings.rows, len(run.query.answer_tokens)
    grid = _Grid(run, settings, positions, layers, max_bytes, torch.full(shape, torch.nan))
    with tqdm(total=len(selected_steps), desc="temporal effect", unit="step", disable=not progress) as bar:
        if hooked_modules(model):
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
        record=record_of_run(run, settings, positions, layers),
    )


@dataclass(frozen=True, eq=False)
class _Grid:
    """The cells of all steps; the methods fill in whether each sample ends with each token of the answer."""

    run: TracedTrajectory
    settings: TraceSettings
    positions: list[int]
    layers: list[int]
    max_bytes: int
    by_sample: Float[Tensor, "step pos layer sample selected"]

    def fill(self, corrupted: Trajectory, steps: Sequence[int], bar: Any) -> None:
        """Restore the states of all steps, then continue each distinct branch once."""
        run, branches = self.run, Branches(self.run, self.settings, corrupted, self.max_bytes)
        numbers = torch.full(self.by_sample.shape[:4], -1)
        # A state that is restored in a step that reveals nothing changes nothing.
        revealing = [step for step in steps if corrupted.from_step(step).started(run.model).reveals_at(step)]
        for step in set(steps) - set(revealing):
            numbers[steps.index(step), self._on_canvas(step)] = torch.arange(len(corrupted))
            bar.update()
        restored_steps = [RestoredStep.of(run, corrupted, step) for step in revealing]
        # The logits of cells are completed by those of the corrupted runs, and guided.
        budget = self.max_bytes, run.proposal_bytes(copies=3)
        for together in run_together(run, restored_steps):
            for runs in run_canvases(run, together, self.settings, self.layers, budget):
                on_canvas = [self._on_canvas(each.step) for each in runs.members]
                cells = runs.cells([[self.positions[i] for i in chosen] for chosen in on_canvas])
                unchanged = torch.arange(len(corrupted), dtype=torch.float64)[:, None].repeat(1, len(runs.members))
                begin = begin_branches(branches, runs, unchanged)
                of_cells = dict(zip(cells, runs.restored.grid(cells, begin, unchanged), strict=True))
                for i, (each, places, chosen) in enumerate(zip(runs.members, runs.places, on_canvas, strict=True)):
                    for at in chosen:
                        of_cell = of_cells[places[self.positions[at]]][..., i]
                        numbers[steps.index(each.step), at] = of_cell.long()
                        bar.update(len(runs.members))
                if run.model.cfg.is_autoregressive:
                    branches.finish(runs.restored.corrupted)
                del runs, begin  # their activations are freed before the next runs
        branches.finish()
        reached = numbers >= 0
        texts = branches.texts(numbers[reached].tolist())[:, list(run.query.answer_positions)].cpu()
        self.by_sample[reached] = (texts == torch.tensor(run.query.answer_tokens)).float()

    def fill_by_replays(self, corrupted: Trajectory, steps: Sequence[int], bar: Any) -> None:
        """Denoise every branch of every cell, in whole copies of the samples.

        The restored step itself is a pass on the branch's own canvases, so it is computed from the restored layer on.
        The loop takes its logits, guided if the run is, and continues with the later steps.
        """
        run, model, settings = self.run, self.run.model, self.settings
        written = run.written(corrupted).float()
        for i, step in enumerate(steps):
            on_canvas = self._on_canvas(step)
            restored, before = RestoredStep.of(run, corrupted, step), corrupted.from_step(step)
            canvas, hooks = restored.canvas, settings.hooks(model, run.query)
            clean, noisy = (run.state(step, tokens) for tokens in (canvas.clean, canvas.corrupted))
            runs = RestoredRuns(
                NetworkInput(model, run.seen(canvas.clean), canvas.rows, step=clean),
                NetworkInput(model, model.cfg.readable(canvas.corrupted), canvas.rows, step=noisy, hooks=hooks),
                run.query.subject,
                settings,
                self.layers,
                self.max_bytes,
                run.loop_row_bytes(copies=3),
            )
            chosen = [self.positions[index] for index in on_canvas]
            self.by_sample[i, on_canvas] = runs.grid(chosen, partial(self._endings, restored, before), written)
            bar.update()

    def _endings(
        self,
        restored: "RestoredStep",
        before: Trajectory,
        logits: Float[Tensor, "batch selected d_vocab_out"],
        computed: Int[Tensor, "selected"],
    ) -> Float[Tensor, "cell sample answer"]:
        """For each answer token, 1 if the branch whose step has these logits ends with it, else 0."""
        n_cells = len(logits) // self.settings.rows
        hooks, guided = conditional_hooks(self.settings, self.run, n_cells), restored.guided(logits)
        finished = before.repeat(n_cells).replay_from_logits(self.run.model, guided, restored.positions, hooks)
        return self.run.written(finished).view(n_cells, self.settings.rows, -1).float()

    def _on_canvas(self, step: int) -> list[int]:
        """Indices of the positions that are on the canvas of a step."""
        reached = set(self.run.on_canvas(step))
        return [index for index, position in enumerate(self.positions) if position in reached]


class Branches:
    """Branches of the corrupted runs, by number; the numbers of the corrupted runs are those of their samples."""

    def __init__(self, run: TracedTrajectory, settings: TraceSettings, corrupted: Trajectory, max_bytes: int) -> None:
        self.run, self.settings, self.corrupted, self.max_bytes = run, settings, corrupted, max_bytes
        # A text that grows has its whole answer after the step that writes the answer's last token.
        grows, last = run.model.cfg.is_autoregressive, corrupted.first_step + corrupted.n_steps
        self.end = run.last_step + 1 if grows else last
        # The branch that a branch becomes in the next step; itself at the end of the run.
        self._next = list(range(len(corrupted)))
        self._samples = list(range(len(corrupted)))
        self._texts: dict[int, Tensor] = dict(enumerate(corrupted.tokens))
        self._known: dict[int, dict[tuple[object, ...], int]] = {}
        self._waiting: dict[int, list[tuple[list[int], LoopRows]]] = {}

    def begin(
        self, step: int, logits: Float[Tensor, "batch selected d_vocab_out"], positions: Sequence[int]
    ) -> list[int]:
        """Numbers of the branches of copies of all samples, by the logits of one step at these positions, guided."""
        n_samples = len(self.corrupted)
        before = self.corrupted.from_step(step).repeat(len(logits) // n_samples)
        rows = before.rows_after(self.run.model, logits, positions)
        return self._numbers(step + 1, rows, [i % n_samples for i in range(len(logits))])

    def _numbers(self, step: int, rows: LoopRows, samples: Sequence[int]) -> list[int]:
        """The branch of each row before a step; those that are new wait for this step."""
        run = self.corrupted.resume(self.run.model, rows)
        if step not in self._known:
            own = self._corrupted_rows(step, run.sampler)
            self._known[step] = {} if own is None else {(i, *key): i for i, key in enumerate(own.keys(run))}
        known, numbers, new = self._known[step], [], []
        for i, key in enumerate(rows.keys(run)):
            number = known.setdefault((samples[i], *key), len(self._next))
            if number == len(self._next):
                self._next.append(number)
                self._samples.append(samples[i])
                new.append((i, number))
            numbers.append(number)
        if step == self.end:
            self._texts |= {number: rows.tokens[i] for i, number in new}
        elif new:
            waiting = [number for _, number in new], rows.at([i for i, _ in new])
            self._waiting.setdefault(step, []).append(waiting)
        return numbers

    def _corrupted_rows(self, step: int, sampler: Sampler) -> LoopRows | None:
        """The corrupted runs before a step; `None` if they lack a confidence that the sampler reads."""
        corrupted = self.corrupted
        if step < corrupted.first_step + corrupted.n_steps:
            rest = corrupted.from_step(step)
            return None if rest.lacks_confidence(sampler) else LoopRows.of(rest.started(self.run.model))
        kept = torch.full((len(corrupted),), float("nan"), dtype=torch.float64)
        return LoopRows(corrupted.tokens, corrupted.revealed_at, corrupted.confidence, kept, corrupted.record["seeds"])

    def finish(self, kept: KeptRun | None = None) -> None:
        """Denoise all branches to the end of the run, from the keys and values of the final texts of the corrupted runs
        if no position sees later ones."""
        for step in range(self.corrupted.first_step, self.end):
            parts = self._waiting.pop(step, [])
            if not parts:
                continue
            numbers = [number for part, _ in parts for number in part]
            rows = LoopRows.joined([part for _, part in parts])
            stop = step + 1 if kept is None else self.end
            run_on = partial(self._run_on, step, stop, numbers, rows, kept)
            for chosen, after in in_batches(run_on, range(len(rows)), self._fitting()):
                samples = [self._samples[numbers[i]] for i in chosen]
                for i, number in zip(chosen, self._numbers(stop, after, samples), strict=True):
                    self._next[numbers[i]] = number

    def _run_on(
        self, step: int, stop: int, numbers: Sequence[int], rows: LoopRows, kept: KeptRun | None, chosen: Sequence[int]
    ) -> LoopRows:
        """Some of these branches, denoised from one step to another."""
        run = self.corrupted.resume(self.run.model, rows.at(chosen))
        samples = torch.tensor([self._samples[numbers[i]] for i in chosen])
        corrupted = _Corrupted(self.run, self.settings, run.canvas, samples)
        run.predictor = corrupted if kept is None else _continued(run, kept, samples)
        run_loop(run, step, stop=stop)
        return LoopRows.of(run)

    def _fitting(self) -> int:
        run, n_pos = self.run, self.run.n_pos
        return max(1, rows_at_once(run.model.cfg, n_pos, n_pos, self.max_bytes, run.loop_row_bytes()))

    def texts(self, numbers: Sequence[int]) -> Tokens:
        """The final text of each of these branches."""
        ends = []
        for number in numbers:
            while number not in self._texts:
                number = self._next[number]
            ends.append(self._texts[number])
        return torch.stack(ends)


def _continued(run: Run, kept: KeptRun, samples: Int[Tensor, "batch"]) -> Predictor:
    """The predictor of branches that agree with the corrupted runs up to their last token."""
    model = run.model
    cached = Cached(Conditional(model, run.canvas))
    n_pos = int((run.canvas.masked(run.tokens)[0]).nonzero()[0]) - 1
    layers = [
        LayerKeyValues(*(kept.activations[name][samples, :n_pos] for name in keys_and_values(block)))
        for block in range(model.cfg.n_layers)
    ]
    cached.begin(layers, run.tokens[:, :n_pos])
    return cached


@dataclass
class _Corrupted(Predictor):
    """One forward pass over canvases whose subject is corrupted, each by the noise of its sample.

    The unconditional branch of guidance does not see the subject: it is computed once for rows that show it the same.
    """

    run: TracedTrajectory
    settings: TraceSettings
    canvas: Canvas
    samples: Int[Tensor, "batch"]
    _passes: int = 0

    @property
    def passes(self) -> int:
        return self._passes

    def __call__(self, state: StepState, positions: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        model, scale = self.run.model, self.run.trajectory.record["cfg_scale"]
        batch, rows = model.readout.locate(positions, block=state.block)
        extent = self.canvas.extent((batch, rows))
        tokens = model.cfg.readable(state.tokens)[:, :extent]
        logits: Tensor = model(self._embedded(tokens), start_at_layer=0, logits_at=(batch, rows))
        self._passes += 1
        if not scale:
            return logits
        unprompted = model.cfg.readable(state.tokens.masked_fill(self.canvas.given, self.canvas.blank))[:, :extent]
        differs = isinstance(state.sigma, tuple) or state.block is not None
        distinct, index = unprompted, torch.arange(len(unprompted), device=unprompted.device)
        if not differs:
            distinct, index = unprompted.unique(dim=0, return_inverse=True)
        read, entry = (index[batch] * extent + rows).unique(return_inverse=True)
        model.clock.step = replace(state, branch="unconditional")
        try:
            other: Tensor = model(distinct, logits_at=(read // extent, read % extent))
        finally:
            model.clock.step = state
        return guide(logits, other[entry], scale)

    def _embedded(self, tokens: Tokens) -> Float[Tensor, "batch pos d_model"]:
        """The corrupted embeddings. The corruption's hooks act on copies of all samples, as which rows are laid out."""
        model, n_samples = self.run.model, self.settings.rows
        seen = torch.nn.functional.one_hot(self.samples, n_samples).cumsum(dim=0)
        copy = seen[torch.arange(len(tokens)), self.samples] - 1
        place, n_copies = copy * n_samples + self.samples, int(copy.max()) + 1
        layout = tokens[:1].repeat(n_copies * n_samples, 1)
        layout[place] = tokens
        with model.hooks(fwd_hooks=self.settings.hooks(model, self.run.query, runs=n_copies)):
            embedded: Tensor = model(layout, stop_at_layer=0)
        return embedded[place]


@dataclass(frozen=True, eq=False)
class RestoredStep:
    """A step of the corrupted runs in which states are restored: `canvas` reads the rows that predict `positions`, at
    which the loop may propose a token; `scale` and `unconditional` are those of guidance."""

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
        positions = positions[:1] if run.model.cfg.is_autoregressive else positions
        rows, scale = run.rows(step, canvases, positions), run.trajectory.record["cfg_scale"]
        canvas = StepCanvas(step, run.canvas(step)[None], canvases, rows)
        return cls(step, canvas, positions, scale, run.unconditional(step, canvases, rows) if scale else None)

    def guided(
        self, logits: Float[Tensor, "batch selected d_vocab_out"]
    ) -> Float[Tensor, "batch selected d_vocab_out"]:
        """The logits after guidance, of copies of all samples."""
        if self.unconditional is None:
            return logits
        return guided_copies(logits, self.unconditional, self.scale, len(self.unconditional))


def begin_branches(
    branches: Branches, runs: CanvasRuns[RestoredStep], unchanged: Float[Tensor, "sample step"]
) -> Measure:
    """The function that begins a branch for each sample of each cell at each step of the runs, and returns their
    numbers, Float[cell sample step]; `unchanged` are those of the corrupted runs."""

    def begin(logits: Float[Tensor, "batch selected d_vocab_out"], computed: Int[Tensor, "selected"]) -> Tensor:
        numbers = unchanged.repeat(len(logits) // len(unchanged), 1, 1)
        index = {column: i for i, column in enumerate(computed.tolist())}
        for i, (step, columns) in enumerate(zip(runs.members, runs.columns, strict=True)):
            changed = [at for at, column in enumerate(columns) if column in index]
            if not changed:
                continue
            of_step = runs.restored.corrupted.logits[:, list(columns)].repeat(len(numbers), 1, 1)
            of_step[:, changed] = logits[:, [index[columns[at]] for at in changed]]
            begun = branches.begin(step.step, step.guided(of_step), step.positions)
            numbers[:, :, i] = torch.tensor(begun, dtype=numbers.dtype).view(-1, len(unchanged))
        return numbers

    return begin
