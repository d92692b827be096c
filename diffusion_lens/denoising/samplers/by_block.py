"""Samplers inside the open block, for models that write block after block. A row opens its next block by itself.

- `BlockConfidence` reveals the most confident positions. A block of B positions is written in S steps: step s of it
  reveals B // S positions, one more in the first B % S steps (Cheng et al. 2025, SDAR, arXiv 2510.06303). Where the
  prompt fills a part of the block, or earlier steps revealed more, the block is filled in fewer steps.
- `BlockPosterior` and `FirstHitting` are the reverse process (Arriola et al. 2025, BD3LM, arXiv 2503.09573): a masked
  position takes a token drawn from p(x_0). The time falls from 1 to 0 in each block, so that rows which write different
  blocks, or opened theirs at different steps, have times of their own. Of a model without blocks, the whole canvas is
  one block. `BlockPosterior` divides the time of a block into equal steps, of which many change nothing. `FirstHitting`
  samples the time at which the next position is revealed, so that each step reveals one (Zheng et al. 2024, arXiv
  2409.02908). Its distribution is that of infinitely many steps.
- `EntropyBound` writes under uniform noise (DiffusionGemma), where a block is a whole canvas. Every step draws a token
  at every position of it and accepts the surest of them: those of the lowest entropy, as long as the entropies of the
  ones before add up to no more than a bound, so that they are nearly independent (Ben-Hamu et al. 2025, arXiv
  2505.24857). All other positions become noise again. The canvas ends with the likeliest token at each position, in its
  last step or as soon as the prediction is stable and sure.
"""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.denoising.sampler import Plan, PositionNoise, Prediction, Proposal, Sampler
from diffusion_lens.hooks.step import Handed, OpenBlock, StepState
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.settings import at_least, checked_arguments, not_negative, one_of
from weight_conversion import NoiseSchedule, Variant

ORDERS = ("confidence", "sequential")
STEPS = 32  # of a block, where neither the sampler nor the run says how many
CANVAS_STEPS = 48  # the same of `EntropyBound`, as in the authors' code


