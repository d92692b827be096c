"""Conversion between text and tokens.

The tokenizer is a fast one of Hugging Face, or `None`. The methods of the model have TransformerLens's names
(`to_tokens`, `to_string`, ...); here are the functions behind them, which take the model.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from jaxtyping import Int
from tokenizers import AddedToken
from torch import Tensor

from diffusion_lens.model.config import reached
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.settings import check_bool, warn_user

MASK_TEXT = "[MASK]"
# End tokens by their texts, for runs whose tokenizer is not at hand.
END_TEXTS = frozenset(
    {"<eos>", "</s>", "[EOS]", "[SEP]", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eot|>"}
)


class TokenError(ValueError, AssertionError):
    """A text is not the one token that is asked for, or a token does not occur; TransformerLens raises the latter."""


def with_mask_token(tokenizer: Any, mask_token_id: int | None) -> Any:
    """The tokenizer; if the id of [MASK] is its next free id, a copy of it that also contains [MASK]."""
    if mask_token_id is None or tokenizer is None or mask_token_id != len(tokenizer):
        return tokenizer
    # A tokenizer that prepends a space to each piece of text (Llama) would encode spaces around [MASK].
    prefixes = len(tokenizer.tokenize(" a")) > len(tokenizer.tokenize("a"))
    tokenizer = deepcopy(tokenizer)  # other models may be made of the caller's vocabulary
    tokenizer.add_special_tokens({"mask_token": AddedToken(MASK_TEXT, lstrip=True, rstrip=prefixes, special=True)})
    return tokenizer


def tokenize(
    model: Any, input: str | Sequence[str], prepend_bos: bool | None = None, padding_side: str | None = None
) -> tuple[Tokens, PosMask]:
    """See `model.tokenize`."""
    if padding_side is None:
        padding_side = getattr(model.tokenizer, "padding_side", "right")
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side={padding_side!r}; it must be 'left' or 'right'")
    if isinstance(input, Mapping):  # what tokenizers return; iterated, its keys would be the texts
        kind = type(input).__name__
        raise TypeError(f"text must be a string or a list of them, not a {kind}; pass its ids, ...['input_ids']")
    several = isinstance(input, Iterable) and not isinstance(input, str | bytes)
    texts: list[Any] = list(input) if several else [input]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"text must be a string or a list of them, not {input!r}; pass ids as torch.tensor(ids)")
    if not texts:
        raise ValueError("there is no text to tokenize: the list is empty")
    rows = encode_all(model, texts, prepend_bos)
    if [] in rows:
        raise ValueError(
            f"the text of row {rows.index([])} is empty and no BOS is prepended, but the model needs at least one token"
        )
    if (token := _unknown_token(model.tokenizer)) is not None:
        id_ = model.tokenizer.convert_tokens_to_ids(token)
        unknown: list[str] = []
        for text, row in zip(texts, rows, strict=True):
            if id_ in row:
                unknown += unknown_words(model, text)
        if unknown:
            warn_user(_unknown(model, unknown))
    length = max(map(len, rows))
    tokens = torch.full((len(rows), length), model.padding.id, dtype=torch.long)
    real = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        filled = slice(len(row)) if padding_side == "right" else slice(length - len(row), None)
        tokens[i, filled] = torch.tensor(row, dtype=torch.long)
        real[i, filled] = True
    return tokens.to(model.cfg.device), real.to(model.cfg.device)


def encode_all(model: Any, texts: Sequence[str], prepend_bos: bool | None) -> list[list[int]]:
    """The ids of several texts by one call of the tokenizer, which is much faster than one call per text."""
    tokenizer = require_tokenizer(model)
    for text in texts:
        _check_whole(text)
    bos = [tokenizer.bos_token_id] if prepends_bos(model, prepend_bos) else []
    rows: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    for row in rows:
        row[:0] = bos
    return rows


def unknown_words(model: Any, text: str) -> list[str]:
    """The pieces of a text that the tokenizer replaces by its unknown token, unless the text itself contains it."""
    tokenizer = require_tokenizer(model)
    _check_whole(text)
    if (unknown := _unknown_token(tokenizer)) is None:
        return []
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    id_ = tokenizer.convert_tokens_to_ids(unknown)
    pieces = []
    for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if token == id_ and (piece := text[start:stop].strip()) != unknown:
            pieces.append(piece)
    return pieces


def check_known(model: Any, text: str) -> None:
    """Raise a `ValueError` that names the words of a text that the tokenizer does not know."""
    if unknown := unknown_words(model, text):
        raise ValueError(_unknown(model, unknown))


def token_spans(model: Any, text: str, prepend_bos: bool | None = None) -> list[tuple[int, int]]:
    """Character span (start, stop) of each token of `to_tokens(text)`; (0, 0) for a prepended BOS."""
    encoded = require_tokenizer(model)(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = list(map(tuple, encoded["offset_mapping"]))
    return [(0, 0), *spans] if prepends_bos(model, prepend_bos) else spans


def to_completion(model: Any, tokens: Int[Tensor, "pos"]) -> str:
    """Text of tokens that a model wrote, without special tokens; a text that grows ends at its first end token."""
    tokenizer, ids = require_tokenizer(model), tokens[reached(tokens)].tolist()
    if model.cfg.is_autoregressive and tokenizer.eos_token_id in ids:
        ids = ids[: ids.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def word_of(model: Any, token: int) -> str:
    """The text of one id; nothing where the text has not reached the position."""
    if not reached(token):
        return ""
    if token == model.cfg.mask_token_id:
        return MASK_TEXT
    tokenizer = require_tokenizer(model)
    if not 0 <= token < len(tokenizer):
        return f"<{token}>"
    return str(tokenizer.decode([token], clean_up_tokenization_spaces=False))


def prepends_bos(model: Any, prepend_bos: bool | None) -> bool:
    """Whether a text of a call begins with BOS."""
    default = check_bool("default_prepend_bos", model.cfg.default_prepend_bos)
    prepends = default if prepend_bos is None else check_bool("prepend_bos", prepend_bos)
    if prepends and prepend_bos and require_tokenizer(model).bos_token_id is None:
        raise ValueError(f"prepend_bos=True, but the tokenizer of {model.cfg.model_name!r} has no BOS token")
    return prepends and require_tokenizer(model).bos_token_id is not None


def require_tokenizer(model: Any) -> Any:
    """The tokenizer of a model; a `ValueError` if it has none."""
    if model.tokenizer is None:
        raise ValueError(
            f"{model.cfg.model_name!r} was loaded without a tokenizer, so it takes token ids only: pass "
            "tokenizer='folder' to from_pretrained (a folder with tokenizer.json and tokenizer_config.json)"
        )
    return model.tokenizer


def _unknown(model: Any, words: Sequence[str]) -> str:
    named = ", ".join(repr(word) for word in dict.fromkeys(words))
    return (
        f"the tokenizer of {model.cfg.model_name!r} does not know {named}: the model sees "
        f"{_unknown_token(model.tokenizer)} in place of each. Use other words, or a model that knows these"
    )


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
