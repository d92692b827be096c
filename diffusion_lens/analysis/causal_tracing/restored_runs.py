"""Scores every (position, layer) cell of a canvas by restoring it in a corrupted run.

A cell restores the states of one position in a span of blocks. In the first block of the span only this position
changes: attention mixes positions before the state is restored, and the rest of the block acts on each position alone.
So one pass of that block with every position restored gives each cell's state there, and the cell enters at
the block after it (`analysis.cells`). The caller's hooks may mix positions wherever they act: while there are any,
cells enter at the span's first block and are written into there too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.causal_tracing.restoration import Restoration, points_of
from diffusion_lens.analysis.cell_budget import CellBudget
from diffusion_lens.analysis.cells import Cell, CellRuns, Measure, Patch
from diffusion_lens.analysis.kept_run import NetworkInput, stream_entering
from diffusion_lens.shapes import Resid

Scores = Float[Tensor, "sample selected"]


@dataclass(frozen=True, eq=False)
class RunPair:
    """The inputs of the clean and the corrupted run of one canvas.

    Attributes:
        clean: Input of one row.
        corrupted: Input with one row per sample, of the same length; both read the same rows of the logits.
        subject: First position that the corruption touches, and one past the last.
    """

    clean: NetworkInput
    corrupted: NetworkInput
    subject: tuple[int, int]

    def needed(self) -> "RunPair":
        """Drops trailing positions that affect neither the rows read nor the corruption, if no position sees them."""
        if not self.corrupted.resumes_at_positions or not self.corrupted.rows:
            return self
        n_pos = self.corrupted.sees_up_to(max(*self.corrupted.read_rows, self.subject[1] - 1))
        clean, corrupted = (replace(run, tokens=run.tokens[:, :n_pos]) for run in (self.clean, self.corrupted))
        return RunPair(clean, corrupted, self.subject)


class RestoredRuns:
    """The clean and the corrupted run of one canvas, and the cells that are restored in the corrupted one.

    Args:
        pair: Inputs of the two runs.
        restoration: States that a cell restores.
        layers: Layers around which states are restored.
        max_bytes: Memory to use in addition to the weights.
        least_by_row: Bytes that a row takes at least, after its pass.

    Raises:
        ValueError: `max_bytes` is too small for the two runs and one cell. Nothing has been run then.
    """

    def __init__(
        self,
        pair: RunPair,
        restoration: Restoration,
        layers: Sequence[int],
        max_bytes: int,
        least_by_row: int = 0,
    ) -> None:
        pair = pair.needed()
        self.n_layers, self.samples = pair.corrupted.model.cfg.n_layers, pair.corrupted.n_rows
        self.is_hooked = pair.corrupted.is_hooked
        self.restoration, self.cfg = restoration, pair.corrupted.model.cfg
        self.spans = {layer: restoration.span(layer, self.n_layers) for layer in layers}
        self.first_touched = pair.corrupted.seen_from(pair.subject[0]) if pair.corrupted.resumes_at_positions else 0
        starts = dict.fromkeys(span.start for span in self.spans.values())
        clean_names = dict.fromkeys(
            point for span in self.spans.values() for block in span for point in self._restored_at(block)
        )
        streams = self._kept_streams()

        # 1. Refuse a budget that is too small before anything is run.
        n_restored = 0 if self.is_hooked or restoration.kind == "resid" else len(starts)
        n_streams = len(streams) + n_restored
        kept_bytes = len(clean_names) * pair.clean.stream_bytes + n_streams * pair.corrupted.stream_bytes
        kept_bytes += self.samples * pair.corrupted.past_bytes_by_row
        kept_bytes += pair.clean.logits_bytes + pair.corrupted.logits_bytes
        self.budget = CellBudget.of(pair.corrupted, kept_bytes, max_bytes, least_by_row)

        # 2. Run both, and the first block of each span with every position restored.
        self.clean = pair.clean.run(clean_names)
        self.corrupted = pair.corrupted.run([*streams, *pair.corrupted.past_points])
        self._restored = {} if self.is_hooked else {start: self._restore(start) for start in starts}

    def grid(
        self, positions: Sequence[int], measure: Measure, unchanged: Tensor, progress: str | None = None
    ) -> Float[Tensor, "pos layer ..."]:
        """The score of every cell.

        Args:
            positions: Positions to restore.
            measure, unchanged: What is scored, and the score of the corrupted run; the same as in `CellRuns`.
            progress: Title of a progress bar; by default none is shown.
        """
        # Windows that are cut off at the first or last block may be the same for several layers.
        spans = list(dict.fromkeys(self.spans.values()))
        cells = [self._cell(position, span) for position in positions for span in spans]
        engine = CellRuns(self.corrupted, measure, unchanged, self.budget)
        scores: Tensor = engine.scores(cells, progress).unflatten(0, (len(positions), len(spans)))
        return scores[:, [spans.index(span) for span in self.spans.values()]].cpu()

    def _cell(self, position: int, span: range) -> Cell:
        """The cell that restores one position in these blocks."""
        # On a causal model positions before the corrupted ones are those of the clean run.
        if not self.first_touched <= position < self.corrupted.input.n_pos:
            return Cell(span.start, ())
        return Cell(span.start + (not self.is_hooked), tuple(self._patches(position, span)))

    def _patches(self, position: int, span: range) -> Iterator[Patch]:
        at = ((position,), (position,))
        if not self.is_hooked:
            yield Patch(span.start, stream_entering(span.start + 1), self._restored[span.start], *at)
        for block in span if self.is_hooked else span[1:]:
            for point in self._restored_at(block):
                yield Patch(block, point, self.clean.activations[point], *at)
        for block in range(span.start + 1, self.n_layers):
            for point in self._severed_at(block):
                yield Patch(block, point, self.corrupted.activations[point], *at)

    def _restored_at(self, block: int) -> list[str]:
        """The hook points of the states that are restored in a block."""
        return points_of(self.restoration.kind, block, self.cfg)

    def _severed_at(self, block: int) -> list[str]:
        """The hook points of the outputs that are kept corrupted in a block above the restored ones."""
        return points_of(self.restoration.severed, block, self.cfg) if self.restoration.severed else []

    def _kept_streams(self) -> list[str]:
        """Hook points that the corrupted run keeps: streams that cells start from, and severed outputs."""
        starts = sorted({span.start for span in self.spans.values()})
        names = [stream_entering(start) for start in starts]
        names += [stream_entering(start + 1) for start in starts]
        names += [point for block in range(starts[0] + 1, self.n_layers) for point in self._severed_at(block)]
        return list(dict.fromkeys(names))

    def _restore(self, block: int) -> Resid:
        """The stream after the first block of a span, at each position when this position alone is restored there."""
        points = self._restored_at(block)
        if self.restoration.kind == "resid":
            stream: Resid = self.clean.activations[points[0]]
            return stream
        everywhere = {point: self.clean.activations[point].expand(self.samples, -1, -1) for point in points}
        return self.corrupted.resume(
            self.corrupted.stream(block),
            range(block, block + 1),
            hooks=[(point, lambda activation, hook: everywhere[hook.name].to(activation.device)) for point in points],
        )


class AnswerRuns:
    """Restored runs in which the probability of an answer is measured.

    Args:
        restored: Both runs and their cells.
        clean_answer: Answer that is scored in the clean run.
        answer: Answer that is scored in the corrupted run and in every cell.
    """

    def __init__(self, restored: RestoredRuns, clean_answer: Answer, answer: Answer) -> None:
        self.restored, self.clean_answer, self.answer, self.samples = restored, clean_answer, answer, restored.samples
        self.clean_scores: Scores = clean_answer.probabilities(restored.clean.logits, 1)[0]
        self.corrupted_scores: Scores = answer.probabilities(restored.corrupted.logits, self.samples)[0]

    def grid(self, positions: Sequence[int], progress: str | None = None) -> Float[Tensor, "pos layer sample selected"]:
        """Probability of each token of the answer in every cell, by sample."""
        return self.restored.grid(positions, self._measure, self.corrupted_scores, progress)

    def _measure(
        self, logits: Float[Tensor, "batch selected d_vocab_out"], computed: Int[Tensor, "selected"]
    ) -> Float[Tensor, "cell sample answer"]:
        """Probabilities of the answer's tokens; those that were not computed are taken from the corrupted run."""
        probabilities = self.answer.probabilities(logits, self.samples, computed)
        scores = self.corrupted_scores.expand(len(probabilities), -1, -1).clone()
        scores[:, :, computed] = probabilities
        return scores
