"""How one tensor of a checkpoint ("theirs") relates to tensors in our layout ("ours"): small invertible operations.

A layout splits one of their tensors into ours, joins ours into theirs, and gives the shape that theirs must have. Rows
that can be split independently of the others form a block, so that a large tensor is never in memory as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from weight_conversion.architecture import Architecture, Shape


class Layout(ABC):
    """An invertible operation between one of their tensors and one or more of ours."""

    @abstractmethod
    def their_shape(self, our_shapes: Sequence[Shape], architecture: Architecture) -> Shape:
        """The shape their tensor must have."""

    @abstractmethod
    def block_rows(self, architecture: Architecture) -> int:
        """Rows of theirs in one block."""

    @abstractmethod
    def split(self, theirs: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
        """Split their tensor, or whole blocks of its rows, into ours, in the order of the rule."""

    @abstractmethod
    def join(self, ours: Sequence[Tensor], architecture: Architecture) -> Tensor:
        """Join our tensors into theirs: the exact inverse of `split`."""


class Same(Layout):
    """The same tensor under another name."""

    def their_shape(self, our_shapes: Sequence[Shape], architecture: Architecture) -> Shape:
        (shape,) = our_shapes
        return shape

    def block_rows(self, architecture: Architecture) -> int:
        return 1

    def split(self, theirs: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
        return (theirs,)

    def join(self, ours: Sequence[Tensor], architecture: Architecture) -> Tensor:
        (tensor,) = ours
        return tensor


class GroupMajorQKV(Layout):
    """lit-gpt's fused projection: for each key/value group the rows of its queries, then of its key, then of its value.

    Source: ML-GSAI/SMDM `lit_gpt/diffmodel.py`, the view `(B, T, n_query_groups, q_per_kv + 2, head_size)`.
    """

    def their_shape(self, our_shapes: Sequence[Shape], architecture: Architecture) -> Shape:
        return (sum(shape[0] for shape in our_shapes), *our_shapes[0][1:])

    def block_rows(self, architecture: Architecture) -> int:
        a = architecture
        return (a.n_heads // a.n_key_value_heads + 2) * a.d_head

    def split(self, theirs: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
        heads = architecture.n_heads // architecture.n_key_value_heads
        grouped = rearrange(theirs, "(group row d) ... -> group row d ...", row=heads + 2, d=architecture.d_head)
        queries, key, value = grouped.split([heads, 1, 1], dim=1)
        return tuple(rearrange(part, "group row d ... -> (group row d) ...") for part in (queries, key, value))

    def join(self, ours: Sequence[Tensor], architecture: Architecture) -> Tensor:
        a = architecture
        grouped = [
            rearrange(part, "(group row d) ... -> group row d ...", group=a.n_key_value_heads, d=a.d_head)
            for part in ours
        ]
        return rearrange(torch.cat(grouped, dim=1), "group row d ... -> (group row d) ...")


class Stacked(Layout):
    """A fused projection whose rows are those of our projections, one after the other: all queries, keys, values."""

    def their_shape(self, our_shapes: Sequence[Shape], architecture: Architecture) -> Shape:
        return (sum(shape[0] for shape in our_shapes), *our_shapes[0][1:])

    def block_rows(self, architecture: Architecture) -> int:
        return sum(self._rows(architecture))

    def split(self, theirs: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
        queries, keys, values = theirs.split(self._rows(architecture))
        return queries, keys, values

    def join(self, ours: Sequence[Tensor], architecture: Architecture) -> Tensor:
        return torch.cat(list(ours))

    def _rows(self, architecture: Architecture) -> list[int]:
        a = architecture
        keys = a.n_key_value_heads * a.d_head
        return [a.n_heads * a.d_head, keys, keys]
