"""Padding of token batches: which positions of a row are text."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model.inputs import check_attention_mask, check_tokens
from diffusion_lens.shapes import PosMask, Tokens


class Padding(ABC):
    """The methods of a model that tell padding from text: by the mask of a call, or by a token that only pads."""

    cfg: DiffusionConfig
    tokenizer: Any

    @abstractmethod
    def to_single_str_token(self, int_token: int) -> str:
        """The text of one id."""

    @property
    def pad_id(self) -> int:
        """The id at padding positions: the tokenizer's padding token, else its end token, else 0."""
        for candidate in (getattr(self.tokenizer, "pad_token_id", None), getattr(self.tokenizer, "eos_token_id", None)):
            if candidate is not None:
                return int(candidate)
        return 0

    @property
    def own_pad_id(self) -> int | None:
        """The id of a token that is used for padding only, so that tokens alone show the padding; otherwise `None`.

        The token's name must contain "pad", and it must not be another special token: if texts end with the token that
        pads them, the model may have written it.
        """
        tokenizer = self.tokenizer
        name = None if tokenizer is None else tokenizer.pad_token
        if name is None or "pad" not in name.lower():
            return None
        others = [tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token, tokenizer.mask_token]
        id_ = int(tokenizer.pad_token_id)
        return None if name in others or id_ == self.cfg.mask_token_id else id_

    def real_positions(self, tokens: Tokens) -> PosMask | None:
        """Bool[batch pos], true from the first to the last token of each row that is not `own_pad_id`.

        `None` if there is no padding, or if the tokens alone do not show it.

        Raises:
            ValueError: A row has padding only.
        """
        pad = self.own_pad_id
        if pad is None:
            return None
        text = tokens != pad
        if bool(text.all()):
            return None
        if not bool(text.any(dim=1).all()):
            row, padding = int((~text.any(dim=1)).nonzero()[0]), self.to_single_str_token(pad)
            raise ValueError(
                f"row {row} of the tokens is all padding ({padding!r}), but the model needs at least one token"
            )
        return (text.cumsum(dim=1) > 0) & (text.flip(1).cumsum(dim=1).flip(1) > 0)

    def without_padding(self, row: Int[Tensor, "pos"]) -> Int[Tensor, "selected"]:
        """One row of tokens without the padding around them, if the tokens show it (`real_positions`)."""
        real = self.real_positions(row[None]) if len(row) else None
        return row if real is None else row[real[0]]

    def checked_real_positions(self, tokens: Tokens) -> PosMask | None:
        """`real_positions`, but an error if padding is possible and the tokens alone do not show it.

        Losses and continuations use it, because padding that is read as text would change their numbers.

        Raises:
            ValueError: The tokenizer has no token that is used for padding only, and some rows, but not all, begin or
                end with the token that pads shorter rows.
        """
        if self.own_pad_id is not None or self.tokenizer is None or self.pad_id == self.cfg.mask_token_id:
            return self.real_positions(tokens)
        filler = tokens == self.pad_id
        if self.pad_id == self.tokenizer.bos_token_id and bool(filler[:, 0].all()):
            filler = filler[:, 1:]
        for edge, column in (("begins", slice(1)), ("ends", slice(-1, None))):
            at_edge = filler[:, column].any(dim=1)
            if bool(at_edge.any()) and not bool(at_edge.all()):
                row, other = int(at_edge.long().argmax()), int((~at_edge).long().argmax())
                side = " (with padding_side='left' before a continuation)" * self.cfg.grows
                padding = self.to_single_str_token(self.pad_id)
                raise ValueError(
                    f"row {row} of the tokens {edge} with {padding!r} and row {other} does not, and the tokenizer "
                    "has no padding token that is not also text: the tokens alone do not show what is padding. Take "
                    f"tokens, mask = model.tokenize(texts){side} and pass attention_mask=mask with the "
                    "tokens, or pass the texts themselves; if every token here is text, pass "
                    "attention_mask=torch.ones_like(tokens)"
                )
        return None

    def checked_tokens(self, tokens: Tensor, attention_mask: Tensor | None = None) -> tuple[Tokens, PosMask | None]:
        """Tokens on the model's device, and which of them are real, by the mask or else by `checked_real_positions`.

        Raises:
            ValueError: Tokens or a mask that do not fit the model, or without a mask, padding that could be text.
        """
        tokens = check_tokens(tokens, self.cfg)
        if attention_mask is None:
            return tokens, self.checked_real_positions(tokens)
        return tokens, check_attention_mask(attention_mask, tokens.shape[0], tokens.shape[1], tokens.device)

    def all_real(self, tokens: Tokens) -> Tensor | None:
        """An `attention_mask` for tokens without padding; `None` if no token would be read as padding anyway."""
        return None if self.own_pad_id is None else torch.ones_like(tokens)
