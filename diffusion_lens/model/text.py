"""Text in, text out, under TransformerLens's names."""

from abc import ABC
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from tokenizers import AddedToken
from torch import Tensor

from diffusion_lens.config import UNREACHED, DiffusionConfig
from diffusion_lens.settings import yes_or_no
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.user_warnings import warn_user

MASK_TEXT = "[MASK]"


class TextInterface(ABC):
    """The tokenizer's side of a model; `tokenizer` is a fast Hugging Face tokenizer, or `None`."""

    cfg: DiffusionConfig
    tokenizer: Any

    def set_tokenizer(self, tokenizer: Any, default_prepend_bos: bool | None = None) -> None:
        """Use `tokenizer`; [MASK] becomes a word of it where its id is the tokenizer's next free one."""
        mask = self.cfg.mask_token_id
        if mask is not None and tokenizer is not None and mask == len(tokenizer):
            # Where each piece of text gets a space in front (Llama), spaces around [MASK] would become tokens.
            prefixes = len(tokenizer.tokenize(" a")) > len(tokenizer.tokenize("a"))
            mask_token = AddedToken(MASK_TEXT, lstrip=True, rstrip=prefixes, special=True)
            tokenizer.add_special_tokens({"mask_token": mask_token})
        self.tokenizer = tokenizer
        if default_prepend_bos is not None:
            self.cfg.default_prepend_bos = yes_or_no("default_prepend_bos", default_prepend_bos)

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str = "right",
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Tokens:
        """Token ids, Int[batch pos], of texts that fill the same number of places, or whose padding can be told.

        Shorter rows are padded where the network can read the padding off the tokens again (`own_pad_id`), and on the
        right of a causal model, whose real rows padding on their right cannot reach (its loss and its continuations
        still need the mask). `tokenize` gives the mask too, and pads whatever the model.

        Raises:
            ValueError: texts of different lengths on another model: their padding would be read as text.
        """
        tokens, real = self.tokenize(input, prepend_bos, padding_side)
        if self.own_pad_id is None and not bool(real.all()):
            unseen = self.cfg.is_causal and padding_side == "right"
            if not unseen:
                raise ValueError(
                    f"the texts have {sorted(set(real.sum(dim=1).tolist()))} tokens, and the tokenizer has no padding "
                    "token that is not also text: alone, the tokens would not say what is padding. Take "
                    "tokens, mask = model.tokenize(texts) and pass attention_mask=mask with the tokens, or pass the "
                    "texts themselves to the model"
                )
        if truncate:
            tokens = tokens[:, : self.cfg.n_ctx]
        return tokens if move_to_device else tokens.cpu()

    def tokenize(
        self, input: str | Sequence[str], prepend_bos: bool | None = None, padding_side: str = "right"
    ) -> tuple[Tokens, PosMask]:
        """Token ids and which of them are real, not padding: what `attention_mask` takes.

        Words that the tokenizer does not know, and makes its unknown token of, are named in a `UserWarning`.
        """
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side={padding_side!r}; it is 'left' or 'right'")
        several = isinstance(input, Iterable) and not isinstance(input, str | bytes)
        texts: list[Any] = list(input) if several else [input]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"text is a string or a list of them, not {input!r}; token ids go in as torch.tensor(ids)")
        if not texts:
            raise ValueError("there is no text to tokenize: the list is empty")
        rows = [self.encode(text, prepend_bos) for text in texts]
        if empty := [row for row, ids in enumerate(rows) if not ids]:
            raise ValueError(
                f"the text of row {empty[0]} is empty and no BOS is prepended: there is no token to run on"
            )
        if unknown := [word for text in texts for word in self.unknown_words(text)]:
            warn_user(self._unknown(unknown))
        length = max(len(row) for row in rows)
        tokens = torch.full((len(rows), length), self.pad_id, dtype=torch.long)
        real = torch.zeros(len(rows), length, dtype=torch.bool)
        for i, row in enumerate(rows):
            filled = slice(len(row)) if padding_side == "right" else slice(length - len(row), None)
            tokens[i, filled] = torch.tensor(row, dtype=torch.long)
            real[i, filled] = True
        return tokens.to(self.cfg.device), real.to(self.cfg.device)

    def encode(self, text: str, prepend_bos: bool | None = None) -> list[int]:
        """The ids of one text, without a word on those that the tokenizer does not know (`unknown_words`)."""
        tokenizer = self._require_tokenizer()
        _check_whole(text)
        ids: list[int] = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return [tokenizer.bos_token_id, *ids] if self._prepends_bos(prepend_bos) else ids

    def unknown_words(self, text: str) -> list[str]:
        """The pieces of a text that the tokenizer replaces by its unknown token; none where the text itself says it."""
        tokenizer = self._require_tokenizer()
        _check_whole(text)
        if (unknown := _unknown_token(tokenizer)) is None:
            return []
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        id_ = tokenizer.convert_tokens_to_ids(unknown)
        spans = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        pieces = [text[start:stop].strip() for token, (start, stop) in spans if token == id_]
        return [piece for piece in pieces if piece != unknown]

    def check_known(self, text: str) -> None:
        """Raise a `ValueError` that names the words of a text which the tokenizer does not know."""
        if unknown := self.unknown_words(text):
            raise ValueError(self._unknown(unknown))

    def _unknown(self, words: Sequence[str]) -> str:
        named = ", ".join(repr(word) for word in dict.fromkeys(words))
        return (
            f"the tokenizer of {self.cfg.model_name!r} does not know {named}: the model sees "
            f"{_unknown_token(self.tokenizer)} in place of each. Use other words, or a model that knows these"
        )

    def to_string(self, tokens: Int[Tensor, "*batch pos"] | Sequence[int]) -> Any:
        """Text of one row, or a list of texts for a batch. Places never reached (-1) are left out."""
        ids = torch.as_tensor(tokens)
        if ids.dim() == 0:
            ids = ids[None]
        if ids.dim() == 2:
            return [self.to_string(row) for row in ids]
        kept = [int(i) for i in ids if int(i) != UNREACHED]
        text: str = self._require_tokenizer().decode(kept, clean_up_tokenization_spaces=False)
        return text

    def to_str_tokens(
        self, input: str | Tensor | Sequence[int] | Sequence[str], prepend_bos: bool | None = None
    ) -> Any:
        """The text of each token of one row; a list of texts gives a list for each."""
        if isinstance(input, str):
            input = self.to_tokens(input, prepend_bos)[0]
        elif not isinstance(input, Tensor) and any(isinstance(text, str) for text in input):
            return [self.to_str_tokens(str(text), prepend_bos) for text in input]
        ids = torch.as_tensor(input)
        if ids.dim() > 1 and ids.shape[0] != 1:
            raise ValueError(f"to_str_tokens takes one row of tokens, not {list(ids.shape)}; go row by row")
        return [self._word(int(i)) for i in ids.flatten()]

    def to_single_token(self, string: str) -> int:
        """The id of a string that is exactly one known token; otherwise a `ValueError` that shows its pieces."""
        ids = self.encode(string, prepend_bos=False)
        self.check_known(string)
        if len(ids) != 1:
            raise ValueError(f"{string!r} is {len(ids)} tokens, not one: {[self._word(i) for i in ids]}")
        return ids[0]

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one id."""
        return self._word(int_token)

    def words(self, tokens: Sequence[int]) -> list[str]:
        """The text of each id, or the ids themselves in brackets when there is no tokenizer: for labels."""
        if self.tokenizer is None:
            return [f"<{token}>" for token in tokens]
        return [self._word(token) for token in tokens]

    def token_spans(self, text: str, prepend_bos: bool | None = None) -> list[tuple[int, int]]:
        """Character span of each token of `to_tokens(text)`; a prepended BOS has (0, 0)."""
        encoded = self._require_tokenizer()(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [(int(a), int(b)) for a, b in encoded["offset_mapping"]]
        return [(0, 0), *spans] if self._prepends_bos(prepend_bos) else spans

    def _word(self, token: int) -> str:
        if token == UNREACHED:
            return ""
        if token == self.cfg.mask_token_id:
            return MASK_TEXT
        tokenizer = self._require_tokenizer()
        if not 0 <= token < len(tokenizer):
            return f"<{token}>"
        text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text

    def _prepends_bos(self, prepend_bos: bool | None) -> bool:
        default = yes_or_no("default_prepend_bos", self.cfg.default_prepend_bos)
        asked = default if prepend_bos is None else yes_or_no("prepend_bos", prepend_bos)
        if asked and prepend_bos and self._require_tokenizer().bos_token_id is None:
            raise ValueError(f"prepend_bos=True, but the tokenizer of {self.cfg.model_name!r} has no BOS token")
        return asked and self._require_tokenizer().bos_token_id is not None

    @property
    def pad_id(self) -> int:
        """The id that fills places which are not real: the tokenizer's padding, else its end, else 0."""
        for candidate in (getattr(self.tokenizer, "pad_token_id", None), getattr(self.tokenizer, "eos_token_id", None)):
            if candidate is not None:
                return int(candidate)
        return 0

    @property
    def own_pad_id(self) -> int | None:
        """The id of a padding token that is nothing else, so that tokens say by themselves what is padding, or `None`.

        It must be called padding ("pad" in its name) and be none of the other special tokens: where texts end with the
        same token that fills rows, a model may have written it, and nothing is guessed.
        """
        tokenizer = self.tokenizer
        name = None if tokenizer is None else tokenizer.pad_token
        if name is None or "pad" not in name.lower():
            return None
        others = [tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token, tokenizer.mask_token]
        id_ = tokenizer.pad_token_id
        return None if name in others or id_ == self.cfg.mask_token_id else int(id_)

    def real_places(self, tokens: Tokens) -> PosMask | None:
        """Which places are no padding, where the tokens say it: between the first and the last that is no `own_pad_id`.

        `None` where nothing is padding, or the tokens cannot say.

        Raises:
            ValueError: a row of padding alone.
        """
        pad = self.own_pad_id
        if pad is None:
            return None
        text = tokens != pad
        if bool(text.all()):
            return None
        if not bool(text.any(dim=1).all()):
            row = int((~text.any(dim=1)).nonzero()[0])
            raise ValueError(
                f"row {row} of the tokens is all padding ({self._word(pad)!r}): there is nothing to run on"
            )
        return (text.cumsum(dim=1) > 0) & (text.flip(1).cumsum(dim=1).flip(1) > 0)

    def without_padding(self, row: Int[Tensor, "pos"]) -> Int[Tensor, "real"]:
        """One row of tokens less the padding around them, where they say it (`real_places`)."""
        real = self.real_places(row[None]) if len(row) else None
        return row if real is None else row[real[0]]

    def told_places(self, tokens: Tokens) -> PosMask | None:
        """`real_places` for a loss or a continuation, which padding taken for text would change: a doubt is refused.

        Raises:
            ValueError: the tokenizer has no padding token of its own, and some rows, but not all, begin or end with the
                token that fills shorter ones.
        """
        if self.own_pad_id is not None or self.tokenizer is None or self.pad_id == self.cfg.mask_token_id:
            return self.real_places(tokens)
        filler = tokens == self.pad_id
        if self.pad_id == self.tokenizer.bos_token_id and bool(filler[:, 0].all()):
            filler = filler[:, 1:]
        for edge, column in (("begins", slice(1)), ("ends", slice(-1, None))):
            at_edge = filler[:, column].any(dim=1)
            if bool(at_edge.any()) and not bool(at_edge.all()):
                row, other = int(at_edge.long().argmax()), int((~at_edge).long().argmax())
                side = " (with padding_side='left' before a continuation)" * self.cfg.is_causal
                raise ValueError(
                    f"row {row} of the tokens {edge} with {self._word(self.pad_id)!r} and row {other} does not, and "
                    "the tokenizer has no padding token that is not also text: the tokens alone do not say what is "
                    f"padding. Take tokens, mask = model.tokenize(texts){side} and pass attention_mask=mask with the "
                    "tokens, or pass the texts themselves; if every token here is text, pass "
                    "attention_mask=torch.ones_like(tokens)"
                )
        return None

    def whole(self, tokens: Tokens) -> Tensor | None:
        """An `attention_mask` under which nothing of these tokens is padding; `None` where nothing would be anyway."""
        return None if self.own_pad_id is None else torch.ones_like(tokens)

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(
                f"{self.cfg.model_name!r} was loaded without a tokenizer, so it takes token ids only: pass "
                "tokenizer='folder' to from_pretrained (a folder with tokenizer.json and tokenizer_config.json)"
            )
        return self.tokenizer


def _unknown_token(tokenizer: Any) -> str | None:
    """What stands for words that the tokenizer does not know, said by its settings or by its vocabulary's model."""
    said: str | None = tokenizer.unk_token or getattr(tokenizer.backend_tokenizer.model, "unk_token", None)
    return said


def _check_whole(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"{text!r} holds half of a surrogate pair, which is no text: write the whole character"
        ) from None
