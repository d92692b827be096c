"""The canvas: what is given, what is blank, what is padding.

On a masked diffusion model a blank place holds [MASK]; on a causal model it holds -1, "not reached yet".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

from diffusion_lens.config import UNREACHED
from diffusion_lens.model.inputs import check_attention_mask, check_length, check_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import whole_number
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.user_warnings import warn_user

Prompt = str | Sequence[str] | Tensor


@dataclass(frozen=True)
class Canvas:
    """Where a run starts.

    Attributes:
        tokens: Int[batch pos], the prompt and the blanks.
        given: Bool[batch pos], places that came with the prompt.
        real: Bool[batch pos], false at padding; `None` when there is none.
        blank: the id that blank places hold.
    """

    tokens: Tokens
    given: PosMask
    real: PosMask | None
    blank: int

    @property
    def grows(self) -> bool:
        """Whether blanks are positions that the text has not reached, which nothing sees, instead of [MASK]s."""
        return self.blank == UNREACHED

    @property
    def positions(self) -> Tokens:
        """Int[batch pos], the number of each place among the real ones of its row."""
        real = torch.ones_like(self.tokens) if self.real is None else self.real.long()
        return (real.cumsum(dim=1) - 1).clamp(min=0)

    def blanks(self, tokens: Tokens) -> PosMask:
        """The places still to be filled on a later state of this canvas."""
        blank = tokens == self.blank
        return blank if self.real is None else blank & self.real


def lay_out(
    model: DiffusionTransformer,
    prompt: Prompt,
    length: SupportsIndex | None = None,
    max_new_tokens: SupportsIndex | None = None,
    attention_mask: Tensor | None = None,
    prepend_bos: bool | None = None,
) -> Canvas:
    """The starting canvas of a prompt: the prompt followed by blanks; [MASK]s inside the prompt are blanks too.

    Args:
        length: places in all, the prompt's included (SMDM's meaning). Texts of different lengths each get what is left.
            Without it, and without [MASK]s in the prompt, the length that the model was trained on, if it is known.
        max_new_tokens: blanks after the prompt, instead of `length`.
        attention_mask: [batch pos] over token prompts, 0 at padding; by default `model.checked_real_positions(prompt)`.

    Raises:
        ValueError: too short, too long for the context, both or neither of the lengths, nothing to fill,
            token rows of which nobody can say what is padding.

    Warns:
        UserWarning: a canvas longer than the texts that the model was trained on.
    """
    if isinstance(prompt, Tensor):
        tokens = check_tokens(prompt, model.cfg)
        real = model.checked_real_positions(tokens) if attention_mask is None else None
        if attention_mask is not None:
            real = check_attention_mask(attention_mask, tokens.shape[0], tokens.shape[1], tokens.device)
        if real is not None and model.cfg.is_causal and bool((real.long().diff(dim=1) < 0).any()):
            raise ValueError("a causal model continues from the place before: pad its prompts on the left")
        ends = torch.full((tokens.shape[0],), tokens.shape[1])
    else:
        if attention_mask is not None:
            raise ValueError("attention_mask belongs to token prompts; texts are padded by themselves")
        tokens, padded = model.tokenize(prompt, prepend_bos)
        real = None
        ends = padded.sum(dim=1).cpu()
    blank = model.cfg.blank
    if length is None and max_new_tokens is None and not bool((tokens == blank).any()):
        length = _trained_length(model, int(ends.max()))
    totals = _totals(
        model,
        tokens,
        ends,
        None if length is None else whole_number("length", length),
        None if max_new_tokens is None else whole_number("max_new_tokens", max_new_tokens),
    )
    _warn_beyond_training(model, int(totals.max()))
    canvas = torch.full((tokens.shape[0], int(totals.max())), blank, dtype=torch.long, device=tokens.device)
    inside = torch.ones_like(canvas, dtype=torch.bool)
    for row, (end, total) in enumerate(zip(ends.tolist(), totals.tolist(), strict=True)):
        canvas[row, :end] = tokens[row, :end]
        canvas[row, total:] = model.pad_id
        inside[row, total:] = False
    if real is not None:
        inside[:, : tokens.shape[1]] &= real
    given = inside & (canvas != blank)
    if bare := (~given.any(dim=1)).nonzero().flatten().tolist():
        raise ValueError(
            f"the prompt of row {bare[0]} is all [MASK]: give at least one token to start from, such as BOS"
        )
    if not bool((inside & (canvas == blank)).any()):
        raise ValueError("there is nothing to fill: give length= (places in all) or max_new_tokens=, or put [MASK]s in")
    return Canvas(canvas, given, None if bool(inside.all()) else inside, blank)


def _trained_length(model: DiffusionTransformer, longest: int) -> int | None:
    """The length to take where none was asked for, which has to leave the longest prompt room to go on."""
    trained = model.cfg.trained_length
    if trained is not None and longest >= trained:
        raise ValueError(
            f"the prompt has {longest} tokens, and {model.cfg.model_name!r} was trained on texts of {trained}, so the "
            "length has no default: give length= (places in all) or max_new_tokens= (blanks after the prompt)"
        )
    return trained


def _warn_beyond_training(model: DiffusionTransformer, longest: int) -> None:
    trained = model.cfg.trained_length
    if trained is not None and longest > trained:
        warn_user(
            f"the canvas has {longest} places, and {model.cfg.model_name!r} was trained on texts of {trained}: what it "
            f"writes beyond them is likely to be wrong. length={trained} is what it knows"
        )


def _totals(
    model: DiffusionTransformer, tokens: Tensor, ends: Tensor, length: int | None, max_new_tokens: int | None
) -> Tensor:
    """Places of each row."""
    if length is not None and max_new_tokens is not None:
        raise ValueError("give length= (places in all) or max_new_tokens= (blanks after the prompt), not both")
    if max_new_tokens is not None:
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative")
        totals = ends + max_new_tokens
    elif length is not None:
        if length < int(ends.max()):
            raise ValueError(
                f"length={length} counts the prompt too, and the prompt alone has {int(ends.max())} tokens"
            )
        totals = torch.full_like(ends, length)
    else:
        totals = ends
    check_length(int(totals.max()), model.cfg)
    return totals
