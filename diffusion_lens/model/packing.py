"""Rows of a batch that hold positions of several sequences, so that the network computes each state once.

`Packing`: a batch of sequences of different lengths is padded, and a pass may need a part of the positions only,
because the states of the others are known or nobody reads them. Here the positions that are needed stand close
together: a row has those of several sequences, and each attends to those of its own sequence, as it does in the batch.
Keys and values of positions with known states come from an earlier pass. Activations then have another shape than hooks
expect, so `is_plain` says whether a network can be run like this.

`TextTree`: texts with common beginnings form a tree, which is laid out in depth-first order in one row. A token follows
those before it in its texts, and everything that sees it comes after it, before any text that does not contain it. It
keeps the position that it has in its texts, and sees what it sees there. Only models whose earlier positions never see
later ones can read a tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.hooks.clock import restoring
from diffusion_lens.model.attention import AttentionContext, AttentionPattern, LayerKeyValues, Visibility
from diffusion_lens.model.hook_points import hooked_modules
from diffusion_lens.model.inputs import LogitRows, columns_of
from diffusion_lens.model.positions import PassPositions, Positions, ScoreBias, Tables
from diffusion_lens.model.shapes import PosMask, Resid
from diffusion_lens.model.transformer import DiffusionTransformer


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the positions of the sequences stand."""

    sequence: Int[Tensor, "row column"]  # the sequence of each place; -1 where the row is padded
    position: Int[Tensor, "row column"]  # the position in this sequence; 0 where the row is padded
    place: Int[Tensor, "batch pos"]  # column + row · columns of each position; -1 where it is left out

    @classmethod
    def of(cls, needed: PosMask, rows: Int[Tensor, "batch"]) -> "Packing":
        """The needed positions of each sequence, in the row that is given for the sequence."""
        sequence, position = needed.nonzero(as_tuple=True)
        row, n_rows = rows[sequence], int(rows.max()) + 1
        column, n_columns = columns_of(row, n_rows)
        sequences = torch.full((n_rows, n_columns), -1, device=row.device)
        sequences[row, column] = sequence
        positions = torch.zeros_like(sequences)
        positions[row, column] = position
        place = torch.full(needed.shape, -1, device=row.device)
        place[sequence, position] = row * n_columns + column
        return cls(sequences, positions, place)

    def find(
        self, sequence: Int[Tensor, "entry"], position: Int[Tensor, "entry"]
    ) -> tuple[Int[Tensor, "entry"], Int[Tensor, "entry"]]:
        """Row and column of positions."""
        place, n_column = self.place[sequence, position], self.sequence.shape[1]
        return place.div(n_column, rounding_mode="floor"), place % n_column

    def gather(self, x: Float[Tensor, "batch pos *rest"]) -> Float[Tensor, "row column *rest"]:
        """The states of these positions; any state where a row is padded."""
        return x[self.sequence.clamp(min=0), self.position]

    def repacked(self, x: Float[Tensor, "row column *rest"], other: "Packing") -> Float[Tensor, "_ _ *rest"]:
        """States at these positions as they stand in another packing, whose positions are all among these."""
        return x.flatten(0, 1)[self.place[other.sequence.clamp(min=0), other.position]]

    def context(
        self,
        whole: AttentionContext,
        known: "Packing | None" = None,
        condition: Float[Tensor, "row d_cond"] | None = None,
    ) -> AttentionContext:
        """The context of a pass over these positions, from that of a pass over the whole batch of sequences; positions
        with `known` keys and values come before these."""
        n_batch, n_pos = self.place.shape
        keys = self if known is None else known.before(self)
        query, key = self.sequence[:, :, None], keys.sequence[:, None, :]
        pairs = query.clamp(min=0), self.position[:, :, None], keys.position[:, None, :]
        visible = whole.visibility.dense(n_pos, n_pos, self.place.device)[:, 0].expand(n_batch, -1, -1)[pairs]
        # Padding sees padding, because the softmax of a row that sees nothing is undefined.
        allowed = ((query == key) & (visible | (query < 0)))[:, None]
        visibility = Visibility(None if bool(allowed.all()) else allowed, causal=False)
        rotary, bias, factors = whole.rotary, whole.bias, whole.query_factors
        if rotary is not None:
            cos, sin = (self.gather(table.expand(n_batch, n_pos, *table.shape[-2:])) for table in rotary)
            rotary = cos, sin
        if bias is not None:
            by_pair = bias.expand(n_batch, -1, -1, -1).permute(0, 2, 3, 1)[pairs].permute(0, 3, 1, 2)
            bias = by_pair.masked_fill(~allowed, float("-inf"))
        if factors is not None:
            factors = self.gather(factors.expand(n_batch, -1, -1, -1))
        return replace(
            whole,
            visibility=visibility,
            rotary=rotary,
            bias=bias,
            query_factors=factors,
            condition=condition,
            is_open=None if whole.is_open is None else self.gather(whole.is_open.expand(n_batch, n_pos)),
            in_global=None if whole.in_global is None else self.context(whole.in_global, known, condition),
        )

    def before(self, other: "Packing") -> "Packing":
        """Each row of these positions, followed by the same row of others. The places are still those of these."""
        sequence = torch.cat([self.sequence, other.sequence], dim=1)
        return Packing(sequence, torch.cat([self.position, other.position], dim=1), self.place)


