"""The denoising loop (Nie et al. 2024, arXiv 2410.18514, section 2): from a canvas of blanks to text.

Each step from t to s: the sampler plans, the predictor gives logits, a token is proposed at each place, the most
confident are revealed. The loop's hook points, all over the whole canvas, in the order in which they pass:

    denoise.hook_tokens      Int[batch pos]                the canvas going in
    denoise.hook_logits      Float[batch pos d_vocab_out]  after guidance, by place; zeros where nothing is proposed
    denoise.hook_candidates  Int[batch pos]                the tokens proposed; the canvas's own elsewhere
    denoise.hook_confidence  Float[batch pos]              their probabilities; zero elsewhere
    denoise.hook_reveal      Bool[batch pos]               the places revealed in this step

What a hook returns there is what the loop uses. While anything is hooked, the network runs at every step and tokens are
proposed at every masked place (on a causal model: at the next one), so that a hook may change the order; otherwise a
step that reveals nothing costs nothing.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.denoising.canvas import Canvas, Prompt, lay_out
from diffusion_lens.denoising.predictor import Conditional, Guided, Predictor
from diffusion_lens.denoising.proposal import confidence_of, propose_tokens
from diffusion_lens.denoising.randomness import PlaceNoise, Seed, row_seeds
from diffusion_lens.denoising.sampler import Plan, Sampler, most_confident
from diffusion_lens.denoising.samplers import resolve_sampler
from diffusion_lens.denoising.schedule import linear_times
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.text import UNREACHED
from diffusion_lens.model.transformer import DiffusionTransformer, LoopHooks
from diffusion_lens.records import provenance
from diffusion_lens.shapes import Places, Tokens
from diffusion_lens.step_state import StepState


@torch.no_grad()
def denoise(
    model: DiffusionTransformer,
    prompt: Prompt,
    *,
    length: int | None = None,
    max_new_tokens: int | None = None,
    steps: int | None = None,
    sampler: str | Sampler | None = None,
    cfg_scale: float = 0.0,
    temperature: float = 0.0,
    seed: Seed = 0,
    attention_mask: Tensor | None = None,
    prepend_bos: bool | None = None,
    fwd_hooks: Sequence[tuple[Any, Any]] = (),
    progress: bool = False,
) -> Trajectory:
    """Run the loop; see `HookedDiffusionTransformer.denoise` for the arguments."""
    chosen = resolve_sampler(sampler, model.cfg.attention_dir)
    _check_numbers(cfg_scale, temperature, model)
    canvas = lay_out(model, prompt, length, max_new_tokens, attention_mask, prepend_bos)
    n_steps = chosen.n_steps(steps, canvas.blanks(canvas.tokens))
    times = linear_times(n_steps, chosen.eps).tolist()
    seeds = row_seeds(seed, canvas.tokens.shape[0])
    predictor: Predictor = Conditional(model, canvas)
    if cfg_scale:
        predictor = Guided(Conditional(model, canvas), cfg_scale)
    run = _Run(model, canvas, chosen, predictor, PlaceNoise(seeds, _positions(canvas)), times, temperature)
    begun = time.perf_counter()
    with model.hooks(fwd_hooks=list(fwd_hooks)):
        try:
            for index in tqdm(range(n_steps), desc="denoise", unit="step", disable=not progress):
                run.step(index)
        finally:
            model.clock.step = None
    record = {
        "sampler": repr(chosen),
        "steps": n_steps,
        "times": times,
        "cfg_scale": cfg_scale,
        "temperature": temperature,
        "seeds": seeds,
        "forward_passes": predictor.passes,
        "seconds": time.perf_counter() - begun,
        **provenance(model, model.cfg),
    }
    return run.trajectory(record)


@dataclass
class _Run:
    """One run in progress: the canvas as it stands, and its history."""

    model: DiffusionTransformer
    canvas: Canvas
    sampler: Sampler
    predictor: Predictor
    noise: PlaceNoise
    times: list[float]
    temperature: float

    def __post_init__(self) -> None:
        self.tokens = self.canvas.tokens
        self.canvases = [self.tokens]
        self.revealed_at = torch.full_like(self.tokens, -1)
        self.confidence = torch.ones(self.tokens.shape, device=self.tokens.device)

    def step(self, index: int) -> None:
        """From times[index] to times[index + 1]."""
        hooks = self.model.loop_hooks
        state = self._state(index, self.tokens)
        self.model.clock.step = state
        if hooks.hook_tokens.is_hooked:
            # A copy, because the canvas is also history, and hooks are in the habit of writing in place.
            self.tokens = hooks.hook_tokens(self.tokens.clone())
            state = self.model.clock.step = self._state(index, self.tokens)
        plan = self.sampler.plan(state, self.noise)
        watched = self.model.is_hooked or _watched(hooks)
        places = state.masked if watched and self.canvas.blank != UNREACHED else plan.places
        if bool(plan.counts.any()) or (watched and bool(places.any())):
            self._reveal(state, plan, places)
        self.canvases.append(self.tokens)

    def _reveal(self, state: StepState, plan: Plan, places: Places) -> None:
        hooks = self.model.loop_hooks
        logits = self.predictor(state, places)
        if hooks.hook_logits.is_hooked:
            canvas = logits.new_zeros(*places.shape, logits.shape[-1])
            canvas[places] = logits
            logits = hooks.hook_logits(canvas)[places]
        uniform = self.noise.by_token(state.index, places, logits.shape[-1]) if self.temperature else None
        candidates = self.tokens.clone()
        candidates[places] = propose_tokens(logits, self.temperature, uniform)
        candidates = hooks.hook_candidates(candidates)
        confidence = torch.zeros(places.shape, dtype=torch.float64, device=places.device)
        confidence[places] = confidence_of(logits, candidates[places])
        confidence = hooks.hook_confidence(confidence)
        reveal = hooks.hook_reveal(most_confident(confidence, plan))
        self.tokens = torch.where(reveal, candidates, self.tokens)
        self.revealed_at = self.revealed_at.masked_fill(reveal, state.index)
        self.confidence = torch.where(reveal, confidence.float(), self.confidence)

    def _state(self, index: int, tokens: Tokens) -> StepState:
        return StepState(
            index=index,
            n_steps=len(self.times) - 1,
            t=self.times[index],
            s=self.times[index + 1],
            tokens=tokens,
            masked=self.canvas.blanks(tokens),
            given=self.canvas.given,
        )

    def trajectory(self, record: dict[str, Any]) -> Trajectory:
        """The finished run."""
        canvases = torch.stack(self.canvases)
        ids = canvases.unique().tolist()
        has_text = self.model.tokenizer is not None
        return Trajectory(
            tokens=self.tokens,
            canvases=canvases,
            revealed_at=self.revealed_at,
            confidence=self.confidence,
            given=self.canvas.given,
            text=self.model.to_string(self.tokens) if has_text else [""] * len(self.tokens),
            words=dict(zip(ids, self.model.words(ids), strict=True)),
            record=record,
        )


def _watched(hooks: LoopHooks) -> bool:
    late = (hooks.hook_logits, hooks.hook_candidates, hooks.hook_confidence, hooks.hook_reveal)
    return any(point.is_hooked for point in late)


def _positions(canvas: Canvas) -> Tokens:
    real = torch.ones_like(canvas.tokens) if canvas.real is None else canvas.real.long()
    return (real.cumsum(dim=1) - 1).clamp(min=0)


def _check_numbers(cfg_scale: float, temperature: float, model: DiffusionTransformer) -> None:
    if not math.isfinite(cfg_scale) or cfg_scale < 0:
        raise ValueError(f"cfg_scale={cfg_scale}; it must be a finite number, 0 (no guidance) or more")
    if cfg_scale and model.cfg.mask_token_id is None:
        raise ValueError(
            f"cfg_scale={cfg_scale} masks the prompt, and {model.cfg.model_name!r} has no [MASK]; use 0 there"
        )
    if not math.isfinite(temperature) or temperature < 0:
        raise ValueError(f"temperature={temperature}; it must be a finite number, 0 (the likeliest token) or more")
