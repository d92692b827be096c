"""Texts with common beginnings in one row, so that the network computes each common beginning once.

The texts form a tree, which is laid out in depth-first order: a token follows those before it in its texts, and
everything that sees it comes after it, before any text that does not contain it. A token keeps the position that it has
in its texts, and sees what it sees there. Only models whose earlier positions never see later ones can read a tree.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from diffusion_lens.model.attention_patterns import AttentionPattern, Visibility
from diffusion_lens.model.positions import Positions, ScoreBias, Tables
from diffusion_lens.shapes import PosMask


@dataclass(frozen=True, eq=False)
class TextTree:
    """The layout of several texts in one row.

    Attributes:
        positions: Int[pos], position of each token in its texts.
        shared: Bool[pos pos], whether the second token is in every text that contains the first.
        stops: One past the last token whose texts contain this one, for each token.
        places: For each text, the place in the row of each of its tokens.
    """

    positions: Int[Tensor, "pos"]
    shared: Bool[Tensor, "pos pos"]
    stops: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, texts: Sequence[Int[Tensor, "batch _"]], size: int) -> tuple["TextTree", Int[Tensor, "batch _"]]:
        """The layout, and the tokens in it, Int[batch _].

        Args:
            texts: Int[batch pos] each, of any lengths. Texts share the positions at which all rows of the batch agree.
            size: Number of neighbouring positions that see each other, which are shared together. A text whose last
                block is not full is followed by places that no text has.
        """
        # 1. The tree. A node is a piece of `size` positions after the pieces of its parents.
        nodes: dict[tuple[int, tuple[int, ...]], int] = {}
        parents: list[int] = []
        pieces: list[Tensor] = []
        depths: list[int] = []
        paths: list[list[int]] = []
        for text in texts:
            node, path = -1, []
            for depth, piece in enumerate(text.split(size, dim=1)):
                parent = node
                node = nodes.setdefault((parent, tuple(piece.flatten().tolist())), len(parents))
                if node == len(parents):
                    parents.append(parent)
                    pieces.append(torch.cat([piece, piece[:, -1:].expand(-1, size - piece.shape[1])], dim=1))
                    depths.append(depth)
                path.append(node)
            paths.append(path)

        # 2. Its nodes in depth-first order, those of earlier texts first.
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        order, waiting = [], children[-1][::-1]
        while waiting:
            order.append(waiting.pop())
            waiting += children.get(order[-1], [])[::-1]
        rank = {node: index for index, node in enumerate(order)}

        # 3. What each node shares, and where the nodes below it end.
        shared = torch.eye(len(order), dtype=torch.bool)
        last = list(range(len(order)))
        for node in order:
            if parents[node] >= 0:
                shared[rank[node]] |= shared[rank[parents[node]]]
        for node in reversed(order):
            if parents[node] >= 0:
                parent = rank[parents[node]]
                last[parent] = max(last[parent], last[rank[node]])
        by_place = shared.repeat_interleave(size, 0).repeat_interleave(size, 1)
        places = [
            tuple(rank[node] * size + i for node in path for i in range(size))[: text.shape[1]]
            for path, text in zip(paths, texts, strict=True)
        ]
        unused = sorted(set(range(len(by_place))).difference(*places))
        by_place[:, unused] = False
        by_place[unused, unused] = True  # A row that sees nothing has no softmax.

        depth_of = torch.tensor([depths[node] for node in order])
        tokens = torch.cat([pieces[node] for node in order], dim=1)
        tree = cls(
            positions=(depth_of[:, None] * size + torch.arange(size)).flatten().to(tokens.device),
            shared=by_place.to(tokens.device),
            stops=tuple((end + 1) * size for end in last for _ in range(size)),
            places=tuple(places),
        )
        return tree, tokens

    @property
    def n_common(self) -> int:
        """Number of positions with which all texts begin."""
        beginnings = zip(*self.places, strict=False)
        return next(
            (i for i, places in enumerate(beginnings) if len(set(places)) > 1),
            min(len(places) for places in self.places),
        )


@contextmanager
def reading_tree(model: Any, tree: TextTree) -> Iterator[None]:
    """Let the network read a row that is laid out as this tree, in every forward pass inside.

    Passes have no padding. They may begin at any place of the tree, with the keys and values of all earlier ones.

    Args:
        model: Network whose learned positions, if it has any, are not read: it must have none.
    """
    with model.clock.held():
        before = model._pattern, model.positions
        model._pattern = _TreePattern(before[0].block_size, before[0], tree)
        model.positions = _TreePositions(before[1], tree)
        try:
            yield
        finally:
            model._pattern, model.positions = before


@dataclass(frozen=True, eq=False)
class _TreePattern(AttentionPattern):
    """A pattern inside each text of a tree."""

    inside: AttentionPattern
    tree: TextTree

    def visibility(
        self,
        n_pos: int,
        device: torch.device,
        real: PosMask | None,
        n_past: int = 0,
        origin: Int[Tensor, "batch"] | None = None,
    ) -> Visibility:
        """The pattern of the places from `n_past` on."""
        place = slice(n_past, n_past + n_pos)
        allowed = self.inside.between(self.tree.positions[: place.stop])[place] & self.tree.shared[place, : place.stop]
        return Visibility(allowed[None, None], causal=False)


class _TreePositions(Positions):
    """The positions of tokens in the texts of a tree."""

    def __init__(self, inner: Positions, tree: TextTree) -> None:
        self.inner, self.tree, self.query_scale = inner, tree, inner.query_scale

    def query_factors_of_pass(
        self, n_pos: int, device: torch.device, positions: Int[Tensor, "batch pos"] | None, n_past: int
    ) -> Any:
        return self.inner.query_factors_of_pass(n_pos, device, self._positions(n_pos, n_past), n_past)

    def of_pass(
        self,
        n_pos: int,
        device: torch.device,
        positions: Int[Tensor, "batch pos"] | None,
        n_past: int,
        activation: torch.dtype,
    ) -> tuple[Tables | None, ScoreBias | None]:
        own, all_keys = self._positions(n_pos, n_past), self._positions(n_past + n_pos, 0)
        tables, _ = self.inner.of_pass(n_pos, device, own, n_past, activation)
        # One table for all rows, as without a tree.
        tables = None if tables is None else (tables[0][0], tables[1][0])
        return tables, self.inner.score_bias(own, all_keys)

    def _positions(self, n_pos: int, n_past: int) -> Int[Tensor, "1 pos"]:
        return self.tree.positions[None, n_past : n_past + n_pos]
