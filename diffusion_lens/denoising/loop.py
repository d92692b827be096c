"""The denoising loop: from a masked canvas to text.

A canvas is the token sequence that a run fills: the prompt, and masked positions to write. A step turns the canvas x_t
into x_s, with s < t since time runs from 1 to 0, by the reverse process of Nie et al. 2024 (arXiv 2410.18514, section
2): the network predicts all masked tokens at once, p(x_0 | x_t), and the loop writes some of the predictions. The
sampler plans which, and how many. A step passes these hook points, in this order:

    denoise.hook_tokens      Int[batch pos]                the canvas x_t; what the hooks return is read and recorded
    denoise.hook_logits      Float[batch pos d_vocab_out]  logits after guidance; 0 where no token is proposed
    denoise.hook_candidates  Int[batch pos]                the proposed tokens; the canvas's own tokens elsewhere
    denoise.hook_confidence  Float[batch pos]              the scores by which positions are ranked; 0 elsewhere. They
                                                           are the probabilities of the proposed tokens, unless the
                                                           sampler's `proposal` says otherwise
    denoise.hook_reveal      Bool[batch pos]               the positions revealed in this step
    denoise.hook_noise       Int[batch pos]                random tokens, for the positions that become noise again

The loop uses what a hook returns there. It reveals masked positions only, and a position where [MASK] itself is
proposed stays masked. Under uniform noise no position is masked: the canvas starts from random tokens, and every
position that was not given may be written in every step. Where a token is proposed, the loop refuses logits that are
NaN or +inf, or -inf for every token that may be written, and it refuses ids that are no tokens, because they would look
like confident predictions. If anything is hooked, every step takes a forward pass and proposes tokens at every masked
position (on a causal model: at the next one), so that a hook may change the order. Otherwise a step that reveals
nothing takes no forward pass.

A run with a `script`, the canvases of an earlier run, is forced: the network and its hooks see those canvases, the loop
reveals their tokens (`hook_candidates` and `hook_reveal` do not pass), and a hook changes only their probabilities.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.predictions import PredictionRecorder, Predictions
from diffusion_lens.denoising.predictor import Repeating, predictor_for
from diffusion_lens.denoising.sampler import (
    Plan,
    PositionNoise,
    Prediction,
    Sampler,
    SequentialNoise,
    confidence_of,
    most_confident,
)
from diffusion_lens.denoising.samplers import describe_sampler
from diffusion_lens.denoising.settings import DenoiseSettings
from diffusion_lens.hooks.names import FwdHooks
from diffusion_lens.hooks.step import Handed, RunIdentity, StepState
from diffusion_lens.model.config import UNREACHED, reached
from diffusion_lens.model.hook_points import is_hooked
from diffusion_lens.model.hooking import require_set_up
from diffusion_lens.model.noise import Head, schedule_of
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.time import expected_embedding
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import provenance
from diffusion_lens.settings import Whole


def run_loop(
    run: "Run",
    first_step: int = 0,
    *,
    stop: int | None = None,
    fwd_hooks: FwdHooks = (),
    around: Callable[[int], AbstractContextManager[Any]] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Take every step from `first_step` on, and return the costs for the record.

    Args:
        stop: Index of the first step that is not taken; by default all are.
        around: Function from a step's index to a context manager that is open during the step, such as one that caches.

    Raises:
        RuntimeError: Another denoising run is in progress on this model.
    """
    begun = time.perf_counter()
    model, steps = run.model, range(first_step, len(run.times) - 1 if stop is None else stop)
    with torch.no_grad(), model.clock.running(model.cfg.model_name), model.hooks(fwd_hooks=list(fwd_hooks)):
        require_set_up(model)
        # A disabled bar takes a lock of tqdm too, which Ctrl-C may leave locked for all threads.
        for index in tqdm(steps, desc="denoise", unit="step") if progress else steps:
            with around(index) if around else nullcontext():
                # 1. Enter: set `hook.step`; a hook may rewrite the canvas x_t.
                state = run.enter(index)

                # 2. Plan: how many positions to reveal by time s, and at which positions a token is proposed. The
                #    default reveals a share 1 - s/t of the masked ones (ML-GSAI/SMDM `diff_sample`, alg="greddy").
                plan = run.plan(state)
                positions = run.open_positions(state, plan)

                if positions is not None:
                    # 3. Predict: compute the logits of p(x_0 | x_t) at these positions, guided by eq. 9 of Nie et al.
                    prediction = run.predict(state, positions)
                    if run.recorder is not None:
                        run.recorder.add(state, positions, prediction)

                    # 4. Propose: take the likeliest token at each position, or sample one at the temperature by
                    #    Gumbel-max (ML-GSAI/SMDM `add_gumbel_noise`). A sampler of transitions draws x_s itself.
                    tokens = run.propose(state, positions, prediction)

                    # 5. Rank: score each proposed token. By default the score is its probability (`diff_sample`;
                    #    Nie et al. 2025, LLaDA, arXiv 2502.09992, `generate.py`).
                    candidates = run.rank(state, positions, prediction, tokens)

                    # 6. Reveal: write the planned number of the most confident tokens.
                    revealed = run.reveal(state, plan, candidates)

                    # 7a. Renoise: under uniform noise, positions that are not revealed may become noise again. What was
                    #     predicted is handed to the next step, or written where the block is finished.
                    if run.sampler.hands_on:
                        run.hand_on(state, plan, prediction, candidates, revealed)

                # 7b. Remask: return revealed positions to [MASK] where the plan says so (Wang et al. 2025, ReMDM,
                #     arXiv 2503.00307). The canvas is now x_s.
                if plan.remask is not None:
                    run.remask(plan.remask)

                # 8. Leave: append the canvas to the history.
                run.leave(state)
    seconds = time.perf_counter() - begun
    return {"first_step": first_step, "forward_passes": run.predictor.passes, "seconds": seconds}


