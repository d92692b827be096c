"""Traces of several canvases of one denoising run, whose common beginnings are computed once.

Where no position sees later ones, the canvases of a run begin alike: those before a step contain what the run had
written, and differ behind it. As one tree of texts (`model/packing.py`) they have one clean and one corrupted run,
and a cell is computed once for all canvases that contain its position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.analysis.causal_tracing.settings import TraceSettings
from diffusion_lens.analysis.causal_tracing.trace import RestoredRuns
from diffusion_lens.analysis.engine.kept_run import NetworkInput
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory
from diffusion_lens.model.packing import TextTree

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
    run: TracedTrajectory,
    members: Sequence[M],
    settings: TraceSettings,
    layers: Sequence[int],
    budget: tuple[int, int],
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