@checked_arguments
@dataclass(frozen=True)
class BlockConfidence(Sampler):
    """Reveals a number of positions of the open block in each step.

    Attributes:
        steps_per_block: Steps S of a block. By default the `steps` of the run are shared evenly among the blocks of a
            row, and without `steps` a block has as many as positions.
        order: "confidence" reveals the positions of the highest confidence first, "sequential" the leftmost.
        threshold: Confidence above which a position is revealed in any case, beyond the step's number; `None` for none.
        entropy_bound: Bound in nats: a step reveals the positions of the lowest entropy as long as their entropies add
            up to no more, and at least one. It replaces the step's number. `None` for none. The proposal's score has
            to be "entropy".
        block_length: Number of positions in a block for which the settings are meant; `None` for any. A model with
            another one is refused.
        sub_block: Number of positions in the parts into which a block is divided from left to right; only the first
            part with masked positions is written. `None` for one part.
    """

    steps_per_block: int | None = None
    order: str = "confidence"
    threshold: float | None = None
    entropy_bound: float | None = None
    block_length: int | None = None
    proposal: Proposal = field(default_factory=Proposal)
    sub_block: int | None = None
    name = "block_confidence"
    writes = "block"
    reads_confidence = False

    def __post_init__(self) -> None:
        for name in ("steps_per_block", "block_length", "sub_block"):
            if (value := getattr(self, name)) is not None:
                at_least(1, name, value)
        for name in ("threshold", "entropy_bound"):
            if (value := getattr(self, name)) is not None:
                not_negative(name, value)
        one_of(*ORDERS)("order", self.order)
        if self.entropy_bound is not None and (self.threshold is not None or self.order != "confidence"):
            raise ValueError("entropy_bound says how many positions a step reveals: leave out threshold and order")
        if self.entropy_bound is not None and self.proposal.score != "entropy":
            raise ValueError(
                f"entropy_bound={self.entropy_bound} adds up entropies, and proposal.score={self.proposal.score!r}: "
                "give proposal=Proposal(score='entropy')"
            )

    def misfit(self, variant: Variant) -> str | None:
        if problem := super().misfit(variant) or _without_blocks(variant):
            return problem
        if self.block_length not in (None, variant.block_size):
            return (
                f"is for blocks of {self.block_length} positions, and this model has blocks of {variant.block_size}: "
                f"give block_length={variant.block_size}, or load the model with block_size={self.block_length}"
            )
        return None

    def settled(self, variant: Variant) -> Sampler:
        return replace(self, steps_per_block=self.steps_per_block or variant.block_size)

    def n_steps_by_blocks(self, steps: int | None, blanks: PosMask, blocks: Int[Tensor, "batch pos"], size: int) -> int:
        """Number of steps of the run, as many as the row that needs most takes at most.

        Raises:
            ValueError: `steps` are fewer than the blocks of a row, or contradict `steps_per_block`.
        """
        masks = (F.one_hot(blocks) * blanks[..., None]).sum(dim=1)
        most = None
        if self.steps_per_block is not None:
            most = int(_steps_of(masks, size, self.steps_per_block).sum(dim=1).max())
        return _steps_of_run(steps, most, self.steps_per_block, int((masks > 0).sum(dim=1).max()))

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        block = step.block
        assert block is not None
        n_masked = step.masked.sum(dim=1)
        if self.entropy_bound is not None:
            return Plan(step.masked, n_masked.clamp(max=1), bound=self.entropy_bound)

        # 1. The steps of this block.
        if self.steps_per_block is not None:
            n_steps = torch.full_like(n_masked, self.steps_per_block)
        else:
            n_steps = block.steps_of(step.n_steps)

        # 2. The number that this one reveals. After the block's last step, which only a hook can cause, all.
        counts = block.size // n_steps + (block.step < block.size % n_steps).long()
        counts = torch.where(block.step < n_steps, counts, n_masked).minimum(n_masked)
        positions, places = step.masked, torch.arange(step.masked.shape[1], device=step.masked.device)
        if self.sub_block is not None:
            part = (places - block.start[:, None]).div(self.sub_block, rounding_mode="floor")
            first = part.masked_fill(~positions, block.size).amin(dim=1, keepdim=True)
            positions = positions & (part == first)
            counts = counts.minimum(positions.sum(dim=1))
        if self.order == "sequential":
            positions = positions & (positions.cumsum(dim=1) <= counts[:, None])

        # 3. The first step of a block may be its first token's alone.
        if block.first_alone:
            seed = step.masked & (places == block.start[:, None])
            seeding = seed.any(dim=1) & (block.step == 0)
            if bool((short := seeding & (n_masked > 1) & (n_steps < block.size)).any()):
                n_short = int(n_steps[short][0])
                given = "1 step" if n_short == 1 else f"{n_short} steps"
                raise ValueError(
                    f"a block of {block.size} positions has {given}, and the first of them is its first token's alone, "
                    f"so [MASK]s would be left: give {block.size} steps for each block (without steps and "
                    "steps_per_block, a block has as many)"
                )
            positions = torch.where(seeding[:, None], seed, positions)
            counts = torch.where(seeding, 1, counts)
        return Plan(positions, counts, threshold=self.threshold)


class _InBlock(Sampler):
    """The reverse process in the open block, whose rows have times of their own; `proposal` ranks nothing."""

    writes = "block"
    reads_confidence = False
    has_times_of_rows = True

    def misfit(self, variant: Variant) -> str | None:
        if problem := super().misfit(variant) or (_without_blocks(variant) if variant.is_autoregressive else None):
            return problem
        if variant.block_context == "causal":
            return (
                "draws all positions of the open block together, and this model predicts a block's first token from "
                "the row before it: use 'block_confidence'"
            )
        return None

    def n_steps(self, steps: int | None, blanks: PosMask) -> int:
        """Number of steps of the run, whose canvas is one block."""
        return self.n_steps_by_blocks(steps, blanks, torch.zeros_like(blanks, dtype=torch.long), blanks.shape[1])