@dataclass(frozen=True)
class Candidates:
    """The positions where a step proposes tokens, the canvas with these, their probabilities and their ranking."""

    positions: PosMask
    tokens: Tokens
    confidence: Float[Tensor, "batch pos"]
    ranking: Float[Tensor, "batch pos"]


@dataclass
class Run:
    """A run in progress: its current canvas, the earlier ones, and the eight parts of a step as methods.

    Attributes:
        settings: Settings whose sampler is resolved.
        noise: Random numbers of each row.
        times: Times of all steps, `n_steps + 1` numbers; a run that begins in the middle has them all too.
        revealed_at: Int[batch pos], as in `Trajectory`.
        confidence: Float[batch pos], probability of each token when it was revealed; NaN where none was.
        script: Int[canvas batch pos], canvases that a forced run follows; `None` for a free run.
        scripted_at: Int[batch pos], `revealed_at` of the run that wrote the script; `None` for a free run.
        sigmas: Noise at each step, which the network is given, or that of each row; by default that of the schedule.
        revealed_before: Int[batch pos], as in `Trajectory`.
        handed_script: What each step of a forced run reads of earlier ones, where the sampler hands something on.
        handed: What the next step reads of the earlier ones; `None` where the sampler hands nothing on.
        recorder: Keeps what the steps predict; `None` if this is not asked for.
        kept: Float[batch], noise of the rows that the last step left as they were, where the sampler keeps it; NaN for
            the others.
    """

    model: DiffusionTransformer
    canvas: Canvas
    settings: DenoiseSettings
    noise: PositionNoise
    times: list[float]
    revealed_at: Int[Tensor, "batch pos"]
    confidence: Float[Tensor, "batch pos"]
    script: Int[Tensor, "canvas batch pos"] | None = None
    scripted_at: Int[Tensor, "batch pos"] | None = None
    sigmas: list[float | tuple[float, ...]] | None = None
    handed_script: Handed | None = None
    handed: Handed | None = None
    recorder: PredictionRecorder | None = None

    def __post_init__(self) -> None:
        assert isinstance(self.settings.sampler, Sampler)
        self.sampler = self.settings.sampler
        self.schedule = schedule_of(self.sampler.schedule or self.model.cfg.schedule)
        if self.model.cfg.noise is not None and self.sigmas is None:
            self.sigmas = list(map(self.schedule.sigma_at, self.times[:-1]))
        if self.canvas.uniform_noise:
            unchanged = self.canvas.masked(self.canvas.tokens) & (self.revealed_at < 0)
            self.revealed_at = self.revealed_at.masked_fill(unchanged, 0)
        self.revealed_before = self.revealed_at
        self.seeds = self.noise.seeds  # one for each row
        self.tokens = self.canvas.tokens
        self.canvases = [self.tokens]
        self.handed_history: list[Handed] = []
        if self.sampler.hands_on and self.handed is None:
            self.handed = self._handed_at_first()
        self.predictor = predictor_for(self.model, self.canvas, self.settings.cfg_scale, self.sampler)
        self.identity = RunIdentity()
        self.kept = torch.full((len(self.seeds),), float("nan"), dtype=torch.float64)

    @cached_property
    def head(self) -> Head:
        """What the logits mean, in all steps."""
        return self.model.head

    def tell_first(self, index: int, sigma: float | tuple[float, ...]) -> None:
        """Give the network this noise, or that of each row, in the first step, which has this index."""
        assert self.sigmas is not None
        self.sigmas[index] = sigma
        of_rows = sigma if isinstance(sigma, tuple) else (sigma,) * len(self.seeds)
        self.kept = torch.tensor(of_rows, dtype=torch.float64)

    def record_predictions(self, top_k: Whole, first_step: int = 0, **limits: Any) -> None:
        """Keep what the steps predict, from the first one on; `limits` are those of `PredictionRecorder`."""
        cfg, canvas, steps = self.model.cfg, self.canvas, range(first_step, len(self.times) - 1)
        inside = torch.ones_like(canvas.given) if canvas.real is None else canvas.real
        n_open = (inside & ~canvas.given).sum(dim=1)  # of each row
        if canvas.reach is not None and not cfg.is_autoregressive:
            n_open = n_open.clamp(max=canvas.reach.size)
        n_entries = int(n_open.sum()) * (1 if cfg.is_autoregressive else len(steps))
        shape = (self.tokens.shape[0], self.tokens.shape[1])
        self.recorder = PredictionRecorder(cfg, top_k, steps, n_entries, shape, **limits)
        if not (self.sampler.hands_on or self.sampler.approximate_cache):
            self.predictor = Repeating(self.model, self.predictor)  # many steps leave the canvas as it is

    def predictions(self, words: dict[int, str], record: dict[str, Any]) -> Predictions | None:
        """What the steps predicted, if this was recorded, with the words of the canvases and those of other tokens."""
        if self.recorder is None:
            return None
        ids = [token for token in self.recorder.ids.tolist() if token not in words]
        return self.recorder.result(
            written=self.tokens.cpu(),
            revealed_at=self.revealed_at.cpu(),
            words={**words, **dict(zip(ids, self.model.words(ids), strict=True))},
            record=record,
        )

    def describe(self) -> dict[str, Any]:
        """The settings and the network, for the record of the trajectory."""
        cfg = self.model.cfg
        records_sigmas = cfg.time_conditioning or cfg.uniform_noise or self.sampler.has_times_of_rows
        return {
            "sampler": describe_sampler(self.sampler),
            "steps": len(self.times) - 1,
            "times": self.times,
            # Elsewhere the schedule alone gives them, and records of earlier versions lack them.
            **({"sigmas": self.sigmas, "noise": cfg.noise} if records_sigmas else {}),
            "cfg_scale": self.settings.cfg_scale,
            "temperature": self.settings.temperature,
            "seeds": self.seeds,
            "blank": self.canvas.blank,
            # Of such numbers none can be drawn again from the middle of a run on.
            **({"drawn_in_sequence": self.noise.state} if isinstance(self.noise, SequentialNoise) else {}),
            **provenance(self.model, cfg),
        }

    def enter(self, index: int) -> StepState:
        """Set `hook.step` to the step from times[index] to times[index + 1], and pass the canvas to `hook_tokens`.

        The canvas that the hooks return replaces the one in the history, since it is the one that the step reads.
        """
        if self.script is not None and self.scripted_at is not None:
            place = len(self.canvases) - 1
            before, now = self.script[max(0, place - 1)], self.script[place]
            rewritten = (now != before) & ~self.canvas.blanks(before)
            self._written_by_hooks(index, self.scripted_at == index, rewritten)
        state = self.model.clock.step = self._state(index)
        point = self.model.loop_hooks.hook_tokens
        if is_hooked(point):
            # A copy, because hooks may write in place, and the canvas is also part of the history.
            tokens = point(self.tokens.clone())
            _require_ids("denoise.hook_tokens", tokens, state, torch.ones_like(state.masked), self.model)
            before, changed = self.canvas.blanks(self.tokens), tokens != self.tokens
            if len(self.canvases) > 1:
                before |= self.canvas.blanks(self.canvases[-2])
            self.tokens = self.canvases[-1] = tokens.long()
            self._written_by_hooks(index, changed & before, changed)
            state = self.model.clock.step = self._state(index)
        if len(self.canvases) == 1:
            self.revealed_before = self.revealed_at
        if state.handed is not None:
            self.handed_history.append(state.handed)
        return state

    def plan(self, state: StepState) -> Plan:
        """The sampler's plan; in a forced run, the plan that follows the script."""
        if self.script is None:
            return self.sampler.plan(state, self.noise, self.confidence)
        after = self.script[len(self.canvases)]
        # A token of the next step that is on the canvas before it was written there by a hook, and not in this step.
        by_hook = (self.scripted_at == state.index + 1) & ~self.canvas.masked(after)
        revealed = state.masked & (after != self.canvas.blank) & ~by_hook
        if state.handed is not None:
            revealed &= ~state.handed.finished[:, None]
        remasked = ~self.canvas.blanks(state.tokens) & (after == self.canvas.blank)
        return Plan.of_all(revealed, remasked)

    def open_positions(self, state: StepState, plan: Plan) -> PosMask | None:
        """Positions at which tokens are proposed, or `None` where the step needs no forward pass.

        While anything is hooked, these are all masked positions, so that a hook may change the order; and while
        predictions are recorded. A text that grows has only the planned ones.
        """
        hooks, writes = self.model.loop_hooks, bool(plan.counts.any())
        if writes and self.model.cfg.is_autoregressive:
            return plan.positions
        later = (hooks.hook_logits, hooks.hook_candidates, hooks.hook_confidence, hooks.hook_reveal)
        all_are_read = self.model.is_hooked or any(map(is_hooked, later))
        if not all_are_read and self.recorder is not None:
            all_are_read = bool(state.masked.any())
        # Where all rows are finished, no hook can change what is written.
        if not all_are_read or (self.sampler.hands_on and not writes):
            return plan.positions if writes else None
        return plan.positions if self.model.cfg.is_autoregressive else state.masked

    def reveals_at(self, index: int) -> bool:
        """Whether the step of this index may reveal a position of the current canvas."""
        return bool(self.plan(self._state(index)).counts.any())

    def predict(self, state: StepState, positions: PosMask) -> Prediction:
        """What the network says at these positions, after guidance and hooks."""
        point = self.model.loop_hooks.hook_logits
        logits = self.predictor(state, positions)
        if is_hooked(point):
            whole = logits.new_zeros(*positions.shape, logits.shape[-1])
            whole[positions] = logits
            logits = point(whole)[positions]
        require_logits(logits, positions, state)
        sigma: Any = state.sigma
        if isinstance(sigma, tuple):
            of_rows = torch.tensor(sigma, dtype=torch.float64, device=positions.device)
            sigma = of_rows[positions.nonzero()[:, 0]]
        present, temperature = state.tokens[positions], self.sampler.temperature(state, self.settings.temperature)
        return Prediction(logits, present, self.head, self.schedule, sigma, temperature, self.sampler.proposal)

    def propose(self, state: StepState, positions: PosMask, prediction: Prediction) -> Tokens:
        """The canvas with a token proposed at each of these positions; in a forced run, the script's tokens.

        A sampler of transitions may propose [MASK].
        """
        propose, mask_id = self.sampler.proposal.propose, self.model.cfg.mask_token_id
        if self.script is not None:
            after = self.script[len(self.canvases)]
            tokens = torch.where(after == self.canvas.blank, self.tokens, after)
            unwritten = positions & (after == self.canvas.blank)
            if bool(unwritten.any()):
                tokens[unwritten] = propose(prediction.logits, mask_id=mask_id)[unwritten[positions]]
            return tokens
        tokens, temperature = self.tokens.clone(), prediction.temperature
        transition = self.sampler.transition(state, prediction)
        if transition is not None:
            _require_distribution(transition, state, positions)
            tokens[positions] = self.noise.drawn(state.index, positions, transition, state.masked)
        else:
            logits = prediction.logits
            uniform = self.noise.by_token(state.index, positions, logits.shape[-1]) if temperature else None
            tokens[positions] = propose(logits, temperature, uniform, mask_id)
            _require_open(logits, tokens[positions], state, positions)
        point = self.model.loop_hooks.hook_candidates
        if not is_hooked(point):
            return tokens
        returned = point(tokens)
        _require_ids("denoise.hook_candidates", returned, state, positions, self.model)
        return returned.long()

    def rank(self, state: StepState, positions: PosMask, prediction: Prediction, tokens: Tokens) -> Candidates:
        """The proposed tokens with their probability, and with the scores by which their positions are ranked."""
        point, proposal, proposed = self.model.loop_hooks.hook_confidence, self.sampler.proposal, tokens[positions]
        logits = prediction.logits
        confidence = torch.zeros(positions.shape, dtype=torch.float64, device=positions.device)
        confidence[positions] = confidence_of(logits, proposed)
        ranking = confidence.clone()
        if not proposal.is_plain:
            ranking[positions] = proposal.scores(logits, proposed, prediction.temperature)
        ranking = point(ranking)
        if is_hooked(point) and (where := _first(ranking[positions].isnan(), state, positions)):
            raise FloatingPointError(
                f"denoise.hook_confidence returned NaN {where}: positions cannot be ranked by it; return numbers, or "
                "-inf for positions that come last"
            )
        return Candidates(positions, tokens, confidence, ranking)

    def reveal(self, state: StepState, plan: Plan, candidates: Candidates) -> PosMask:
        """Write the planned number of the most confident candidates; in a forced run, those that the script writes.

        Returns the positions that are written.
        """
        reveal = plan.positions
        if self.script is None:
            reveal = self.model.loop_hooks.hook_reveal(most_confident(candidates.ranking, plan))
            if reveal.dtype != torch.bool:
                raise TypeError(
                    f"denoise.hook_reveal returned {reveal.dtype}; return a bool for each position, true where the "
                    "step reveals a token"
                )
            reveal = reveal & candidates.positions & (candidates.tokens != self.canvas.blank)
        changed = reveal & (candidates.tokens != self.tokens)
        self.tokens = torch.where(reveal, candidates.tokens, self.tokens)
        self.revealed_at = self.revealed_at.masked_fill(changed, state.index)
        self.confidence = torch.where(reveal, candidates.confidence.float(), self.confidence)
        return reveal

    def hand_on(
        self, state: StepState, plan: Plan, prediction: Prediction, candidates: Candidates, revealed: PosMask
    ) -> None:
        """Put noise at the positions of the plan that were not revealed, and hand the prediction to the next step.

        Rows whose block is finished keep the likeliest tokens instead. In a forced run the script says both.
        """
        before, block = state.handed, state.block
        assert before is not None
        assert block is not None
        if self.script is not None:
            return
        # 1. New noise.
        positions, logits = candidates.positions, prediction.logits
        fresh = self.tokens.clone()
        fresh[state.masked] = self.noise.tokens(state.index, state.masked, self.model.cfg.d_vocab_out)
        fresh = self.model.loop_hooks.get_submodule("hook_noise")(fresh)
        _require_ids("denoise.hook_noise", fresh, state, state.masked, self.model)
        self.tokens = torch.where(plan.positions & ~revealed, fresh.long(), self.tokens)

        # 2. What the next step reads of this prediction. A row that has waited keeps what it had.
        waits = before.finished
        rows, places = positions.nonzero(as_tuple=True)
        places = places - block.start[rows]
        expected, likeliest = before.expected.clone(), before.likeliest.clone()
        active = ~waits[rows]
        embedded = expected_embedding(self.model.embed, logits[active] / (prediction.temperature or 1.0))
        expected[rows[active], places[active]] = embedded.to(expected.dtype)
        likeliest[rows[active], places[active]] = logits.argmax(dim=-1)[active]
        same = (likeliest == before.likeliest).all(dim=1)
        streak = torch.where(waits, before.streak, torch.where(same, before.streak, 0) + 1)
        handed = Handed(expected, likeliest, streak, before.finished)

        # 3. Rows that end their block with this step.
        entropy = -candidates.ranking.masked_fill(~plan.positions, 0)
        done = ~waits & (self.sampler.finishes(state, handed, entropy) | self._is_last_of_block(state))
        written = self.tokens.clone()
        written[rows, places + block.start[rows]] = likeliest[rows, places]
        self.tokens = torch.where(done[:, None] & plan.positions, written, self.tokens)
        certain = candidates.confidence.clone()
        certain[positions] = confidence_of(logits, self.tokens[positions])
        self.confidence = torch.where(plan.positions, certain.float(), self.confidence)
        self.revealed_at = self.revealed_at.masked_fill(plan.positions & (self.tokens != state.tokens), state.index)
        self.handed = replace(handed, finished=waits | done)

    def remask(self, positions: PosMask) -> None:
        """Mask the positions that the plan remasks."""
        self.tokens = self.tokens.masked_fill(positions, self.canvas.blank)
        self.revealed_at = self.revealed_at.masked_fill(positions, -1)
        self.confidence = self.confidence.masked_fill(positions, float("nan"))

    def leave(self, state: StepState) -> None:
        """Open the next block of rows that filled theirs, and append the canvas to the history.

        In a forced run, the canvas is the script's.
        """
        if self.script is not None:
            self.tokens = self.script[len(self.canvases)]
        elif self.sampler.keeps_prediction and self.sampler.has_times_of_rows:
            now = state.sigma if isinstance(state.sigma, tuple) else (state.sigma,) * len(self.tokens)
            unchanged = (self.tokens == state.tokens).all(dim=1).cpu()
            self.kept = torch.tensor(now, dtype=torch.float64).masked_fill(~unchanged, float("nan"))
        elif self.sampler.keeps_prediction and self.sigmas is not None and torch.equal(self.tokens, state.tokens):
            # The next step, if there is one, is given the same time.
            for index in range(state.index + 1, state.n_steps)[:1]:
                self.sigmas[index] = self.sigmas[state.index]
        if self.script is None and self.canvas.reach is not None:
            if not self.canvas.uniform_noise:
                self.tokens = self.canvas.opened(self.tokens)
            elif bool(self._is_last_of_block(state).all()):
                before, n_tokens = self.tokens, self.model.cfg.d_vocab_out
                self.tokens = self.canvas.with_noise(before, self.noise, state.index, n_tokens)
                if not torch.equal(before, self.tokens):
                    filled = (before == self.tokens).all(dim=1)
                    self.handed = replace(self._handed_at_first(), finished=filled)
        if self.canvas.uniform_noise:  # a block that was opened contains tokens
            opened = ~reached(state.tokens) & reached(self.tokens)
            self.revealed_at = self.revealed_at.masked_fill(opened, state.index + 1)
        self.canvases.append(self.tokens)

    def _handed_at_first(self) -> Handed:
        """What the first step of a block reads."""
        assert self.canvas.reach is not None
        cfg = self.model.cfg
        return Handed.empty(len(self.tokens), self.canvas.reach.size, cfg.d_model, cfg.dtype, self.tokens.device)

    def _is_last_of_block(self, state: StepState) -> Bool[Tensor, "batch"]:
        """Whether the step is the last of the block that a row writes."""
        assert state.block is not None
        return state.block.step >= state.block.steps_of_all(state.n_steps) - 1

    def _written_by_hooks(self, index: int, new: PosMask, changed: PosMask) -> None:
        """Note what hooks wrote before a step: masks, new tokens in place of masks, and others over tokens."""
        masked = (new | changed) & ((self.tokens == self.canvas.blank) | ~reached(self.tokens))
        self.revealed_at = self.revealed_at.masked_fill(new, index).masked_fill(masked, -1)
        certain = (new | changed) & (self.revealed_at >= 0)
        self.confidence = self.confidence.masked_fill(certain, 1.0).masked_fill(masked, float("nan"))

    def _state(self, index: int) -> StepState:
        state = StepState(
            index=index,
            n_steps=len(self.times) - 1,
            t=self.times[index],
            s=self.times[index + 1],
            tokens=self.tokens,
            masked=self.canvas.masked(self.tokens),
            given=self.canvas.given,
            sigma=None if self.sigmas is None else self.sigmas[index],
            run=self.identity,
            block=self.canvas.open_block(self.tokens, self.revealed_at, index, len(self.times) - 1)
            if self.canvas.reach
            else None,
            real=self.canvas.real,
            handed=self.handed if self.handed_script is None else self.handed_script[len(self.canvases) - 1],
        )
        if self.script is not None or self.sigmas is None or not self.sampler.has_times_of_rows:
            return state
        sigma = self.schedule.sigma(self.sampler.times_of_rows(state, self.noise)).cpu()
        of_rows = tuple(torch.where(self.kept.isnan(), sigma, self.kept).tolist())
        self.sigmas[index] = of_rows[0] if len(set(of_rows)) == 1 else of_rows
        return replace(state, sigma=self.sigmas[index])


