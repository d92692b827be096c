"""One run in progress: the canvas as it stands, its history, and the step from one to the next.

Each step from t to s: the sampler plans, the predictor gives logits, a token is proposed at each place, the most
confident are revealed. The loop's hook points, all over the whole canvas, in the order in which they pass:

    denoise.hook_tokens      Int[batch pos]                the canvas going in
    denoise.hook_logits      Float[batch pos d_vocab_out]  after guidance, by place; zeros where nothing is proposed
    denoise.hook_candidates  Int[batch pos]                the tokens proposed; the canvas's own elsewhere
    denoise.hook_confidence  Float[batch pos]              how sure the model is of them; zero elsewhere. By this they
                                                           are ranked: their probability, unless the sampler's
                                                           `proposal` says otherwise
    denoise.hook_reveal      Bool[batch pos]               the places revealed in this step

What a hook returns there is what the loop uses; only masked places can be revealed, and one where [MASK] itself is
proposed stays masked. Logits that are NaN or +inf, or -inf for every token that may be written, are refused at any
place where a token is proposed, and so are ids that are no tokens: they would pass for confident text. While anything
is hooked, the network runs at every step and tokens are proposed at every masked place (on a causal model: at the next
one), so that a hook may change the order; otherwise a step that reveals nothing costs nothing.

With a `script`, the canvases of an earlier run, the run is forced: the network and its hooks see those canvases, their
tokens are revealed (nothing passes `hook_candidates` and `hook_reveal`), and what changes under a hook is how probable
they are.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.predictor import predictor_for
from diffusion_lens.denoising.proposal import confidence_of
from diffusion_lens.denoising.randomness import PlaceNoise, Seed, row_seeds
from diffusion_lens.denoising.refusals import require_choice, require_ids, require_logits, require_open, require_scores
from diffusion_lens.denoising.sampler import Plan, Sampler, most_confident
from diffusion_lens.denoising.samplers import describe_sampler, resolve_sampler, sampler_from
from diffusion_lens.model.hook_points import is_hooked
from diffusion_lens.model.hooking import LoopHooks
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.shapes import Places, Tokens
from diffusion_lens.step_state import RunIdentity, StepState


@dataclass
class Run:
    """A canvas on its way.

    Attributes:
        times: the times of the whole run, `n_steps + 1` of them; a branch of a run keeps them.
        revealed_at: Int[batch pos], as in `Trajectory`.
        confidence: Float[batch pos], probability of each token when it was revealed; NaN where none was.
        script: Int[step+1 batch pos], the canvases that are followed, if the run is forced.
    """

    model: DiffusionTransformer
    canvas: Canvas
    sampler: Sampler
    cfg_scale: float
    temperature: float
    seeds: list[int]
    times: list[float]
    revealed_at: Int[Tensor, "batch pos"]
    confidence: Float[Tensor, "batch pos"]
    script: Int[Tensor, "step_plus_1 batch pos"] | None = None

    def __post_init__(self) -> None:
        self.tokens = self.canvas.tokens
        self.canvases = [self.tokens]
        self.noise = PlaceNoise(self.seeds, self.canvas.positions)
        self.predictor = predictor_for(self.model, self.canvas, self.cfg_scale)
        self.identity = RunIdentity()

    def settings(self) -> dict[str, Any]:
        """What a trajectory records of how it was made."""
        return {
            "sampler": describe_sampler(self.sampler),
            "steps": len(self.times) - 1,
            "times": self.times,
            "cfg_scale": self.cfg_scale,
            "temperature": self.temperature,
            "seeds": self.seeds,
            "blank": self.canvas.blank,
            **provenance(self.model, self.model.cfg),
        }

    def step(self, index: int) -> None:
        """From times[index] to times[index + 1]."""
        hooks = self.model.loop_hooks
        state = self.model.clock.step = self._state(index)
        if is_hooked(hooks.hook_tokens):
            # A copy, because the canvas is also history, and hooks are in the habit of writing in place.
            tokens = hooks.hook_tokens(self.tokens.clone())
            require_ids("denoise.hook_tokens", tokens, state, torch.ones_like(state.masked), self.model)
            self.tokens = tokens.long()
            state = self.model.clock.step = self._state(index)
        plan = self._plan(state)
        watched = self.model.is_hooked or _watched(hooks)
        places = state.masked if watched and not self.canvas.grows else plan.places
        if watched or bool(plan.counts.any()):
            self._reveal(state, plan, places)
        if plan.remask is not None:
            self.tokens = self.tokens.masked_fill(plan.remask, self.canvas.blank)
            self.revealed_at = self.revealed_at.masked_fill(plan.remask, -1)
            self.confidence = self.confidence.masked_fill(plan.remask, float("nan"))
        if self.script is not None:
            self.tokens = self.script[len(self.canvases)]
        self.canvases.append(self.tokens)

    def _plan(self, state: StepState) -> Plan:
        if self.script is None:
            return self.sampler.plan(state, self.noise, self.confidence)
        after = self.script[len(self.canvases)]
        revealed = state.masked & (after != self.canvas.blank)
        remasked = (state.tokens != self.canvas.blank) & (after == self.canvas.blank)
        return Plan(revealed, revealed.sum(dim=1), remasked)

    def _reveal(self, state: StepState, plan: Plan, places: Places) -> None:
        hooks = self.model.loop_hooks
        logits = self.predictor(state, places)
        if is_hooked(hooks.hook_logits):
            canvas = logits.new_zeros(*places.shape, logits.shape[-1])
            canvas[places] = logits
            logits = hooks.hook_logits(canvas)[places]
        require_logits(logits, places, state)
        candidates = self._propose(state, places, logits)
        if self.script is None:
            candidates = self._hooked_candidates(candidates, state, places)
        proposal, tokens = self.sampler.proposal, candidates[places]
        confidence = torch.zeros(places.shape, dtype=torch.float64, device=places.device)
        confidence[places] = confidence_of(logits, tokens)
        ranking = confidence.clone()
        if not proposal.is_plain:
            ranking[places] = proposal.scores(logits, tokens, self.temperature)
        ranking = hooks.hook_confidence(ranking)
        if is_hooked(hooks.hook_confidence):
            require_scores(ranking, state, places)
        reveal = plan.places
        if self.script is None:
            reveal = hooks.hook_reveal(most_confident(ranking, plan))
            require_choice(reveal)
            reveal = reveal & places & (candidates != self.canvas.blank)
        self.tokens = torch.where(reveal, candidates, self.tokens)
        self.revealed_at = self.revealed_at.masked_fill(reveal, state.index)
        self.confidence = torch.where(reveal, confidence.float(), self.confidence)

    def _propose(self, state: StepState, places: Places, logits: Float[Tensor, "place d_vocab_out"]) -> Tokens:
        propose, mask_id = self.sampler.proposal.propose, self.model.cfg.mask_token_id
        if self.script is not None:
            after = self.script[len(self.canvases)]
            candidates = torch.where(after == self.canvas.blank, self.tokens, after)
            unwritten = places & (after == self.canvas.blank)
            if bool(unwritten.any()):
                candidates[unwritten] = propose(logits, mask_id=mask_id)[unwritten[places]]
            return candidates
        uniform = self.noise.by_token(state.index, places, logits.shape[-1]) if self.temperature else None
        candidates = self.tokens.clone()
        candidates[places] = propose(logits, self.temperature, uniform, mask_id)
        require_open(logits, candidates[places], state, places)
        return candidates

    def _hooked_candidates(self, candidates: Tokens, state: StepState, places: Places) -> Tokens:
        point = self.model.loop_hooks.hook_candidates
        if not is_hooked(point):
            return candidates
        returned = point(candidates)
        require_ids("denoise.hook_candidates", returned, state, places, self.model)
        return returned.long()

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


def execute(
    run: Run,
    first_step: int = 0,
    *,
    fwd_hooks: Sequence[tuple[Any, Any]] = (),
    around: Callable[[int], AbstractContextManager[Any]] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Take every step from `first_step` on; returns what the record keeps of it.

    Args:
        around: a context for each step, such as one that caches.

    Raises:
        RuntimeError: another run of the loop is under way on this model.
    """
    begun = time.perf_counter()
    steps = range(first_step, len(run.times) - 1)
    clock, name = run.model.clock, run.model.cfg.model_name
    with torch.no_grad(), clock.running(name), run.model.hooks(fwd_hooks=list(fwd_hooks)):
        run.model.require_set_up()
        for index in tqdm(steps, desc="denoise", unit="step", disable=not progress):
            with around(index) if around else nullcontext():
                run.step(index)
    seconds = time.perf_counter() - begun
    return {"first_step": first_step, "forward_passes": run.predictor.passes, "seconds": seconds}


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