def rows_of_least_work(lengths: Sequence[int], per_position: int, per_key: int) -> list[int]:
    """The row of each sequence, for rows that take the fewest multiplications.

    Few rows have little padding; in many rows, a position meets few keys. The multiplications of a position are
    `per_position` in the linear maps of a block, and `per_key` with one key and its value.
    """
    n_rows, least, chosen = len(lengths), float("inf"), [0] * len(lengths)
    while True:
        # The longest sequence first, each in the row that is the shortest so far.
        filled, rows = [0] * n_rows, [0] * len(lengths)
        for sequence in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            rows[sequence] = filled.index(min(filled))
            filled[rows[sequence]] += lengths[sequence]
        width = max(filled)
        if (work := n_rows * width * (per_position + per_key * width)) <= least:
            least, chosen = work, rows
        if n_rows == 1:
            return chosen
        n_rows = (n_rows + 1) // 2


def is_plain(model: DiffusionTransformer, first_block: int) -> bool:
    """Whether nobody sees the shape of activations from a block on: no hook, no step of the loop, no foreign module,
    no second place of weights."""
    if model.clock.step is not None or model.placement is not None:
        return False
    parts = [*model.blocks[first_block:], model.ln_final, model.unembed]
    if model.cfg.time_conditioning:
        parts += [model.time_embed, model.final_modulation, model.hook_time, model.hook_final_modulation]
    classes = {type(module).__module__ for module in chain.from_iterable(part.modules() for part in parts)}
    own = all(name.startswith(("diffusion_lens.model.", "torch.nn.")) for name in classes)
    return own and not any(map(hooked_modules, parts))


def run_blocks(
    model: DiffusionTransformer,
    resid: Resid,
    context: AttentionContext,
    first_block: int,
    past: Sequence[LayerKeyValues],
    rows: LogitRows | None = None,
) -> Float[Tensor, "batch _ d_model"]:
    """The residual stream behind the last block, from that which enters the first of these; new keys and values are
    appended to `past`, and the last block computes `rows` only."""
    with model.clock.passes[get_ident()]:
        model.clock.require_free()
        blocks = model.blocks[first_block:]
        for i, (block, known) in enumerate(zip(blocks, past, strict=True)):
            resid = block(resid, context, known, rows if i == len(blocks) - 1 else None)
        return resid if rows is None or len(blocks) else rows.gather(resid)


@dataclass(frozen=True, eq=False)
class TextTree:
    """The layout of several texts in one row."""

    positions: Int[Tensor, "pos"]  # position of each token in its texts
    shared: Bool[Tensor, "pos pos"]  # whether the second token is in every text that contains the first
    stops: tuple[int, ...]  # one past the last token whose texts contain this one, for each token
    places: tuple[tuple[int, ...], ...]  # for each text, the place in the row of each of its tokens

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


@restoring
def reading_tree(model: Any, tree: TextTree) -> Iterator[None]:
    """Let the network read a row that is laid out as this tree, in every forward pass inside.

    Passes have no padding. They may begin at any place of the tree, with the keys and values of all earlier ones. The
    model must have no learned positions, which would not be read.
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

    def query_factors_of_pass(self, at: PassPositions) -> Any:
        return self.inner.query_factors_of_pass(at._replace(given=self._positions(at.n_pos, at.n_past)))

    def of_pass(self, at: PassPositions) -> tuple[Tables | None, ScoreBias | None]:
        own, all_keys = self._positions(at.n_pos, at.n_past), self._positions(at.n_past + at.n_pos, 0)
        tables, _ = self.inner.of_pass(at._replace(given=own))
        # One table for all rows, as without a tree.
        tables = None if tables is None else (tables[0][0], tables[1][0])
        return tables, self.inner.score_bias(own, all_keys)

    def _positions(self, n_pos: int, n_past: int) -> Int[Tensor, "1 pos"]:
        return self.tree.positions[None, n_past : n_past + n_pos]