_OF_ROWS = ("tokens", "revealed_at", "confidence", "kept")


@dataclass(frozen=True, eq=False)
class LoopRows:
    """Rows of a run between two steps: all that its later steps depend on, so that equal rows end alike.

    The fields are those of `Run`.
    """

    tokens: Tokens
    revealed_at: Int[Tensor, "batch pos"]
    confidence: Float[Tensor, "batch pos"]
    kept: Float[Tensor, "batch"]
    seeds: list[int]

    @classmethod
    def of(cls, run: Run) -> "LoopRows":
        """The rows of a run that has taken its last step so far."""
        return cls(run.tokens, run.revealed_at, run.confidence, run.kept, run.seeds)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    def at(self, rows: Sequence[int]) -> "LoopRows":
        """Some of the rows."""
        chosen = list(rows)
        tensors = {name: getattr(self, name)[chosen] for name in _OF_ROWS}
        return LoopRows(**tensors, seeds=[self.seeds[row] for row in chosen])

    @classmethod
    def joined(cls, parts: Sequence["LoopRows"]) -> "LoopRows":
        """The rows of several."""
        tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in _OF_ROWS}
        return cls(**tensors, seeds=[seed for part in parts for seed in part.seeds])

    def keys(self, run: Run) -> list[tuple[object, ...]]:
        """For each row, what its later steps in this run depend on, apart from its seed.

        Confidence is a part of it only where the sampler reads it. The steps that revealed tokens are one where blocks
        are opened by the step that filled the last.
        """
        parts = [self.tokens.tolist()]
        if run.sampler.reads_confidence:
            parts.append(self.confidence.nan_to_num(nan=-1.0).tolist())
        if run.canvas.reach is not None and not run.model.cfg.is_autoregressive:
            parts.append(self.revealed_at.tolist())
        if run.sampler.has_times_of_rows:
            parts.append(self.kept.nan_to_num(nan=-1.0)[:, None].tolist())
        return [tuple(map(tuple, row)) for row in zip(*parts, strict=True)]


