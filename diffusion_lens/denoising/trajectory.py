"""`Trajectory`: the result of a denoising run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.loop import run_loop
from diffusion_lens.denoising.predictor import FirstGiven
from diffusion_lens.denoising.randomness import Seed, row_seeds
from diffusion_lens.denoising.run import Run
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_model
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.trajectory_diff import TrajectoryDiff
from diffusion_lens.hook_names import FwdHooks
from diffusion_lens.identity import run_of
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import as_dataclass, load_result, save_result
from diffusion_lens.settings import whole_number
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.step_state import StepState

_TENSORS = ("tokens", "canvases", "revealed_at", "confidence", "given", "real")


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A finished run, with everything needed to inspect it and to repeat it.

    Attributes:
        tokens: Int[batch pos], the final canvas.
        canvases: Int[canvas batch pos], x_t before each step, and the final canvas. A position contains the mask id, or
            on a causal model -1, until it is revealed.
        revealed_at: Int[batch pos], step that revealed each position; -1 where it was given, or is still masked.
        confidence: Float[batch pos], probability of each token when it was revealed; 1 where it was given, 0 where it
            is still masked.
        given: Bool[batch pos], positions that came with the prompt.
        real: Bool[batch pos], false at padding.
        text: Final canvas as text, one string for each row; empty strings where the model has no tokenizer.
        words: Text of every id that occurs.
        record: Sampler, steps, times, guidance, temperature, seeds, model, hash of the weights, hooks, modules,
            versions, forward passes and seconds; of a replay also its kind, and the network that wrote the replayed
            canvases.
    """

    tokens: Tokens
    canvases: Int[Tensor, "canvas batch pos"]
    revealed_at: Int[Tensor, "batch pos"]
    confidence: Float[Tensor, "batch pos"]
    given: PosMask
    real: PosMask
    text: list[str]
    words: dict[int, str]
    record: dict[str, Any]

    @classmethod
    def of(cls, run: Run, record: dict[str, Any]) -> "Trajectory":
        """The trajectory of a finished run."""
        model, canvas = run.model, run.canvas
        canvases = torch.stack(run.canvases)
        ids = canvases.unique().tolist()
        has_text = model.tokenizer is not None
        real = torch.ones_like(canvas.given) if canvas.real is None else canvas.real
        return cls(
            tokens=run.tokens,
            canvases=canvases,
            revealed_at=run.revealed_at,
            confidence=run.confidence.nan_to_num(nan=1.0).masked_fill(canvas.blanks(run.tokens), 0.0),
            given=canvas.given,
            real=real,
            text=[
                model.to_string(row[inside]) if has_text else "" for row, inside in zip(run.tokens, real, strict=True)
            ],
            words=dict(zip(ids, model.words(ids), strict=True)),
            record=record,
        )

    @property
    def first_step(self) -> int:
        """Index of the first step: 0, or where a branch begins."""
        return int(self.record["first_step"])

    @property
    def n_steps(self) -> int:
        """Number of steps in this trajectory."""
        return self.canvases.shape[0] - 1

    @property
    def forward_passes(self) -> int:
        """Number of forward passes of the run; two guided branches in one batch count once."""
        return int(self.record["forward_passes"])

    @property
    def tokens_per_second(self) -> float:
        """Number of revealed tokens per second of the run."""
        return float((self.revealed_at >= self.first_step).sum()) / float(self.record["seconds"])

    @property
    def blank(self) -> int:
        """Id of positions not yet revealed: [MASK], or -1 on a causal canvas."""
        return int(self.record["blank"])

    @property
    def prompt(self) -> Tokens:
        """Int[batch pos], the given tokens, with every other position masked."""
        return self.tokens.masked_fill(~self.given, self.blank)

    def is_masked(self, canvases: Int[Tensor, "*batch pos"]) -> Bool[Tensor, "*batch pos"]:
        """The positions of canvases that are not yet revealed."""
        return canvases == self.blank

    def from_step(self, step: SupportsIndex) -> "Trajectory":
        """The part of the run from the canvas before `step` on, for a replay from there with other hooks or seeds.

        Steps keep their index, and so their time and their random numbers.
        """
        step = whole_number("step", step)
        fields = {**vars(self), "canvases": self.canvases[self._canvas_index(step) :]}
        masked = self.is_masked(self.canvases)
        remasked = bool((masked[1:] & ~masked[:-1]).any()) or self.record.get("remasked", False)
        return Trajectory(**{**fields, "record": {**self.record, "first_step": step, "remasked": remasked}})

    def state_at(self, step: int, device: str | torch.device | None = None) -> StepState:
        """The value of `hook.step` at a step, in the conditional branch, for forward passes that stand for this step.

        Args:
            device: Device of its tensors; by default that of the trajectory.
        """
        times: list[float] = self.record["times"]
        tokens, real = (x.to(device) for x in (self.canvases[self._canvas_index(step)], self.real))
        return StepState(
            index=step,
            n_steps=len(times) - 1,
            t=times[step],
            s=times[step + 1],
            tokens=tokens,
            masked=self.is_masked(tokens) & real,
            given=self.given.to(device),
            run=None,
        )

    def repeat(self, n: SupportsIndex) -> "Trajectory":
        """`n` copies of the batch, one after the other, with the same seeds, to be replayed under hooks by row."""
        n = whole_number("n", n)
        if n < 1:
            raise ValueError(f"n={n}; the number of copies of each row must be at least 1")
        rows = {name: getattr(self, name).repeat(n, 1) for name in _TENSORS if name != "canvases"}
        return replace(
            self,
            **rows,
            canvases=self.canvases.repeat(1, n, 1),
            text=self.text * n,
            record={**self.record, "seeds": self.record["seeds"] * n},
        )

    def row(self, index: int) -> "Trajectory":
        """One row of a batch as a trajectory of its own; forward passes and seconds are still those of the batch."""
        rows = {name: getattr(self, name)[index, None] for name in _TENSORS if name != "canvases"}
        record = {**self.record, "seeds": [self.record["seeds"][index]]}
        return replace(self, **rows, canvases=self.canvases[:, index, None], text=[self.text[index]], record=record)

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
        run = self._begin_again(model, None, None, forced=False)
        run.predictor = FirstGiven(run.predictor, self.first_step, logits, positions)
        return self._finish(run, "free", fwd_hooks)

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

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return save_result(path, "trajectory", tensors, {"text": self.text, "words": self.words, "record": self.record})

    @classmethod
    def load(cls, path: str | Path) -> "Trajectory":
        """Read what `save` wrote."""
        tensors, record = load_result(path, "trajectory")
        words = {int(token): word for token, word in record["words"].items()}  # JSON's keys are strings
        return as_dataclass(cls, {**tensors, **record, "words": words})

    def str_canvases(self, row: int = 0) -> list[list[str]]:
        """The text at each position of one row, for every canvas."""
        return [[self.words[token] for token in canvas] for canvas in self.canvases[:, row].tolist()]

    def plot(self, row: int = 0, ax: Any = None, title: str | None = None) -> Any:
        """The canvas by step, tokens coloured by confidence; returns the matplotlib axes."""
        return plots.denoising_grid(*self._drawn(row), title=title, ax=ax)

    def to_html(self, row: int = 0) -> str:
        """The canvas by step as a self-contained HTML page, tokens coloured by confidence."""
        return plots.canvas_table(f"{self.record['model']}: {self.text[row] or 'a run'}", *self._drawn(row))

    def _drawn(self, row: int) -> tuple[list[list[str]], list[list[bool]], list[int], list[float], int]:
        """The data that the figures of one row show."""
        masked = self.is_masked(self.canvases[:, row]).tolist()
        revealed_at, confidence = self.revealed_at[row].tolist(), self.confidence[row].tolist()
        return self.str_canvases(row), masked, revealed_at, confidence, self.first_step

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
        real = None if bool(self.real.all()) else self.real.to(device)
        before = (self.revealed_at >= 0) & (self.revealed_at < self.first_step)
        return Run(
            model=model,
            canvas=Canvas(self.canvases[0].to(device), self.given.to(device), real, self.blank, model.cfg.grows),
            settings=settings.on(model.cfg, model.cfg.model_name),
            seeds=row_seeds(settings.seed, self.canvases.shape[1]),
            times=list(self.record["times"]),
            revealed_at=self.revealed_at.masked_fill(~before, -1).to(device),
            confidence=self.confidence.masked_fill(~before, float("nan")).to(device),
            script=self.canvases.to(device) if forced else None,
        )

    def _canvas_index(self, step: int) -> int:
        """The index of a step in `canvases`; a `ValueError` if the trajectory does not contain the step."""
        if not self.first_step <= step < self.first_step + self.n_steps:
            last = self.first_step + self.n_steps - 1
            raise ValueError(f"step {step} is not one of the steps {self.first_step} to {last} of the trajectory")
        return step - self.first_step

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        return f"Trajectory({batch} x {pos} positions, {self.n_steps} steps, {self.forward_passes} forward passes)"