@checked_arguments
@dataclass(frozen=True)
class BlockPosterior(_InBlock):
    """Draws the token of each masked position of the open block from the posterior under absorbing noise.

    A block of S steps has the times 1 - j/(S - 1), j = 0 … S - 1, and a step removes noise for 1/S, as in the authors'
    code. Its last step is at time 0, where no noise is left: it draws every position that is still masked from p(x_0).
    A row whose block is filled earlier opens its next block at once.

    Attributes:
        steps_per_block: Steps S of a block. By default the `steps` of the run are shared evenly among the blocks of a
            row, and without `steps` a block has 32.
        keeps_prediction: Whether the network is given the time of the last step that changed the row's canvas.
    """

    steps_per_block: int | None = None
    keeps_prediction: bool = False
    proposal: Proposal = field(default_factory=Proposal)
    schedule: NoiseSchedule | None = None
    name = "block_posterior"
    may_change_nothing = True

    def __post_init__(self) -> None:
        if self.steps_per_block is not None:
            at_least(1, "steps_per_block", self.steps_per_block)

    def settled(self, variant: Variant) -> Sampler:
        return replace(self, steps_per_block=self.steps_per_block or STEPS)

    def n_steps_by_blocks(self, steps: int | None, blanks: PosMask, blocks: Int[Tensor, "batch pos"], size: int) -> int:
        """Number of steps of the run, as many as the row with most blocks takes at most.

        Raises:
            ValueError: `steps` are fewer than the blocks of a row, or contradict `steps_per_block`.
        """
        n_blocks = max(len(row[blank].unique()) for row, blank in zip(blocks, blanks, strict=True))
        most = None if self.steps_per_block is None else n_blocks * self.steps_per_block
        return _steps_of_run(steps, most, self.steps_per_block, n_blocks)

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        return Plan.of_all(step.masked)

    def times_of_rows(self, step: StepState, noise: PositionNoise) -> Float[Tensor, "batch"]:
        return 1 - self._share(step, _block(step))

    def transition(self, step: StepState, prediction: Prediction) -> Float[Tensor, "selected d_vocab"]:
        block, rows = _block(step), step.masked.nonzero()[:, 0]
        n_steps, t = self._n_steps(step, block), 1 - self._share(step, block)
        is_last = block.step >= n_steps - 1
        s = torch.where(is_last, 0.0, t - 1 / n_steps)
        # At time 0 nothing is noise: the step is one from any other time.
        t = torch.where(is_last, 1.0, t)
        chances = (prediction.schedule.chance(x)[rows, None] for x in (t, s))
        return prediction.noise.posterior(prediction.p_clean, prediction.present, *chances)

    def _n_steps(self, step: StepState, block: OpenBlock) -> Int[Tensor, "batch"]:
        """Number of steps of the block of each row."""
        if self.steps_per_block is not None:
            return torch.full_like(block.step, self.steps_per_block)
        return block.steps_of(step.n_steps)

    def _share(self, step: StepState, block: OpenBlock) -> Float[Tensor, "batch"]:
        """The share of its block's time that each row has behind it."""
        last = (self._n_steps(step, block) - 1).clamp(min=1)
        return (block.step.double() / last).clamp(max=1.0)


@checked_arguments
@dataclass(frozen=True)
class FirstHitting(_InBlock):
    """Reveals one position of the open block in each step, at a sampled time; which one is chosen at random.

    From a time t at which m positions are masked, the first of them is revealed at the time t · u^(1/m), with u ~
    U(0, 1). A time-conditioned network gets that one.
    """

    proposal: Proposal = field(default_factory=Proposal)
    schedule: NoiseSchedule | None = None
    name = "first_hitting"

    def n_steps_by_blocks(self, steps: int | None, blanks: PosMask, blocks: Int[Tensor, "batch pos"], size: int) -> int:
        """One step for each position to write, of the row with most of them.

        Raises:
            ValueError: `steps` is another number.
        """
        most = int(blanks.sum(dim=1).max())
        if steps not in (None, most):
            raise ValueError(
                f"steps={steps}, but there is one step for each position to write, {most} in all: leave steps out"
            )
        return most

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        order = torch.full(step.masked.shape, 2.0, dtype=torch.float64, device=step.masked.device)
        order[step.masked] = noise.by_position(step.index, step.masked)
        chosen = torch.zeros_like(step.masked).scatter_(1, order.argmin(dim=1, keepdim=True), True) & step.masked
        return Plan.of_all(chosen)

    def times_of_rows(self, step: StepState, noise: PositionNoise) -> Float[Tensor, "batch"]:
        block, masked = _block(step), step.masked.sum(dim=1)
        log_t = torch.zeros(masked.shape, dtype=torch.float64, device=masked.device)
        # The steps of the block up to this one; `earlier` of them ago, so many more positions were masked.
        for earlier in range(int(block.step.max()) + 1):
            log_u = noise.by_row(step.index - earlier).clamp(min=torch.finfo(torch.float64).tiny).log()
            inside = (earlier <= block.step) & (masked > 0)
            log_t += torch.where(inside, log_u.to(log_t.device) / (masked + earlier).clamp(min=1), 0.0)
        return log_t.exp()

    def transition(self, step: StepState, prediction: Prediction) -> Float[Tensor, "selected d_vocab"]:
        return prediction.p_clean


def _without_blocks(variant: Variant) -> str | None:
    """Why a sampler that reveals positions inside the model's blocks does not fit a kind of model; `None` if it may."""
    if not variant.is_autoregressive and variant.opens_blocks:
        return None
    instead = (
        "'left_to_right'" if variant.is_autoregressive else "'confidence', or 'blocks', which makes blocks of any size"
    )
    return f"reveals positions inside the model's blocks, and this model has none: use {instead}"


