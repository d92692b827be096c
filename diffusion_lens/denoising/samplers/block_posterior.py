"""The reverse process inside the open block, for models that write block after block (Arriola et al. 2025, BD3LM,
arXiv 2503.09573). Of a model without blocks, the whole canvas is one block.

The time falls from 1 to 0 in each block, so that rows which write different blocks, or opened theirs at different
steps, have times of their own. A masked position takes a token drawn from p(x_0):

- `BlockPosterior` divides the time of a block into equal steps, of which many change nothing.
- `FirstHitting` samples the time at which the next position is revealed, so that each step reveals one (Zheng et al.
  2024, arXiv 2409.02908). Its distribution is that of infinitely many steps.
"""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.denoising.prediction import Prediction
from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.randomness import PositionNoise
from diffusion_lens.denoising.sampler import Plan, Sampler
from diffusion_lens.denoising.samplers.block_confidence import steps_of_run, without_blocks
from diffusion_lens.settings import whole_number
from diffusion_lens.shapes import PosMask
from diffusion_lens.step_state import OpenBlock, StepState
from weight_conversion import NoiseSchedule, Variant

# Steps of a block, where neither the sampler nor the run says how many.
STEPS = 32


@dataclass(frozen=True)
class BlockPosterior(Sampler):
    """Draws the token of each masked position of the open block from the posterior under absorbing noise.

    A block of S steps has the times 1 - j/(S - 1), j = 0 … S - 1, and a step removes noise for 1/S, as in the authors'
    code. Its last step is at time 0, where no noise is left: it draws every position that is still masked from p(x_0).
    A row whose block is filled earlier opens its next block at once.

    Attributes:
        steps_per_block: Steps S of a block. By default the `steps` of the run are shared evenly among the blocks of a
            row, and without `steps` a block has 32.
        keeps_prediction: Whether the network is told the time of the last step that changed the row's canvas.
        proposal: Limits of the likeliest tokens that are drawn from. It ranks nothing.
        schedule: Schedule of noise; `None` takes the model's.
    """

    steps_per_block: int | None = None
    keeps_prediction: bool = False
    proposal: Proposal = field(default_factory=Proposal)
    schedule: NoiseSchedule | None = None
    name = "block_posterior"
    reads_confidence = False
    may_change_nothing = True
    has_times_of_rows = True

    def __post_init__(self) -> None:
        if self.steps_per_block is not None and whole_number("steps_per_block", self.steps_per_block) < 1:
            raise ValueError(f"steps_per_block={self.steps_per_block}; it must be a whole number, at least 1, or None")

    def misfit(self, variant: Variant) -> str | None:
        return _misfit(variant)

    def settled(self, steps: int | None, variant: Variant) -> Sampler:
        unknown = steps is None and self.steps_per_block is None
        return replace(self, steps_per_block=STEPS) if unknown else self

    def n_steps(self, steps: int | None, blanks: PosMask) -> int:
        """Number of steps of the run, whose canvas is one block."""
        return self.n_steps_by_blocks(steps, blanks, torch.zeros_like(blanks, dtype=torch.long), blanks.shape[1])

    def n_steps_by_blocks(self, steps: int | None, blanks: PosMask, blocks: Int[Tensor, "batch pos"], size: int) -> int:
        """Number of steps of the run, as many as the row with most blocks takes at most.

        Raises:
            ValueError: `steps` are fewer than the blocks of a row, or contradict `steps_per_block`.
        """
        n_blocks = max(len(row[blank].unique()) for row, blank in zip(blocks, blanks, strict=True))
        most = None if self.steps_per_block is None else n_blocks * self.steps_per_block
        return steps_of_run(steps, most, self.steps_per_block, n_blocks)

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        return Plan.of_all(step.masked)

    def times_of_rows(self, step: StepState, noise: PositionNoise) -> Float[Tensor, "batch"]:
        block = _block(step)
        return 1 - self._share(step, block)

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


@dataclass(frozen=True)
class FirstHitting(Sampler):
    """Reveals one position of the open block in each step, at a sampled time; which one is chosen at random.

    From a time t at which m positions are masked, the first of them is revealed at the time t · u^(1/m), with u ~
    U(0, 1). A network that is told the time is told that one.

    Attributes:
        proposal: Limits of the likeliest tokens that are drawn from. It ranks nothing.
        schedule: Schedule of noise; `None` takes the model's.
    """

    proposal: Proposal = field(default_factory=Proposal)
    schedule: NoiseSchedule | None = None
    name = "first_hitting"
    reads_confidence = False
    has_times_of_rows = True

    def misfit(self, variant: Variant) -> str | None:
        return _misfit(variant)

    def n_steps(self, steps: int | None, blanks: PosMask) -> int:
        """Number of steps of the run, whose canvas is one block."""
        return self.n_steps_by_blocks(steps, blanks, torch.zeros_like(blanks, dtype=torch.long), blanks.shape[1])

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


def _misfit(variant: Variant) -> str | None:
    if variant.grows:
        return without_blocks(variant)
    if variant.block_context == "causal":
        return (
            "draws all positions of the open block together, and this model predicts a block's first token from the "
            "row before it: use 'block_confidence'"
        )
    return None


def _block(step: StepState) -> OpenBlock:
    """The open block; of a model without blocks, the whole canvas."""
    if step.block is not None:
        return step.block
    zeros = torch.zeros(len(step.tokens), dtype=torch.long, device=step.tokens.device)
    n_pos = step.tokens.shape[1]
    return OpenBlock(
        index=zeros,
        origin=zeros,
        start=zeros,
        stop=zeros + n_pos,
        step=zeros + step.index,
        order=zeros,
        n_blocks=zeros + 1,
        size=n_pos,
    )
