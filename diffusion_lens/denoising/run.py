"""One run in progress: the canvas as it stands, its history, and what each part of a step does to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.predictor import predictor_for
from diffusion_lens.denoising.proposal import confidence_of
from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.refusals import require_choice, require_ids, require_logits, require_open, require_scores
from diffusion_lens.denoising.sampler import Plan, Sampler, most_confident
from diffusion_lens.denoising.samplers import describe_sampler
from diffusion_lens.model.hook_points import is_hooked
from diffusion_lens.model.hooking import LoopHooks
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.step_state import RunIdentity, StepState


@dataclass
class Run:
    """A canvas on its way.

    Attributes:
        settings: with the sampler that the run has.
        seeds: of the rows.
        times: the times of the whole run, `n_steps + 1` of them; a branch of a run keeps them.
        revealed_at: Int[batch pos], as in `Trajectory`.
        confidence: Float[batch pos], probability of each token when it was revealed; NaN where none was.
        script: Int[step+1 batch pos], the canvases that are followed, if the run is forced.
    """

    model: DiffusionTransformer
    canvas: Canvas
    settings: DenoiseSettings
    seeds: list[int]
    times: list[float]
    revealed_at: Int[Tensor, "batch pos"]
    confidence: Float[Tensor, "batch pos"]
    script: Int[Tensor, "step_plus_1 batch pos"] | None = None

    def __post_init__(self) -> None:
        self.tokens = self.canvas.tokens
        self.canvases = [self.tokens]
        self.noise = PositionNoise(self.seeds, self.canvas.positions)
        self.predictor = predictor_for(self.model, self.canvas, self.settings.cfg_scale)
        self.identity = RunIdentity()

    @property
    def sampler(self) -> Sampler:
        """The sampler of the settings."""
        assert self.settings.sampler is not None
        return self.settings.sampler

    def describe(self) -> dict[str, Any]:
        """For the record of its trajectory: the settings, and what it is made by."""
        return {
            "sampler": describe_sampler(self.sampler),
            "steps": len(self.times) - 1,
            "times": self.times,
            "cfg_scale": self.settings.cfg_scale,
            "temperature": self.settings.temperature,
            "seeds": self.seeds,
            "blank": self.canvas.blank,
            **provenance(self.model, self.model.cfg),
        }

    def enter(self, index: int) -> StepState:
        """Lend the step from times[index] to times[index + 1] to every hook, the canvas's own first."""
        state = self.model.clock.step = self._state(index)
        point = self.model.loop_hooks.hook_tokens
        if is_hooked(point):
            # A copy, because the canvas is also history, and hooks are in the habit of writing in place.
            tokens = point(self.tokens.clone())
            require_ids("denoise.hook_tokens", tokens, state, torch.ones_like(state.masked), self.model)
            self.tokens = tokens.long()
            state = self.model.clock.step = self._state(index)
        return state

    def plan(self, state: StepState) -> Plan:
        """What the sampler decides; of a forced run, what its script does."""
        if self.script is None:
            return self.sampler.plan(state, self.noise, self.confidence)
        after = self.script[len(self.canvases)]
        revealed = state.masked & (after != self.canvas.blank)
        remasked = (state.tokens != self.canvas.blank) & (after == self.canvas.blank)
        return Plan(revealed, revealed.sum(dim=1), remasked)

    def proposed_places(self, state: StepState, plan: Plan) -> PosMask | None:
        """Where tokens are proposed: as planned, or everywhere if a hook may see it; `None` if nothing need run."""
        watched = self.model.is_hooked or _watched(self.model.loop_hooks)
        if watched:
            return plan.places if self.canvas.grows else state.masked
        return plan.places if bool(plan.counts.any()) else None

    def predict(self, state: StepState, places: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        """Logits of the places, after guidance and hooks."""
        point = self.model.loop_hooks.hook_logits
        logits = self.predictor(state, places)
        if is_hooked(point):
            canvas = logits.new_zeros(*places.shape, logits.shape[-1])
            canvas[places] = logits
            logits = point(canvas)[places]
        require_logits(logits, places, state)
        return logits

    def propose(self, state: StepState, places: PosMask, logits: Float[Tensor, "selected d_vocab_out"]) -> Tokens:
        """The canvas with a token proposed at each place; of a forced run, those of its script."""
        propose, mask_id = self.sampler.proposal.propose, self.model.cfg.mask_token_id
        if self.script is not None:
            after = self.script[len(self.canvases)]
            candidates = torch.where(after == self.canvas.blank, self.tokens, after)
            unwritten = places & (after == self.canvas.blank)
            if bool(unwritten.any()):
                candidates[unwritten] = propose(logits, mask_id=mask_id)[unwritten[places]]
            return candidates
        uniform = self.noise.by_token(state.index, places, logits.shape[-1]) if self.settings.temperature else None
        candidates = self.tokens.clone()
        candidates[places] = propose(logits, self.settings.temperature, uniform, mask_id)
        require_open(logits, candidates[places], state, places)
        point = self.model.loop_hooks.hook_candidates
        if not is_hooked(point):
            return candidates
        returned = point(candidates)
        require_ids("denoise.hook_candidates", returned, state, places, self.model)
        return returned.long()

    def rank(
        self, state: StepState, places: PosMask, logits: Float[Tensor, "selected d_vocab_out"], candidates: Tokens
    ) -> tuple[Float[Tensor, "batch pos"], Float[Tensor, "batch pos"]]:
        """How probable each candidate is, and the scores by which they are ranked; 0 at other places."""
        point, proposal, tokens = self.model.loop_hooks.hook_confidence, self.sampler.proposal, candidates[places]
        confidence = torch.zeros(places.shape, dtype=torch.float64, device=places.device)
        confidence[places] = confidence_of(logits, tokens)
        ranking = confidence.clone()
        if not proposal.is_plain:
            ranking[places] = proposal.scores(logits, tokens, self.settings.temperature)
        ranking = point(ranking)
        if is_hooked(point):
            require_scores(ranking, state, places)
        return confidence, ranking

    def reveal(
        self,
        state: StepState,
        plan: Plan,
        places: PosMask,
        candidates: Tokens,
        confidence: Float[Tensor, "batch pos"],
        ranking: Float[Tensor, "batch pos"],
    ) -> None:
        """Write the most confident candidates, as many as planned; of a forced run, those of its script."""
        reveal = plan.places
        if self.script is None:
            reveal = self.model.loop_hooks.hook_reveal(most_confident(ranking, plan))
            require_choice(reveal)
            reveal = reveal & places & (candidates != self.canvas.blank)
        self.tokens = torch.where(reveal, candidates, self.tokens)
        self.revealed_at = self.revealed_at.masked_fill(reveal, state.index)
        self.confidence = torch.where(reveal, confidence.float(), self.confidence)

    def remask(self, plan: Plan) -> None:
        """Blank what the plan takes back."""
        if plan.remask is not None:
            self.tokens = self.tokens.masked_fill(plan.remask, self.canvas.blank)
            self.revealed_at = self.revealed_at.masked_fill(plan.remask, -1)
            self.confidence = self.confidence.masked_fill(plan.remask, float("nan"))

    def leave(self) -> None:
        """Keep the canvas; of a forced run, the script's."""
        if self.script is not None:
            self.tokens = self.script[len(self.canvases)]
        self.canvases.append(self.tokens)

    def _state(self, index: int) -> StepState:
        return StepState(
            index=index,
            n_steps=len(self.times) - 1,
            t=self.times[index],
            s=self.times[index + 1],
            tokens=self.tokens,
            masked=self.canvas.blanks(self.tokens),
            given=self.canvas.given,
            run=self.identity,
        )


def require_same_model(record: Mapping[str, Any], model: DiffusionTransformer) -> None:
    """Raise a `ValueError` unless a run was made by this model; its weights may have been edited since."""
    if record["model"] != model.cfg.model_name:
        raise ValueError(
            f"the trajectory was made by {record['model']!r} and cannot be taken up by {model.cfg.model_name!r}: its "
            "tokens and steps mean nothing there. Load that model, or denoise the prompt anew"
        )
    require_same_architecture(record, model)


def require_same_architecture(record: Mapping[str, Any], model: DiffusionTransformer) -> None:
    """Raise a `ValueError` unless a run was made by this model or by another checkpoint of its architecture."""
    recorded, current = record["architecture"], model.cfg.architecture.to_dict()
    if {**recorded, "name": None} != {**current, "name": None}:
        raise ValueError(
            f"the trajectory was made by {record['model']!r}, of another architecture than {model.cfg.model_name!r} "
            "here, where its tokens and steps mean nothing. Load the model it was made by, or denoise the prompt anew"
        )


def _watched(hooks: LoopHooks) -> bool:
    late = (hooks.hook_logits, hooks.hook_candidates, hooks.hook_confidence, hooks.hook_reveal)
    return any(is_hooked(point) for point in late)
