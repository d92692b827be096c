"""`Trajectory`: the result of a denoising run, to be read, saved, drawn, compared and taken again with hooks."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.denoising.cache import TrajectoryCache
from diffusion_lens.denoising.canvas import Canvas, reach_of
from diffusion_lens.denoising.difference import RunDifference
from diffusion_lens.denoising.loop import LoopRows, Run, run_loop
from diffusion_lens.denoising.predictions import MAX_BYTES, Predictions
from diffusion_lens.denoising.predictor import Cached, Conditional, FirstGiven
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_model
from diffusion_lens.denoising.sampler import PositionNoise, Sampler, Seed, row_seeds
from diffusion_lens.denoising.settings import DenoiseSettings
from diffusion_lens.hooks.names import FwdHooks
from diffusion_lens.hooks.step import Handed, StepState
from diffusion_lens.model.config import reached
from diffusion_lens.model.noise import schedule_of
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.text import to_completion
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.captions import caption_of, selection_of
from diffusion_lens.records.identity import run_of
from diffusion_lens.records.results import Result, Saved, Table, load_result, shown_model, texts_of
from diffusion_lens.records.schema import built, require_indices
from diffusion_lens.settings import at_least, checked_arguments, one_of, whole_number
from diffusion_lens.settings.figures import styled
from weight_conversion import Architecture, NoiseSchedule, Variant

_TENSORS = ("tokens", "canvases", "prompt", "revealed_at", "revealed_before", "confidence", "given", "real")
_TEXTS = ("text", "completion")


@dataclass(frozen=True, eq=False)
class Trajectory(Saved, Result):
    """A finished run: what it wrote, step by step. It may be taken again under intervention, whole or from a step on.

    Columns of the data frame: batch, pos, token, given, revealed_at, confidence; a row for each position that is
    not padding.

    A canvas is recorded as its step read it, with what hooks at `denoise.hook_tokens` wrote, and a replay begins with
    the canvas that its first step read. A position that hooks mask again is not revealed until a step reveals it. A
    token that they write in place of a mask counts as revealed in the step that first reads it, although the canvas of
    this step contains it already; one that they write over another token leaves `revealed_at` as it is. Its confidence
    is 1. For samplers it is a token like others: one that masks tokens again may mask it.

    Attributes:
        tokens: Int[batch pos], the final canvas.
        canvases: Int[canvas batch pos], x_t as each step read it, and the final canvas. A position contains the mask id
            until it is revealed, or -1 until the text reaches it: on a causal model, and in blocks that are not open.
            Under uniform noise it contains a random token at first.
        prompt: Int[batch pos], the tokens that were given, also where hooks wrote others over them, with every other
            position masked, or -1 where nothing is masked. Files of earlier versions lack it; it is then taken from the
            first canvas, with what hooks had written over it.
        revealed_at: Int[batch pos], step that revealed each position; -1 where it was given, or is still masked. Under
            uniform noise, the last step that changed it, or 0 if none did.
        revealed_before: Int[batch pos], the same of the first canvas: also where the token was rewritten later. Files
            of earlier versions lack it; it is then -1 for such tokens.
        confidence: Float[batch pos], probability of each token when it was revealed; 1 where it was given or written by
            a hook, 0 where it is still masked. Under uniform noise, the probability in the last step that it is the
            clean token.
        given: Bool[batch pos], positions that came with the prompt.
        real: Bool[batch pos], false at padding.
        text: Final canvas as text, one string for each row; empty strings where the model has no tokenizer.
        completion: What the run wrote of it, without the prompt and without special tokens; a text that grows ends at
            the first end token. Files that an earlier version saved contain none: it is then empty text.
        words: Text of every id that occurs, on a canvas or as the likeliest one that a step handed on.
        record: Sampler, steps, times, guidance, temperature, seeds, model, hash of the weights, hooks, modules,
            versions, forward passes and seconds; of a replay also its kind, and the network that wrote the replayed
            canvases.
        handed: What each step read of the steps before it, beside the canvas, with a first axis for steps; `None` where
            steps read the canvas alone.
        recorded: What each step predicted, if this was recorded; `predictions` reads it.
    """

    tokens: Tokens
    canvases: Int[Tensor, "canvas batch pos"]
    prompt: Tokens
    revealed_at: Int[Tensor, "batch pos"]
    revealed_before: Int[Tensor, "batch pos"]
    confidence: Float[Tensor, "batch pos"]
    given: PosMask
    real: PosMask
    text: list[str]
    completion: list[str]
    words: dict[int, str]
    record: dict[str, Any]
    handed: Handed | None = None
    recorded: Predictions | None = None
    KIND = "trajectory"
    SHOWS = "the text after each denoising step, coloured by the probability of each token when it was written"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"model": str, "blank": int, "first_step": int, "forward_passes": int}
    AXES = (("batch", "text"), ("batch", "completion"))

    def _check(self) -> None:
        if "times" in self.record:
            require_indices("times", [self.first_step, self.first_step + self.n_steps], len(self.record["times"]))
        if unknown := set(self.canvases.unique().tolist()) - self.words.keys():
            raise ValueError(f"words lacks the token {min(unknown)}, which is on the canvases")

    @classmethod
    def of(cls, run: Run, record: dict[str, Any]) -> "Trajectory":
        """The trajectory of a finished run."""
        model, canvas = run.model, run.canvas
        canvases = torch.stack(run.canvases)
        handed = Handed.stacked(run.handed_history) if run.handed_history else None
        shown = canvases if handed is None else torch.cat([canvases.flatten(), handed.likeliest.flatten()])
        ids = shown.unique().tolist()
        words = dict(zip(ids, model.words(ids), strict=True))
        has_text = model.tokenizer is not None
        real = torch.ones_like(canvas.given) if canvas.real is None else canvas.real
        whole = [row[inside] for row, inside in zip(run.tokens, real, strict=True)]
        written = [row[inside] for row, inside in zip(run.tokens, real & ~canvas.given, strict=True)]
        unwritten = (run.tokens == canvas.blank) | ~reached(run.tokens)
        return cls(
            tokens=run.tokens,
            canvases=canvases,
            prompt=canvas.tokens.masked_fill(~canvas.given, canvas.blank),
            revealed_at=run.revealed_at,
            revealed_before=run.revealed_before,
            confidence=run.confidence.nan_to_num(nan=1.0).masked_fill(unwritten, 0.0),
            given=canvas.given,
            real=real,
            text=[model.to_string(row) if has_text else "" for row in whole],
            completion=[to_completion(model, row) if has_text else "" for row in written],
            words=words,
            record=record,
            handed=handed,
            recorded=run.predictions(words, record),
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
        """Id of positions not yet revealed: [MASK], or -1, which no position contains under uniform noise."""
        return int(self.record["blank"])

    @property
    def uniform_noise(self) -> bool:
        """Whether the noise is uniform, so that every position that was not given may change in every step."""
        return self.record.get("noise") == "uniform"

    @property
    def rewrites(self) -> bool:
        """Earlier name of `uniform_noise`."""
        warnings.warn("rewrites is now called uniform_noise", DeprecationWarning, stacklevel=2)
        return self.uniform_noise

    def lacks_confidence(self, sampler: Sampler) -> bool:
        """Whether the sampler of a free run from here on would read the confidence of a token that was rewritten later,
        which is not recorded."""
        rewritten = (self.canvases != self.canvases[0]).any(dim=0) & ~self.is_open(self.canvases[0]) & self.real
        return sampler.reads_confidence and self.first_step > 0 and bool(rewritten.any())

    def is_masked(self, canvases: Int[Tensor, "*batch pos"]) -> Bool[Tensor, "*batch pos"]:
        """The positions of canvases that are not yet revealed."""
        return (canvases == self.blank) | ~reached(canvases)

    def is_open(self, canvases: Int[Tensor, "*batch pos"]) -> Bool[Tensor, "*batch pos"]:
        """The positions of whole canvases that a step may write: those not yet revealed, under uniform noise all that
        were not given."""
        if not self.uniform_noise:
            return self.is_masked(canvases)
        return (~self.given & self.real).to(canvases.device).expand_as(canvases)

    def __len__(self) -> int:
        """Number of rows of the batch."""
        return self.tokens.shape[0]

    def __getitem__(self, row: int) -> Int[Tensor, "pos"]:
        """The tokens of one row, as of a batch of tokens that another library generates."""
        return self.tokens[row]

    @classmethod
    def load(cls, path: str | Path) -> "Trajectory":
        """Read what `save` wrote."""
        tensors, record = load_result(path, cls.KIND)
        texts = record.get("text")
        missing = {
            "completion": [""] * len(texts) if isinstance(texts, list) else [],
            "prompt": tensors.get("tokens"),
            "revealed_before": tensors.get("revealed_at"),
        }
        run = built(cls, {**missing, **tensors, **record}, str(path))
        # Files of earlier versions lack these.
        derived: dict[str, Any] = {
            "prompt": run.canvases[0].masked_fill(~run.given, run.blank),
            "revealed_before": run.revealed_at.masked_fill(~run._known(run.first_step), -1),
        }
        return replace(run, **{name: derived[name] for name in derived.keys() - tensors.keys()})

    def repeat(self, n: SupportsIndex) -> "Trajectory":
        """`n` copies of the batch, one after the other, with the same seeds, to be replayed under hooks by row."""
        return self._at([*range(len(self))] * at_least(1, "n", n))

    def row(self, index: int) -> "Trajectory":
        """One row of a batch as a trajectory of its own; forward passes and seconds are still those of the batch."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index={index}, but the trajectory has {len(self)} rows")
        return self._at([index])

    def _at(self, rows: list[int]) -> "Trajectory":
        """The trajectory of these rows."""
        tensors = {name: getattr(self, name)[rows] for name in _TENSORS if name != "canvases"}
        texts: dict[str, Any] = {name: [getattr(self, name)[row] for row in rows] for name in _TEXTS}
        record = {**self.record, "seeds": [self.record["seeds"][row] for row in rows]}
        if sigmas := record.get("sigmas"):
            record["sigmas"] = [
                [sigma[row] for row in rows] if isinstance(sigma, Sequence) else sigma for sigma in sigmas
            ]
        handed = None if self.handed is None else self.handed[:, rows]
        recorded = None if self.recorded is None else self.recorded.part(rows)
        changed: dict[str, Any] = {**tensors, **texts, "record": record, "handed": handed, "recorded": recorded}
        return replace(self, canvases=self.canvases[:, rows], **changed)

    def str_canvases(self, row: int = 0) -> list[list[str]]:
        """The text at each position of one row, for every canvas."""
        return [[self.words[token] for token in canvas] for canvas in self.canvases[:, row].tolist()]

    @styled
    def plot(self, row: int = 0, ax: Any = None, title: str | None = None, *, folded: bool = True) -> Any:
        """The canvas by step, tokens coloured by confidence; returns the matplotlib axes.

        Args:
            row: Row of the batch.
            folded: Whether consecutive steps that write nothing share a thin row; otherwise every step has its own.
        """
        from diffusion_lens import plots  # when it is drawn: loading a model should not wait for it

        return plots.denoising_grid(*self._drawn(row), title=title, ax=ax, folded=folded)

    def caption(self, **selected: Any) -> str:
        """Two sentences for the legend of the picture, see `PicturedResult.caption`."""
        return caption_of(self.SHOWS + selection_of(self.plot, selected), self._settings())

    def to_html(self, row: int = 0, *, folded: bool = True) -> str:
        """The canvas by step as a self-contained HTML page, tokens coloured by confidence; arguments as in `plot`."""
        from diffusion_lens import plots

        title = f"{shown_model(self.record)}: {self.text[row] or 'a run'}"
        return plots.canvas_table(title, *self._drawn(row), folded=folded)

    def from_step(self, step: SupportsIndex) -> "Trajectory":
        """The part of the run from the canvas before `step` on, for a replay from there with other hooks or seeds.

        Steps keep their index, and so their time and their random numbers.
        """
        step = whole_number("step", step)
        index, record = self._canvas_index(step), {**self.record, "first_step": step}
        before, handed = self._revealed_before(step), None if self.handed is None else self.handed[index:]
        recorded = None if self.recorded is None else self.recorded.part(range(len(self)), index)
        return replace(
            self,
            canvases=self.canvases[index:],
            revealed_before=before,
            record=record,
            handed=handed,
            recorded=recorded,
        )

    def state_at(self, step: int, device: str | torch.device | None = None, tokens: Tokens | None = None) -> StepState:
        """The value of `hook.step` at a step, in the conditional branch, for forward passes that stand for this step.

        Args:
            device: Device of its tensors; by default that of the trajectory.
            tokens: Canvas in place of the recorded one.
        """
        times: list[float] = self.record["times"]
        tokens = (self.canvases[self._canvas_index(step)] if tokens is None else tokens).to(device)
        architecture = Architecture.from_dict(self.record["architecture"])
        canvas = self._canvas(tokens, architecture)
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
            block=canvas.open_block(tokens, self._revealed_before(step).to(tokens.device), step, len(times) - 1)
            if canvas.reach
            else None,
            real=canvas.real,
            handed=None if self.handed is None else self.handed[self._canvas_index(step)].to(tokens.device),
        )

    @checked_arguments
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
        one_of("forced", "free")("canvas", canvas)
        run = self.started(model, sampler, seeds, forced=canvas == "forced")
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
        self, model: DiffusionTransformer, logits: Float[Tensor, "batch selected d_vocab_out"], positions: Sequence[int]
    ) -> LoopRows:
        """The rows after the first step of a free replay that uses the given logits; as in `replay_from_logits`."""
        run = self.started(model)
        run.predictor = FirstGiven(run.predictor, self.first_step, logits, positions)
        run_loop(run, self.first_step, stop=self.first_step + 1)
        return LoopRows.of(run)

    def started(
        self,
        model: DiffusionTransformer,
        sampler: str | Sampler | None = None,
        seeds: Seed | None = None,
        *,
        forced: bool = False,
    ) -> Run:
        """A replay before its first step, from this trajectory's first canvas; a forced one follows its canvases."""
        require_same_model(self.record, model)
        device = model.cfg.device
        if self.record.get("drawn_in_sequence") and not forced and seeds is None:
            raise ValueError(
                "the random numbers of this run are those of a torch.Generator, in sequence, and cannot be drawn "
                "again. Pass seeds= to replay it freely with others, or denoise with a number as seed="
            )
        handed = None if self.handed is None else self.handed.to(device)
        # The confidence of a token that was rewritten later is not recorded, only that there was one.
        certain = ~self.is_open(self.canvases[0]) & ~self.given & self.real
        confidence = torch.where(certain, 1.0, torch.nan)
        run = self._run(
            model,
            DenoiseSettings.recorded(self.record, sampler, seeds),
            canvas=self._canvas(self.canvases[0].to(device), model.cfg),
            revealed_at=self.revealed_before.to(device),
            confidence=torch.where(self._known(self.first_step), self.confidence, confidence).to(device),
            script=self.canvases.to(device) if forced else None,
            scripted_at=self.revealed_at.to(device) if forced else None,
            sigmas=[_plain(sigma) for sigma in self.record["sigmas"]] if forced and self.record.get("sigmas") else None,
            handed_script=handed if forced else None,
            handed=None if handed is None else handed[0],
        )
        if not forced and self.lacks_confidence(run.sampler):
            raise ValueError(
                f"the sampler {run.sampler.name!r} needs to know the confidence of tokens, which is not recorded of "
                f"those that were masked again or replaced in step {self.first_step} or later: replay the run freely "
                "from its start, or forced from any step"
            )
        if run.sampler.keeps_prediction and not forced and sampler is None and seeds is None:
            # Steps before the first one may have left the canvas as it is, and so its time.
            run.tell_first(self.first_step, _plain(self.record["sigmas"][self.first_step]))
        return run

    def resume(self, model: DiffusionTransformer, rows: LoopRows) -> Run:
        """A free run of these rows with the settings of this trajectory, whose given positions are those of row 0."""
        settings = DenoiseSettings.recorded(self.record, None, rows.seeds)
        canvas = self.row(0).repeat(len(rows))._canvas(rows.tokens, model.cfg)
        run = self._run(model, settings, canvas=canvas, revealed_at=rows.revealed_at, confidence=rows.confidence)
        run.kept = rows.kept
        return run

    @cached_property
    def predictions(self) -> "RunPredictions | NoPredictions":
        """What each step predicted: attributes are those of `Predictions`, as `denoise(..., predictions=k)` recorded
        it, and a call, `trajectory.predictions(model, top_k=k)`, takes a forced replay, with the same numbers."""
        return NoPredictions(self) if self.recorded is None else RunPredictions.of_run(self, self.recorded)

    def diff(self, other: "Trajectory") -> RunDifference:
        """What another run of the same prompt wrote where this one wrote something else, and since which step, as a
        picture, a table and sentences.

        The other run may have other hooks, settings or seeds, another number of steps, or be that of another model of
        the same vocabulary. Canvases are compared at equal step numbers; a run that has ended keeps its final canvas.

        Raises:
            ValueError: The runs have different shapes [batch pos], vocabularies or prompts.
        """
        return RunDifference.of(self, other)

    def explore(
        self,
        path: str | Path | None = None,
        *,
        lens: Any = None,
        trace: Any = None,
        attention: TrajectoryCache | None = None,
        logits: TrajectoryCache | None = None,
        predictions: Any = None,
        answer: str | None = None,
        circuit: Any = None,
        graph: Any = None,
        experts: TrajectoryCache | None = None,
        signatures: Any = None,
        views: Sequence[Any] = (),
        row: SupportsIndex = 0,
        max_bytes: SupportsIndex = 16 * 2**20,
    ) -> Any:
        """Write one row as an explorer page: one HTML file that needs no network, for any browser.

        The page shows the canvas by step with the order and the confidence of the tokens, what each step predicted, if
        that was recorded, and the results that are given. Where one is missing, it says what to pass. Every view shows
        the Python code that gives its numbers.

        Args:
            path: File to write, ending in .html; by default the page is returned, and shows itself in a notebook.
            lens: `logit_lens(model, trajectory)`, at all or some steps.
            trace: `trace_trajectory(model, fact, trajectory=trajectory, ...)`, or several, of different kinds.
            attention: Cache with the patterns, `blocks.{i}.attn.hook_pattern`, of some layers and steps.
            logits: Ignored, and will be removed.
            predictions: `trajectory.predictions(model, top_k=5)`, in place of those that were recorded with the run.
                Without either, the last layer of the lens gives them where there is no guidance.
            answer: Text that should follow the prompt, such as " Paris"; the page says whether the run wrote it. By
                default that of the trace.
            circuit: `edge_attribution` or `node_attribution` between this run, or a canvas of it, and other inputs.
            graph: `run_graph(model, trajectory, position, prompt)`, pruned or not, whose clean run is this one.
            experts: Cache with the choices of routers, `blocks.{i}.mlp.hook_experts`, of some layers and steps; with
                `hook_router_weights` the page shows their weights too.
            signatures: `reversal_signatures(model, pairs)` whose pairs contain the fact of this run.
            views: Views of your own, each a `CustomView` with its data.
            row: Row of the batch.
            max_bytes: Largest size of the file; a larger one is refused, with what to leave out.

        Returns:
            The path, or without one the page.

        Raises:
            ValueError: A result of another run or network, a cache without what its view shows, two views of one name,
                or a page that is too large.
        """
        # The explorer, with its pages, is a room above this one.
        from diffusion_lens.explorer.page_of_run import page_of
        from diffusion_lens.pages.page import html_path, write_page

        if logits is not None:
            instead = "pass predictions=trajectory.predictions(model, top_k=5), or denoise with predictions=5"
            warnings.warn(f"logits= of explore is ignored and will be removed; {instead}", DeprecationWarning, 2)
        if path is not None:
            html_path(path)
        traces = () if trace is None else tuple(trace) if isinstance(trace, Sequence) else (trace,)
        learned: dict[str, Any] = {
            "circuit": circuit,
            "graph": graph,
            "experts": experts,
            "signatures": signatures,
            "custom": views,
        }
        page = page_of(self, lens, traces, attention, predictions, whole_number("row", row), answer, **learned)
        return page if path is None else write_page(page, path, whole_number("max_bytes", max_bytes))

    def _finish(self, run: Run, canvas: str, fwd_hooks: FwdHooks, progress: bool = False) -> "Trajectory":
        """Take the steps of a replay, and record what it replays."""
        model = run.model
        with run_of(model, fwd_hooks, edits=False):
            record = run_loop(run, self.first_step, fwd_hooks=fwd_hooks, progress=progress)
            record |= {"replay": canvas, "replayed_from": self.first_step, "trajectory": canvas_provenance(self.record)}
            return replace(Trajectory.of(run, {**self.record, **run.describe(), **record}), prompt=self.prompt)

    def _run(self, model: DiffusionTransformer, settings: DenoiseSettings, *, canvas: Canvas, **state: Any) -> Run:
        """A run with the times of this trajectory, before it takes its first step."""
        settings = settings.on(model.cfg, model.cfg.model_name)
        noise = PositionNoise(row_seeds(settings.seed, len(canvas.tokens)), canvas.positions)
        return Run(model, canvas, settings, noise, list(self.record["times"]), **state)

    def _sigma(self, step: int, architecture: Architecture) -> float | tuple[float, ...] | None:
        """The noise at a step; `None` for a model of next tokens."""
        if architecture.noise is None:
            return None
        if sigmas := self.record.get("sigmas"):
            return _plain(sigmas[step])
        described = self.record["sampler"].get("schedule")
        schedule = architecture.schedule if described is None else NoiseSchedule(**described)
        return schedule_of(schedule).sigma_at(self.record["times"][step])

    def _known(self, step: int) -> PosMask:
        """The positions whose token was there when a step read its canvas, and was not rewritten later."""
        index = self._canvas_index(step)
        now, after = self.canvases[index], self.canvases[index + 1]
        # Under uniform noise every position is open, and what a step leaves as it is, it has not written.
        by_hook = (self.revealed_at == step) & (~self.is_open(now) | (now == after))
        return ((self.revealed_at >= 0) & (self.revealed_at < step)) | by_hook

    def _revealed_before(self, step: int) -> Int[Tensor, "batch pos"]:
        """The step that had revealed each position when a step read its canvas; -1 where it was given or masked.

        Of a token that was rewritten later, it is the last recorded step that read its position masked.
        """
        masked = self.is_masked(self.canvases[: self._canvas_index(step) + 1]) & self.real
        steps = torch.arange(self.first_step, step + 1, device=masked.device)[:, None, None]
        last = torch.where(masked, steps, -1).amax(dim=0)
        earlier = torch.where(last < 0, self.revealed_before, last).masked_fill(masked[-1], -1)
        return torch.where(self._known(step), self.revealed_at, earlier)

    def _canvas(self, tokens: Tokens, variant: Variant) -> Canvas:
        """The canvas with these tokens, on their device, for a kind of model."""
        real = None if bool(self.real.all()) else self.real.to(tokens.device)
        return Canvas(tokens, self.given.to(tokens.device), real, self.blank, reach_of(variant), self.uniform_noise)

    def _canvas_index(self, step: int) -> int:
        """The index of a step in `canvases`; a `ValueError` if the trajectory does not contain the step."""
        if not self.first_step <= step < self.first_step + self.n_steps:
            last = self.first_step + self.n_steps - 1
            raise ValueError(f"step {step} is not one of the steps {self.first_step} to {last} of the trajectory")
        return step - self.first_step

    def _table(self) -> Table:
        batch, n_pos = self.tokens.shape
        values = {
            "token": texts_of(self.tokens, self.words),
            "given": self.given,
            "revealed_at": self.revealed_at,
            "confidence": self.confidence,
        }
        return Table.of_cells({"batch": range(batch), "pos": range(n_pos)}, values).where(self.real)

    def _page(self, picture: str) -> str:
        """With the canvas of the first row by step, which takes less time than a picture."""
        from diffusion_lens import plots

        canvas = plots.canvas_fragment(*self._drawn(0)) if len(self) else ""
        return super()._page(canvas)

    def _drawn(self, row: int) -> tuple[list[list[str]], list[list[bool]], list[int], list[float], int]:
        """The data that the figures of one row show."""
        masked = self.is_masked(self.canvases[:, row]).tolist()
        revealed_at, confidence = self.revealed_at[row].tolist(), self.confidence[row].tolist()
        return self.str_canvases(row), masked, revealed_at, confidence, self.first_step

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        size = f"{batch} x {pos} positions, {self.n_steps} steps, {self.forward_passes} forward passes"
        return f"{type(self).__name__}({size})"