def _steps_of_run(steps: int | None, most: int | None, steps_per_block: int | None, n_blocks: int) -> int:
    """The number of steps of a run, from `steps` or from `steps_per_block`, by which the canvas takes `most`."""
    if most is not None:
        if steps not in (None, most):
            raise ValueError(
                f"steps={steps}, and with steps_per_block={steps_per_block} this canvas takes {most}: leave one of "
                "them out"
            )
        return max(1, most)
    assert steps is not None, "a sampler without either was settled for the model"
    if steps < n_blocks:
        raise ValueError(f"steps={steps} for {n_blocks} blocks: a block takes at least one step; give {n_blocks}")
    return steps


def _steps_of(masks: Int[Tensor, "batch block"], size: int, n_steps: int) -> Int[Tensor, "batch block"]:
    """The number of steps that fill blocks with so many masked positions; 0 of a block without any."""
    each, more = divmod(size, n_steps)
    revealed = torch.tensor([each + (step < more) for step in range(n_steps)], device=masks.device).cumsum(dim=0)
    return torch.searchsorted(revealed, masks) + (masks > 0)


def _block(step: StepState) -> OpenBlock:
    """The open block; of a model without blocks, the whole canvas."""
    if step.block is not None:
        return step.block
    zeros, n_pos = step.tokens.new_zeros(len(step.tokens)), step.tokens.shape[1]
    return OpenBlock(zeros, zeros, zeros, zeros + n_pos, zeros + step.index, zeros, zeros + 1, n_pos)


@checked_arguments
@dataclass(frozen=True)
class EntropyBound(Sampler):
    """Accepts tokens by a bound on their entropies; `steps` of a run are those of one canvas.

    The temperature falls linearly from `t_max` to `t_min`, with the steps that are left.

    Attributes:
        entropy_bound: Nats that the entropies of the accepted tokens add up to at most, without the largest of them.
        t_min, t_max: Temperatures, of the prediction that is drawn from, ranked and handed to the next step.
        stability_threshold: Number of steps before it that predicted the same tokens, for a row to be finished.
        confidence_threshold: Mean entropy in nats below which a row is finished, if it is stable too.
    """

    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    name = "entropy_bound"
    noises = frozenset({"uniform"})
    writes = "block"
    reads_confidence = False
    hands_on = True
    proposal = Proposal(score="entropy", scored_on="sampled")

    def __post_init__(self) -> None:
        for name in ("entropy_bound", "confidence_threshold", "t_min"):
            not_negative(name, getattr(self, name))
        at_least(0, "stability_threshold", self.stability_threshold)
        if not 0 < self.t_min < self.t_max:
            raise ValueError(
                f"t_min={self.t_min}, t_max={self.t_max}; the temperature falls from t_max to t_min above 0"
            )

    def misfit(self, variant: Variant) -> str | None:
        if problem := super().misfit(variant):
            return problem
        if variant.opens_blocks and variant.uniform_noise:
            return None
        return "writes canvas after canvas under uniform noise, and this model does not"

    def n_steps_by_blocks(self, steps: int | None, blanks: PosMask, blocks: Int[Tensor, "batch pos"], size: int) -> int:
        """Number of steps of the run: those of a canvas times the canvases of the row that has most.

        Raises:
            ValueError: A canvas would not have its full length, with which the model was trained.
        """
        to_write = (F.one_hot(blocks) * blanks[..., None]).sum(dim=1)
        if bool(((to_write != 0) & (to_write != size)).any()):
            raise ValueError(
                f"this model writes canvases of {size} positions behind the prompt: give max_new_tokens={size}, or a "
                f"multiple of it"
            )
        return (CANVAS_STEPS if steps is None else steps) * int((to_write > 0).sum(dim=1).max())

    def temperature(self, step: StepState, temperature: float) -> float:
        assert step.block is not None
        n_steps = step.block.steps_of_all(step.n_steps)
        left = n_steps - int(step.block.step.min())
        return self.t_min + (self.t_max - self.t_min) * left / n_steps

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        assert step.handed is not None
        positions = step.masked & ~step.handed.finished[:, None]
        counts = positions.any(dim=1).long()
        return Plan(positions, counts, bound=self.entropy_bound, crosses=True)

    def transition(self, step: StepState, prediction: Prediction) -> Float[Tensor, "selected d_vocab"]:
        return prediction.p_clean

    def finishes(self, step: StepState, handed: Handed, entropy: Float[Tensor, "batch pos"]) -> Bool[Tensor, "batch"]:
        n_open = step.masked.sum(dim=1).clamp(min=1)
        stable = handed.streak > self.stability_threshold
        return stable & (entropy.sum(dim=1) / n_open < self.confidence_threshold)
