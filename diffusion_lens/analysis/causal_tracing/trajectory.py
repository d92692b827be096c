"""Causal tracing over denoising steps: which states carry the answer, and when?

In the loop of a masked diffusion model the tokens of an answer appear at different steps, from t1, which reveals the
first of them, to t2, which reveals the last. A causal trace is made on the canvas of every step from t1 to t2:
p(answer) is the joint probability of the tokens still masked. The first step isolates the flow from the subject; later
steps also show the flow from the tokens already revealed. A causal model takes the same call; the answer's tokens that
it has not reached are filled in (teacher forcing).

There are two kinds of corrupted canvases. *Forced*: the corrupted run reads the canvases of the clean run. *Free*: each
sample reveals its own tokens from the start. In both, an answer token that has been revealed counts 1, and another
token in its position counts 0. So a step at which none is masked, because a hook wrote the answer or a sampler masks
tokens again, scores 1 or 0 in every cell.

Under guidance the subject is corrupted and the state restored in the conditional branch; the unconditional branch does
not see the subject.

The caller's hooks inside the network act here as in the loop, and can read the step. Hooks on the loop's own hook
points (`denoise.hook_*`) do not act here; their changes to the clean run are in its canvases.

Common beginnings of canvases are computed once. Where no position sees later ones, the canvases of a run begin alike:
those before a step contain what the run had written, and differ behind it. As one tree of texts (`model/packing.py`)
they have one clean and one corrupted run, and a cell is computed once for all canvases that contain its position.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.causal_tracing.trace import (
    AnswerRuns,
    CausalTrace,
    RestoredRuns,
    TraceSettings,
    record_of_trace,
    share_of_total,
)
from diffusion_lens.analysis.engine.answer import Answer
from diffusion_lens.analysis.engine.batching import reserved
from diffusion_lens.analysis.engine.kept_run import NetworkInput
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory, check_steps
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_network, warn_of_another_network
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.settings import DenoiseSettings
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.interventions import Hook, on_branch
from diffusion_lens.model.hook_points import hooked_modules
from diffusion_lens.model.packing import TextTree
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, shaped, shown_model
from diffusion_lens.records.schema import require_indices
from diffusion_lens.settings import Whole, one_of, pick_indices, takes
from diffusion_lens.settings.figures import styled

# The canvas of the clean run, and those of the corrupted run.
CanvasPair = tuple[Int[Tensor, "1 pos"], Int[Tensor, "sample pos"]]


M = TypeVar("M", bound="HasCanvas")
T = TypeVar("T")


def run_together(run: TracedTrajectory, steps: Sequence[T]) -> list[Sequence[T]]:
    """The steps whose canvases are run together: all, as a tree, if the network reads the canvases of the run alike at
    every step and without hooks; otherwise each alone."""
    model, size = run.model, run.model.cfg.block_size
    by_text = size is not None and size < run.n_pos and not model.cfg.counts_from_prompt
    same_network = not (model.is_hooked or model.cfg.time_conditioning or model.head.needs_canvas)
    is_tree = by_text and same_network and not model.positions.learned
    return [steps] if steps and is_tree else [[step] for step in steps]


@dataclass(frozen=True, eq=False)
class StepCanvas:
    """The canvas of a step, or of several that show the network the same tokens, in both runs, and the rows of the
    logits that are read."""

    step: int
    clean: Int[Tensor, "1 pos"]
    corrupted: Int[Tensor, "sample pos"]
    rows: Sequence[int]

    def seen(self, run: TracedTrajectory) -> CanvasPair:
        """What the network reads."""
        return run.seen(self.clean), run.seen(self.corrupted)

    def needed(self, run: TracedTrajectory) -> CanvasPair:
        """What it reads up to the last position that affects a row that is read, or that the corruption touches."""
        clean, corrupted = self.seen(run)
        stop = NetworkInput(run.model, clean).sees_up_to(max(*self.rows, run.query.subject[1] - 1))
        return clean[:, :stop], corrupted[:, :stop]


@runtime_checkable
class HasCanvas(Protocol):
    """What is read on a canvas."""

    @property
    def canvas(self) -> StepCanvas: ...


@dataclass(frozen=True, eq=False)
class CanvasRuns(Generic[M]):
    """The clean and the corrupted run of one canvas, or of several that share their beginnings.

    Attributes:
        members: What is read on each canvas.
        places: The place in the row of each position of each canvas.
        columns: The column of each row of each canvas among all that are read.
    """

    members: Sequence[M]
    places: Sequence[Sequence[int]]
    columns: Sequence[Sequence[int]]
    restored: RestoredRuns

    @property
    def read(self) -> list[tuple[M, int]]:
        """For each column, a member that reads it, and the index among the rows of its canvas."""
        found = {
            column: (member, index)
            for member, columns in zip(self.members, self.columns, strict=True)
            for index, column in enumerate(columns)
        }
        return [found[column] for column in sorted(found)]

    def cells(self, positions: Sequence[Sequence[int]]) -> list[int]:
        """The places of these positions of each canvas, each once."""
        chosen = zip(self.places, positions, strict=True)
        return list(dict.fromkeys(places[position] for places, of_canvas in chosen for position in of_canvas))


def run_canvases(
    run: TracedTrajectory, members: Sequence[M], settings: TraceSettings, layers: Sequence[int], budget: tuple[int, int]
) -> Iterator[CanvasRuns[M]]:
    """Compute the clean and the corrupted run of canvases that `run_together`, in as few trees as fit into the budget:
    memory to use in addition to the weights, and bytes that a row takes at least, after its pass."""
    # 1. The inputs of both runs: of one canvas, or of a tree of several.
    model, subject = run.model, run.query.subject
    canvases = [member.canvas for member in members]
    tree, fits = None, True
    if len(canvases) == 1:
        clean, corrupted = canvases[0].seen(run)
        places: Sequence[Sequence[int]] = [range(clean.shape[1])]
    else:
        assert model.cfg.block_size is not None
        tree, tokens = TextTree.of([torch.cat(canvas.needed(run)) for canvas in canvases], model.cfg.block_size)
        (clean, corrupted), places = (tokens[:1], tokens[1:]), tree.places
        # The subject has to stand before the canvases differ.
        fits = tokens.shape[1] <= model.cfg.n_ctx and subject[1] <= tree.n_common
    by_canvas = [[of_canvas[row] for row in canvas.rows] for canvas, of_canvas in zip(canvases, places, strict=True)]
    rows = list(dict.fromkeys(place for of_canvas in by_canvas for place in of_canvas))
    first_step = canvases[0]
    hooks = settings.hooks(model, run.query)
    states = (run.state(first_step.step, tokens) for tokens in (first_step.clean, first_step.corrupted))
    inputs = (
        NetworkInput(model, clean, rows, step=next(states), tree=tree),
        NetworkInput(model, corrupted, rows, step=next(states), hooks=hooks, tree=tree),
    )

    # 2. The runs, or those of both halves of the canvases.
    restored = None
    try:
        if fits:
            restored = RestoredRuns(*inputs, subject, settings, layers, *budget)
    except ValueError:
        if len(canvases) == 1:
            raise
    if restored is None:
        half = len(canvases) // 2
        yield from run_canvases(run, members[:half], settings, layers, budget)
        yield from run_canvases(run, members[half:], settings, layers, budget)
        return
    columns = [[rows.index(place) for place in of_canvas] for of_canvas in by_canvas]
    yield CanvasRuns(members, places, columns, restored)


# Canvases that the corrupted runs read: those of the clean run, or those that each corrupted run writes itself.
CANVASES = ("forced", "free")


@dataclass(frozen=True, eq=False, repr=False)
class TrajectoryTrace(PicturedResult, Saved):
    """The causal traces of one query at several steps of one denoising run.

    Columns of the data frame: step, pos, layer, token, score, indirect_effect, clean, corrupted.

    Attributes:
        scores: Float[step pos layer], p(answer) with that state restored at that step, mean over the samples: the
            product over the tokens still masked, times 0 where another token than the answer's has been revealed. NaN
            at positions that a causal model has not reached yet.
        token_scores, clean, corrupted, clean_token_scores, corrupted_token_scores: Those of `CausalTrace`, with a first
            axis for the steps.
        chained: Float[pos layer], p(answer) by the chain rule: each token is read at the step that committed it, with
            the state restored at all these steps. `None` for free canvases, and if not all of these steps were traced.
        steps: Step of each grid.
        revealed_at: Step in which the clean run revealed each answer token for good.
        known: Whether the clean run wrote the answer.
        str_canvases: Text at each position of the canvas, for each step.
        subject, positions, layers: Those of `CausalTrace`.
        record: Settings of the trace and of the run, model, hash of the weights, hooks, modules, versions. "trajectory"
            contains the weights, hooks and modules that wrote the clean run's canvases.
    """

    KIND = "trajectory trace"
    SHOWS = "p(answer) when one state is restored in a corrupted run, by position and layer at one denoising step"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"model": str, "kind": str, "answer": list[str]}
    AXES = (
        ("step", "steps"),
        ("pos", "positions"),
        ("layer", "layers"),
        ("selected", "revealed_at"),
        ("step canvas", "str_canvases"),
    )

    scores: Float[Tensor, "step pos layer"]
    token_scores: Float[Tensor, "step pos layer selected"]
    chained: Float[Tensor, "pos layer"] | None
    clean: Float[Tensor, "step"]
    corrupted: Float[Tensor, "step"]
    clean_token_scores: Float[Tensor, "step selected"]
    corrupted_token_scores: Float[Tensor, "step selected"]
    steps: list[int]
    revealed_at: list[int]
    known: bool
    str_canvases: list[list[str]]
    subject: tuple[int, int]
    positions: list[int]
    layers: list[int]
    record: dict[str, Any]

    def _check(self) -> None:
        for canvas in self.str_canvases:
            require_indices("positions", self.positions, len(canvas))

    @property
    def indirect_effect(self) -> Float[Tensor, "step pos layer"]:
        """Rise of p(answer) when a state is restored: scores - corrupted."""
        return self.scores - self.corrupted[:, None, None]

    @property
    def normalized_effect(self) -> Float[Tensor, "step pos layer"]:
        """Share of the step's total effect, clean - corrupted, that a restored state recovers; NaN where that is below
        0.01, as in `CausalTrace`."""
        return share_of_total(self.indirect_effect, (self.clean - self.corrupted)[:, None, None])

    @property
    def order(self) -> list[int]:
        """Indices of the answer's tokens in the order of their commitment; from left to right within a step."""
        return sorted(range(len(self.revealed_at)), key=lambda token: self.revealed_at[token])

    def at_step(self, step: int) -> CausalTrace:
        """The grid of one step as a `CausalTrace`."""
        if step not in self.steps:
            raise KeyError(f"step {step} was not traced; the steps are {self.steps}")
        i = self.steps.index(step)
        return CausalTrace(
            scores=self.scores[i],
            token_scores=self.token_scores[i],
            clean_token_scores=self.clean_token_scores[i],
            corrupted_token_scores=self.corrupted_token_scores[i],
            clean=self.clean[i].item(),
            corrupted=self.corrupted[i].item(),
            known=self.known,
            str_tokens=self.str_canvases[i],
            subject=self.subject,
            positions=self.positions,
            layers=self.layers,
            record={**self.record, "step": step},
        )

    @styled
    def plot(self, step: int, ax: Any = None, title: str | None = None) -> Any:
        """The heat map of one step, on a colour scale that all steps share; returns the matplotlib axes."""
        limits = float(self.corrupted.min()), float(self.scores.nan_to_num().max())
        return self.at_step(step).plot(ax=ax, title=title or f"step {step}", limits=limits)

    def _table(self) -> Table:
        tokens = [canvas[pos] for canvas in self.str_canvases for pos in self.positions]
        return Table.of_cells(
            {"step": self.steps, "pos": self.positions, "layer": self.layers},
            {
                "token": shaped(tokens, len(self.steps), len(self.positions), 1),
                "score": self.scores,
                "indirect_effect": self.indirect_effect,
                "clean": self.clean[:, None, None],
                "corrupted": self.corrupted[:, None, None],
            },
            most="indirect_effect",
        )

    def _picture(self) -> Any:
        """The step at which a restored state has the largest effect."""
        strongest = self.indirect_effect.nan_to_num().flatten(1).amax(dim=1).argmax()
        return self.plot(self.steps[int(strongest)])

    def page(self, title: str | None = None) -> Any:
        """The heat maps with a slider over the steps, as a page; `pages.write_page` writes it."""
        return plots.step_slider(
            self.scores,
            str_canvases=self.str_canvases,
            subject=self.subject,
            steps=self.steps,
            layers=self.layers,
            positions=self.positions,
            kind=self.record["kind"],
            answer=self.record["answer"],
            clean=self.clean,
            corrupted=self.corrupted,
            title=title or f"{shown_model(self.record)}: {' '.join(map(plots.readable, self.str_canvases[-1]))}",
        )