class _Replayed:
    """A run whose predictions a call gives, by a forced replay."""

    trajectory: Trajectory

    @checked_arguments
    def __call__(
        self,
        model: DiffusionTransformer,
        top_k: SupportsIndex = 5,
        *,
        fwd_hooks: FwdHooks = (),
        max_bytes: SupportsIndex = MAX_BYTES,
        progress: bool = False,
    ) -> Predictions:
        """What each step predicts in a forced replay, under the hooks of the model and these.

        Args:
            model: The model of the run, whose weights may have been edited since.
            top_k: Number of likeliest tokens to record at each position.
            fwd_hooks: The same as in `denoise`.
            max_bytes: Most memory for the predictions.
            progress: Whether to show a progress bar.

        Raises:
            ValueError: Another model, more tokens than it can write, or predictions that exceed `max_bytes`.
        """
        own = self.trajectory
        run = own.started(model, forced=True)
        limit = whole_number("max_bytes", max_bytes)
        run.record_predictions(whole_number("top_k", top_k), own.first_step, max_bytes=limit, name="top_k")
        recorded = own._finish(run, "forced", fwd_hooks, progress).recorded
        assert recorded is not None
        return replace(recorded, revealed_at=own.revealed_at.cpu())


class RunPredictions(_Replayed, Predictions):
    """`Trajectory.predictions` of a run that recorded them; a call gives those of a forced replay."""

    @classmethod
    def of_run(cls, trajectory: Trajectory, recorded: Predictions) -> "RunPredictions":
        """The predictions that a run recorded."""
        own = cls(**{each.name: getattr(recorded, each.name) for each in fields(recorded)})
        vars(own)["trajectory"] = trajectory
        return own


class NoPredictions(_Replayed):
    """`Trajectory.predictions` of a run that recorded none; a call gives those of a forced replay."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"predictions.{name}: this run recorded none. Call trajectory.predictions(model, top_k=5), which takes its "
            "steps again, or denoise(..., predictions=5)"
        )


def _plain(sigma: float | Sequence[float]) -> float | tuple[float, ...]:
    """The noise of a step, or that of each row, from a record."""
    return tuple(sigma) if isinstance(sigma, Sequence) else float(sigma)
