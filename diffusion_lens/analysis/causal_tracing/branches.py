"""Corrupted denoising runs that continue from the step in which a state was restored, each distinct one once.

After the restored step a branch is a corrupted run like any other: what it writes depends on its canvas, its sample of
the noise and the step. Most restored states change no token of their step, so that their branches are the corrupted run
itself, and others write what another branch has written. Branches are therefore compared after every step, and the loop
goes on with the distinct ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.batching import in_batches, rows_at_once
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.kept_run import KeptRun, keys_and_values
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory
from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.loop import run_loop
from diffusion_lens.denoising.loop_rows import LoopRows
from diffusion_lens.denoising.predictor import Cached, Conditional, Predictor, guide
from diffusion_lens.denoising.run import Run
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.kv_cache import LayerKeyValues
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.step_state import StepState


class Branches:
    """Branches of the corrupted runs, by number; the numbers of the corrupted runs are those of their samples.

    Args:
        run: Clean run and its query.
        corruption: Corruption of the subject.
        corrupted: The corrupted runs, one row per sample.
        max_bytes: Memory to use in addition to the weights.
    """

    def __init__(self, run: TracedTrajectory, corruption: Corruption, corrupted: Trajectory, max_bytes: int) -> None:
        self.run, self.corruption, self.corrupted, self.max_bytes = run, corruption, corrupted, max_bytes
        # A text that grows has its whole answer after the step that writes the answer's last token.
        grows, last = run.model.cfg.grows, corrupted.first_step + corrupted.n_steps
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
        """Numbers of the branches of copies of all samples, whose logits of one step are given, after guidance.

        Args:
            positions: The positions that the logits predict.
        """
        n_samples = len(self.corrupted)
        before = self.corrupted.from_step(step).repeat(len(logits) // n_samples)
        rows = before.rows_after(self.run.model, logits, positions)
        return self._numbers(step + 1, rows, [i % n_samples for i in range(len(logits))])

    def _numbers(self, step: int, rows: LoopRows, samples: Sequence[int]) -> list[int]:
        """The branch of each row before a step; those that are new wait for this step."""
        run = self.corrupted.resume(self.run.model, rows)
        if step not in self._known:
            own = self._corrupted_rows(step)
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

    def _corrupted_rows(self, step: int) -> LoopRows | None:
        """The corrupted runs before a step; `None` if they were remasked, and what they were is not recorded."""
        corrupted = self.corrupted
        if step < corrupted.first_step + corrupted.n_steps:
            rest = corrupted.from_step(step)
            return None if rest.record["remasked"] else LoopRows.of(rest.started(self.run.model))
        kept = torch.full((len(corrupted),), float("nan"), dtype=torch.float64)
        return LoopRows(corrupted.tokens, corrupted.revealed_at, corrupted.confidence, kept, corrupted.record["seeds"])

    def finish(self, kept: KeptRun | None = None) -> None:
        """Denoise all branches to the end of the run.

        Args:
            kept: The corrupted runs with the keys and values of their final texts, if no position sees later ones.
        """
        for step in range(self.corrupted.first_step, self.end):
            parts = self._waiting.pop(step, [])
            if not parts:
                continue
            numbers, rows = (
                [number for part, _ in parts for number in part],
                LoopRows.joined([part for _, part in parts]),
            )
            steps = _Steps(self, step, numbers, rows, kept)
            for chosen, after in in_batches(steps, range(len(rows)), self._fitting()):
                samples = [self._samples[numbers[i]] for i in chosen]
                stop = step + 1 if kept is None else self.end
                for i, number in zip(chosen, self._numbers(stop, after, samples), strict=True):
                    self._next[numbers[i]] = number

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


@dataclass(frozen=True, eq=False)
class _Steps:
    """Takes the next step of some branches or, with stored keys and values, all that are left."""

    branches: Branches
    step: int
    numbers: Sequence[int]
    rows: LoopRows
    kept: KeptRun | None

    def __call__(self, chosen: Sequence[int]) -> LoopRows:
        of, rows = self.branches, self.rows.at(chosen)
        samples = torch.tensor([of._samples[self.numbers[i]] for i in chosen])
        run = of.corrupted.resume(of.run.model, rows)
        if self.kept is None:
            run.predictor = _Corrupted(of.run, of.corruption, run.canvas, samples)
            run_loop(run, self.step, stop=self.step + 1)
        else:
            run.predictor = _continued(run, self.kept, samples)
            run_loop(run, self.step, stop=of.end)
        return LoopRows.of(run)


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
    corruption: Corruption
    canvas: Canvas
    samples: Int[Tensor, "batch"]
    _passes: int = 0

    @property
    def passes(self) -> int:
        return self._passes

    def __call__(self, state: StepState, positions: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        model, scale = self.run.model, self.run.trajectory.record["cfg_scale"]
        batch, rows = Conditional(model, self.canvas).located(state, positions, None)
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
        model, n_samples = self.run.model, self.corruption.rows
        seen = torch.nn.functional.one_hot(self.samples, n_samples).cumsum(dim=0)
        copy = seen[torch.arange(len(tokens)), self.samples] - 1
        place, n_copies = copy * n_samples + self.samples, int(copy.max()) + 1
        layout = tokens[:1].repeat(n_copies * n_samples, 1)
        layout[place] = tokens
        with model.hooks(fwd_hooks=self.corruption.hooks(model, self.run.query, runs=n_copies)):
            embedded: Tensor = model(layout, stop_at_layer=0)
        return embedded[place]
