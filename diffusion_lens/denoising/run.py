"""A run in progress: its current canvas, the earlier ones, and the eight parts of a step as methods."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.prediction import Prediction
from diffusion_lens.denoising.predictor import predictor_for
from diffusion_lens.denoising.proposal import confidence_of
from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.refusals import (
    require_choice,
    require_distribution,
    require_ids,
    require_logits,
    require_open,
    require_scores,
)
from diffusion_lens.denoising.sampler import Plan, Sampler, most_confident
from diffusion_lens.denoising.samplers import describe_sampler
from diffusion_lens.model.hook_points import is_hooked
from diffusion_lens.model.hooking import LoopHooks
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.noise import draw, schedule_of
from diffusion_lens.records import provenance
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.step_state import RunIdentity, StepState


@dataclass(frozen=True)
class Candidates:
    """The tokens proposed in one step.

    Attributes:
        positions: Bool[batch pos], where a token is proposed.
        tokens: Int[batch pos], the canvas with these tokens in place.
        confidence: Float[batch pos], probability of each proposed token; 0 elsewhere.
        ranking: Float[batch pos], scores by which the positions are ranked; 0 elsewhere.
    """

    positions: PosMask
    tokens: Tokens
    confidence: Float[Tensor, "batch pos"]
    ranking: Float[Tensor, "batch pos"]


@dataclass
class Run:
    """A run of the loop between two steps.

    Attributes:
        settings: Settings whose sampler is resolved.
        seeds: One seed for each row.
        times: Times of all steps, `n_steps + 1` numbers; a run that begins in the middle has them all too.
        revealed_at: Int[batch pos], as in `Trajectory`.
        confidence: Float[batch pos], probability of each token when it was revealed; NaN where none was.
        script: Int[canvas batch pos], canvases that a forced run follows; `None` for a free run.
        sigmas: Noise at each step, of which the network is told, or that of each row; by default that of the schedule.
        kept: Float[batch], noise of the rows that the last step left as they were, where the sampler keeps it; NaN for
            the others.
    """

    model: DiffusionTransformer
    canvas: Canvas
    settings: DenoiseSettings
    seeds: list[int]
    times: list[float]
    revealed_at: Int[Tensor, "batch pos"]
    confidence: Float[Tensor, "batch pos"]
    script: Int[Tensor, "canvas batch pos"] | None = None
    sigmas: list[float | tuple[float, ...]] | None = None

    def __post_init__(self) -> None:
        self.head = self.model.head
        self.schedule = schedule_of(self.sampler.schedule or self.model.cfg.schedule)
        if self.head.noise is not None and self.sigmas is None:
            self.sigmas = [self.schedule.sigma_at(t) for t in self.times[:-1]]
        if self.canvas.rewrites:
            unchanged = self.canvas.blanks(self.canvas.tokens) & (self.revealed_at < 0)
            self.revealed_at = self.revealed_at.masked_fill(unchanged, 0)
        self.tokens = self.canvas.tokens
        self.canvases = [self.tokens]
        self.noise = PositionNoise(self.seeds, self.canvas.positions)
        self.predictor = predictor_for(
            self.model, self.canvas, self.settings.cfg_scale, self.sampler.may_change_nothing
        )
        self.identity = RunIdentity()
        self.kept = torch.full((len(self.seeds),), float("nan"), dtype=torch.float64)

    def tell_first(self, index: int, sigma: float | tuple[float, ...]) -> None:
        """Tell the network this noise, or that of each row, in the first step, which has this index."""
        assert self.sigmas is not None
        self.sigmas[index] = sigma
        of_rows = sigma if isinstance(sigma, tuple) else (sigma,) * len(self.seeds)
        self.kept = torch.tensor(of_rows, dtype=torch.float64)

    @property
    def sampler(self) -> Sampler:
        """The sampler of the settings."""
        assert self.settings.sampler is not None
        return self.settings.sampler

    def describe(self) -> dict[str, Any]:
        """The settings and the network, for the record of the trajectory."""
        cfg = self.model.cfg
        records_sigmas = cfg.is_told_time or cfg.rewrites or self.sampler.has_times_of_rows
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
            **provenance(self.model, cfg),
        }

    def enter(self, index: int) -> StepState:
        """Set `hook.step` to the step from times[index] to times[index + 1], and pass the canvas to `hook_tokens`."""
        state = self.model.clock.step = self._state(index)
        point = self.model.loop_hooks.hook_tokens
        if is_hooked(point):
            # A copy, because hooks may write in place, and the canvas is also part of the history.
            tokens = point(self.tokens.clone())
            require_ids("denoise.hook_tokens", tokens, state, torch.ones_like(state.masked), self.model)
            self.tokens = tokens.long()
            state = self.model.clock.step = self._state(index)
        return state

    def plan(self, state: StepState) -> Plan:
        """The sampler's plan; in a forced run, the plan that follows the script."""
        if self.script is None:
            return self.sampler.plan(state, self.noise, self.confidence)
        after = self.script[len(self.canvases)]
        revealed = state.masked & (after != self.canvas.blank)
        remasked = ~self.canvas.blanks(state.tokens) & (after == self.canvas.blank)
        return Plan.of_all(revealed, remasked)

    def open_positions(self, state: StepState, plan: Plan) -> PosMask | None:
        """Positions at which tokens are proposed, or `None` where the step needs no forward pass.

        While anything is hooked, these are all masked positions, so that a hook may change the order. A text that grows
        has only the planned ones.
        """
        writes, grows = bool(plan.counts.any()), self.model.cfg.grows
        if grows and writes:
            return plan.positions
        if self.model.is_hooked or _any_hooked(self.model.loop_hooks):
            return plan.positions if grows else state.masked
        return plan.positions if writes else None

    def reveals_at(self, index: int) -> bool:
        """Whether the step of this index may reveal or mask a position of the current canvas, whatever is predicted."""
        plan = self.plan(self._state(index))
        return bool(plan.counts.any()) or plan.remask is not None

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
        return Prediction(
            output=logits,
            present=state.tokens[positions],
            head=self.head,
            schedule=self.schedule,
            sigma=sigma,
            temperature=self.settings.temperature,
            proposal=self.sampler.proposal,
        )

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
        tokens, temperature = self.tokens.clone(), self.settings.temperature
        transition = self.sampler.transition(state, prediction)
        if transition is not None:
            require_distribution(transition, state, positions)
            tokens[positions] = draw(transition, self.noise.by_token(state.index, positions, transition.shape[-1]))
        else:
            logits = prediction.logits
            uniform = self.noise.by_token(state.index, positions, logits.shape[-1]) if temperature else None
            tokens[positions] = propose(logits, temperature, uniform, mask_id)
            require_open(logits, tokens[positions], state, positions)
        point = self.model.loop_hooks.hook_candidates
        if not is_hooked(point):
            return tokens
        returned = point(tokens)
        require_ids("denoise.hook_candidates", returned, state, positions, self.model)
        return returned.long()

    def rank(self, state: StepState, positions: PosMask, prediction: Prediction, tokens: Tokens) -> Candidates:
        """The proposed tokens with their probability, and with the scores by which their positions are ranked."""
        point, proposal, proposed = self.model.loop_hooks.hook_confidence, self.sampler.proposal, tokens[positions]
        logits = prediction.logits
        confidence = torch.zeros(positions.shape, dtype=torch.float64, device=positions.device)
        confidence[positions] = confidence_of(logits, proposed)
        ranking = confidence.clone()
        if not proposal.is_plain:
            ranking[positions] = proposal.scores(logits, proposed, self.settings.temperature)
        ranking = point(ranking)
        if is_hooked(point):
            require_scores(ranking, state, positions)
        return Candidates(positions, tokens, confidence, ranking)

    def reveal(self, state: StepState, plan: Plan, candidates: Candidates) -> None:
        """Write the planned number of the most confident candidates; in a forced run, those that the script writes."""
        reveal = plan.positions
        if self.script is None:
            reveal = self.model.loop_hooks.hook_reveal(most_confident(candidates.ranking, plan))
            require_choice(reveal)
            reveal = reveal & candidates.positions & (candidates.tokens != self.canvas.blank)
        changed = reveal & (candidates.tokens != self.tokens)
        self.tokens = torch.where(reveal, candidates.tokens, self.tokens)
        self.revealed_at = self.revealed_at.masked_fill(changed, state.index)
        self.confidence = torch.where(reveal, candidates.confidence.float(), self.confidence)

    def remask(self, plan: Plan) -> None:
        """Mask the positions that the plan remasks."""
        if plan.remask is not None:
            self.tokens = self.tokens.masked_fill(plan.remask, self.canvas.blank)
            self.revealed_at = self.revealed_at.masked_fill(plan.remask, -1)
            self.confidence = self.confidence.masked_fill(plan.remask, float("nan"))

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
            # The next step, if there is one, is told the same time.
            for index in range(state.index + 1, state.n_steps)[:1]:
                self.sigmas[index] = self.sigmas[state.index]
        self.tokens = self.canvas.opened(self.tokens)
        self.canvases.append(self.tokens)

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
            block=self.canvas.open_block(self.tokens, self.revealed_at, index),
        )
        if self.script is not None or self.sigmas is None or not self.sampler.has_times_of_rows:
            return state
        sigma = self.schedule.sigma(self.sampler.times_of_rows(state, self.noise)).cpu()
        of_rows = tuple(torch.where(self.kept.isnan(), sigma, self.kept).tolist())
        self.sigmas[index] = of_rows[0] if len(set(of_rows)) == 1 else of_rows
        return replace(state, sigma=self.sigmas[index])


def _any_hooked(hooks: LoopHooks) -> bool:
    """Whether the loop's hook points behind the forward pass carry a hook."""
    points = (hooks.hook_logits, hooks.hook_candidates, hooks.hook_confidence, hooks.hook_reveal)
    return any(is_hooked(point) for point in points)
