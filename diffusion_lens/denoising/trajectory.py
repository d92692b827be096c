"""`Trajectory`: the result of a denoising run."""

from collections.abc import Sequence
from pathlib import Path
from typing import SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.denoising.cache import TrajectoryCache
from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.explored import page_of
from diffusion_lens.denoising.explored_results import Results, Trace
from diffusion_lens.denoising.loop import run_loop
from diffusion_lens.denoising.loop_rows import LoopRows
from diffusion_lens.denoising.predictor import Cached, Conditional, FirstGiven
from diffusion_lens.denoising.randomness import Seed, row_seeds
from diffusion_lens.denoising.reach import Reach, reach_of
from diffusion_lens.denoising.recording import Recording
from diffusion_lens.denoising.run import Run
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_model
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.trajectory_diff import TrajectoryDiff
from diffusion_lens.hook_names import FwdHooks
from diffusion_lens.identity import run_of
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.noise import schedule_of
from diffusion_lens.pages.page import Page, html_path, write_page
from diffusion_lens.pages.views import Lens
from diffusion_lens.settings import naming_the_nearest, whole_number
from diffusion_lens.shapes import Tokens
from diffusion_lens.step_state import StepState
from weight_conversion import Architecture, NoiseSchedule


class Trajectory(Recording):
    """A finished run: its `Recording`, which may be taken again under intervention, whole or from a step on.

    The attributes, and the columns of the data frame, are those of `Recording`.
    """

    def from_step(self, step: SupportsIndex) -> "Trajectory":
        """The part of the run from the canvas before `step` on, for a replay from there with other hooks or seeds.

        Steps keep their index, and so their time and their random numbers.
        """
        step = whole_number("step", step)
        fields = {**vars(self), "canvases": self.canvases[self._canvas_index(step) :]}
        masked = self.is_masked(self.canvases)
        remasked = bool((masked[1:] & ~masked[:-1]).any()) or self.record.get("remasked", False)
        return Trajectory(**{**fields, "record": {**self.record, "first_step": step, "remasked": remasked}})

    def state_at(self, step: int, device: str | torch.device | None = None, tokens: Tokens | None = None) -> StepState:
        """The value of `hook.step` at a step, in the conditional branch, for forward passes that stand for this step.

        Args:
            device: Device of its tensors; by default that of the trajectory.
            tokens: Canvas in place of the recorded one.
        """
        times: list[float] = self.record["times"]
        tokens = (self.canvases[self._canvas_index(step)] if tokens is None else tokens).to(device)
        architecture = Architecture.from_dict(self.record["architecture"])
        canvas = self._canvas(tokens, reach_of(architecture))
        before = (self.revealed_at >= 0) & (self.revealed_at < step)
        return StepState(
            index=step,
            n_steps=len(times) - 1,
            t=times[step],
            s=times[step + 1],
            tokens=tokens,
            masked=canvas.masked(tokens),
            given=canvas.given,
            sigma=self._sigma(step, architecture),
            run=None,
            block=canvas.open_block(tokens, self.revealed_at.masked_fill(~before, -1).to(tokens.device), step),
        )

    @naming_the_nearest
    def replay(
        self,
        model: DiffusionTransformer,
        *,
        canvas: str = "forced",
        fwd_hooks: FwdHooks = (),
        sampler: str | Sampler | None = None,
        seeds: Sequence[SupportsIndex] | SupportsIndex | None = None,
        progress: bool = False,
    ) -> "Trajectory":
        """Take the same steps again under intervention; the network may also have been edited since.

        The record contains the weights, hooks and modules of the current network, and under "trajectory" those of the
        network that wrote this trajectory's canvases. A free replay from the middle (`from_step`) keeps the earlier
        canvases; under another network, two networks have then written the canvases.

        Args:
            canvas: With "forced" the network reads the recorded canvases: the tokens stay, their confidence changes.
                "free" is a new run from the first canvas, with the same settings and seeds, which may write other
                tokens.
            fwd_hooks: The same as in `denoise`.
            sampler: Sampler of a free replay, in place of the recorded one.
            seeds: Seeds of a free replay, one for each row or a number as in `denoise`, in place of the recorded ones.
            progress: Whether to show a progress bar.

        Raises:
            ValueError: The model is not the recorded one, or the sampler is unknown.
        """
        if canvas not in ("forced", "free"):
            raise ValueError(f"canvas={canvas!r}; it must be 'forced' (the recorded canvases) or 'free' (new ones)")
        run = self._begin_again(model, sampler, seeds, forced=canvas == "forced")
        return self._finish(run, canvas, fwd_hooks, progress)

    def replay_from_logits(
        self,
        model: DiffusionTransformer,
        logits: Float[Tensor, "batch selected d_vocab_out"],
        positions: Sequence[int],
        fwd_hooks: FwdHooks = (),
    ) -> "Trajectory":
        """A free replay whose first step uses the given logits instead of a forward pass.

        Args:
            logits: Logits after guidance, at every position where the first step may propose a token.
            positions: The positions that they predict.
            fwd_hooks: The same as in `denoise`. Hooks inside the network act from the second step on.
        """
        run = self.started(model)
        run.predictor = FirstGiven(run.predictor, self.first_step, logits, positions)
        return self._finish(run, "free", fwd_hooks)

    def replay_with_first(self, model: DiffusionTransformer, first_hooks: FwdHooks) -> "Trajectory":
        """A free replay of a text that grows, with hooks that act on the prompt alone, which is computed once."""
        run = self.started(model)
        run.predictor = Cached(Conditional(model, run.canvas), list(first_hooks))
        return self._finish(run, "free", ())

    def rows_after(
        self,
        model: DiffusionTransformer,
        logits: Float[Tensor, "batch selected d_vocab_out"],
        positions: Sequence[int],
    ) -> LoopRows:
        """The rows after the first step of a free replay that uses the given logits; as in `replay_from_logits`."""
        run = self.started(model)
        run.predictor = FirstGiven(run.predictor, self.first_step, logits, positions)
        run_loop(run, self.first_step, stop=self.first_step + 1)
        return LoopRows.of(run)

    def started(self, model: DiffusionTransformer) -> Run:
        """A free replay before its first step."""
        return self._begin_again(model, None, None, forced=False)

    def resume(self, model: DiffusionTransformer, rows: LoopRows) -> Run:
        """A free run of these rows with the settings of this trajectory, whose given positions are those of row 0."""
        settings = DenoiseSettings.recorded(self.record, None, rows.seeds)
        run = Run(
            model=model,
            canvas=self.row(0).repeat(len(rows))._canvas(rows.tokens, reach_of(model.cfg)),
            settings=settings.on(model.cfg, model.cfg.model_name),
            seeds=rows.seeds,
            times=list(self.record["times"]),
            revealed_at=rows.revealed_at,
            confidence=rows.confidence,
        )
        run.kept = rows.kept
        return run

    def _finish(self, run: Run, canvas: str, fwd_hooks: FwdHooks, progress: bool = False) -> "Trajectory":
        """Take the steps of a replay, and record what it replays."""
        model = run.model
        with run_of(model, fwd_hooks):
            record = run_loop(run, self.first_step, fwd_hooks=fwd_hooks, progress=progress)
            record |= {"replay": canvas, "replayed_from": self.first_step, "trajectory": canvas_provenance(self.record)}
            return Trajectory.of(run, {**self.record, **run.describe(), **record})

    def diff(self, other: "Trajectory") -> TrajectoryDiff:
        """The differences from another run of the same prompt."""
        names = ("tokens", "canvases", "revealed_at", "confidence")
        first, second = ({name: getattr(trajectory, name) for name in names} for trajectory in (self, other))
        return TrajectoryDiff.of(first, second, self.first_step)

    def explore(
        self,
        path: str | Path | None = None,
        *,
        lens: Lens | None = None,
        trace: Trace | Sequence[Trace] | None = None,
        attention: TrajectoryCache | None = None,
        logits: TrajectoryCache | None = None,
        row: SupportsIndex = 0,
        max_bytes: SupportsIndex = 16 * 2**20,
    ) -> Path | Page:
        """Write one row as an explorer page: one HTML file that needs no network, for any browser.

        The page shows the canvas by step with the order and the confidence of the tokens, and the results that are
        given. Where one is missing, it says what to pass. Every view shows the Python code that gives its numbers.

        Args:
            path: File to write, ending in .html; by default the page is returned, and shows itself in a notebook.
            lens: `logit_lens(model, trajectory)`, at all or some steps.
            trace: `trace_trajectory(model, fact, trajectory=trajectory, ...)`, or several, of different kinds.
            attention: Cache with the patterns, `blocks.{i}.attn.hook_pattern`, of some layers and steps.
            logits: Cache with `denoise.hook_logits`, for the likeliest tokens at every masked position, after guidance.
                It may be the same cache. Without it they are those of the lens's last layer, if there is no guidance.
            row: Row of the batch.
            max_bytes: Largest size of the file; a larger one is refused, with what to leave out.

        Returns:
            The path, or without one the page.

        Raises:
            ValueError: A result of another run or network, a cache without what its view shows, or a page that is too
                large.
        """
        if path is not None:
            html_path(path)
        traces = () if trace is None else (trace,) if isinstance(trace, Trace) else tuple(trace)
        results = Results(lens, traces, attention, logits)
        page = page_of(self, results, whole_number("row", row))
        return page if path is None else write_page(page, path, whole_number("max_bytes", max_bytes))

    def _begin_again(
        self, model: DiffusionTransformer, sampler: str | Sampler | None, seeds: Seed | None, *, forced: bool
    ) -> Run:
        """A run that starts from this trajectory's first canvas; a forced run follows its canvases."""
        require_same_model(self.record, model)
        if self.record.get("remasked") and self.first_step and not forced:
            raise ValueError(
                "the sampler reads the confidence of every revealed token, and a run that remasks does not record it "
                "for tokens that were rewritten later: replay it freely from its start, or forced from any step"
            )
        settings = DenoiseSettings.recorded(self.record, sampler, seeds)
        device = model.cfg.device
        before = (self.revealed_at >= 0) & (self.revealed_at < self.first_step)
        run = Run(
            model=model,
            canvas=self._canvas(self.canvases[0].to(device), reach_of(model.cfg)),
            settings=settings.on(model.cfg, model.cfg.model_name),
            seeds=row_seeds(settings.seed, self.canvases.shape[1]),
            times=list(self.record["times"]),
            revealed_at=self.revealed_at.masked_fill(~before, -1).to(device),
            confidence=self.confidence.masked_fill(~before, float("nan")).to(device),
            script=self.canvases.to(device) if forced else None,
            sigmas=[_plain(sigma) for sigma in self.record["sigmas"]] if forced and self.record.get("sigmas") else None,
        )
        if run.sampler.keeps_prediction and not forced and sampler is None and seeds is None:
            # Steps before the first one may have left the canvas as it is, and so its time.
            run.tell_first(self.first_step, _plain(self.record["sigmas"][self.first_step]))
        return run

    def _sigma(self, step: int, architecture: Architecture) -> float | tuple[float, ...] | None:
        """The noise at a step; `None` for a model of next tokens."""
        if architecture.noise is None:
            return None
        if sigmas := self.record.get("sigmas"):
            return _plain(sigmas[step])
        described = self.record["sampler"].get("schedule")
        schedule = architecture.schedule if described is None else NoiseSchedule(**described)
        return schedule_of(schedule).sigma_at(self.record["times"][step])

    def _canvas(self, tokens: Tokens, reach: Reach | None) -> Canvas:
        """The canvas with these tokens, on their device."""
        real = None if bool(self.real.all()) else self.real.to(tokens.device)
        return Canvas(tokens, self.given.to(tokens.device), real, self.blank, reach, self.rewrites)

    def _canvas_index(self, step: int) -> int:
        """The index of a step in `canvases`; a `ValueError` if the trajectory does not contain the step."""
        if not self.first_step <= step < self.first_step + self.n_steps:
            last = self.first_step + self.n_steps - 1
            raise ValueError(f"step {step} is not one of the steps {self.first_step} to {last} of the trajectory")
        return step - self.first_step


def _plain(sigma: float | Sequence[float]) -> float | tuple[float, ...]:
    """The noise of a step, or that of each row, from a record."""
    return tuple(sigma) if isinstance(sigma, Sequence) else float(sigma)
