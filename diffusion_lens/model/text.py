"""Conversion between text and tokens, under TransformerLens's names."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from tokenizers import AddedToken
from torch import Tensor

from diffusion_lens.config import reached
from diffusion_lens.model.padding import Padding
from diffusion_lens.settings import yes_or_no
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.user_warnings import warn_user

MASK_TEXT = "[MASK]"


@runtime_checkable
class Rows(Protocol):
    """Anything with rows of tokens, Int[batch pos]."""

    tokens: Tensor


class TextInterface(Padding):
    """The methods of a model that use its tokenizer: a fast Hugging Face tokenizer, or `None`."""

    def set_tokenizer(self, tokenizer: Any, default_prepend_bos: bool | None = None) -> None:
        """Use `tokenizer`; if the id of [MASK] is its next free id, use a copy of it that also contains [MASK]."""
        mask = self.cfg.mask_token_id
        if mask is not None and tokenizer is not None and mask == len(tokenizer):
            # A tokenizer that prepends a space to each piece of text (Llama) would encode spaces around [MASK].
            prefixes = len(tokenizer.tokenize(" a")) > len(tokenizer.tokenize("a"))
            tokenizer = deepcopy(tokenizer)  # other models may be made of the caller's vocabulary
            tokenizer.add_special_tokens(
                {"mask_token": AddedToken(MASK_TEXT, lstrip=True, rstrip=prefixes, special=True)}
            )
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
        """Token ids Int[batch pos] of a text or of several.

        Shorter texts are padded in two cases: if the tokens alone show the padding (`own_pad_id`), and on the right for
        a causal model, where padding on the right does not affect real tokens (the loss and continuations still need
        the mask). `tokenize` pads for any model, and also returns the mask.

        Raises:
            ValueError: The texts have different lengths in any other case: their padding would be read as text.
        """
        tokens, real = self.tokenize(input, prepend_bos, padding_side)
        if self.own_pad_id is None and not bool(real.all()) and not (self.cfg.is_causal and padding_side == "right"):
            raise ValueError(
                f"the texts have {sorted(set(real.sum(dim=1).tolist()))} tokens, and the tokenizer has no padding "
                "token that is not also text: the tokens alone do not show what is padding. Take "
                "tokens, mask = model.tokenize(texts) and pass attention_mask=mask with the tokens, or pass the "
                "texts themselves to the model"
            )
        if truncate:
            tokens = tokens[:, : self.cfg.n_ctx]
        return tokens if move_to_device else tokens.cpu()

    def tokenize(
        self, input: str | Sequence[str], prepend_bos: bool | None = None, padding_side: str = "right"
    ) -> tuple[Tokens, PosMask]:
        """Token ids Int[batch pos] and Bool[batch pos], false at padding, to be passed as `attention_mask`.

        A `UserWarning` names words that the tokenizer replaces by its unknown token.
        """
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side={padding_side!r}; it must be 'left' or 'right'")
        if isinstance(input, Mapping):  # what tokenizers return; iterated, its keys would be the texts
            kind = type(input).__name__
            raise TypeError(f"text must be a string or a list of them, not a {kind}; pass its ids, ...['input_ids']")
        several = isinstance(input, Iterable) and not isinstance(input, str | bytes)
        texts: list[Any] = list(input) if several else [input]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"text must be a string or a list of them, not {input!r}; pass ids as torch.tensor(ids)")
        if not texts:
            raise ValueError("there is no text to tokenize: the list is empty")
        rows = self._encode_all(texts, prepend_bos)
        if empty := [row for row, ids in enumerate(rows) if not ids]:
            raise ValueError(
                f"the text of row {empty[0]} is empty and no BOS is prepended, but the model needs at least one token"
            )
        if (token := _unknown_token(self.tokenizer)) is not None:
            id_ = self.tokenizer.convert_tokens_to_ids(token)
            suspects = [text for text, row in zip(texts, rows, strict=True) if id_ in row]
            if unknown := [word for text in suspects for word in self.unknown_words(text)]:
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
        """The ids of one text, without a warning for unknown words (`unknown_words` returns these)."""
        return self._encode_all([text], prepend_bos)[0]

    def _encode_all(self, texts: list[str], prepend_bos: bool | None) -> list[list[int]]:
        """`encode` of several texts by one call of the tokenizer, which is much faster than one call per text."""
        tokenizer = self._require_tokenizer()
        for text in texts:
            _check_whole(text)
        bos = [tokenizer.bos_token_id] if self._prepends_bos(prepend_bos) else []
        return [[*bos, *ids] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def unknown_words(self, text: str) -> list[str]:
        """The pieces of a text that the tokenizer replaces by its unknown token, unless the text itself contains it."""
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
        """Raise a `ValueError` that names the words of a text that the tokenizer does not know."""
        if unknown := self.unknown_words(text):
            raise ValueError(self._unknown(unknown))

    def _unknown(self, words: Sequence[str]) -> str:
        named = ", ".join(repr(word) for word in dict.fromkeys(words))
        return (
            f"the tokenizer of {self.cfg.model_name!r} does not know {named}: the model sees "
            f"{_unknown_token(self.tokenizer)} in place of each. Use other words, or a model that knows these"
        )

    def to_string(self, tokens: Int[Tensor, "*rest"] | Sequence[int] | Rows) -> Any:
        """Text of one token or sequence, or a list of texts for a batch, such as a `Trajectory`.

        Positions not reached (-1) are left out.
        """
        ids = torch.as_tensor(getattr(tokens, "tokens", tokens))
        if ids.dim() == 0:
            ids = ids[None]
        if ids.dim() == 2:
            return [self.to_string(row) for row in ids]
        return self._require_tokenizer().decode(ids[reached(ids)].long().tolist(), clean_up_tokenization_spaces=False)

    def to_completion(self, tokens: Int[Tensor, "pos"]) -> str:
        """Text of tokens that a model wrote, without special tokens; a text that grows ends at its first end token."""
        tokenizer, ids = self._require_tokenizer(), tokens[reached(tokens)].tolist()
        if self.cfg.grows and tokenizer.eos_token_id in ids:
            ids = ids[: ids.index(tokenizer.eos_token_id)]
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None) -> Any:
        """The text of each token of one sequence, also of a `Trajectory` of one row; for texts, a list for each."""
        input = getattr(input, "tokens", input)
        if isinstance(input, str):
            input = self.to_tokens(input, prepend_bos)[0]
        elif not isinstance(input, Tensor) and any(isinstance(text, str) for text in input):
            return [self.to_str_tokens(str(text), prepend_bos) for text in input]
        ids = torch.as_tensor(input)
        if ids.dim() > 1 and ids.shape[0] != 1:
            raise ValueError(f"to_str_tokens takes one row of tokens, not {list(ids.shape)}; call it for each row")
        return [self._word(int(i)) for i in ids.flatten()]

    def to_single_token(self, string: str) -> int:
        """The id of a string that is exactly one known token; otherwise a `ValueError` that shows its tokens."""
        ids = self.encode(string, prepend_bos=False)
        self.check_known(string)
        if len(ids) != 1:
            raise ValueError(f"{string!r} is {len(ids)} tokens, not one: {[self._word(i) for i in ids]}")
        return ids[0]

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one id."""
        return self._word(int_token)

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Int[Tensor, "*batch pos"],
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str = "right",
    ) -> int:
        """Position of a token in a text or in one sequence of tokens, as in TransformerLens.

        Args:
            single_token: Id of the token, or a text that is exactly one token.
            input: Text, or tokens Int[pos] or Int[1 pos].
            mode: "first" or "last" of several occurrences.

        Raises:
            ValueError: The token does not occur, or an argument does not fit.
        """
        if mode not in ("first", "last"):
            raise ValueError(f"mode={mode!r}; it must be 'first' or 'last'")
        tokens = self.to_tokens(input, prepend_bos, padding_side) if isinstance(input, str) else input
        if tokens.dim() > 1 and tokens.shape[0] != 1:
            raise ValueError(f"a token is searched in one row of tokens, not in {list(tokens.shape)}")
        token = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        positions = (tokens.flatten() == token).nonzero().flatten().tolist()
        if not positions:
            raise ValueError(f"{self.words([token])[0]!r} does not occur in {self.words(tokens.flatten().tolist())}")
        return int(positions[0 if mode == "first" else -1])

    def words(self, tokens: Sequence[int]) -> list[str]:
        """A label for each id: its text or, without a tokenizer, the id in brackets."""
        return [f"<{token}>" if self.tokenizer is None else self._word(token) for token in tokens]

    def token_spans(self, text: str, prepend_bos: bool | None = None) -> list[tuple[int, int]]:
        """Character span (start, stop) of each token of `to_tokens(text)`; (0, 0) for a prepended BOS."""
        encoded = self._require_tokenizer()(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [(int(a), int(b)) for a, b in encoded["offset_mapping"]]
        return [(0, 0), *spans] if self._prepends_bos(prepend_bos) else spans

    def _word(self, token: int) -> str:
        if not reached(token):
            return ""
        if token == self.cfg.mask_token_id:
            return MASK_TEXT
        tokenizer = self._require_tokenizer()
        if not 0 <= token < len(tokenizer):
            return f"<{token}>"
        return str(tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _prepends_bos(self, prepend_bos: bool | None) -> bool:
        default = yes_or_no("default_prepend_bos", self.cfg.default_prepend_bos)
        prepends = default if prepend_bos is None else yes_or_no("prepend_bos", prepend_bos)
        if prepends and prepend_bos and self._require_tokenizer().bos_token_id is None:
            raise ValueError(f"prepend_bos=True, but the tokenizer of {self.cfg.model_name!r} has no BOS token")
        return prepends and self._require_tokenizer().bos_token_id is not None

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(
                f"{self.cfg.model_name!r} was loaded without a tokenizer, so it takes token ids only: pass "
                "tokenizer='folder' to from_pretrained (a folder with tokenizer.json and tokenizer_config.json)"
            )
        return self.tokenizer


def _unknown_token(tokenizer: Any) -> Any:
    """The token for words that the tokenizer does not know, from its settings or from the model of its vocabulary."""
    return tokenizer.unk_token or getattr(tokenizer.backend_tokenizer.model, "unk_token", None)


def _check_whole(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"{text!r} contains half of a surrogate pair, which is not text: write the whole character"
        ) from None