def begin_again(
    model: DiffusionTransformer,
    *,
    canvases: Int[Tensor, "step_plus_1 batch pos"],
    given: Places,
    real: Places,
    revealed_at: Int[Tensor, "batch pos"],
    confidence: Float[Tensor, "batch pos"],
    record: Mapping[str, Any],
    sampler: str | Sampler | None,
    seeds: Seed | None,
    forced: bool,
) -> Run:
    """A recorded run at its first canvas, ready to be taken again; the arguments are those of a `Trajectory`."""
    require_same_model(record, model)
    if record.get("remasked") and record["first_step"] and not forced:
        raise ValueError(
            "a run that masked tokens again does not keep how sure each step was of tokens since rewritten, which its "
            "sampler asks: replay it freely from its start, or forced from any step"
        )
    device = model.cfg.device
    canvas = Canvas(
        canvases[0].to(device), given.to(device), None if bool(real.all()) else real.to(device), record["blank"]
    )
    before = (revealed_at >= 0) & (revealed_at < record["first_step"])
    return Run(
        model=model,
        canvas=canvas,
        sampler=resolve_sampler(sampler or sampler_from(record["sampler"]), model.cfg),
        cfg_scale=record["cfg_scale"],
        temperature=record["temperature"],
        seeds=row_seeds(record["seeds"] if seeds is None else seeds, canvases.shape[1]),
        times=list(record["times"]),
        revealed_at=revealed_at.masked_fill(~before, -1).to(device),
        confidence=confidence.masked_fill(~before, float("nan")).to(device),
        script=canvases.to(device) if forced else None,
    )


def _watched(hooks: LoopHooks) -> bool:
    late = (hooks.hook_logits, hooks.hook_candidates, hooks.hook_confidence, hooks.hook_reveal)
    return any(is_hooked(point) for point in late)
