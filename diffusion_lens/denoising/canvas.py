"""The canvas: the token sequence that a run fills, with its given positions, its blanks, its padding and its blocks.

A blank is a position to be written. It contains [MASK], or -1, "not reached yet", on a model whose text grows at its
end and in blocks that are not open yet. Under uniform noise a run starts from random tokens at the positions to write,
which stay open to the end.

A model that writes block after block opens its blocks from left to right. A position whose block has not been opened
contains -1, `UNREACHED`: no position sees it. Opening a block puts the blank of the model there: [MASK], or for a
causal model -1 again, because its network reads nothing at a position still to be written. A causal model is the case
of blocks of one position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, SupportsIndex

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.denoising.sampler import PositionNoise
from diffusion_lens.hooks.step import OpenBlock
from diffusion_lens.model.config import UNREACHED, reached
from diffusion_lens.model.inputs import check_attention_mask, check_length, check_readable, check_tokens
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.text import tokenize
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import at_least, warn_user, whole_number
from weight_conversion import Context, Variant

Prompt = Annotated[
    str | Sequence[str] | Tensor,
    "a string or a list of them, or a tensor of tokens: torch.tensor(ids), of a tokenizer's result its ids, "
    "...['input_ids']",
]
_NO_BLOCK = 2**31 - 1  # higher than the number of any block
_START = -1  # the random numbers of the first canvas have the key of the step before the first


@dataclass(frozen=True)
class Reach:
    """Where the blocks of a canvas begin.

    Attributes:
        size: Number of positions in a block.
        context: "blocks" counts blocks from the first token of the text, so that a prompt may end inside one. "causal"
            counts them from the end of the prompt, in both directions; what comes before the open one is causal.
            "prompt" makes the prompt the first block, whatever its length, and counts the others from its end.
        first_shifted: Whether the first token of a block, and no other, is read in the row before it.
        first_alone: Whether the first token of a block is read in a finished row: it is written before the others.
    """

    size: int
    context: Context
    first_shifted: bool = False
    first_alone: bool = False

    def blocks(self, positions: Tokens, given: PosMask) -> Int[Tensor, "batch pos"]:
        """The number of the block of each position, from 0.

        Args:
            positions: Int[batch pos], the number of each position among the real ones of its row.
            given: Bool[batch pos], positions of the prompt.
        """
        if self.context == "blocks":
            return positions // self.size
        # The first position of each row that is not given. Padding on the left has the number of the first token, which
        # belongs to the prompt.
        end = positions.masked_fill(given | (positions == 0), positions.shape[1]).amin(dim=1, keepdim=True)
        after = (positions - end).div(self.size, rounding_mode="floor")
        return (
            after.clamp(min=-1) + 1
            if self.context == "prompt"
            else after - (-end).div(self.size, rounding_mode="floor")
        )

    def in_blocks(self, blocks: Int[Tensor, "batch pos"], opened: Int[Tensor, "batch"]) -> PosMask:
        """The positions that are read in blocks, while each row writes its block `opened`; before them is context."""
        if self.context == "blocks":
            return torch.ones_like(blocks, dtype=torch.bool)
        return blocks > 0 if self.context == "prompt" else blocks >= opened[:, None]


def reach_of(variant: Variant) -> Reach | None:
    """Where the blocks of a model begin; `None` where the whole canvas is open from the first step on."""
    if not variant.opens_blocks:
        return None
    assert variant.block_size is not None
    shifted = variant.block_context == "causal" and variant.has_mask
    alone = shifted or (variant.readout == "shifted" and variant.block_size > 1)
    return Reach(variant.block_size, variant.block_context, first_shifted=shifted, first_alone=alone)


@dataclass(frozen=True)
class Canvas:
    """The canvas from which a run starts.

    Attributes:
        tokens: Int[batch pos], the prompt and the blanks.
        given: Bool[batch pos], positions that came with the prompt.
        real: Bool[batch pos], false at padding; `None` where there is no padding.
        blank: Id that blanks contain where the canvas is open. Under uniform noise they contain -1 before the run
            starts, and tokens in it.
        reach: Where its blocks begin; `None` if the whole canvas is open from the first step on.
        uniform_noise: Whether the noise is uniform, so that every position that was not given may be written in every
            step.
    """

    tokens: Tokens
    given: PosMask
    real: PosMask | None
    blank: int
    reach: Reach | None = None
    uniform_noise: bool = False

    @property
    def positions(self) -> Tokens:
        """Int[batch pos], the number of each position among the real ones of its row."""
        real = torch.ones_like(self.tokens) if self.real is None else self.real.long()
        return (real.cumsum(dim=1) - 1).clamp(min=0)

    def blanks(self, tokens: Tokens) -> PosMask:
        """Bool[batch pos], the positions still to be written on a later state of this canvas."""
        return self._inside(~self.given if self.uniform_noise else (tokens == self.blank) | ~reached(tokens))

    def masked(self, tokens: Tokens) -> PosMask:
        """Bool[batch pos], those of them that are open."""
        if not self.uniform_noise:
            return self._inside(tokens == self.blank)
        open_ = self._inside(~self.given)
        return open_ if self.blocks is None else open_ & (self.blocks == self._first_unfilled(tokens)[:, None])

    @cached_property
    def blocks(self) -> Int[Tensor, "batch pos"] | None:
        """The number of the block of each position; `None` if the canvas has no blocks."""
        return None if self.reach is None else self.reach.blocks(self.positions, self.given)

    def opened(self, tokens: Tokens) -> Tokens:
        """A state of this canvas in which each row has opened the first block that is not filled yet."""
        if self.blocks is None:
            return tokens
        first = self.blocks == self._first_unfilled(tokens)[:, None]
        return tokens.masked_fill(first & self._inside(~reached(tokens)), self.blank)

    def open_block(
        self, tokens: Tokens, revealed_at: Int[Tensor, "batch pos"], step: int, n_steps: int
    ) -> OpenBlock | None:
        """The block that each row writes in a step, from the canvas before it; of a filled row, the last one.

        Under uniform noise, where no token shows when a block was opened, each block has as many of the `n_steps`.
        """
        if self.reach is None or self.blocks is None:
            return None
        # 1. Each row's first block with something to write; of a filled row, its last block.
        inside = self._inside(torch.ones_like(self.given))
        first = self._first_unfilled(tokens)
        index = torch.where(first < _NO_BLOCK, first, self.blocks.masked_fill(~inside, -1).amax(dim=1))
        own, before = inside & (self.blocks == index[:, None]), self.blocks < index[:, None]
        places = torch.arange(own.shape[1], device=own.device).expand_as(own)

        # 2. The blocks in which the run writes, which are not those that the prompt fills.
        to_write = torch.where(inside & ~self.given, self.blocks, self.blocks.max() + 1)
        written = torch.zeros(len(own), int(to_write.max()) + 1, dtype=torch.bool, device=own.device)
        written = written.scatter_(1, to_write, True)[:, : int(self.blocks.max()) + 1]
        numbers = torch.arange(written.shape[1], device=own.device)
        in_blocks = inside & self.reach.in_blocks(self.blocks, index)
        order, n_blocks = (written & (numbers < index[:, None])).sum(dim=1), written.sum(dim=1)
        begun = step - 1 - revealed_at.masked_fill(~before, -1).amax(dim=1).clamp(max=step - 1)
        if self.uniform_noise:
            begun = step - order * (n_steps // n_blocks.max())
        return OpenBlock(
            index=index,
            origin=places.masked_fill(~in_blocks, own.shape[1]).amin(dim=1),
            start=places.masked_fill(~own, own.shape[1]).amin(dim=1),
            stop=places.masked_fill(~own, -1).amax(dim=1) + 1,
            step=begun,
            order=order,
            n_blocks=n_blocks,
            size=self.reach.size,
            first_shifted=self.reach.first_shifted,
            first_alone=self.reach.first_alone,
        )

    def extent(self, rows: tuple[Int[Tensor, "selected"], Int[Tensor, "selected"]]) -> int:
        """Number of positions after which nothing changes these rows of logits."""
        if self.blocks is None or not len(rows[0]):
            return self.tokens.shape[1]
        furthest = torch.full_like(self.blocks[:, 0], -1).scatter_reduce(0, rows[0], self.blocks[rows], "amax")
        return int((self.blocks <= furthest[:, None]).any(dim=0).nonzero().max()) + 1

    def n_filled(self, tokens: Tokens) -> int:
        """Number of leading positions in blocks that are filled in every row, so that their states do not change."""
        if self.blocks is None:
            return 0
        rest = (self.blocks >= self._first_unfilled(tokens)[:, None]).any(dim=0).nonzero()
        return int(rest.min()) if len(rest) else tokens.shape[1]

    def _first_unfilled(self, tokens: Tokens) -> Int[Tensor, "batch"]:
        """The first block of each row with something to write; `_NO_BLOCK` of a filled row.

        Under uniform noise it is the last one that was opened.
        """
        assert self.blocks is not None
        if self.uniform_noise:
            return self.blocks.masked_fill(~self._inside(reached(tokens)), -1).amax(dim=1)
        return self.blocks.masked_fill(~self.blanks(tokens), _NO_BLOCK).amin(dim=1)

    def _inside(self, positions: PosMask) -> PosMask:
        return positions if self.real is None else positions & self.real

    def with_noise(self, tokens: Tokens, noise: PositionNoise, step: int, n_tokens: int) -> Tokens:
        """A state of this canvas under uniform noise, with a random one of `n_tokens` at each position that is not
        reached, of a canvas with blocks in the next block of each row."""
        where = self.blanks(tokens) & ~reached(tokens)
        if self.blocks is not None:
            where &= self.blocks == self.blocks.masked_fill(~where, _NO_BLOCK).amin(dim=1, keepdim=True)
        tokens = tokens.clone()
        tokens[where] = noise.tokens(step, where, n_tokens)
        return tokens

    def started(self, noise: PositionNoise, n_tokens: int) -> "Canvas":
        """This canvas as a run under uniform noise begins."""
        return replace(self, tokens=self.with_noise(self.tokens, noise, _START, n_tokens))


def lay_out(
    model: DiffusionTransformer,
    prompt: Prompt,
    length: SupportsIndex | None = None,
    max_new_tokens: SupportsIndex | None = None,
    attention_mask: Tensor | None = None,
    prepend_bos: bool | None = None,
) -> Canvas:
    """The starting canvas of a prompt: the prompt followed by blanks; [MASK]s inside the prompt are blanks too.

    The arguments are those of `HookedDiffusionTransformer.denoise`. Texts of different lengths are each filled up to
    `length`. The padding of tokens is by default `model.padding.certainly_real(prompt)`.

    Raises:
        ValueError: A length that is too short or too long for the context, both lengths, nothing to fill, or token rows
            whose padding cannot be told from text.

    Warns:
        UserWarning: A canvas longer than the texts that the model was trained on.
    """
    # 1. Tokens of the prompt, and where each row of it ends.
    cfg, real = model.cfg, None
    if isinstance(prompt, Tensor):
        tokens = check_tokens(prompt, cfg)
        if attention_mask is None:
            real = model.padding.certainly_real(tokens)
        else:
            real = check_attention_mask(attention_mask, tokens.shape[0], tokens.shape[1], tokens.device)
        if real is not None and cfg.is_autoregressive and bool((real.long().diff(dim=1) < 0).any()):
            raise ValueError("a causal model continues from the last position: pad its prompts on the left")
        ends = torch.full((tokens.shape[0],), tokens.shape[1])
    else:
        if attention_mask is not None:
            raise ValueError(
                "attention_mask is for token prompts only; leave it out, because the padding of texts is known"
            )
        tokens, padded = tokenize(model, prompt, prepend_bos, "right")
        ends = padded.sum(dim=1).cpu()

    # 2. Number of positions of each row.
    blank, trained, longest = UNREACHED if cfg.uniform_noise else cfg.blank, cfg.trained_length, int(ends.max())
    written = "new tokens" if cfg.mask_token_id is None else "masked positions"
    lengths = f"length= (positions in all) or max_new_tokens= ({written} after the prompt)"
    if length is None and max_new_tokens is None and not bool((tokens == blank).any()):
        if trained is not None and longest >= trained:
            raise ValueError(
                f"the prompt has {longest} tokens, and {cfg.model_name!r} was trained on texts of {trained}, so the "
                f"length has no default: give {lengths}"
            )
        length = trained
    totals = ends
    if length is not None:
        if max_new_tokens is not None:
            raise ValueError(f"give {lengths}, not both")
        if (length := whole_number("length", length)) < longest:
            raise ValueError(f"length={length} counts the prompt too, and the prompt alone has {longest} tokens")
        totals = torch.full_like(ends, length)
    elif max_new_tokens is not None:
        totals = ends + at_least(0, "max_new_tokens", max_new_tokens)
    n_pos = int(totals.max())
    check_length(n_pos, cfg)
    if trained is not None and n_pos > trained:
        warn_user(
            f"the canvas has {n_pos} positions, and {cfg.model_name!r} was trained on texts of {trained}: what it "
            f"writes beyond them is likely to be wrong. It was trained with length={trained}"
        )

    # 3. The prompt, then blanks up to the row's length, then padding.
    canvas = torch.full((tokens.shape[0], n_pos), blank, dtype=torch.long, device=tokens.device)
    inside = torch.ones_like(canvas, dtype=torch.bool)
    for row, (end, total) in enumerate(zip(ends.tolist(), totals.tolist(), strict=True)):
        canvas[row, :end] = tokens[row, :end]
        if total < n_pos:
            canvas[row, total:] = model.padding.id
            inside[row, total:] = False
    if real is not None:
        inside[:, : tokens.shape[1]] &= real

    # 4. Every row needs something to start from, and the batch something to write.
    given = inside & (canvas != blank)
    if cfg.unread_tokens:
        check_readable(canvas[given], cfg)
    if empty := (~given.any(dim=1)).nonzero().flatten().tolist():
        raise ValueError(
            f"the prompt of row {empty[0]} is all [MASK]: give at least one token to start from, such as BOS"
        )
    if not bool((inside & (canvas == blank)).any()):
        masks = ", or put [MASK]s in the prompt" if cfg.has_mask else ""
        raise ValueError(f"there is nothing to fill: give {lengths}{masks}")

    # 5. Only the first block is open.
    real = None if bool(inside.all()) else inside
    whole = Canvas(canvas, given, real, blank, reach_of(cfg), cfg.uniform_noise)
    if whole.reach is None:
        return whole
    return replace(whole, tokens=whole.opened(canvas.masked_fill(whole.blanks(canvas), UNREACHED)))