def require_logits(
    logits: Float[Tensor, "selected d_vocab_out"], positions: PosMask, state: StepState | None = None
) -> None:
    """Raise a `FloatingPointError` unless the largest logit of every row is finite; -inf forbids single tokens."""
    # The largest is NaN where any logit is, +inf where any logit is, and -inf where all logits are.
    if where := _first(~logits.amax(dim=-1).isfinite(), state, positions):
        raise FloatingPointError(
            f"the logits are not finite {where}, so no token can be chosen. Either the weights contain such numbers or "
            f"overflow to them (in {str(logits.dtype).removeprefix('torch.')}; try dtype=torch.float32), or "
            "cfg_scale= is too large, or a hook returned them. A hook may forbid tokens with -inf if it leaves one; to "
            "force a token, return it from denoise.hook_candidates"
        )


def _require_open(
    logits: Float[Tensor, "selected d_vocab_out"], tokens: Int[Tensor, "selected"], state: StepState, positions: PosMask
) -> None:
    """Raise a `FloatingPointError` if only [MASK], which is not written, has a finite logit."""
    if where := _first(~logits.gather(1, tokens[:, None])[:, 0].isfinite(), state, positions):
        raise FloatingPointError(
            f"every token but [MASK] is forbidden by a logit of -inf {where}: leave one token that can be written, or "
            "allow [MASK] with Proposal(writes_mask=True)"
        )


