"""Text in, text out, under TransformerLens's names."""

from abc import ABC
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from tokenizers import AddedToken
from torch import Tensor

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.shapes import Places, Tokens

MASK_TEXT = "[MASK]"
UNREACHED = -1


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
            self.cfg.default_prepend_bos = default_prepend_bos

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str = "right",
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Tokens:
        """Token ids, Int[batch pos]; shorter rows are padded (`tokenize` also returns which are real)."""
        tokens, real = self.tokenize(input, prepend_bos)
        if padding_side == "left":
            # A stable sort by "is real" moves each row's padding to the front and keeps its tokens in order.
            tokens = tokens.gather(1, real.long().argsort(dim=1, stable=True))
        if truncate:
            tokens = tokens[:, : self.cfg.n_ctx]
        return tokens if move_to_device else tokens.cpu()

    def tokenize(self, input: str | Sequence[str], prepend_bos: bool | None = None) -> tuple[Tokens, Places]:
        """Token ids and which of them are real, not padding."""
        texts = [input] if isinstance(input, str) or input is None else list(input)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"text is a string or a list of them, not {input!r}; token ids go in as torch.tensor(ids)")
        if not texts:
            raise ValueError("there is no text to tokenize: the list is empty")
        rows = [self._encode(text, prepend_bos) for text in texts]
        length = max(len(row) for row in rows)
        if length == 0:
            raise ValueError("the text is empty and no BOS is prepended: there is no token to run on")
        tokens = torch.full((len(rows), length), self.pad_id, dtype=torch.long)
        real = torch.zeros(len(rows), length, dtype=torch.bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row, dtype=torch.long)
            real[i, : len(row)] = True
        return tokens.to(self.cfg.device), real.to(self.cfg.device)

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
        """The id of a string that is exactly one token; otherwise a `ValueError` that shows its pieces."""
        ids = self._encode(string, prepend_bos=False)
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

    def _encode(self, text: str, prepend_bos: bool | None) -> list[int]:
        tokenizer = self._require_tokenizer()
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(
                f"{text!r} holds half of a surrogate pair, which is no text: write the whole character"
            ) from None
        ids: list[int] = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return [tokenizer.bos_token_id, *ids] if self._prepends_bos(prepend_bos) else ids

    def _prepends_bos(self, prepend_bos: bool | None) -> bool:
        asked = self.cfg.default_prepend_bos if prepend_bos is None else prepend_bos
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

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(
                f"{self.cfg.model_name!r} was loaded without a tokenizer, so it takes token ids only: pass "
                "tokenizer='folder' to from_pretrained (a folder with tokenizer.json and tokenizer_config.json)"
            )
        return self.tokenizer
