"""The words of a page: the text of each token that occurs, referred to by index."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diffusion_lens.pages.chunks import Stored

NONE = -1
_MOST_IN_U2 = 2**16 - 1


class Words:
    """Texts of token ids in the order in which they were first asked for.

    Ids below 0 are no tokens; their index is -1. Two ids with the same text are two words.

    Args:
        known: Words that the reader has already; the words of this object then count on from theirs, and `texts` are
            the further ones only.
    """

    def __init__(self, known: "Words | None" = None) -> None:
        self._index: dict[int, int] = {} if known is None else dict(known._index)
        self._first = len(self._index)
        self._is_further = known is not None
        self.texts: list[str] = []

    @property
    def header(self) -> dict[str, list[str]]:
        """The entry of a chunk's header with the further words; none if the manifest lists the words."""
        return {"words": self.texts} if self._is_further and self.texts else {}

    def index(self, token: int, texts: Mapping[int, str]) -> int:
        """The index of one token."""
        if token < 0:
            return NONE
        if token not in self._index:
            self._index[token] = self._first + len(self.texts)
            self.texts.append(texts[token])
        return self._index[token]

    def indices(self, tokens: Tensor | Iterable[Any], texts: Mapping[int, str]) -> NDArray[np.int32]:
        """The indices of an array of tokens, in its shape."""
        ids = tokens.cpu().numpy() if isinstance(tokens, Tensor) else np.asarray(tokens)
        different, inverse = np.unique(ids, return_inverse=True)
        table = np.array([self.index(int(token), texts) for token in different], dtype=np.int32)
        indices: NDArray[np.int32] = table[inverse.reshape(ids.shape)] if ids.size else ids.astype(np.int32)
        return indices

    def stored(self, tokens: Tensor, texts: Mapping[int, str]) -> Stored:
        """The indices as a chunk stores them: u2 with 65535 for none, or i4 with -1 where there are too many words."""
        indices = self.indices(tokens, texts)
        if self._first + len(self.texts) >= _MOST_IN_U2:
            return Stored("i4", indices)
        return Stored("u2", np.where(indices < 0, _MOST_IN_U2, indices).astype(np.uint16))
