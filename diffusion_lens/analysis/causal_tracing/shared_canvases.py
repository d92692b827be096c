"""Traces of several canvases of one denoising run, whose common beginnings are computed once.

Where no position sees later ones, the canvases of a run begin alike: those before a step contain what the run had
written, and differ behind it. As one tree of texts (`model/text_tree.py`) they have one clean and one corrupted run,
and a cell is computed once for all canvases that contain its position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.restored_runs import RestoredRuns, RunPair
from diffusion_lens.analysis.kept_run import NetworkInput
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory
from diffusion_lens.model.text_tree import TextTree
from diffusion_lens.model.transformer import DiffusionTransformer

# The canvas of the clean run, and those of the corrupted run.
CanvasPair = tuple[Int[Tensor, "1 pos"], Int[Tensor, "sample pos"]]


@dataclass(frozen=True, eq=False)
class SharedCanvases:
    """Canvases as the network reads them, each alone or several as a tree.

    Attributes:
        clean: Int[1 pos], the canvases of the clean run.
        corrupted: Int[sample pos], those of the corrupted run.
        places: For each canvas, the place in the row of each of its positions.
        tree: Their layout; `None` for a canvas alone.
    """

    clean: Int[Tensor, "1 pos"]
    corrupted: Int[Tensor, "sample pos"]
    places: Sequence[Sequence[int]]
    tree: TextTree | None = None

    @classmethod
    def of(cls, pairs: Sequence[CanvasPair], size: int | None) -> "SharedCanvases":
        """The canvases of these clean and corrupted runs; `size` is the number of positions that see each other."""
        if len(pairs) == 1:
            return cls(*pairs[0], [range(pairs[0][0].shape[1])])
        assert size is not None
        tree, tokens = TextTree.of([torch.cat(pair) for pair in pairs], size)
        return cls(tokens[:1], tokens[1:], tree.places, tree)

    def fits(self, model: DiffusionTransformer, subject: tuple[int, int]) -> bool:
        """Whether the model can read the row, with the subject before the canvases differ."""
        return self.tree is None or (self.clean.shape[1] <= model.cfg.n_ctx and subject[1] <= self.tree.n_common)


def can_share_beginnings(run: TracedTrajectory) -> bool:
    """Whether the canvases of a run can be a tree: the network reads them alike at every step, without hooks."""
    model, size = run.model, run.model.cfg.block_size
    by_text = size is not None and size < run.n_pos and not model.cfg.counts_from_prompt
    same_network = not (model.is_hooked or model.cfg.is_told_time or model.head.needs_canvas)
    return by_text and same_network and not model.positions.learned


@dataclass(frozen=True, eq=False)
class StepCanvas:
    """The canvas of a step in both runs.

    Attributes:
        step: Step, or one of several that show the network the same tokens.
        clean: Int[1 pos], the canvas of the clean run.
        corrupted: Int[sample pos], those of the corrupted run.
        rows: Rows of the logits that are read.
    """

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


@dataclass(frozen=True, eq=False)
class CanvasRuns:
    """The clean and the corrupted run of one canvas, or of several that share their beginnings.

    Attributes:
        first: Index of the first of these canvases among all.
        canvases: The canvases.
        places: For each canvas, the place in the row of each of its positions.
        columns: For each canvas, the column of each of its rows among all that are read.
        restored: The runs.
    """

    first: int
    canvases: Sequence[StepCanvas]
    places: Sequence[Sequence[int]]
    columns: Sequence[Sequence[int]]
    restored: RestoredRuns

    @property
    def read(self) -> list[tuple[int, int]]:
        """For each column, a canvas that reads it, and the index among the rows of this canvas."""
        found = {
            column: (canvas, index)
            for canvas, columns in enumerate(self.columns)
            for index, column in enumerate(columns)
        }
        return [found[column] for column in sorted(found)]

    def cells(self, positions: Sequence[Sequence[int]]) -> list[int]:
        """The places of these positions of each canvas, each once."""
        chosen = zip(self.places, positions, strict=True)
        return list(dict.fromkeys(places[position] for places, of_canvas in chosen for position in of_canvas))


def run_canvases(
    run: TracedTrajectory,
    canvases: Sequence[StepCanvas],
    restoration: Restoration,
    corruption: Corruption,
    layers: Sequence[int],
    budget: tuple[int, int],
    first: int = 0,
) -> Iterator[CanvasRuns]:
    """Compute the clean and the corrupted run of these canvases, in as few trees as fit into the budget.

    Args:
        canvases: One canvas, or several if they `can_share_beginnings`.
        budget: Memory to use in addition to the weights, and bytes that a row takes at least, after its pass.
        first: Index of the first of these canvases among all.

    Raises:
        ValueError: The budget is too small for one canvas.
    """
    # 1. The inputs of both runs.
    hooks = corruption.hooks(run.model, run.query)
    inputs = [canvas.seen(run) if len(canvases) == 1 else canvas.needed(run) for canvas in canvases]
    shared = SharedCanvases.of(inputs, run.model.cfg.block_size)
    by_canvas = [[places[row] for row in canvas.rows] for canvas, places in zip(canvases, shared.places, strict=True)]
    rows = list(dict.fromkeys(place for places in by_canvas for place in places))
    alone = canvases[0]
    clean, corrupted = (
        NetworkInput(run.model, tokens, rows, step=run.state(alone.step, canvas), hooks=own, tree=shared.tree)
        for tokens, canvas, own in (
            (shared.clean, alone.clean, ()),
            (shared.corrupted, alone.corrupted, hooks),
        )
    )

    # 2. The runs, or those of both halves of the canvases.
    restored = None
    try:
        if shared.fits(run.model, run.query.subject):
            restored = RestoredRuns(RunPair(clean, corrupted, run.query.subject), restoration, layers, *budget)
    except ValueError:
        if len(canvases) == 1:
            raise
    if restored is None:
        half = len(canvases) // 2
        yield from run_canvases(run, canvases[:half], restoration, corruption, layers, budget, first)
        yield from run_canvases(run, canvases[half:], restoration, corruption, layers, budget, first + half)
        return
    columns = [[rows.index(place) for place in places] for places in by_canvas]
    yield CanvasRuns(first, canvases, shared.places, columns, restored)
