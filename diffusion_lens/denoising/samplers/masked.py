"""Samplers of models with absorbing noise that reveal masked positions anywhere on the canvas, and `LeftToRight`.

- `Confidence` reveals the positions of the highest confidence: SMDM's "greedy" (ML-GSAI/SMDM `diff_sample`,
  alg="greddy").
- `Ancestral` is the reverse process itself: each masked position is revealed with probability 1 - s/t, independently
  (Sahoo et al. 2024, arXiv 2406.07524; ML-GSAI/SMDM `diff_sample` and DreamLM/Dream `_sample`, alg="origin").
- `ReMDM` may mask a revealed token again (Wang et al. 2025, arXiv 2503.00307; kuleshov-group/remdm `diffusion.py`).
  With alpha(t) the share revealed at time t, a revealed position is masked again with probability sigma, and a masked
  one is revealed with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t), so that the share at time s is
  alpha_s. The probability sigma is at most sigma_max = min(1, (1 - alpha_s) / alpha_t).
- `Blocks` reveals block after block from left to right, and within a block equally many positions a step
  (semi-autoregressive; Nie et al. 2025, LLaDA, arXiv 2502.09992, ML-GSAI/LLaDA `generate.py`).
- `ConfidenceThreshold` reveals all positions of a block that are confident enough (Wu et al. 2025, Fast-dLLM, arXiv
  2505.22618; NVlabs/Fast-dLLM `llada/generate.py`).
- `LeftToRight` reveals the next token, as a causal model writes; on a masked diffusion model, the leftmost masked one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.denoising.sampler import Plan, PositionNoise, Proposal, Sampler, check_eps
from diffusion_lens.hooks.step import StepState
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.settings import at_least, checked_arguments, not_negative, one_of
from weight_conversion import Variant


@checked_arguments
@dataclass(frozen=True)
class Confidence(Sampler):
    """Reveals floor(masked · (1 - s/t)) positions a step; the last step reveals all that remain.

    Attributes:
        scope: Set of positions that are counted and ranked together. "row" takes each row by itself. "batch" takes the
            batch as one pool, as SMDM's code does. "mean" ranks each row by itself and reveals in each the number that
            an average row is due, as Dream's code does, so that a row with more masks than average keeps some.
        choice_temperature: 0 takes the positions of the highest confidence; above 0, positions are sampled without
            replacement, with probabilities softmax(confidence / choice_temperature).
        rounding: "down" rounds the number of each step down, as above. "up" rounds up the number that is revealed by
            the end of a step: of the positions to write, floor(all · (steps left) / steps) stay masked.
    """

    scope: str = "row"
    eps: float = 1e-5
    choice_temperature: float = 0.0
    proposal: Proposal = field(default_factory=Proposal)
    rounding: str = "down"
    name = "confidence"
    reads_confidence = False

    def __post_init__(self) -> None:
        one_of("row", "batch", "mean")("scope", self.scope)
        one_of("down", "up")("rounding", self.rounding)
        not_negative("choice_temperature", self.choice_temperature, "no sampling")
        check_eps(self.eps)

    def couples_rows(self, variant: Variant) -> bool:
        return self.scope != "row"

    def by_row(self, variant: Variant) -> Sampler:
        return replace(self, scope="row")

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        produced = (step.masked | ~confidence.isnan()) & ~step.given
        pooled = torch.stack([step.masked, produced]).sum(dim=2).float()
        if self.scope == "batch":
            pooled = pooled.sum(dim=1, keepdim=True)
        elif self.scope == "mean":
            pooled = pooled.mean(dim=1, keepdim=True).expand_as(pooled)
        n_masked, n_produced = pooled
        if self.rounding == "up":
            share_left = (step.n_steps - 1 - step.index) / step.n_steps
            counts = (n_masked - (n_produced * share_left).floor()).clamp(min=0)
        else:
            # 1 - s/t in float32, as in the authors' code.
            share = float(1 - torch.tensor(step.s) / torch.tensor(step.t)) if step.index < step.n_steps - 1 else 1.0
            counts = n_masked * share
        jitter = None
        if self.choice_temperature:
            # Gumbel noise: the largest of score + noise sample without replacement (Kool et al. 2019, 1903.06059).
            uniform = noise.by_position(step.index, step.masked).clamp(min=torch.finfo(torch.float64).tiny)
            jitter = torch.zeros(step.masked.shape, dtype=torch.float64, device=step.masked.device)
            jitter[step.masked] = -self.choice_temperature * torch.log(-torch.log(uniform))
        return Plan(step.masked, counts.to(torch.long), jitter=jitter)


@checked_arguments
@dataclass(frozen=True)
class Ancestral(Sampler):
    """Reveals positions at random; the last step reveals all that remain.

    Attributes:
        proposal: Rule by which tokens are proposed; its scores are not used, because nothing is ranked.
    """

    eps: float = 1e-5
    proposal: Proposal = field(default_factory=Proposal)
    name = "ancestral"
    reads_confidence = False

    def __post_init__(self) -> None:
        check_eps(self.eps)

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        positions = step.masked
        if step.index < step.n_steps - 1:
            positions, share = step.masked.clone(), float(1 - torch.tensor(step.s) / torch.tensor(step.t))
            positions[step.masked] = noise.by_position(step.index, step.masked) < share
        return Plan.of_all(positions)


ETA = {"cap": 0.008, "rescale": 0.015, "conf": 1.0, "loop": 0.02}  # the authors' settings for each strategy


@checked_arguments
@dataclass(frozen=True)
class ReMDM(Sampler):
    """Reveals and remasks positions at random; the last step reveals all that remain and remasks none.

    Attributes:
        strategy: Rule for sigma. "cap" takes min(eta, sigma_max). "rescale" takes eta · sigma_max. "conf" spreads
            eta · sigma_max over the revealed positions by softmax(-p), so that the tokens of the lowest probability
            return first. "loop" takes plain steps until `t_on`, then sigma = eta at a constant share `alpha_on`, and
            plain steps again after `t_off`.
        eta: Strength of remasking, from 0 to 1; by default the authors' value for the strategy.
        t_on: Time at which "loop" begins to remask.
        t_off: Time at which "loop" ends remasking.
        alpha_on: Share revealed while "loop" remasks.
    """

    strategy: str = "cap"
    eta: float | None = None
    t_on: float = 0.55
    t_off: float = 0.05
    alpha_on: float = 0.9
    name = "remdm"

    def __post_init__(self) -> None:
        one_of(*ETA)("strategy", self.strategy)
        if self.eta is not None and not 0 <= self.eta <= 1:
            raise ValueError(f"eta={self.eta}; it must be between 0 (never mask again) and 1")
        if not 0 < self.t_off < self.t_on < 1 or not 0 < self.alpha_on < 1:
            raise ValueError(
                f"t_off={self.t_off}, t_on={self.t_on}, alpha_on={self.alpha_on}; they must satisfy "
                "0 < t_off < t_on < 1 and 0 < alpha_on < 1"
            )

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        if step.index == step.n_steps - 1:
            return Plan.of_all(step.masked)
        alpha_t, alpha_s = self._alpha(step.t), self._alpha(step.s)
        revealed = ~confidence.isnan()
        sigma = self._sigma(step, alpha_t, alpha_s)
        share = torch.zeros_like(confidence)
        if self.strategy == "conf":
            spread = (-confidence).masked_fill(~revealed, float("-inf")).softmax(dim=1).nan_to_num()
            share = sigma * spread
            sigma = 0.0
        else:
            share += sigma
        reveal = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
        positions, remask = step.masked.clone(), revealed.clone()
        positions[step.masked] = noise.by_position(step.index, step.masked) < reveal
        remask[revealed] = noise.by_position(step.index, revealed) < share[revealed]
        return Plan.of_all(positions, remask)

    def _alpha(self, t: float) -> float:
        """The share revealed at time t."""
        if self.strategy != "loop":
            return 1 - t
        if t > self.t_on:
            return (1 - t) * self.alpha_on / (1 - self.t_on)
        return self.alpha_on if t > self.t_off else 1 - t * (1 - self.alpha_on) / self.t_off

    def _sigma(self, step: StepState, alpha_t: float, alpha_s: float) -> float:
        """The probability with which a revealed position returns to [MASK]; for "conf", their sum over positions."""
        eta = ETA[self.strategy] if self.eta is None else self.eta
        sigma_max = min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0
        if self.strategy == "loop":
            return min(eta, sigma_max) if self.t_off < step.s and step.t <= self.t_on else 0.0
        return min(eta, sigma_max) if self.strategy == "cap" else eta * sigma_max


@checked_arguments
@dataclass(frozen=True)
class LeftToRight(Sampler):
    """One position a step in every row that has one left; `steps=` has no effect."""

    name = "left_to_right"
    writes = "next"
    reads_confidence = False

    def n_steps(self, steps: int | None, blanks: PosMask) -> int:
        return int(blanks.sum(dim=1).max())

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        first = step.masked & (step.masked.cumsum(dim=1) == 1)
        return Plan.of_all(first)


@checked_arguments
@dataclass(frozen=True)
class Blocks(Sampler):
    """Divides the masks of a row, in reading order, into blocks of `block_length`, and the steps evenly among these.

    The steps left to the current block share the masks up to its end evenly; the first of them take the remainder. A
    block is therefore full when the next begins, also where a hook filled some of it.

    Attributes:
        block_length: Number of masked positions of a block; `None` makes one block.
        order: Order within a block: "confidence" reveals the positions of the highest confidence first, "random" any.
        masks_in_prompt: "counted" treats masks in the prompt like the other masks. "uncounted", as in LLaDA's code,
            divides only the last unbroken series of masks into blocks. Earlier masks compete with this series for the
            same number of reveals. As many positions as the prompt had masks therefore stay masked.
    """

    block_length: int | None = None
    order: str = "confidence"
    masks_in_prompt: str = "counted"
    proposal: Proposal = field(default_factory=Proposal)
    name = "blocks"
    reads_confidence = False

    def __post_init__(self) -> None:
        if self.block_length is not None:
            at_least(1, "block_length", self.block_length, or_none="for one block")
        one_of("confidence", "random")("order", self.order)
        one_of("counted", "uncounted")("masks_in_prompt", self.masks_in_prompt)

    def n_steps(self, steps: int | None, blanks: PosMask) -> int:
        """Number of steps of the run; by default one for each masked position of the row that has most.

        Raises:
            ValueError: The masked positions of a row are not whole blocks, or blocks cannot share the steps evenly.
        """
        lengths = self._in_blocks(blanks).sum(dim=1).tolist()
        steps = max(1, *lengths) if steps is None else steps
        if self.block_length is not None:
            _check(lengths, self.block_length, steps)
        return steps

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        # 1. Divide the masked positions of each row into blocks. Padding is neither masked nor revealed, so it is in no
        #    block.
        in_blocks = self._in_blocks((step.masked | ~confidence.isnan()) & ~step.given)
        lengths = in_blocks.sum(dim=1)
        size = lengths.clamp(min=1) if self.block_length is None else torch.full_like(lengths, self.block_length)
        n_blocks = _rounded_up(lengths, size).clamp(min=1)

        # 2. Find the block of this step, and the steps from `begin` to `end` that are its own. Rounding up makes a
        #    replay end in the last block also where its blocks cannot share its steps evenly.
        current = _rounded_up((step.index + 1) * n_blocks, step.n_steps) - 1
        begin, end = current * step.n_steps // n_blocks, (current + 1) * step.n_steps // n_blocks

        # 3. Consider all masks up to the end of that block.
        block_of = (in_blocks.cumsum(dim=1) - 1).clamp(min=0) // size[:, None]
        positions = step.masked & (block_of <= current[:, None])
        n_masked = positions.sum(dim=1)

        # 4. Reveal this step's share of them; uncounted masks of the prompt do not enlarge it.
        if self.masks_in_prompt == "counted":
            counts = _rounded_up(n_masked, end - step.index)
        else:
            length = (in_blocks & (block_of == current[:, None])).sum(dim=1)
            counts = length // (end - begin) + (step.index - begin < length % (end - begin)).long()
            counts = counts.minimum(n_masked)
        if self.order == "random":
            positions = _sampled(positions, counts, noise.by_position(step.index, positions))
        return Plan(positions, counts)

    def _in_blocks(self, blanks: PosMask) -> PosMask:
        """Bool[batch pos], the masked positions that are divided into blocks."""
        if self.masks_in_prompt == "counted":
            return blanks
        # Masks without another token between them share a number; the last series has the highest.
        series = (~blanks).cumsum(dim=1)
        return blanks & (series == series.masked_fill(~blanks, -1).amax(dim=1, keepdim=True))


CACHES = ("prefix", "dual")


@checked_arguments
@dataclass(frozen=True)
class ConfidenceThreshold(Sampler):
    """Reveals in each step all positions of the open block that are confident enough, and at least the most confident.

    The masks of a row are divided into blocks as by `Blocks`, and a row opens its next block in the step after the one
    that filled the last. There are as many steps as masks; those after the text is filled take no forward pass.

    Attributes:
        confidence: Confidence above which a position is revealed; `None` with `factor`.
        factor: Instead, the n most confident positions are revealed, for the largest n such that each k-th of them has
            a confidence of at least 1 - factor / (k + 1); the last position of a block with all others.
        block_length: Number of masked positions of a block, fewer in the last; `None` makes one block.
        approximate_cache: Keys and values that are held from the first step of a block while it is written: those of
            the positions before the block ("prefix"), those of all outside it ("dual"), or none. They are those of an
            earlier canvas, so that probabilities differ from those without a cache. Hooks see all positions; what they
            change at a held one is read by no other.
        first_alone: Whether the first step of a block reveals its first position, and no other. By default it does with
            an approximate cache, if a token is read in the row before it, which later steps do not compute.
    """

    confidence: float | None = 0.9
    factor: float | None = None
    block_length: int | None = None
    approximate_cache: str | None = None
    first_alone: bool | None = None
    name = "confidence_threshold"
    reads_confidence = False

    def __post_init__(self) -> None:
        if (self.confidence is None) == (self.factor is None):
            raise ValueError(f"confidence={self.confidence} and factor={self.factor}: give one of them")
        for name in ("confidence", "factor"):
            if (value := getattr(self, name)) is not None:
                not_negative(name, value)
        if self.block_length is not None:
            at_least(1, "block_length", self.block_length, or_none="for one block")
        if self.approximate_cache is not None:
            one_of(*CACHES)("approximate_cache", self.approximate_cache)

    def adapted(self, variant: Variant) -> Sampler:
        if self.first_alone is not None:
            return self
        return replace(self, first_alone=self.approximate_cache is not None and variant.readout == "shifted")

    def n_steps(self, steps: int | None, blanks: PosMask) -> int:
        """By default one step for each masked position, of the row with most of them.

        Raises:
            ValueError: `steps` are fewer.
        """
        most = int(blanks.sum(dim=1).max())
        if steps is not None and steps < most:
            raise ValueError(
                f"steps={steps}, but a step reveals as many positions as are confident enough, which may be one alone: "
                f"give {most} or more, or leave steps out. Steps after the text is filled take no forward pass"
            )
        return steps or most

    def open_block(self, writable: PosMask, masked: PosMask) -> PosMask:
        size = writable.shape[1] if self.block_length is None else self.block_length
        blocks = (writable.cumsum(dim=1) - 1).clamp(min=0) // size
        first = blocks.masked_fill(~masked, writable.shape[1]).amin(dim=1, keepdim=True)
        return writable & (blocks == first)

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        block = self.open_block((step.masked | ~confidence.isnan()) & ~step.given, step.masked)
        positions = step.masked & block
        if self.first_alone:
            opens = (positions == block).all(dim=1, keepdim=True)
            positions = positions & ~(opens & (positions.cumsum(dim=1) > 1))
        counts = positions.sum(dim=1).clamp(max=1)
        return Plan(positions, counts, threshold=self.confidence, factor=self.factor)


def _rounded_up(n: Int[Tensor, "batch"], parts: int | Int[Tensor, "batch"]) -> Int[Tensor, "batch"]:
    """n / parts, rounded up."""
    return -(n // -parts)


def _sampled(positions: PosMask, counts: Int[Tensor, "batch"], uniform: Float[Tensor, "selected"]) -> PosMask:
    """The `counts` positions of each row whose random number is largest."""
    numbers = torch.full(positions.shape, -1.0, dtype=uniform.dtype, device=positions.device)
    numbers[positions] = uniform
    rank = numbers.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return positions & (rank < counts[:, None])


def _check(lengths: Sequence[int], block_length: int, steps: int) -> None:
    """Raise a `ValueError` unless every row is whole blocks, and these share the steps evenly."""
    for row, length in enumerate(lengths):
        if length % block_length:
            fits = ", ".join(str(n) for n in range(1, length + 1) if length % n == 0)
            raise ValueError(
                f"block_length={block_length} does not divide the {length} masked positions of row {row}: use blocks "
                f"of {fits}, or {_multiples(length, block_length)} masked positions"
            )
    shared = math.lcm(*(max(length // block_length, 1) for length in lengths))
    if steps % shared:
        raise ValueError(
            f"steps={steps} cannot be divided evenly among {shared} blocks of block_length={block_length}: use "
            f"{_multiples(steps, shared)} steps"
        )


def _multiples(n: int, of: int) -> str:
    """The multiples of a number next to n, in words."""
    below = n // of * of
    return f"{below} or {below + of}" if below else f"{of}"