def _require_distribution(p: Float[Tensor, "selected d_vocab"], state: StepState, positions: PosMask) -> None:
    """Raise a `FloatingPointError` unless some token or [MASK] can be drawn at every position."""
    largest = p.amax(dim=-1)
    if where := _first(~(largest.isfinite() & (largest > 0)), state, positions):
        raise FloatingPointError(
            f"the sampler gives no token a probability {where}: the logits there forbid all of them, or the noise of "
            "the step is out of the range of floating-point numbers"
        )


def _require_ids(name: str, ids: Tensor, state: StepState, positions: PosMask, model: DiffusionTransformer) -> None:
    """Raise an error unless a hook returned token ids, or the canvas's blank, at these positions."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(
            f"{name} returned {ids.dtype}; token ids are integers: return a tensor of the dtype that it received"
        )
    wrong = (ids < 0) | (ids >= model.cfg.d_vocab)
    blank = ""
    wrong &= ~((ids == UNREACHED) & ~reached(state.tokens))  # a position that no block has reached stays so
    if not model.cfg.uniform_noise:
        wrong &= ids != model.cfg.blank
        blank = f", and {model.cfg.blank} for a position that is still to be written"
    wrong = wrong[positions]
    if where := _first(wrong, state, positions):
        raise ValueError(
            f"{name} returned the id {int(ids[positions][wrong][0])} {where}; {model.cfg.model_name!r} has the tokens "
            f"0 to {model.cfg.d_vocab - 1}{blank}"
        )


def _first(wrong: Tensor, state: StepState | None, positions: PosMask) -> str | None:
    """Description of the first wrong position, or `None` where none is wrong."""
    if not bool(wrong.any()):
        return None
    row, position = positions.nonzero()[wrong.nonzero()[0, 0]].tolist()
    step = "" if state is None else f"step {state.index}, "
    return f"at {step}row {row}, position {position} ({int(wrong.sum())} of {len(wrong)} positions)"
