"""Traces of several canvases of one denoising run, whose common beginnings are computed once.

Where no position sees later ones, the canvases of a run begin alike: those before a step contain what the run had
written, and differ behind it. As one tree of texts (`model/text_tree.py`) they have one clean and one corrupted run,
and a cell is computed once for all canvases that contain its position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.restored_runs import AnswerRuns, RestoredRuns, RunPair
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
    """A canvas of a run, and the steps that show it to the network.

    Attributes:
        steps: Steps.
        clean: Int[1 pos], the canvas of the clean run.
        corrupted: Int[sample pos], those of the corrupted run.
        clean_answer: The answer as it is read in the clean run.
        answer: The answer as it is read in the corrupted run.
        is_open: For each token of the answer, whether some sample still has to write it.
    """

    steps: list[int]
    clean: Int[Tensor, "1 pos"]
    corrupted: Int[Tensor, "sample pos"]
    clean_answer: Answer
    answer: Answer
    is_open: list[bool]

    def seen(self, run: TracedTrajectory) -> CanvasPair:
        """What the network reads."""
        return run.seen(self.clean), run.seen(self.corrupted)

    def needed(self, run: TracedTrajectory) -> CanvasPair:
        """What it reads up to the last position that affects a row that is read, or that the corruption touches."""
        clean, corrupted = self.seen(run)
        last = max(*self.answer.rows.tolist(), run.query.subject[1] - 1)
        stop = NetworkInput(run.model, clean).sees_up_to(last)
        return clean[:, :stop], corrupted[:, :stop]


@dataclass(frozen=True, eq=False)
class CanvasRuns:
    """Restored runs of one canvas, or of several that share their beginnings.

    Attributes:
        canvases: The canvases.
        places: For each canvas, the place in the row of each of its positions.
        columns: For each canvas, the column of each token of the answer among all that are read.
        runs: The runs.
    """

    canvases: Sequence[StepCanvas]
    places: Sequence[Sequence[int]]
    columns: Sequence[Sequence[int]]
    runs: AnswerRuns

    def grids(
        self, positions: Sequence[Sequence[int]]
    ) -> Iterator[tuple[StepCanvas, dict[int, Float[Tensor, "layer sample selected"]]]]:
        """For each canvas, the probability of each token of the answer in the cells of its positions."""
        of_canvas = list(zip(self.canvases, self.places, self.columns, positions, strict=True))
        cells = list(dict.fromkeys(places[position] for _, places, _, chosen in of_canvas for position in chosen))
        scores = dict(zip(cells, self.runs.grid(cells), strict=True))
        for canvas, places, columns, chosen in of_canvas:
            yield canvas, {position: scores[places[position]][..., list(columns)] for position in chosen}

    def scores(self, index: int) -> tuple[Tensor, Tensor]:
        """The tokens' probabilities in the clean and in the corrupted run of one canvas, Float[sample selected]."""
        columns = list(self.columns[index])
        return self.runs.clean_scores[:, columns], self.runs.corrupted_scores[:, columns]


def run_canvases(
    run: TracedTrajectory,
    canvases: Sequence[StepCanvas],
    restoration: Restoration,
    corruption: Corruption,
    layers: Sequence[int],
    max_bytes: int,
) -> Iterator[CanvasRuns]:
    """Compute the clean and the corrupted run of these canvases, in as few trees as fit into `max_bytes`.

    Raises:
        ValueError: `max_bytes` is too small for one canvas.
    """
    model, size = run.model, run.model.cfg.block_size
    hooks = corruption.hooks(model, run.query)
    shared = SharedCanvases.of(
        [canvas.seen(run) if len(canvases) == 1 else canvas.needed(run) for canvas in canvases], size
    )
    restored = None
    if shared.fits(model, run.query.subject):
        # 1. The rows that are read, and the token that each predicts.
        read: dict[tuple[int, int], tuple[int, int]] = {}
        columns = []
        for index, (canvas, places) in enumerate(zip(canvases, shared.places, strict=True)):
            tokens = range(len(canvas.is_open))
            at = [(places[row], token) for token, row in zip(tokens, canvas.answer.rows.tolist(), strict=True)]
            needed = [len(canvases) == 1 or is_open for is_open in canvas.is_open]
            for token in tokens:
                if needed[token]:
                    read.setdefault(at[token], (index, token))
            order = list(read)
            # A token that all samples have revealed counts 1 or 0, whatever the network says.
            columns.append([order.index(at[token]) if needed[token] else 0 for token in tokens])

        # 2. Both runs.
        rows, first = [place for place, _ in read], canvases[0].steps[0]
        inputs = [(shared.clean, canvases[0].clean, ()), (shared.corrupted, canvases[0].corrupted, hooks)]
        clean, corrupted = (
            NetworkInput(model, tokens, rows, step=run.state(first, alone), hooks=own, tree=shared.tree)
            for tokens, alone, own in inputs
        )
        pair = RunPair(clean, corrupted, run.query.subject)
        try:
            restored = RestoredRuns(pair, restoration, layers, max_bytes)
        except ValueError:
            if len(canvases) == 1:
                raise
    if restored is None:
        for half in (canvases[: len(canvases) // 2], canvases[len(canvases) // 2 :]):
            yield from run_canvases(run, half, restoration, corruption, layers, max_bytes)
        return
    answers = [
        _joined([(canvases[index].clean_answer, token) for index, token in read.values()]),
        _joined([(canvases[index].answer, token) for index, token in read.values()]),
    ]
    yield CanvasRuns(canvases, shared.places, columns, AnswerRuns(restored, *answers))


def _joined(chosen: Sequence[tuple[Answer, int]]) -> Answer:
    """One answer of these tokens of several."""
    answer = chosen[0][0]
    if all(each is answer for each, _ in chosen) and len(chosen) == len(answer.tokens):
        return answer
    unconditional = None
    if answer.unconditional is not None:
        n_rows = max(len(each.unconditional) for each, _ in chosen if each.unconditional is not None)
        parts = [
            each.unconditional[:, token].expand(n_rows, -1) for each, token in chosen if each.unconditional is not None
        ]
        unconditional = torch.stack(parts, dim=1)
    tokens = torch.stack([each.tokens[token] for each, token in chosen])
    return replace(answer, tokens=tokens, rows=torch.arange(len(chosen)), unconditional=unconditional)