@takes(TraceSettings)
@begins_run
@torch.no_grad()
def trace_trajectory(
    model: DiffusionTransformer,
    fact_or_query: Fact | Query,
    steps: Iterable[Whole] | None = None,
    canvas: str = "forced",
    *,
    trajectory: Trajectory | None = None,
    settings: TraceSettings,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> TrajectoryTrace:
    """Make a causal trace at every step from the one that unmasks the first answer token to the last that reveals one.

    Args:
        model, fact_or_query, max_bytes, progress: The same as in `causal_trace`.
        steps: Steps to trace; by default from t1, which unmasks the first answer token, to t2, which reveals the last.
        canvas: "forced" or "free", canvases that the corrupted run reads.
        trajectory: Clean run, `model.denoise(query.tokens[None], ...)` with the settings you study (on a causal model,
            of the prompt); by default a run with the default settings of `denoise`. Forced canvases may be another
            network's, such as the plain run's for a model under a hook. All scores are then of the model as it is now,
            but `known`, `revealed_at` and the canvases are of the network that wrote them.
        settings: What is corrupted and restored.

    Raises:
        ValueError: A setting out of range, a trajectory of another prompt or architecture, a step after the one that
            reveals the answer's last token. With canvas="free", a trajectory made by another checkpoint or under other
            hooks, weights or modules, since the free runs are those of the model as it is now.

    Warns:
        UserWarning: Canvases that were made by another checkpoint, or under other hooks, weights, modules or dtype.
    """
    # 1. Check the settings; with free canvases, denoise the corrupted runs.
    one_of(*CANVASES)("canvas", canvas)
    run = TracedTrajectory.of(model, fact_or_query, trajectory)
    settings = settings.with_noise(model, [run.query])
    selected_steps = check_steps(run, range(run.answered_from, run.last_step + 1) if steps is None else steps)
    if canvas == "free":
        require_same_network(run.trajectory.record, model, "trace_trajectory(canvas='free')")
    else:
        warn_of_another_network({"trajectory": (run.trajectory.record, model)})
    positions = pick_indices("positions", settings.positions, run.n_pos)
    layers = pick_indices("layers", settings.layers, model.cfg.n_layers)
    if canvas == "free":
        require_loop_memory(run, settings, max_bytes)
    free = corrupted_run(run, settings) if canvas == "free" else None

    # 2. Group the steps at which the network reads the same tokens, since these share their passes: steps that reveal
    # nothing and, on a causal model, all steps whose tokens are the answer's. Steps are not grouped under the caller's
    # hooks, which may act by step, on free canvases, or where the network is given different times or predictions.
    # Canvases with common beginnings are computed together.
    can_share = free is None and not model.is_hooked and not model.cfg.self_conditioning
    groups: dict[Hashable, list[int]] = {}
    for step in selected_steps:
        sigma = run.trajectory.state_at(step).sigma if model.cfg.time_conditioning else None
        seen = (sigma, *run.seen(run.canvas(step)[None])[0].tolist())
        groups.setdefault(seen if can_share else step, []).append(step)

    # 3. Score every cell of each canvas.
    traced: dict[int, ScoredStep] = {}
    with tqdm(total=len(groups), desc=f"trace {settings.kind}", unit="canvas", disable=not progress) as bar:
        for together in run_together(run, list(groups.values())):
            canvases = [AnswerCanvas.of(run, members, free, settings.rows) for members in together]
            for runs in run_canvases(run, canvases, settings, layers, (max_bytes, 0)):
                traced |= scored_steps(run, runs, positions, free)
                bar.update(len(runs.members))
                del runs  # their activations are freed before the next runs

    # 4. Average over the samples.
    by_step = [traced[step] for step in selected_steps]
    scores, clean, corrupted = map(torch.stack, zip(*by_step, strict=True))
    return TrajectoryTrace(
        scores=scores.prod(dim=4).mean(dim=3),
        token_scores=scores.mean(dim=3),
        chained=_chain(scores, corrupted, selected_steps, run.revealed_at) if free is None else None,
        clean=clean.prod(dim=1),
        corrupted=corrupted.prod(dim=2).mean(dim=1),
        clean_token_scores=clean,
        corrupted_token_scores=corrupted.mean(dim=1),
        steps=selected_steps,
        revealed_at=run.revealed_at,
        known=run.wrote_the_answer,
        str_canvases=[model.words(run.canvas(step).tolist()) for step in selected_steps],
        subject=run.query.subject,
        positions=positions,
        layers=layers,
        record={**record_of_run(run, settings, positions, layers), "canvas": canvas, "query": run.query.describe()},
    )


def record_of_run(
    run: TracedTrajectory, settings: TraceSettings, positions: Sequence[int], layers: Sequence[int]
) -> dict[str, Any]:
    """The record of what is traced along a run: that of the run, of the trace, and who wrote the canvases."""
    return {
        **run.trajectory.record,
        **record_of_trace(run.model, run.query, settings, positions, layers),
        "trajectory": canvas_provenance(run.trajectory.record),
    }


def corrupted_run(run: TracedTrajectory, settings: TraceSettings) -> Trajectory:
    """The corrupted denoising runs, one row per sample; each reveals its own tokens, as if it ran alone.

    Raises:
        ValueError: No sampler is known by which samples do not depend on one another, or steps hand something on.
    """
    model, query, trajectory = run.model, run.query, run.trajectory
    if model.cfg.self_conditioning:
        raise ValueError(
            f"a corrupted run of {model.cfg.model_name!r} hands predictions of its own from step to step, and a state "
            "is restored on a canvas under what the recorded run handed on: use trace_trajectory with canvas='forced', "
            "or replay the run freely under hooks, trajectory.replay(model, canvas='free', fwd_hooks=...)"
        )
    written_by = DenoiseSettings.recorded(trajectory.record).on(model.cfg, model.cfg.model_name)
    assert isinstance(written_by.sampler, Sampler)
    sampler, copies = written_by.sampler.by_row(model.cfg), trajectory.repeat(settings.rows)
    prompt = trajectory.given[0].logical_not().nonzero().flatten().min()
    if model.cfg.is_autoregressive and query.subject[1] <= prompt and not hooked_modules(model):
        return copies.replay_with_first(model, settings.hooks(model, query))
    return copies.replay(model, canvas="free", fwd_hooks=conditional_hooks(settings, run), sampler=sampler)


def conditional_hooks(settings: TraceSettings, run: TracedTrajectory, runs: int = 1) -> list[tuple[str, Hook]]:
    """The corruption of `settings.hooks` in the conditional branch of guidance, the only one that sees the subject."""
    hooks = settings.hooks(run.model, run.query, runs)
    return [(name, on_branch(hook, "conditional")) for name, hook in hooks]


def require_loop_memory(run: TracedTrajectory, settings: TraceSettings, max_bytes: int) -> None:
    """Raise a `ValueError` unless `max_bytes` suffices to denoise all samples of the corrupted run together."""
    needed = settings.rows * reserved(run.model.cfg, run.loop_row_bytes())
    if max_bytes < needed:
        raise ValueError(
            f"max_bytes={max_bytes:,} is too small: {settings.rows} samples in the denoising loop take {needed:,} bytes"
        )


@dataclass(frozen=True, eq=False)
class AnswerCanvas:
    """A canvas, and the answer that each run reads from it at the steps that show it to the network.

    Only rows of `open_tokens` are read: the indices in the answer of the tokens that some row still has to write. The
    others count 1 or 0, whatever the network says.
    """

    steps: list[int]
    canvas: StepCanvas
    clean_answer: Answer
    answer: Answer
    open_tokens: list[int]

    @classmethod
    def of(cls, run: TracedTrajectory, steps: list[int], free: Trajectory | None, n_rows: int) -> "AnswerCanvas":
        """The canvas of these steps; `free` are the corrupted runs, if their canvases are read."""
        clean = run.canvas(steps[0])[None]
        clean_answer, corrupted = run.reading(steps[0], clean), corrupted_canvases(run, steps[0], free, n_rows)
        read = [run.canvas(step)[None] for step in steps]
        read += [] if free is None else [corrupted_canvases(run, step, free, n_rows) for step in steps]
        # Where hooks or a sampler that masks again leave none open, one row is read and not used.
        open_tokens = run.settled(torch.cat(read)).isnan().any(dim=0).nonzero().flatten().tolist() or [0]
        rows = clean_answer.rows.tolist()
        return cls(
            steps=steps,
            canvas=StepCanvas(steps[0], clean, corrupted, [rows[token] for token in open_tokens]),
            clean_answer=clean_answer,
            answer=clean_answer if free is None else run.reading(steps[0], corrupted),
            open_tokens=open_tokens,
        )


class ScoredStep(NamedTuple):
    """The probabilities of the answer's tokens at one step; NaN at positions that are not on the canvas."""

    grid: Float[Tensor, "pos layer sample selected"]
    clean: Float[Tensor, "selected"]
    corrupted: Float[Tensor, "sample selected"]


def scored_steps(
    run: TracedTrajectory, runs: CanvasRuns[AnswerCanvas], positions: Sequence[int], free: Trajectory | None
) -> dict[int, ScoredStep]:
    """The probabilities of the canvases of `runs`, at each of their steps."""
    # 1. Score the cells of all canvases.
    canvases = runs.members
    on_canvas = {step: set(run.on_canvas(step)) for each in canvases for step in each.steps}
    reached = [[pos for pos in positions if any(pos in on_canvas[step] for step in each.steps)] for each in canvases]
    tokens = [(canvas, canvas.open_tokens[row]) for canvas, row in runs.read]
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


def _chain(
    scores: Float[Tensor, "step pos layer sample selected"],
    corrupted: Float[Tensor, "step sample selected"],
    steps: Sequence[int],
    revealed_at: Sequence[int],
) -> Float[Tensor, "pos layer"] | None:
    """p(answer) by the chain rule, with each token read at the step that committed it.

    A position that was not on the canvas of that step could not be restored: its token keeps the corrupted score.
    """
    if not set(revealed_at) <= set(steps):
        return None
    indices = [steps.index(step) for step in revealed_at]
    restored = torch.stack([scores[index, ..., token] for token, index in enumerate(indices)], dim=-1)
    unrestored = torch.stack([corrupted[index, :, token] for token, index in enumerate(indices)], dim=-1)
    return torch.where(restored.isnan(), unrestored, restored).prod(dim=3).mean(dim=2)
